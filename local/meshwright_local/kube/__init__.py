"""A small Kubernetes client: requests, informers, selectors and quantities."""
