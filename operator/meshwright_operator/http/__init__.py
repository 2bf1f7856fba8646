"""Servers for clients that are not trusted: every connection, request and byte of them is bounded."""
