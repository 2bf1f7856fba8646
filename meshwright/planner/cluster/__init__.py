"""The cluster's nodes, free resources and hardware limits."""
