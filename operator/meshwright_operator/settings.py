"""Settings of the operator process. Each has a flag, and an environment variable of the same name for manifests.

For example, `MESHWRIGHT_OPERATOR_LEASE_SECONDS` sets `--lease-seconds`. Settings do no I/O. If a value is invalid, the
process exits with a message that names the flag.
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
    """The address that a server listens on. An empty host means every interface, port 0 any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT` or `:PORT`.

        Raises:
            ValueError: The text has another format.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"`{text}` must be HOST:PORT, such as 127.0.0.1:{COORDINATOR_PORT}, or :PORT")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the process. Times are in seconds."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; all of the cluster if empty."""
    kubeconfig: Path | None = None
    """Kubeconfig file. If None, the pod's service account, or else the default kubeconfig."""
    coordinator_listen: Address = Address("", COORDINATOR_PORT)
    """Address on which the coordinator serves worker agents."""
    coordinator_url: str | None = None
    """URL at which worker pods reach the coordinator; derived from `coordinator_listen` if None."""
    key_file: Path = Path("coordinator.key")
    """File with the key from which the jobs' tokens are derived; created with mode 0600 if it does not exist."""
    metrics_listen: Address = Address("", 9471)
    """Address on which /metrics, /healthz and /readyz are served."""
    lease_name: str = "meshwright-operator"
    """Name of the leader's Lease."""
    lease_namespace: str = "default"
    """Namespace of the leader's Lease."""
    lease_seconds: float = 15.0
    """Duration of the Lease: how long other processes wait after its holder stopped renewing."""
    identity: str = ""
    """Name of this process in the Lease; its host name and a random suffix if empty."""
    resync_seconds: float = 120.0
    """Time between full listings, which repair what watches missed."""
    watch_idle_seconds: float = 70.0
    """A watch reconnects if nothing arrives for this long. The API server sends a bookmark every minute."""
    workers: int = 8
    """Jobs reconciled at the same time."""
    drain_seconds: float = 10.0
    """How long a stopping process waits for running reconciles before it cancels them."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """text, or json with one object per line."""


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, else the environment, else defaults. Exits with a usage message if one is invalid."""
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
    """The environment's settings as flags, so that one parser checks both. The command line overrides them."""
    arguments: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        text = environment.get(ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper())
        if text is None or flag == "--help":
            continue
        values = text.split(",") if action.dest == "namespaces" else [text]
        arguments += [part for value in values for part in (flag, value.strip())]
    return arguments
