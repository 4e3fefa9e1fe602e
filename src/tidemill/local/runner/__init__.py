"""Pods as processes: the part of a node that starts containers, probes them and keeps their logs."""
