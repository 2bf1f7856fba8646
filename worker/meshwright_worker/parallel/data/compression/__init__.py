"""What replicas send instead of whole gradients: one module a method."""
