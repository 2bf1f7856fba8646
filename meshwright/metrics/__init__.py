"""Declares Prometheus metrics. Exporters, documentation pages and checks are derived from the declarations."""
