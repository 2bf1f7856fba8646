"""Checks of what jobs run on: GPUs, fabric labels, storage, and images. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.api.labels import GPU_RESOURCE, LABEL_JOB
from meshwright.api.objects import KubeObject
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.accelerators import ACCELERATORS, accelerator
from meshwright.planner.topology.site import FabricError, parse_fabric
from meshwright_cli.client.objects import pod_state
from meshwright_cli.cluster_fabric import KEY, fabric_of
from meshwright_cli.doctor.facts import EMBEDDED, Facts
from meshwright_cli.doctor.findings import Finding, error, ok, skipped, warning
from meshwright_cli.text import plural

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
MAX_NAMED = 5


def check_gpu_resource(facts: Facts) -> Iterator[Finding]:
    """Nodes advertise the GPU resource that jobs request."""
    name = "GPU resource"
    if facts.nodes is None:
        yield skipped(name, facts.forbidden["nodes"])
        return
    wanted = {_gpu_resource(job) for job in facts.jobs or ()} or {GPU_RESOURCE}
    others = sorted({key for node in facts.nodes for key in _allocatable(node) if _is_gpu(key)})
    for resource in sorted(wanted):
        nodes = [node for node in facts.nodes if int(_allocatable(node).get(resource) or 0) > 0]
        if nodes:
            gpus = sum(int(_allocatable(node)[resource]) for node in nodes)
            yield ok(name, f"{plural(len(nodes), 'node')} with {plural(gpus, 'GPU')} ({resource})")
        elif others:
            fix = f"Set `spec.workers.gpuResource: {others[0]}` in your jobs"
            yield error(name, f"no node advertises {resource}; nodes advertise {', '.join(others)}", fix)
        else:
            fix = "Install the device plugin of your GPUs, such as the NVIDIA GPU operator, and check the GPUs' drivers"
            yield error(name, f"no node advertises {resource}", fix)


def check_gpu_nodes(facts: Facts) -> Iterator[Finding]:
    """Nodes with GPUs may get workers, their product is known, and their GPUs are not shared."""
    name = "GPU nodes"
    inventory = _inventory(facts)
    if inventory is None or not any(node.capacity.gpus for node in inventory.nodes.values()):
        return
    unusable = inventory.unusable
    usable = [node for node in inventory.usable if node.capacity.gpus]
    if unusable:
        reasons = Counter(unusable.values()).most_common()
        text = "; ".join(f"{plural(count, 'node')}: {reason}" for reason, count in reasons)
        report = warning if usable else error
        total = len(usable) + len(unusable)
        yield report(
            name, f"{len(unusable)} of {total} GPU nodes get no workers ({text})", _fix_unusable(reasons[0][0])
        )
    unlabeled = sum(not node.gpu_product for node in usable)
    if unlabeled:
        fix = (
            "Set the label `nvidia.com/gpu.product`, as GPU feature discovery does. Without it, steps are not estimated"
        )
        have = "has" if unlabeled == 1 else "have"
        yield warning(name, f"{unlabeled} of {len(usable)} GPU nodes {have} no product label", fix)
    products = {node.gpu_product for node in usable if node.gpu_product}
    unknown = sorted(product for product in products if accelerator(product) is None)
    if unknown:
        fix = f"Set the parallel degrees in your jobs. The catalog has {', '.join(sorted(ACCELERATORS))}"
        yield warning(name, f"steps on {', '.join(unknown[:MAX_NAMED])} cannot be estimated", fix)
    if usable and not unusable and not unknown and not unlabeled:
        counts = Counter(node.gpu_product for node in usable)
        yield ok(name, ", ".join(f"{plural(count, 'node')} with {product}" for product, count in counts.items()))


def _fix_unusable(reason: str) -> str:
    if reason.startswith("taint"):
        return "Add the taint to `spec.workers.tolerations`, or remove it with `kubectl taint nodes NODE KEY-`"
    if reason == "cordoned":
        return "Run `kubectl uncordon NODE` when the node may be used again"
    if reason == "not ready":
        return "Read `kubectl describe node NODE`"
    return (
        "Give jobs entire GPUs: turn off time slicing and MIG on these nodes"
        if "GPUs are" in reason
        else "Check the node"
    )


def check_fabric(facts: Facts) -> Iterator[Finding]:
    """Nodes have the labels of the fabric, and these contradict each other nowhere."""
    name = "Fabric levels"
    for document in facts.fabrics or ():
        yield from _document_problem(document)
    inventory = _inventory(facts)
    usable = [node for node in inventory.usable if node.capacity.gpus] if inventory is not None else []
    if inventory is None or not usable:
        return
    for text in inventory.warnings:
        if "malformed" in text or "more GPUs than" in text:
            yield warning(name, text, "Correct the node's object")
        elif "gpu.memory" in text:
            yield warning(name, text, "Correct the label: GPU feature discovery sets it in MiB")
        elif "no rack label" in text:
            fix = "Label the nodes with their switch, for example with topograph: docs/placement.md lists the labels"
            yield warning(name, text, fix)
        else:
            yield warning(name, text, "Correct the labels: each location must be in one location of the next level")
    if not inventory.warnings:
        counts = [f"{plural(len({node.place.at(level) for node in usable}), level)}" for level in inventory.levels]
        yield ok(name, f"{', '.join(counts)} for {plural(len(usable), 'GPU node')}")


def _document_problem(document: KubeObject) -> Iterator[Finding]:
    """The fabric of the site is valid."""
    metadata = document["metadata"]
    try:
        parse_fabric(document["data"][KEY])
    except FabricError as problem:
        text = f"the fabric of ConfigMap {metadata['namespace']}/{metadata['name']} is invalid: {problem}"
        fix = "Correct `fabric` in the chart's values. Until then, the last valid one is in effect"
        yield error("Fabric of the site", text, fix)


def check_storage(facts: Facts) -> Iterator[Finding]:
    """There is a default StorageClass, and the claims of jobs exist, are bound and can be mounted by all workers."""
    name = "Storage"
    if facts.classes is None:
        yield skipped(name, facts.forbidden["classes"])
    else:
        defaults = [one for one in facts.classes if _annotations(one).get(DEFAULT_CLASS) == "true"]
        names = ", ".join(one["metadata"]["name"] for one in facts.classes)
        if defaults:
            yield ok(name, f"default StorageClass {defaults[0]['metadata']['name']}")
        elif facts.version.endswith(EMBEDDED) and not facts.classes:
            yield ok(name, "the embedded cluster makes a directory for each claim without a class")
        else:
            have = f"there are {names}" if names else "there is no StorageClass at all"
            fix = "Name a class with ReadWriteMany in `spec.storageClassName` of each claim, or mark one as default"
            yield warning(name, f"no default StorageClass: {have}", fix)
    for job in facts.jobs or ():
        yield from _claims(facts, job)


def _claims(facts: Facts, job: KubeObject) -> Iterator[Finding]:
    if facts.claims is None or _finished(job):
        return
    namespace = job["metadata"]["namespace"]
    found = {one["metadata"]["name"]: one for one in facts.claims if one["metadata"]["namespace"] == namespace}
    where = f"job {namespace}/{job['metadata']['name']}"
    if "claims" in facts.forbidden and namespace != facts.namespace:
        return
    for use in claims_of(job):
        claim = found.get(use.name)
        if claim is None:
            fix = f"Create the claim, or correct `{use.field}`"
            yield error("Storage", f"{where}: claim `{use.name}` does not exist in its namespace", fix)
            continue
        phase = (claim.get("status") or {}).get("phase")
        if phase == "Lost":
            yield error("Storage", f"{where}: claim `{use.name}` has lost its volume", "Create another claim")
        modes = claim["spec"].get("accessModes") or []
        if use.writes and "ReadWriteMany" not in modes and _workers(job) > 1:
            fix = f"Use a claim with access mode ReadWriteMany for `{use.field}`: all workers write checkpoints"
            yield error(
                "Storage", f"{where}: claim `{use.name}` is {', '.join(modes)}, and the job has several workers", fix
            )
        if phase == "Pending" and not (claim["spec"].get("volumeName")) and _no_class(facts, claim):
            fix = "Set `spec.storageClassName` of the claim to a class that exists"
            yield error(
                "Storage", f"{where}: claim `{use.name}` is Pending, because its StorageClass does not exist", fix
            )


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """A claim that a job mounts."""

    name: str
    field: str
    writes: bool = False


def claims_of(job: KubeObject) -> list[ClaimUse]:
    """The claims that a job mounts, with the fields that name them."""
    spec = job.get("spec") or {}
    uses = []
    if name := (spec.get("checkpoint") or {}).get("claimName"):
        uses.append(ClaimUse(name, "spec.checkpoint.claimName", writes=True))
    if name := (spec.get("data") or {}).get("claimName"):
        uses.append(ClaimUse(name, "spec.data.claimName"))
    volumes = (spec.get("workers") or {}).get("volumes") or ()
    names = [(index, volume.get("claimName")) for index, volume in enumerate(volumes)]
    return uses + [ClaimUse(name, f"spec.workers.volumes[{index}].claimName") for index, name in names if name]


def _no_class(facts: Facts, claim: KubeObject) -> bool:
    if facts.classes is None:
        return False
    name = claim["spec"].get("storageClassName")
    if name is None:
        return not any(_annotations(one).get(DEFAULT_CLASS) == "true" for one in facts.classes)
    return bool(name) and name not in {one["metadata"]["name"] for one in facts.classes}


def check_images(facts: Facts) -> Iterator[Finding]:
    """Nodes can pull the worker images."""
    name = "Worker image"
    if facts.pods is None:
        yield skipped(name, facts.forbidden["pods"])
        return
    failing: dict[str, str] = {}
    for pod in facts.pods:
        job = (pod["metadata"].get("labels") or {}).get(LABEL_JOB)
        if job and (state := pod_state(pod)) in PULL_FAILURES:
            image = pod["spec"]["containers"][0]["image"]
            failing.setdefault(image, f"{state} in pod {pod['metadata']['namespace']}/{pod['metadata']['name']}")
    for image, where in sorted(failing.items()):
        fix = (
            "Correct `spec.workers.image`, push the image, or name the registry's secret in `workers.imagePullSecrets`"
        )
        yield error(name, f"image {image} cannot be pulled: {where}", fix)
    images = sorted({str((job["spec"].get("workers") or {}).get("image")) for job in _running(facts.jobs)})
    if not failing:
        yield ok(name, ", ".join(images[:MAX_NAMED]) if images else "no job to check")


def _inventory(facts: Facts) -> Inventory | None:
    if facts.nodes is None:
        return None
    resources = sorted({_gpu_resource(job) for job in facts.jobs or ()} or {GPU_RESOURCE})
    return Inventory.from_objects(facts.nodes, (), gpu_resource=resources[0], site=fabric_of(facts.fabrics or ()))


def _running(jobs: Sequence[KubeObject] | None) -> list[KubeObject]:
    return [job for job in jobs or () if not _finished(job)]


def _finished(job: KubeObject) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(one.get("type") in ("Complete", "Failed") and one.get("status") == "True" for one in conditions)


def _workers(job: KubeObject) -> int:
    return int(((job.get("status") or {}).get("plan") or {}).get("workers") or 1)


def _gpu_resource(job: KubeObject) -> str:
    return str(((job.get("spec") or {}).get("workers") or {}).get("gpuResource") or GPU_RESOURCE)


def _allocatable(node: KubeObject) -> dict[str, str]:
    return dict((node.get("status") or {}).get("allocatable") or {})


def _is_gpu(key: str) -> bool:
    domain, _, resource = key.partition("/")
    return bool(resource) and ("gpu" in resource or domain in ("gpu.intel.com", "amd.com", "habana.ai"))


def _annotations(item: KubeObject) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}
