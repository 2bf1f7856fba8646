"""The embedded cluster: API server, scheduler, controllers and node agents as plain processes, for one machine."""
