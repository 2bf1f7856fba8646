"""Which resources the API server serves, and how their objects are read and written."""
