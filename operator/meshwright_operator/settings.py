"""Settings of the operator process. Each has a flag, and an environment variable of the same name for manifests.

For example, `MESHWRIGHT_OPERATOR_LEASE_SECONDS` sets `--lease-seconds`. Settings do no I/O. If a value is invalid, the
process exits with a message that names the flag.
"""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from meshwright.addresses import split_host_port
from meshwright.api.labels import COORDINATOR_PORT
from meshwright_operator.feature_gates import GATES, FeatureGates
from meshwright_operator.http.limits import ConnectionLimits
from meshwright_operator.kube.progress_budget import PROGRESS_WRITES_PER_SECOND
from meshwright_operator.logging_config import FORMATS
from meshwright_operator.manifests.network_policy import NetworkPolicyOptions

ENV_PREFIX = "MESHWRIGHT_OPERATOR_"
TLS_MODES = ("managed", "files", "disabled")
BURST_SECONDS = 4.0
"""A burst of connections has as many as come in this time at the rate."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address that a server listens on. An empty host means every interface, port 0 any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT`, `[IPV6]:PORT` or `:PORT`.

        Raises:
            ValueError: The text has another format.
        """
        try:
            return cls(*split_host_port(text))
        except ValueError:
            examples = f"127.0.0.1:{COORDINATOR_PORT} or [::1]:{COORDINATOR_PORT}"
            raise ValueError(f"`{text}` must be HOST:PORT, such as {examples}, or :PORT") from None


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
    credentials_secret: str = "meshwright-operator-credentials"
    """Name of the Secret, in `lease_namespace`, with the key of the jobs' tokens and the CA. Created if missing."""
    key_file: Path | None = None
    """File with the key of the jobs' tokens, instead of the Secret; created with mode 0600 if it does not exist."""
    tls: str = "managed"
    """managed: certificates from the CA in the Secret. files: from the files below. disabled: plain HTTP."""
    tls_names: tuple[str, ...] = ()
    """Host names and IP addresses in managed certificates, in addition to the host of `coordinator_url`."""
    tls_ca_days: float = 365.0
    """Lifetime of a managed CA. The next one is created after two thirds of it."""
    tls_cert_file: Path | None = None
    """Serving certificate, with intermediate certificates."""
    tls_key_file: Path | None = None
    """Private key of the serving certificate."""
    tls_ca_file: Path | None = None
    """CA certificates with which agents verify the serving certificate."""
    tls_server_name: str = ""
    """Name that agents verify; the host of `coordinator_url` if empty."""
    max_connections_per_source: int = ConnectionLimits.unverified_per_source
    """Connections from one address that have not sent a request with a valid signature. Raise it for a gateway."""
    connection_rate_per_source: float = ConnectionLimits.rate_per_source
    """The same, new ones per second."""
    policy_file: Path | None = None
    """File with the administrator's policy; no bounds if None."""
    fabric_file: Path | None = None
    """File with the fabric of the site; nothing is stated about it if None."""
    feature_gates: FeatureGates = FeatureGates()
    """Which alpha and beta features are on."""
    job_network_policies: NetworkPolicyOptions | None = None
    """What the NetworkPolicies of jobs allow; none are created if None."""
    agent_image: str = ""
    """Image of the agent for jobs with `runtime.agent: Injected`; such jobs are rejected if empty."""
    profiles_file: Path | None = None
    """File with the administrator's profiles of worker pods; none if None."""
    unbound_seconds: float = 1800.0
    """How long another scheduler may take to bind the first pod of a job; 0 for no limit."""
    partly_bound_seconds: float = 300.0
    """The same for the other pods, after the first one."""
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
    progress_writes_per_second: float = PROGRESS_WRITES_PER_SECOND
    """Writes to the API server per second, over all jobs, that only update the progress in a job's status."""
    drain_seconds: float = 10.0
    """How long a stopping process waits for running reconciles before it cancels them."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """text, or json with one object per line."""

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits of the coordinator's connections."""
        return ConnectionLimits(
            unverified_per_source=self.max_connections_per_source,
            rate_per_source=self.connection_rate_per_source,
            burst_per_source=BURST_SECONDS * self.connection_rate_per_source,
        )


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, else the environment, else defaults. Exits with a usage message if one is invalid."""
    parser = _parser()
    given = parser.parse_args(_from_environment(parser, environment) + list(arguments))
    settings = vars(given)
    for names in ("namespaces", "tls_names"):
        settings[names] = tuple(dict.fromkeys(name for name in settings[names] if name))
    settings["identity"] = settings["identity"] or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    for name, least in (
        ("lease_seconds", 1),
        ("resync_seconds", 1),
        ("watch_idle_seconds", 1),
        ("workers", 1),
        ("progress_writes_per_second", 1),
        ("max_connections_per_source", 1),
        ("connection_rate_per_source", 1),
    ):
        if not least <= settings[name] < inf:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, and finite")
    for name in ("drain_seconds", "unbound_seconds", "partly_bound_seconds"):
        if not 0 <= settings[name] < inf:
            parser.error(f"--{name.replace('_', '-')} must not be negative, and finite")
    if given.coordinator_url is None and given.coordinator_listen.host in ("", "0.0.0.0", "::"):
        parser.error("--coordinator-url is required if --coordinator-listen has no address that pods can reach")
    _check_tls(parser, given)
    return Settings(**settings)


def _check_tls(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Exit with a usage message if the settings of TLS contradict each other."""
    files = (given.tls_cert_file, given.tls_key_file, given.tls_ca_file)
    if given.tls == "files" and None in files:
        parser.error("--tls files requires --tls-cert-file, --tls-key-file and --tls-ca-file")
    if given.tls != "files" and any(files):
        parser.error(f"--tls-cert-file, --tls-key-file and --tls-ca-file require --tls files, got --tls {given.tls}")
    scheme = "http" if given.tls == "disabled" else "https"
    if given.coordinator_url is not None and not given.coordinator_url.startswith(f"{scheme}://"):
        parser.error(
            f"--coordinator-url must start with {scheme}:// with --tls {given.tls}, got {given.coordinator_url}"
        )
    if not 0 < given.tls_ca_days < inf:
        parser.error("--tls-ca-days must be above 0, and finite")


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="meshwright-operator",
        description="Run the Meshwright operator, which plans, places and runs ParallelTrainingJobs.",
        epilog=f"Every option can also be set in the environment: --lease-name as {ENV_PREFIX}LEASE_NAME.",
        allow_abbrev=False,
    )
    text = "Namespace to serve. Repeat the option for several. Default: all namespaces."
    parser.add_argument("--namespace", dest="namespaces", metavar="NAME", action="append", default=[], help=text)

    def add(flag: str, metavar: str, kind: Callable[[str], object], value: object, text: str) -> None:
        parser.add_argument(flag, metavar=metavar, type=kind, default=value, help=text)

    text = "Path of a kubeconfig file. Default: service account, or default kubeconfig."
    add("--kubeconfig", "FILE", Path, None, text)
    _add_coordinator(parser, add)
    _add_options_of_jobs(add)
    _add_limits(add)
    _add_documents(add)
    text = "Address on which /metrics, /healthz and /readyz are served."
    add("--metrics-listen", "HOST:PORT", Address.parse, default.metrics_listen, text)
    _add_lease(add)
    _add_rhythm(add)
    levels = ["debug", "info", "warning", "error"]
    text = "Lowest level of the records that are logged."
    parser.add_argument("--log-level", choices=levels, default=default.log_level, help=text)
    parser.add_argument("--log-format", choices=FORMATS, default=default.log_format, help="Format of log lines.")
    return parser


