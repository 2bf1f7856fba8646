"""The administrator's profiles: what worker pods may have beyond the restricted Pod Security Standard."""
