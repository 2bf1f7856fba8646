"""Authentication, authorization and the certificates of the cluster."""
