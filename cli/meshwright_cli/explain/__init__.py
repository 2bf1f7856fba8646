"""`meshwright explain`: why a job runs where it runs, and figures of its schedule, memory and collectives."""
