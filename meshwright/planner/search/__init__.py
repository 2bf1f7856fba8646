"""Searching the layout of a job: every combination that its runtime can run, priced, and the reasons for the best."""
