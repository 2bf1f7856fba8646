"""Follows the devices behind Dynamic Resource Allocation in the cluster."""
