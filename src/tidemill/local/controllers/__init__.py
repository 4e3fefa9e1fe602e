"""The controllers that a Deployment needs: Deployment to ReplicaSets, ReplicaSet to pods."""
