"""Preflight: every seeded misconfiguration is found by its check, and named with its fix."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshwright.protocol.preflight import PodNeeds
from meshwright_worker.preflight.checks import Pod, run_checks
from meshwright_worker.preflight.gpu_health import read_gpus
from meshwright_worker.preflight.host import Host
from meshwright_worker.preflight.volume import ID_FILE

GPUS = ("0000:17:00.0", "0000:b1:00.0")
IBVERBS = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
IB = PodNeeds(network="InfiniBand", rdma=True, several_workers=True)


class NVMLError(Exception):
    """As in pynvml."""


class Nvml(ModuleType):
    """The part of pynvml that is used, with the state of two GPUs."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x40, 0x80
    nvmlClocksThrottleReasonHwSlowdown = 0x08

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.errors, self.rows, self.reasons = [0, 0], [(0, 0, 0, 0)] * 2, [0, 0]

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return self.errors[handle]

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self.rows[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        if self.reasons[handle] < 0:
            raise NVMLError("Not Supported")
        return self.reasons[handle]


@dataclass
class Seed:
    """A node on which everything is as it should be, until a test changes it."""

    root: Path
    nvml: Nvml
    pod: Pod

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, name: str) -> None:
        (self.root / name.lstrip("/")).unlink()

    def change(self, **fields: Any) -> None:
        self.pod = replace(self.pod, **fields)

    def change_host(self, **fields: Any) -> None:
        self.change(host=replace(self.pod.host, **fields))

    def change_needs(self, **fields: Any) -> None:
        self.change(needs=self.pod.needs.model_copy(update=fields))


@pytest.fixture
def seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seed:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    root, volume = tmp_path / "root", tmp_path / "volume"
    volume.mkdir()
    host = Host(
        root, memlock=lambda: resource.RLIM_INFINITY, allowed_cpus=lambda: {0, 1, 2, 3}, size_of=lambda path: 64 << 30
    )
    needs = IB.model_copy(update={"huge_pages": {"2Mi": "5120Mi"}})
    found = Seed(root, nvml, Pod(needs, host, volume / "job-1", clock_skew=0.3, local_ranks=2))
    for name in ("/dev/infiniband/uverbs0", IBVERBS, "/dev/nvidia0", "/dev/nvidia1"):
        found.write(name)
    found.write("/dev/nvidia-caps-imex-channels/channel0")
    found.write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "2560\n")
    for number, address in enumerate(GPUS):
        found.write(f"/proc/driver/nvidia/gpus/{address}/information", "Model: \t\t NVIDIA H100 80GB HBM3\n")
        found.write(f"/sys/bus/pci/devices/{address}/numa_node", f"{number}\n")
        found.write(f"/sys/devices/system/node/node{number}/cpulist", f"{2 * number}-{2 * number + 1}\n")
    return found


def gb200(seed: Seed) -> None:
    for address in GPUS:
        seed.write(f"/proc/driver/nvidia/gpus/{address}/information", "Model: \t NVIDIA GB200\n")
    seed.remove("/dev/nvidia-caps-imex-channels/channel0")


def read_only_volume(seed: Seed) -> None:
    missing = seed.root.parent / "not-mounted" / "job-1"
    seed.change(checkpoint_dir=missing)


def no_efa(seed: Seed) -> None:
    seed.remove("/dev/infiniband/uverbs0")
    seed.write("/opt/amazon/ofi-nccl/lib/libnccl-net.so")
    seed.change_needs(network="EFA", rdma=False)


def remapped(row: tuple[int, int, int, int]) -> Callable[[Seed], None]:
    def change(seed: Seed) -> None:
        seed.nvml.rows = [(0, 0, 0, 0), row]

    return change


def no_ofi_plugin(seed: Seed) -> None:
    seed.change_needs(network="EFA")


