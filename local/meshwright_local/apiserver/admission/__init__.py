"""Checks and defaults that the API server applies before it stores an object."""
