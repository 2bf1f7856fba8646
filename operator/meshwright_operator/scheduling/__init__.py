"""Which job gets which nodes: the queue, inventories and placements."""
