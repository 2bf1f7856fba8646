"""The agent's settings, from environment variables that the operator sets; nothing else is read."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.api import labels
from meshwright.protocol.messages import DEFAULT_REPORT_SECONDS
from meshwright.protocol.preflight import PodNeeds
from meshwright_worker.agent.coordinator_trust import BundleError, CoordinatorTrust

# Tuning that no manifest needs; the operator's timeouts assume these defaults.
ENV_REPORT_SECONDS = "MESHWRIGHT_REPORT_SECONDS"
ENV_REJECT_SECONDS = "MESHWRIGHT_REJECT_SECONDS"

DEFAULT_GRACE_SECONDS = 30.0
DEFAULT_REJECT_SECONDS = 60.0
# Remaining grace period when the last rank is killed: time to report and exit before the kubelet kills the agent.
EXIT_RESERVE_SECONDS = 5.0


class SettingsError(ValueError):
    """An environment variable is missing or invalid. The message names it and states what it must contain."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The agent's settings. Times in seconds."""

    namespace: str
    job: str
    uid: str
    worker: int
    incarnation: int
    pod_uid: str
    pod_address: str
    coordinator_url: str
    token: str = field(repr=False)
    coordinator_ca: str = ""
    """CA certificates that the coordinator is verified with, in PEM format. Empty: none are pinned."""
    coordinator_name: str = ""
    """Name in the coordinator's certificate; the host of `coordinator_url` if empty."""
    metrics_port: int = labels.METRICS_PORT
    """Port of /metrics; 0 picks a free one."""
    checkpoint_dir: str | None = None
    checkpoint_uri: str | None = None
    data_dir: str | None = None
    needs: PodNeeds = field(default_factory=PodNeeds)
    """What the pod needs and the agent cannot see."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """The pod's termination grace period, in seconds."""
    report_seconds: float = DEFAULT_REPORT_SECONDS
    """Shortest interval between heartbeats, in seconds. The coordinator may set a longer one."""
    reject_seconds: float = DEFAULT_REJECT_SECONDS
    """How long the coordinator may answer 401 or 404 without interruption before the agent exits, in seconds."""

    @property
    def drain_seconds(self) -> float:
        """How long ranks may take to save and stop after SIGTERM, in seconds."""
        return max(self.grace_seconds - EXIT_RESERVE_SECONDS, self.grace_seconds / 2)


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read the settings from `environment`.

    Raises:
        SettingsError: a variable is missing or invalid.
    """
    url = _text(environment, labels.ENV_COORDINATOR_URL)
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"{labels.ENV_COORDINATOR_URL} must be an http:// or https:// URL, got {url!r}")
    authorities = environment.get(labels.ENV_COORDINATOR_CA, "").strip()
    if authorities and not url.startswith("https://"):
        raise SettingsError(
            f"{labels.ENV_COORDINATOR_URL} must be an https:// URL if {labels.ENV_COORDINATOR_CA} is set, got {url!r}"
        )
    return Settings(
        namespace=_text(environment, labels.ENV_JOB_NAMESPACE),
        job=_text(environment, labels.ENV_JOB_NAME),
        uid=_text(environment, labels.ENV_JOB_UID),
        worker=_count(environment, labels.ENV_WORKER_INDEX),
        incarnation=_count(environment, labels.ENV_INCARNATION),
        pod_address=_address(environment, labels.ENV_POD_IP),
        coordinator_url=url.rstrip("/"),
        token=_text(environment, labels.ENV_TOKEN),
        pod_uid=_text(environment, labels.ENV_POD_UID),
        coordinator_ca=_bundle(authorities),
        coordinator_name=environment.get(labels.ENV_COORDINATOR_NAME, ""),
        metrics_port=_port(environment, labels.ENV_METRICS_PORT, labels.METRICS_PORT),
        checkpoint_dir=environment.get(labels.ENV_CHECKPOINT_DIR) or None,
        checkpoint_uri=environment.get(labels.ENV_CHECKPOINT_URI) or None,
        data_dir=environment.get(labels.ENV_DATA_DIR) or None,
        needs=_needs(environment.get(labels.ENV_POD_NEEDS, "")),
        grace_seconds=_seconds(environment, labels.ENV_GRACE_SECONDS, DEFAULT_GRACE_SECONDS),
        report_seconds=_seconds(environment, ENV_REPORT_SECONDS, DEFAULT_REPORT_SECONDS),
        reject_seconds=_seconds(environment, ENV_REJECT_SECONDS, DEFAULT_REJECT_SECONDS),
    )


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise SettingsError(f"{name} is not set: the operator sets it in the worker pod's environment")
    return value


def _bundle(authorities: str) -> str:
    try:
        CoordinatorTrust(authorities)
    except BundleError as error:
        raise SettingsError(f"{labels.ENV_COORDINATOR_CA}: {error}") from None
    return authorities


def _needs(text: str) -> PodNeeds:
    """What a pod needs. If it cannot be read, less is checked, but the pod trains."""
    try:
        return PodNeeds.model_validate_json(text) if text.strip() else PodNeeds()
    except ValueError:
        return PodNeeds()


def _count(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isascii() or not value.isdigit():
        raise SettingsError(f"{name} must be an integer of at least 0, got {value!r}")
    return int(value)


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    port = _count(environment, name) if environment.get(name) else default
    if port > 65535:
        raise SettingsError(f"{name} must be a port of at most 65535, got {port}")
    return port


def _address(environment: Mapping[str, str], name: str) -> str:
    value = _text(environment, name)
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise SettingsError(f"{name} must be an IP address, got {value!r}") from None


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name)
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingsError(f"{name} must be a number of seconds above 0, got {value!r}")
    return seconds
