"""Manifests of the objects that the operator creates, as plain dicts: pure functions with deterministic names."""
