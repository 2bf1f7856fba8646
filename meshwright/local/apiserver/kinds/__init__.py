"""What single kinds do beyond the general rules: defaults, checks, set-up at creation, life cycle at deletion."""
