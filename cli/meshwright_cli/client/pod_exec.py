"""Runs a command in a container of a pod, as `kubectl exec` does, over a WebSocket.

The protocol is Kubernetes' `v5.channel.k8s.io`, or `v4` of older servers: each message begins with a byte that names
its channel, 1 for standard output, 2 for standard error and 3 for the final status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from meshwright.api.labels import WORKER_CONTAINER
from meshwright_cli.client.api_server import EXEC_PROTOCOLS, PODS, Action
from meshwright_cli.client.errors import RejectedError
from meshwright_cli.client.job_reader import JobReader

_STDOUT, _STDERR, _STATUS = 1, 2, 3
MAX_OUTPUT = 1 << 30


async def run_in_pod(
    reader: JobReader, pod: str, command: Sequence[str], *, container: str = WORKER_CONTAINER, seconds: float = 60.0
) -> bytes:
    """Run a command in a pod; return its standard output.

    Raises:
        ForbiddenError: you may not run commands in pods.
        RejectedError: the pod does not run, or the command failed.
    """
    action = Action("create", PODS, reader.namespace, pod, "exec")
    params = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", c) for c in command)]
    streams = {_STDOUT: bytearray(), _STDERR: bytearray(), _STATUS: bytearray()}
    try:
        async with asyncio.timeout(seconds):
            path = PODS.path(reader.namespace, pod, "exec")
            async for message in reader.server.messages(path, action, params, EXEC_PROTOCOLS):
                if message and message[0] in streams:
                    streams[message[0]] += message[1:]
                if len(streams[_STDOUT]) > MAX_OUTPUT:
                    raise RejectedError(f"pod {pod} sent more than {MAX_OUTPUT:,} bytes", 0)
    except TimeoutError:
        raise RejectedError(f"pod {pod} did not answer within {seconds:g} s", 0) from None
    status = json.loads(streams[_STATUS] or b"{}")
    if status.get("status") != "Success":
        last = streams[_STDERR].decode(errors="replace").strip().splitlines()
        why = last[-1] if last else status.get("message") or "the connection ended early"
        raise RejectedError(f"pod {pod}: {why}", 0)
    return bytes(streams[_STDOUT])
