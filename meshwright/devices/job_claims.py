"""What the claims of a job's pods request, from the objects that the job names. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.devices.claims import CHANNEL_CLASS, Wanted, wanted_by

CLAIMS, TEMPLATES = "resourceclaims", "resourceclaimtemplates"
KINDS = {CLAIMS: "ResourceClaim", TEMPLATES: "ResourceClaimTemplate"}
GPU_CLASSES = "gpu."
"""How the names of device classes with GPUs begin: `gpu.nvidia.com`, `gpu.amd.com`."""


def named_claims(spec: ParallelTrainingJobSpec) -> Iterator[tuple[str, str, str]]:
    """The objects that the job names: path below `spec`, resource and name."""
    for index, claim in enumerate(spec.workers.resource_claims or ()):
        path = f"workers.resourceClaims[{index}]"
        if claim.resource_claim_name is not None:
            yield f"{path}.resourceClaimName", CLAIMS, claim.resource_claim_name
        elif claim.resource_claim_template_name is not None:
            yield f"{path}.resourceClaimTemplateName", TEMPLATES, claim.resource_claim_template_name


def wanted_of(obj: Mapping[str, Any], resource: str) -> Counter[Wanted]:
    """How many devices a claim, or each claim of a template, requests.

    Raises:
        ValueError: the object is malformed. So do the other errors of `MALFORMED`.
    """
    spec = obj.get("spec") or {}
    return wanted_by(spec["spec"] if resource == TEMPLATES else spec)


def with_claims(
    spec: ParallelTrainingJobSpec, wanted: Callable[[str, str], Counter[Wanted] | None]
) -> ParallelTrainingJobSpec:
    """The spec that knows what its claims join.

    A channel of a ComputeDomain joins the hosts of a clique and the pods of a host, as `topology.multiNodeNVLink` does.
    One claim with GPUs that all pods share joins the pods of a host.

    Args:
        spec: the spec.
        wanted: resource and name -> what the object requests, or None if that is not known.
    """
    channel = joined = False
    for _, resource, name in named_claims(spec):
        classes = {one.device_class for one in wanted(resource, name) or ()}
        channel = channel or CHANNEL_CLASS in classes
        joined = joined or (resource == CLAIMS and any(one.startswith(GPU_CLASSES) for one in classes))
    return spec.joined_by_claims(channel=channel, pods=joined) if channel or joined else spec
