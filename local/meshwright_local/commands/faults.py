"""`meshwright local node` and `meshwright local chaos`: inject faults into the cluster, and end them.

The cluster's process makes nodes and containers fail (see `control_socket.py`). The embedded API server makes requests
and watches fail, by the rules at `/debug/chaos`, which this module only reads and writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import click

from meshwright.api.objects import KubeObject
from meshwright_local import control_socket
from meshwright_local.daemon import daemon_pid
from meshwright_local.kube.client import REQUEST_ERRORS, ApiClient, ApiError
from meshwright_local.kube.kubeconfig import Connection

CHAOS_PATH = "/debug/chaos"

_EFFECTS = {
    "answer": "answer",
    "delay": "delay",
    "drop-watches": "dropWatches",
    "delay-events": "delayEvents",
    "half-open": "halfOpen",
    "stale": "stale",
    "lost-answer": "lostAnswer",
}
"""Effect on the command line -> its type in a rule."""


def default_directory() -> Path:
    """The default directory of `meshwright local`, in the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "meshwright" / "cluster"


directory_option = click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_directory,
    show_default="~/.local/state/meshwright/cluster",
    help="Directory of the cluster.",
)


def running_directory(directory: Path) -> Path:
    """The directory, if a cluster is running in it."""
    directory = directory.resolve()
    if daemon_pid(directory) is None:
        raise click.ClickException(f"no cluster is running in {directory}: start one with `meshwright local up`")
    return directory


def _send_command(directory: Path, **order: str) -> None:
    try:
        control_socket.send(running_directory(directory), **order)
    except control_socket.ControlError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.argument("action", metavar="ACTION", type=click.Choice(control_socket.NODE_ACTIONS))
@click.argument("name")
@click.option("--rack", default="rack0", show_default=True, help="Rack of the node to add.")
@directory_option
def node(action: str, name: str, rack: str, directory: Path) -> None:
    """Fail, recover, add or remove a simulated node.

    ACTION is one of these. partition: the node's API requests stop, its processes keep running. power-off: its
    processes are killed. recover: ends a partition or a power-off. add, remove: add or remove a node until
    `meshwright local down`. To cordon, drain or taint a node, use kubectl.
    """
    _send_command(directory, action=action, node=name, rack=rack)
    click.echo(f"{name}: {action}")


@click.group()
def chaos() -> None:
    """Inject faults into requests, watches and processes."""


@chaos.command("list")
@directory_option
def list_rules(directory: Path) -> None:
    """Print all rules, one JSON object per line."""
    for rule in _rules(directory):
        click.echo(json.dumps(rule))


@chaos.command()
@directory_option
def clear(directory: Path) -> None:
    """Remove every rule."""
    _request(directory, "DELETE")


@chaos.command()
@click.argument("effect", type=click.Choice(list(_EFFECTS)))
@click.argument("details", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--match", "matches", multiple=True, metavar="KEY=VALUE", help="Requests that the rule affects (default: all)."
)
@directory_option
def add(effect: str, details: tuple[str, ...], matches: tuple[str, ...], directory: Path) -> None:
    """Add a rule for the effect of matching requests.

    \b
    answer code=429 retryAfter=1 reason=... message=...   an error; the request is not executed
    delay seconds=2                                       the request is executed later
    drop-watches                                          open watches are closed
    delay-events seconds=2                                watches deliver changes later
    half-open                                             watches stay open and deliver nothing
    stale revisions=20                                    reads return an earlier state
    lost-answer                                           executed, but the connection is closed

    \b
    --match verbs=list,watch    resource=pods    namespace=...    name=...    subresource=status
    --match userAgent=...       probability=0.5  count=3
    """  # noqa: D301 - the escape tells click to keep the line breaks
    rule = {"match": _pairs(matches), "effect": {"type": _EFFECTS[effect], **_pairs(details)}}
    _request(directory, "PUT", [*_rules(directory), rule])
    click.echo(json.dumps(rule))


@chaos.command()
@click.argument("pod")
@click.option("--namespace", "-n", default="default", show_default=True, help="Namespace of the pod.")
@click.option("--container", "-c", default="", help="Name of the container.  [default: the first]")
@directory_option
def kill(pod: str, namespace: str, container: str, directory: Path) -> None:
    """Kill the main process of a container.

    The restart policy of the pod decides what happens next.
    """
    _send_command(directory, action="kill", namespace=namespace, pod=pod, container=container)
    click.echo(f"{namespace}/{pod}: killed")


def _pairs(words: tuple[str, ...]) -> KubeObject:
    """`key=value` words as JSON, with numbers as numbers. The server validates the keys."""
    pairs: KubeObject = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise click.UsageError(f"expected KEY=VALUE, got {word!r}")
        value: Any = text
        with contextlib.suppress(ValueError):
            value = float(text) if "." in text else int(text)
        pairs[key] = text.split(",") if key == "verbs" else value
    return pairs


def _rules(directory: Path) -> list[KubeObject]:
    return list(_request(directory, "GET"))


def _request(directory: Path, method: str, body: Any = None) -> Any:
    connection = Connection.from_kubeconfig(running_directory(directory) / "kubeconfig")

    async def ask() -> Any:
        async with ApiClient(connection, timeout=10) as client:
            return await client.request(method, CHAOS_PATH, body=body)

    try:
        return asyncio.run(ask())
    except REQUEST_ERRORS as error:
        if isinstance(error, ApiError) and error.status == 404:
            raise click.ClickException(
                f"{connection.url} does not support fault injection: it is not an embedded cluster"
            ) from error
        raise click.ClickException(f"{connection.url}: {error}") from error
