"""A cluster in one process: API server, the controllers a Deployment needs, pods as processes."""
