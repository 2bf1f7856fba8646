"""The node agent's HTTP server: logs and exec."""
