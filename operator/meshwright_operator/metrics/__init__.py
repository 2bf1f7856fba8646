"""Prometheus metrics of jobs and of the cluster."""
