"""Plans for other frameworks: what each of them can run, and a plan in its own flags or configuration."""
