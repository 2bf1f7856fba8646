"""Grafana dashboards and Prometheus rules, and the code that generates them."""
