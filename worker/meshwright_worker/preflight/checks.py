"""The checks of a pod. Each yields what is wrong, with its fix."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.api.preflight import Check
from meshwright.protocol.preflight import MAX_FINDINGS, Finding, PodNeeds, PreflightReport
from meshwright_worker.preflight import gpu_health
from meshwright_worker.preflight.host import Host
from meshwright_worker.preflight.numa import far_gpus
from meshwright_worker.preflight.volume import volume_id

SKEW_SECONDS = 5.0
"""Difference of clocks that is reported. The coordinator's time has whole seconds, and travels."""
MIN_SHARED_MEMORY = 1 << 30
"""Bytes of `/dev/shm` for a pod with several GPUs: NCCL and data loaders need hundreds of MiB."""
IMEX_PRODUCTS = re.compile(r"\bGB[23]00\b")
"""GPUs whose NVLink domain spans nodes."""
_RDMA = ("InfiniBand", "RoCE", "EFA")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod to check."""

    needs: PodNeeds = field(default_factory=PodNeeds)
    host: Host = field(default_factory=Host)
    checkpoint_dir: Path | None = None
    library_path: str = ""
    """Value of `LD_LIBRARY_PATH`."""
    clock_skew: float | None = None
    """Seconds that this clock is ahead of the coordinator's. None if it is not known."""
    local_ranks: int = 1
    """GPUs of the pod, as far as they are known."""
    read_gpus: Callable[[], list[gpu_health.GpuState]] = gpu_health.read_gpus


def run_checks(pod: Pod) -> PreflightReport:
    """Run every check. May take seconds: call it in a thread."""
    found: list[Finding] = []
    for check, checker in _CHECKS.items():
        found += [Finding(check=check.value, message=text[:512], fix=fix[:512]) for text, fix in checker(pod)]
    volume, problems = _volume(pod)
    return PreflightReport(findings=[*found, *problems][:MAX_FINDINGS], volume=volume)


Problems = Iterator[tuple[str, str]]


def _network_device(pod: Pod) -> Problems:
    kind, verbs = pod.needs.network, pod.host.glob("/dev/infiniband/uverbs*")
    if not pod.needs.several_workers or verbs or not (kind in _RDMA or pod.needs.rdma):
        return
    if kind == "EFA":
        yield (
            "no EFA device is in the pod (/dev/infiniband/uverbs*): NCCL falls back to TCP",
            "request the interfaces of the node with `workers.resources.devices: {vpc.amazonaws.com/efa: 32}` "
            "(16 on p5en), and install the EFA device plugin",
        )
    elif pod.needs.rdma:
        yield (
            "the pod requests RDMA devices, and none is in it (/dev/infiniband/uverbs*): NCCL falls back to TCP",
            "check the device plugin of the network and the drivers of the node",
        )
    else:
        yield (
            f"the network of the site is {kind}, and no RDMA device is in the pod (/dev/infiniband/uverbs*): NCCL "
            "falls back to TCP",
            "request a device with `workers.resources.devices`, such as `rdma/ib: 1` (docs/clusters.md)",
        )


def _network_library(pod: Pod) -> Problems:
    kind, more = pod.needs.network, pod.library_path.split(":")
    if not pod.needs.several_workers:
        return
    if (kind in _RDMA or pod.needs.rdma) and not pod.host.has_library("libibverbs.so*", more):
        yield (
            "the image has no libibverbs: NCCL cannot use RDMA and falls back to TCP",
            "install libibverbs in the image (package libibverbs1 and ibverbs-providers, or rdma-core)",
        )
    if kind in ("EFA", "Plugin") and not pod.host.has_library("libnccl-net*.so*", more):
        what = "aws-ofi-nccl (and libfabric)" if kind == "EFA" else "the plugin of your cloud"
        yield (
            f"the image has no network plugin of NCCL (libnccl-net*.so), which {kind} needs: NCCL falls back to TCP",
            f"install {what} in the image, or mount it and set LD_LIBRARY_PATH in `workers.env`",
        )


def _locked_memory(pod: Pod) -> Problems:
    rdma = pod.needs.rdma or pod.needs.network in _RDMA
    limit = pod.host.memlock()
    if pod.needs.several_workers and rdma and limit != resource.RLIM_INFINITY and not pod.host.may_lock_memory:
        yield (
            f"the limit of locked memory is {limit // 1024} KiB: RDMA cannot register memory, and NCCL uses TCP",
            "set an unlimited memlock for containers on the nodes, such as LimitMEMLOCK=infinity of containerd's unit",
        )


