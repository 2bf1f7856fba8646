"""The resources that the API server serves, and reads and writes of their objects."""
