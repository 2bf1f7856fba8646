"""The scheduler: pure filters and scores, and the loop that binds pods over the API."""