def _add_coordinator(parser: argparse.ArgumentParser, add: Callable[..., None]) -> None:
    default = Settings()
    listen = default.coordinator_listen
    add("--coordinator-listen", "HOST:PORT", Address.parse, listen, "Address on which the coordinator serves agents.")
    text = "URL at which worker pods reach the coordinator. Default: from --coordinator-listen."
    add("--coordinator-url", "URL", str, None, text)
    text = "Name of the Secret with the key of the jobs' tokens and the CA, next to the Lease. Created if missing."
    add("--credentials-secret", "NAME", str, default.credentials_secret, text)
    text = "Path of the key of the jobs' tokens, for local use instead of the Secret. Created if it does not exist."
    add("--key-file", "FILE", Path, default.key_file, text)
    _add_tls(parser, add)


def _add_limits(add: Callable[..., None]) -> None:
    default = Settings()
    text = "Largest number of connections from one address without a valid signature."
    add("--max-connections-per-source", "COUNT", int, default.max_connections_per_source, text)
    text = "New connections per second from one address that do not send a valid signature."
    add("--connection-rate-per-source", "RATE", float, default.connection_rate_per_source, text)


def _add_lease(add: Callable[..., None]) -> None:
    default = Settings()
    add("--lease-name", "NAME", str, default.lease_name, "Name of the leader's Lease.")
    add("--lease-namespace", "NAME", str, default.lease_namespace, "Namespace of the leader's Lease.")
    add("--lease-seconds", "SECONDS", float, default.lease_seconds, "Duration of the Lease.")
    text = "Name of this process in the Lease. Default: its host name and a random suffix."
    add("--identity", "NAME", str, default.identity, text)


