"""The NetworkPolicy of a job: its pods reach each other, the coordinator and DNS, and only metrics are open to others.

Ranks of one job use any port among themselves: the rendezvous store's, and those that NCCL and Gloo draw. RDMA is not
IP traffic to which a policy applies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.api.labels import ANNOTATION_NETWORK_POLICY, COORDINATOR_PORT, LABEL_JOB, LABEL_JOB_UID, METRICS_PORT
from meshwright.api.objects import KubeObject, service_name
from meshwright_operator.manifests.owned_objects import metadata

DNS_PORT = 53
FIELDS = ("metricsFrom", "coordinator", "coordinatorPort", "egress")


@dataclass(frozen=True, slots=True)
class NetworkPolicyOptions:
    """What the administrator allows in addition to a job's own traffic. Peers and rules are those of the API."""

    metrics_from: tuple[KubeObject, ...] = ()
    """Peers that may scrape the agents' metrics. Empty: everyone."""
    coordinator: tuple[KubeObject, ...] = ()
    """Peers that are the coordinator. Empty: any address, at the coordinator's port."""
    coordinator_port: int = COORDINATOR_PORT
    egress: tuple[KubeObject, ...] = ()
    """Further egress rules, such as that to an object store."""

    @classmethod
    def parse(cls, text: str) -> NetworkPolicyOptions:
        """Read the options as a JSON object.

        Raises:
            ValueError: It is not one, or has an unknown field or a field of another type.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"must be a JSON object, such as {{}}: {error}") from None
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object, such as {}")  # noqa: TRY004 - a setting, not a bug
        for name in given:
            if name not in FIELDS:
                raise ValueError(f"unknown field `{name}`: use {', '.join(FIELDS)}")
        port = given.get("coordinatorPort", COORDINATOR_PORT)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= 65535:  # noqa: PLR2004
            raise ValueError(f"`coordinatorPort` must be a port, got {port}")
        return cls(_objects(given, "metricsFrom"), _objects(given, "coordinator"), port, _objects(given, "egress"))


def _objects(given: Mapping[str, Any], name: str) -> tuple[KubeObject, ...]:
    value = given.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"`{name}` must be a list of objects")
    return tuple(value)


def wanted(job: KubeObject) -> bool:
    """Whether a job gets a policy where the operator creates them: its annotation can only say no."""
    annotations = job["metadata"].get("annotations") or {}
    return bool(annotations.get(ANNOTATION_NETWORK_POLICY) != "None")


def network_policy(name: str, namespace: str, uid: str, options: NetworkPolicyOptions) -> KubeObject:
    """The policy for the pods of one job, and for no others."""
    own = {LABEL_JOB: name, LABEL_JOB_UID: uid}
    peers: KubeObject = {"podSelector": {"matchLabels": own}}
    metrics: KubeObject = {"ports": [_port("TCP", METRICS_PORT)]}
    coordinator: KubeObject = {"ports": [_port("TCP", options.coordinator_port)]}
    if options.metrics_from:
        metrics["from"] = list(options.metrics_from)
    if options.coordinator:
        coordinator["to"] = list(options.coordinator)
    # Caches of DNS on the nodes have addresses of the host network, which no selector matches.
    dns = {"ports": [_port(protocol, DNS_PORT) for protocol in ("UDP", "TCP")]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service_name(name, uid), namespace, name, uid),
        "spec": {
            "podSelector": {"matchLabels": own},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [peers]}, metrics],
            "egress": [{"to": [peers]}, coordinator, dns, *options.egress],
        },
    }


def _port(protocol: str, number: int) -> KubeObject:
    return {"protocol": protocol, "port": number}
