"""Generates the dashboards and the rules: `python -m dashboards.source`."""
