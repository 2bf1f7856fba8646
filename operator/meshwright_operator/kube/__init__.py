"""Access to the Kubernetes API: client, watches, caches, events, leader election."""
