"""NUMA binding: which CPUs each rank gets on trees of sysfs, and real affinity calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright_worker.agent.launcher import bind_to_numa_node
from meshwright_worker.preflight.host import Host, parse_cpu_list
from meshwright_worker.preflight.numa import cpus_of_rank, numa_nodes

EIGHT = [f"0000:{bus:02x}:00.0" for bus in (0x17, 0x2A, 0x3C, 0x5D, 0x97, 0xAB, 0xBD, 0xDB)]


def machine(root: Path, cpus: dict[int, str], gpus: dict[str, int], allowed: set[int]) -> Host:
    for number, text in cpus.items():
        path = root / f"sys/devices/system/node/node{number}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(text + "\n")
    for address, node in gpus.items():
        (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        path = root / "sys/bus/pci/devices" / address.lower()
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return Host(root, allowed_cpus=lambda: set(allowed))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5", {5}), ("x,1-b,2", {2}), ("0-1, 4-5", {0, 1, 4, 5})],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_a_rank_runs_on_the_node_of_its_gpu(tmp_path: Path) -> None:
    gpus = {address: int(index >= 4) for index, address in enumerate(EIGHT)}
    host = machine(tmp_path, {0: "0-47,96-143", 1: "48-95,144-191"}, gpus, set(range(192)))
    nodes = numa_nodes(host)
    assert [cpus_of_rank(host, rank, 8) for rank in range(8)] == [nodes[0]] * 4 + [nodes[1]] * 4


def test_a_rank_gets_only_cpus_of_its_pod(tmp_path: Path) -> None:
    gpus = {EIGHT[0]: 0, EIGHT[1]: 1}
    host = machine(tmp_path, {0: "0-3", 1: "4-7"}, gpus, {2, 3, 4})
    assert [cpus_of_rank(host, rank, 2) for rank in range(2)] == [{2, 3}, {4}]
    # The pod's CPUs are all on one node: there is nothing to bind.
    one = Host(tmp_path, allowed_cpus=lambda: {0, 1})
    assert cpus_of_rank(one, 1, 2) is None


def test_without_known_gpus_ranks_are_spread_evenly(tmp_path: Path) -> None:
    host = machine(tmp_path, {0: "0-3", 1: "4-7"}, {}, set(range(8)))
    assert [cpus_of_rank(host, rank, 4) for rank in range(4)] == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2
    assert cpus_of_rank(host, 0, 1) is None, "one rank would leave the other node unused"
    # Three of four GPUs are visible, or the driver does not know the node.
    unknown = machine(tmp_path / "b", {0: "0-3", 1: "4-7"}, {EIGHT[0]: -1, EIGHT[1]: -1}, set(range(8)))
    assert [cpus_of_rank(unknown, rank, 2) for rank in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_the_node_of_a_gpu_without_allowed_cpus_is_left_alone(tmp_path: Path) -> None:
    host = machine(tmp_path, {0: "0-3", 1: "4-7", 2: "8-11"}, {EIGHT[0]: 2, EIGHT[1]: 0}, set(range(8)))
    assert cpus_of_rank(host, 0, 2) is None
    assert cpus_of_rank(host, 1, 2) == {0, 1, 2, 3}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_process_is_bound_and_keeps_to_the_pods_cpus(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    first, second = sorted(allowed)[:2]
    host = machine(tmp_path, {0: f"{first}", 1: f"{second}"}, {}, allowed)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        bind_to_numa_node(process.pid, 1, 2, host)
        assert os.sched_getaffinity(process.pid) == {second}
        assert os.sched_getaffinity(0) == allowed, "the agent keeps its CPUs"
        single = Host(tmp_path / "none")
        bind_to_numa_node(process.pid, 0, 2, single)
        assert os.sched_getaffinity(process.pid) == {second}, "without NUMA nodes nothing changes"
    finally:
        process.communicate(b"\n")
    bind_to_numa_node(process.pid, 0, 2, host)  # it has exited: nothing happens
