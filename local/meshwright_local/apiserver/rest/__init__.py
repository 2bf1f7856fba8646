"""The HTTP side of the API server: routes, handlers, lists, watches and printed columns."""
