"""Tidemill: how many replicas of which model variant run, and which of them serves a request."""

__version__ = "0.1.0"
