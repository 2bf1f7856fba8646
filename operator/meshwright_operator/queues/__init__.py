"""Queues of other projects that decide when a job runs."""
