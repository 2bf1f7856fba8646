"""The agent: one per worker pod, between the operator's coordinator and the processes of the pod's ranks.

`mesh_generation` and `state_machine` decide and are pure; `coordinator_client`, `rank_process`, `server_process`,
`fork_client` and `launcher` act; `agent` connects them.
"""
