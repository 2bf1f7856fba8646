"""The agent: one per worker pod, between the operator's coordinator and the processes of the pod's ranks.

`generation` and `core` decide and are pure; `client`, `ranks`, `rank_server` and `commands` act; `agent` joins them.
"""
