"""Addresses and host names of the node's pods."""
