"""Server-side apply: field sets, merging, conflicts and the bookkeeping of `managedFields`."""
