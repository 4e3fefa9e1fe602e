"""A Kubernetes API server in one process, for trying things and for tests. Data in memory."""
