"""Commands to a running cluster: make a node fail or recover, kill a container.

The process of the cluster listens on DIR/control.sock, which only its owner can open. One connection carries one JSON
request and one JSON response, a line each. Node failures cannot go through the API server: a node that is partitioned
could not receive the command to recover.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright_local.cluster import LocalCluster

logger = logging.getLogger(__name__)

SOCKET = "control.sock"
NODE_ACTIONS = ("partition", "power-off", "recover", "add", "remove")
_ANSWER_SECONDS = 60.0


class ControlError(Exception):
    """A command failed; the message says why."""


class ControlServer:
    """Serves the control socket of a cluster's directory."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Replace a socket that a killed predecessor left behind."""
        with _address(self._cluster.directory) as path:
            before = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._serve, path)
            finally:
                os.umask(before)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            (self._cluster.directory / SOCKET).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = {"error": ""}
            try:
                await execute_command(self._cluster, json.loads(await reader.readline()))
            except (KeyError, ValueError, RuntimeError) as error:
                answer["error"] = str(error.args[0]) if error.args else repr(error)
            except Exception as error:
                logger.exception("a command failed")
                answer["error"] = repr(error)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except ConnectionError as error:
            logger.debug("control connection lost: %r", error)
        finally:
            writer.close()


async def execute_command(cluster: LocalCluster, command: dict[str, Any]) -> None:
    """Execute `{action, node, rack}` or `{action: kill, namespace, pod, container}`.

    Raises:
        KeyError: No such node, pod or container.
        ValueError: No such action, or a node that cannot be added.
        RuntimeError: The cluster cannot have simulated nodes.
    """
    action = command["action"]
    if action == "kill":
        namespace, pod = command["namespace"], command["pod"]
        agent = next((item for item in cluster.nodes.values() if item.find(namespace, pod)), None)
        if agent is None:
            raise KeyError(f"no simulated node runs a pod {namespace}/{pod}")
        agent.signal(namespace, pod, command["container"])
        return
    if action not in NODE_ACTIONS:
        raise ValueError(f"action {action!r}: one of {', '.join((*NODE_ACTIONS, 'kill'))}")
    name = command["node"]
    if action == "add":
        await cluster.add_node(cluster.shape.node(command["rack"], name))
        return
    if name not in cluster.nodes:
        raise KeyError(f"no simulated node {name!r}: there are {', '.join(sorted(cluster.nodes)) or 'none'}")
    if action == "remove":
        await cluster.remove_node(name)
    else:
        agent = cluster.nodes[name]
        await {"partition": agent.partition, "power-off": agent.power_off, "recover": agent.recover}[action]()


def send(directory: Path, **command: str) -> None:
    """Send a command to the cluster of a directory and wait until it is done.

    Raises:
        ControlError: It failed, or no cluster listens.
    """
    with socket.socket(socket.AF_UNIX) as connection, _address(directory) as path:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(path)
            connection.sendall(json.dumps(command).encode() + b"\n")
            answer = connection.makefile().readline()
        except OSError as error:
            raise ControlError(f"{directory / SOCKET}: {error.strerror or error}") from error
    problem = json.loads(answer)["error"] if answer else "the cluster ended"
    if problem:
        raise ControlError(problem)


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Return a short path to the socket: the kernel accepts at most 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
