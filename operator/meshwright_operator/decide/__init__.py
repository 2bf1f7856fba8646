"""Decisions: pure functions of what was observed. Each policy has its own module."""
