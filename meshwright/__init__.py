"""Meshwright: what operator, worker and command line share. Pure Python and pydantic."""

__version__ = "0.1.0"
