"""What a layout costs: memory of every rank and time of a step, by closed forms with a few fitted constants."""
