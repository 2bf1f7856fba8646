"""GPU-hours and money that jobs have spent."""
