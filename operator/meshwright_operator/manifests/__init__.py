"""The objects the operator makes, as plain dicts: pure functions with deterministic names."""
