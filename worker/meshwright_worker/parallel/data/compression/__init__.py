"""Gradient compression between replicas: one module per method."""
