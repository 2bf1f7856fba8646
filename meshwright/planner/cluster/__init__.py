"""What the cluster offers: nodes, free resources and limits."""