def _imex_channel(pod: Pod) -> Problems:
    models = [pod.host.text(f"/proc/driver/nvidia/gpus/{address}/information") for address in pod.host.gpus()]
    spans = any(IMEX_PRODUCTS.search(model) for model in models)
    if pod.needs.several_workers and spans and not pod.host.glob("/dev/nvidia-caps-imex-channels/channel*"):
        yield (
            "no IMEX channel is in the pod (/dev/nvidia-caps-imex-channels): NVLink ends at the node",
            "claim a channel of a ComputeDomain for the job (docs/clusters.md), or state `levels.domain.labels: []` in "
            "the fabric of the site, so that each node is planned as its own domain",
        )


def _numa(pod: Pod) -> Problems:
    far = far_gpus(pod.host)
    if far:
        yield (
            f"the pod may use no CPU of the NUMA node of its GPU: {', '.join(far)}. Copies to it are slower",
            "set the kubelet's topologyManagerPolicy to `restricted` or `single-numa-node`, or request more CPUs",
        )


def _clock_skew(pod: Pod) -> Problems:
    skew = pod.clock_skew
    if skew is not None and abs(skew) > SKEW_SECONDS:
        side = "ahead of" if skew > 0 else "behind"
        yield (
            f"the clock of the node is {abs(skew):.0f} s {side} that of the operator",
            "synchronize the clocks of the nodes (chrony or NTP)",
        )


def _shared_memory(pod: Pod) -> Problems:
    if pod.local_ranks < 2 or not pod.host.has_gpus:
        return
    try:
        size = pod.host.size_of(pod.host.path("/dev/shm"))  # noqa: S108 - the file system itself
    except OSError as error:
        yield f"/dev/shm cannot be read: {error.strerror}", "mount a memory volume at /dev/shm"
        return
    if size < MIN_SHARED_MEMORY:
        yield (
            f"/dev/shm has {size >> 20} MiB: NCCL and data loaders need at least {MIN_SHARED_MEMORY >> 20} MiB",
            "raise `workers.resources.sharedMemory` and `memory`, or remove `sharedMemory`",
        )


def _gpu_health(pod: Pod) -> Problems:
    yield from gpu_health.problems(pod.read_gpus())


def _huge_pages(pod: Pod) -> Problems:
    for size, wanted in pod.needs.huge_pages.items():
        kibibytes = {"Ki": 1, "Mi": 1 << 10, "Gi": 1 << 20}.get(size[-2:], 0)
        number = size[:-2]
        if not kibibytes or not number.isdigit():
            continue
        name = f"/sys/kernel/mm/hugepages/hugepages-{int(number) * kibibytes}kB/nr_hugepages"
        pages = pod.host.text(name)
        if not pages.isdigit() or not int(pages):
            yield (
                f"the pod requests {wanted} of huge pages of {size}, and the node has none ({name})",
                "reserve huge pages on the node (vm.nr_hugepages) and restart its kubelet, or remove "
                "`workers.resources.hugePages`",
            )


def _volume(pod: Pod) -> tuple[str, list[Finding]]:
    if pod.checkpoint_dir is None:
        return "", []
    try:
        return volume_id(pod.checkpoint_dir), []
    except OSError as error:
        text = f"the checkpoint volume {pod.checkpoint_dir.parent} cannot be written: {error.strerror or error}"
        fix = (
            "make the volume of `checkpoint.claimName` writable for the pod's group (`workers.runAsGroup`), and free "
            "space on it"
        )
        return "", [Finding(check=Check.VOLUME.value, message=text[:512], fix=fix)]


_CHECKS: dict[Check, Callable[[Pod], Problems]] = {
    Check.NETWORK_DEVICE: _network_device,
    Check.NETWORK_LIBRARY: _network_library,
    Check.LOCKED_MEMORY: _locked_memory,
    Check.IMEX_CHANNEL: _imex_channel,
    Check.NUMA: _numa,
    Check.CLOCK_SKEW: _clock_skew,
    Check.SHARED_MEMORY: _shared_memory,
    Check.GPU_HEALTH: _gpu_health,
    Check.HUGE_PAGES: _huge_pages,
}
