"""Prometheus metrics of the operator and of its jobs."""
