"""Searches the layout of a job: estimates the cost of what its runtime can run, and explains the best."""
