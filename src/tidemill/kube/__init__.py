"""A Kubernetes API seen from Python. Knows nothing of inference."""