def _add_rhythm(add: Callable[..., None]) -> None:
    """Options of how often, how long and how much at once."""
    default = Settings()
    text = "Time between full listings, which repair what watches missed."
    add("--resync-seconds", "SECONDS", float, default.resync_seconds, text)
    text = "Time without data after which a watch reconnects."
    add("--watch-idle-seconds", "SECONDS", float, default.watch_idle_seconds, text)
    text = "Time that a stopping process waits for running reconciles."
    add("--drain-seconds", "SECONDS", float, default.drain_seconds, text)
    add("--workers", "COUNT", int, default.workers, "Largest number of jobs reconciled at the same time.")
    text = "Largest number of status writes per second, over all jobs, that only update progress."
    add("--progress-writes-per-second", "RATE", float, default.progress_writes_per_second, text)


def _add_options_of_jobs(add: Callable[..., None]) -> None:
    default = Settings()
    text = "Time in which another scheduler must bind a job's first pod, unless the job says otherwise. 0: no limit."
    add("--unbound-seconds", "SECONDS", float, default.unbound_seconds, text)
    text = "The same for the job's other pods, after the first one is bound. 0: no limit."
    add("--partly-bound-seconds", "SECONDS", float, default.partly_bound_seconds, text)
    text = "Create a NetworkPolicy for each job, with these options. {} for the defaults. Default: no NetworkPolicies."
    add("--job-network-policies", "JSON", _checked(NetworkPolicyOptions.parse), None, text)
    text = "Image of the agent for jobs with `runtime.agent: Injected`. Default: such jobs are rejected."
    add("--agent-image", "IMAGE", str, default.agent_image, text)
    text = f"Turn alpha and beta features on or off: {', '.join(f'{name}=true|false' for name in GATES)}."
    add("--feature-gates", "NAME=true,...", _checked(FeatureGates.parse), default.feature_gates, text)


def _checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    """A parser of a flag's value that shows why a value is wrong."""

    def checked(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _add_documents(add: Callable[..., None]) -> None:
    text = "Path of the administrator's policy, read again when it changes. Default: no bounds."
    add("--policy-file", "FILE", Path, None, text)
    text = "Path of the fabric of the site, read again when it changes. Default: known labels and usual bandwidths."
    add("--fabric-file", "FILE", Path, None, text)
    text = "Path of the administrator's profiles of worker pods, read again when it changes. Default: no profiles."
    add("--profiles-file", "FILE", Path, None, text)


def _add_tls(parser: argparse.ArgumentParser, add: Callable[..., None]) -> None:
    default = Settings()
    text = "Certificates of the coordinator. managed: from a CA in the Secret. files: from files. disabled: plain HTTP."
    parser.add_argument("--tls", choices=TLS_MODES, default=default.tls, help=text)
    text = "Name or IP address in managed certificates, in addition to that of the URL. Repeat the option for several."
    parser.add_argument("--tls-name", dest="tls_names", metavar="NAME", action="append", default=[], help=text)
    text = "Lifetime of a managed CA. It is rotated after two thirds of it."
    add("--tls-ca-days", "DAYS", float, default.tls_ca_days, text)
    add("--tls-cert-file", "FILE", Path, None, "Path of the serving certificate for --tls files.")
    add("--tls-key-file", "FILE", Path, None, "Path of the serving certificate's private key for --tls files.")
    add("--tls-ca-file", "FILE", Path, None, "Path of the CA certificates that agents trust, for --tls files.")
    text = "Name in the serving certificate that agents verify. Default: the host of --coordinator-url."
    add("--tls-server-name", "NAME", str, default.tls_server_name, text)


def _from_environment(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> list[str]:
    """The environment's settings as flags, so that one parser checks both. The command line overrides them."""
    arguments: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        text = environment.get(ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper())
        if text is None or flag == "--help":
            continue
        values = text.split(",") if action.dest in ("namespaces", "tls_names") else [text]
        arguments += [part for value in values for part in (flag, value.strip())]
    return arguments
