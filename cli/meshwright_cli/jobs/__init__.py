"""Commands for the jobs of a cluster: submit, list, status, logs, wait and others."""
