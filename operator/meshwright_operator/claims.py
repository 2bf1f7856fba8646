"""What pods hold on nodes, in the least that placement needs of them.

Thousands of whole pods would be hundreds of megabytes, and most of them ask for the same: requests are kept as text,
which a gang's pods share, and read once for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from sys import intern
from typing import Any

import orjson

from meshwright.api.labels import KIND
from meshwright.planner.inventory import MALFORMED
from meshwright.planner.pods import Amount, is_terminal, node_of, request_of

Object = dict[str, Any]

KEPT = ("overhead", "resources")
CONTAINERS = ("containers", "initContainers")
KEPT_OF_CONTAINER = ("resources", "restartPolicy")


@dataclass(frozen=True, slots=True)
class Claim:
    """One pod that has not ended, and what it holds."""

    name: str
    namespace: str
    node: str
    ask: str
    """What it requests, as `ask_of` writes it."""
    job: str = ""
    """Name of the job it belongs to; empty for a pod of somebody else."""
    job_uid: str = ""

    def amount(self, gpu_resource: str) -> Amount:
        """What it holds.

        Raises:
            one of MALFORMED: its requests cannot be read.
        """
        return _amount(self.ask, gpu_resource)


def ask_of(pod: Mapping[str, Any]) -> str:
    """The part of a raw pod that says what it requests, as JSON; what is malformed is written as `null`."""
    spec = pod.get("spec") or {}
    try:
        kept = {key: spec[key] for key in KEPT if spec.get(key)}
        for key in CONTAINERS:
            if spec.get(key):
                kept[key] = [{k: c[k] for k in KEPT_OF_CONTAINER if k in c} for c in spec[key]]
        return intern(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode())
    except (*MALFORMED, orjson.JSONEncodeError):
        return "null"


@lru_cache(maxsize=4096)
def _amount(ask: str, gpu_resource: str) -> Amount:
    spec = orjson.loads(ask)
    if spec is None:
        raise ValueError("its containers cannot be read")
    return request_of({"spec": spec}, gpu_resource)


def read_claim(obj: Mapping[str, Any], node_by_hostname: Mapping[str, str]) -> Claim | None:
    """What this raw pod claims; None when it has ended, may run on any node or is no pod at all."""
    try:
        node = None if is_terminal(obj) else node_of(obj, node_by_hostname)
        if node is None:
            return None
        metadata = obj["metadata"]
        owners = metadata.get("ownerReferences") or ()
        job: Object = next((o for o in owners if o.get("controller") and o.get("kind") == KIND), {})
        where = str(metadata.get("namespace", ""))
        return Claim(metadata["name"], where, node, ask_of(obj), job.get("name", ""), job.get("uid", ""))
    except MALFORMED:
        return None


def ask_for(amount: Amount, gpu_resource: str) -> str:
    """The same of one pod that is still to be made."""
    wanted = {gpu_resource: amount.gpus, "cpu": f"{amount.cpu_milli}m", "memory": amount.memory_bytes}
    return ask_of({"spec": {"containers": [{"resources": {"requests": wanted}}]}})


def held(claims: Iterable[Claim], gpu_resource: str) -> tuple[dict[str, Amount], list[str]]:
    """Node -> what these pods hold there, and a sentence for each pod that could not be counted."""
    strange: list[str] = []
    alike: Counter[tuple[str, str]] = Counter()
    for claim in claims:
        try:
            claim.amount(gpu_resource)
        except MALFORMED as error:
            strange.append(f"pod {claim.name} was not counted: its object is malformed ({error})")
        else:
            alike[claim.node, claim.ask] += 1
    found: dict[str, Amount] = {}
    for (node, ask), count in alike.items():
        found[node] = found.get(node, Amount()) + _amount(ask, gpu_resource) * count
    return found, strange
