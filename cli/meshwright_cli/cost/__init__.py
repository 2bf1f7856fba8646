"""GPU-hours and money: what jobs have spent, and what a plan will spend."""
