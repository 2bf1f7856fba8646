"""Pipeline schedules: what each rank does in which order. Pure: the planner simulates what the runtime executes."""
