"""Schemas: reading them, defaulting, pruning and validating objects by them, CEL rules."""
