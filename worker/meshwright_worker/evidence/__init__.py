"""What is left of a failed rank after its pod is gone: the end of its log, its stacks and the phases of its start."""
