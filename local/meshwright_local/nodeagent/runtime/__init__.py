"""Containers as local processes: environment, mounts, probes."""