MISCONFIGURATIONS: dict[str, tuple[Callable[[Seed], None], str, str, str]] = {
    "device plugin gives no device": (
        lambda seed: seed.remove("/dev/infiniband/uverbs0"),
        "NetworkDevice", "requests RDMA devices, and none is in it", "device plugin of the network",
    ),
    "job requests no device": (
        lambda seed: (seed.remove("/dev/infiniband/uverbs0"), seed.change_needs(rdma=False)),
        "NetworkDevice", "the network of the site is InfiniBand", "`workers.resources.devices`",
    ),
    "no EFA interface": (no_efa, "NetworkDevice", "no EFA device", "vpc.amazonaws.com/efa"),
    "image without libibverbs": (
        lambda seed: seed.remove(IBVERBS),
        "NetworkLibrary", "no libibverbs", "libibverbs1",
    ),
    "image without network plugin": (no_ofi_plugin, "NetworkLibrary", "no network plugin of NCCL", "aws-ofi-nccl"),
    "limited memlock": (
        lambda seed: seed.change_host(memlock=lambda: 8 << 20),
        "LockedMemory", "8192 KiB", "unlimited memlock",
    ),
    "no IMEX channel": (gb200, "ImexChannel", "no IMEX channel", "ComputeDomain"),
    "CPUs of another NUMA node": (
        lambda seed: seed.change_host(allowed_cpus=lambda: {0, 1}),
        "Numa", "0000:b1:00.0 (node 1)", "topologyManagerPolicy",
    ),
    "clock ahead": (lambda seed: seed.change(clock_skew=42.0), "ClockSkew", "42 s ahead of", "chrony"),
    "clock behind": (lambda seed: seed.change(clock_skew=-9.0), "ClockSkew", "9 s behind", "NTP"),
    "volume not writable": (read_only_volume, "Volume", "cannot be written", "`checkpoint.claimName`"),
    "small shared memory": (
        lambda seed: seed.change_host(size_of=lambda path: 64 << 20),
        "SharedMemory", "64 MiB", "`workers.resources.sharedMemory`",
    ),
    "memory errors": (
        lambda seed: seed.nvml.errors.__setitem__(1, 3),
        "GpuHealth", "GPU 1 (NVIDIA H100 80GB HBM3) has had 3 uncorrectable memory errors", "nvidia-smi --gpu-reset",
    ),
    "row to remap": (remapped((0, 1, 1, 0)), "GpuHealth", "wait to be remapped", "reset the GPU"),
    "no spare row": (remapped((0, 9, 0, 1)), "GpuHealth", "could not remap", "replace the GPU"),
    "hot GPU": (
        lambda seed: seed.nvml.reasons.__setitem__(0, 0x48),
        "GpuHealth", "GPU 0 (NVIDIA H100 80GB HBM3) is slowed down by heat", "cooling",
    ),
    "no huge pages": (
        lambda seed: seed.write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n"),
        "HugePages", "5120Mi of huge pages of 2Mi", "vm.nr_hugepages",
    ),
}  # fmt: skip


def test_a_pod_without_a_misconfiguration_has_no_finding(seed: Seed) -> None:
    found = run_checks(seed.pod)
    assert found.findings == []
    assert len(found.volume) == 32


@pytest.mark.parametrize("name", MISCONFIGURATIONS)
def test_each_misconfiguration_is_found_and_named_with_its_fix(name: str, seed: Seed) -> None:
    change, check, message, fix = MISCONFIGURATIONS[name]
    change(seed)
    (finding,) = run_checks(seed.pod).findings
    assert finding.check == check
    assert message in finding.message
    assert fix in finding.fix


def test_with_ipc_lock_the_limit_of_locked_memory_does_not_matter(seed: Seed) -> None:
    seed.change_host(memlock=lambda: 8 << 20)
    seed.write("/proc/self/status", "Name:\tpython\nCapEff:\t0000000000004000\nCapBnd:\t0000000000004000\n")
    assert run_checks(seed.pod).findings == []
    seed.write("/proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\nCapBnd:\t0000000000004000\n")
    assert [one.check for one in run_checks(seed.pod).findings] == ["LockedMemory"], "only effective ones count"


def test_a_job_of_one_worker_needs_no_network(seed: Seed) -> None:
    seed.remove("/dev/infiniband/uverbs0")
    seed.remove(IBVERBS)
    seed.change_host(memlock=lambda: 8 << 20)
    seed.change_needs(several_workers=False)
    assert run_checks(seed.pod).findings == []


def test_workers_of_one_volume_find_the_same_id_and_leave_only_it(seed: Seed) -> None:
    first, again = run_checks(seed.pod), run_checks(seed.pod)
    assert first.volume == again.volume != ""
    assert seed.pod.checkpoint_dir is not None
    assert [path.name for path in seed.pod.checkpoint_dir.parent.iterdir()] == [ID_FILE]


def test_a_gpu_or_driver_that_answers_nothing_is_no_finding(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    seed.nvml.reasons = [-1, -1]
    monkeypatch.delattr(Nvml, "nvmlDeviceGetRemappedRows")
    assert [gpu.index for gpu in read_gpus()] == [0, 1]
    assert run_checks(seed.pod).findings == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == []

    def no_driver() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=no_driver, NVMLError=NVMLError))
    assert read_gpus() == []


def test_this_machine_can_be_checked(tmp_path: Path) -> None:
    found = run_checks(Pod(checkpoint_dir=tmp_path / "job"))
    assert not [one for one in found.findings if one.check not in ("Numa", "GpuHealth")]
