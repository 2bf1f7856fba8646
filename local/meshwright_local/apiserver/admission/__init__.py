"""What the API server checks and fills in before it stores an object."""
