"""Who a request comes from, and the certificates of the cluster."""
