"""Devices behind Dynamic Resource Allocation (resource.k8s.io/v1): what nodes have, and what claims request."""
