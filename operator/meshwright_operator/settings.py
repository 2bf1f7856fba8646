"""Settings of the operator process: one flag each, and the environment variable of the same name for manifests.

`--lease-seconds` reads `MESHWRIGHT_OPERATOR_LEASE_SECONDS`, and so on. Settings do no I/O; a bad value ends the process
with a message that names the flag.
"""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.api.labels import COORDINATOR_PORT
from meshwright_operator.logging_config import FORMATS

ENV_PREFIX = "MESHWRIGHT_OPERATOR_"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. An empty host means every interface; port 0 means any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`HOST:PORT` or `:PORT`.

        Raises:
            ValueError: it is neither.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"`{text}` must be HOST:PORT, such as 127.0.0.1:{COORDINATOR_PORT}, or :PORT")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the process was told. Times in seconds."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; all of the cluster when empty."""
    kubeconfig: Path | None = None
    """Kubeconfig file; the pod's service account, else the usual kubeconfig, when None."""
    coordinator_listen: Address = Address("", COORDINATOR_PORT)
    """Where the coordinator listens for worker agents."""
    coordinator_url: str | None = None
    """URL under which worker pods reach the coordinator; derived from `coordinator_listen` when None."""
    key_file: Path = Path("coordinator.key")
    """File with the key from which the jobs' tokens are derived; made with mode 0600 when it does not exist."""
    metrics_listen: Address = Address("", 9471)
    """Where /metrics, /healthz and /readyz are served."""
    lease_name: str = "meshwright-operator"
    """Name of the leader's Lease."""
    lease_namespace: str = "default"
    """Namespace of the leader's Lease."""
    lease_seconds: float = 15.0
    """How long a leader that stopped renewing keeps others out."""
    identity: str = ""
    """This process in the Lease; its host name and a random suffix when empty."""
    resync_seconds: float = 120.0
    """Time between full listings that repair what watches missed."""
    watch_idle_seconds: float = 70.0
    """A watch in which nothing arrives for so long is connected again. The server sends a bookmark every minute."""
    workers: int = 8
    """Jobs reconciled at the same time."""
    drain_seconds: float = 10.0
    """How long a stopping process lets running reconciles end before it cancels them."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """text for people, json for machines: one object a line."""


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, else environment, else defaults; ends the process with a usage message when one is bad."""
    parser = _parser()
    given = parser.parse_args(_from_environment(parser, environment) + list(arguments))
    settings = vars(given)
    settings["namespaces"] = tuple(dict.fromkeys(name for name in settings["namespaces"] if name))
    settings["identity"] = settings["identity"] or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    for name, least in (("lease_seconds", 1), ("resync_seconds", 1), ("watch_idle_seconds", 1), ("workers", 1)):
        if settings[name] < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if given.drain_seconds < 0:
        parser.error("--drain-seconds must not be negative")
    if given.coordinator_url is None and given.coordinator_listen.host in ("", "0.0.0.0", "::"):
        parser.error("--coordinator-url is needed when --coordinator-listen names no address that pods can reach")
    return Settings(**settings)


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="meshwright-operator",
        description="The Meshwright operator: plans, places and keeps ParallelTrainingJobs running.",
        epilog=f"Every flag can be given in the environment: --lease-name as {ENV_PREFIX}LEASE_NAME.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--namespace", dest="namespaces", metavar="NAME", action="append", default=[], help="repeat for several")
    add("--kubeconfig", metavar="FILE", type=Path, help="default: service account, else the usual kubeconfig")
    add("--coordinator-listen", metavar="HOST:PORT", type=Address.parse, default=default.coordinator_listen)
    add("--coordinator-url", metavar="URL", help="how worker pods reach the coordinator")
    add("--key-file", metavar="FILE", type=Path, default=default.key_file, help="key of the coordinator's tokens")
    add("--metrics-listen", metavar="HOST:PORT", type=Address.parse, default=default.metrics_listen)
    add("--lease-name", metavar="NAME", default=default.lease_name)
    add("--lease-namespace", metavar="NAME", default=default.lease_namespace)
    add("--lease-seconds", metavar="SECONDS", type=float, default=default.lease_seconds)
    add("--identity", metavar="NAME", default=default.identity, help="default: host name and a random suffix")
    add("--resync-seconds", metavar="SECONDS", type=float, default=default.resync_seconds)
    add("--watch-idle-seconds", metavar="SECONDS", type=float, default=default.watch_idle_seconds)
    add("--drain-seconds", metavar="SECONDS", type=float, default=default.drain_seconds)
    add("--workers", metavar="COUNT", type=int, default=default.workers, help="jobs reconciled at the same time")
    add("--log-level", choices=["debug", "info", "warning", "error"], default=default.log_level)
    add("--log-format", choices=FORMATS, default=default.log_format)
    return parser


def _from_environment(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> list[str]:
    """The environment's settings as flags, so that one parser checks both; a real flag after them wins."""
    arguments: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        text = environment.get(ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper())
        if text is None or flag == "--help":
            continue
        values = text.split(",") if action.dest == "namespaces" else [text]
        arguments += [part for value in values for part in (flag, value.strip())]
    return arguments
