"""Which runs the runtime can execute: the planner asks before pods exist, the ranks again before any group forms."""
