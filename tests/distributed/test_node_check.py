"""The check of nodes before a start: who is at fault, by rule and with real processes that exchange data."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore

from meshwright_worker.distributed import node_check
from meshwright_worker.distributed.node_check import Findings, Place, check_nodes, check_product, faults, partners
from tests.patience import LEAST_SECONDS

CPU = torch.device("cpu")


@pytest.mark.parametrize("workers", range(2, 12))
def test_everybody_has_one_partner_and_another_one_in_the_second_round(workers: int) -> None:
    for turn in range(2):
        for worker in range(workers):
            members = partners(worker, workers, turn)
            assert worker in members
            assert len(members) <= 2
            assert all(partners(other, workers, turn) == members for other in members)
        alone = [worker for worker in range(workers) if len(partners(worker, workers, turn)) == 1]
        assert len(alone) == workers % 2
    if workers > 2:
        assert not any(
            partners(worker, workers, 0) == partners(worker, workers, 1)
            for worker in range(workers)
            if len(partners(worker, workers, 0)) == 2
        )


def found(workers: int, broken: set[int], missing: frozenset[int] = frozenset()) -> dict[int, list[Findings]]:
    """What ranks find if the links of the broken and missing workers fail."""

    def link(worker: int, turn: int) -> str | None:
        members = set(partners(worker, workers, turn))
        if len(members) == 1:
            return None
        return "Connection refused" if members & (broken | missing) else ""

    return {
        worker: [Findings("", 1.0, (link(worker, 0), link(worker, 1)))]
        for worker in range(workers)
        if worker not in missing
    }


@pytest.mark.parametrize("workers", range(3, 12))
def test_the_worker_whose_links_fail_is_at_fault_and_nobody_else(workers: int) -> None:
    assert faults(found(workers, set()), workers) == {}
    for broken in range(workers):
        assert faults(found(workers, {broken}), workers) == {broken: "its all-gathers fail: Connection refused"}


def test_several_are_at_fault_but_never_more_than_half() -> None:
    assert set(faults(found(8, {0, 5}), 8)) == {0, 5}
    assert set(faults(found(9, {2, 6}), 9)) == {2, 6}
    assert faults(found(4, {0, 1, 2}), 4) == {}


def test_with_two_workers_a_failed_link_is_nobodys_fault() -> None:
    assert faults(found(2, {0}), 2) == {}


def test_partners_of_a_worker_that_does_not_answer_are_not_at_fault() -> None:
    for missing in range(5):
        assert faults(found(5, set(), frozenset({missing})), 5) == {}


def test_a_slow_worker_is_at_fault() -> None:
    usual = {worker: [Findings("", 1.0 + worker / 4, ("", "")), Findings("", 1.0, ("", ""))] for worker in range(4)}
    assert faults(usual, 4) == {}
    usual[2] = [Findings("", 1.0, ("", "")), Findings("", 5.0, ("", ""))]
    (reason,) = [faults(usual, 4)[2]]
    assert reason == "its matrix products take 3.3 times as long as the median worker's"


def test_a_right_product_is_right_and_every_wrong_element_is_found() -> None:
    assert check_product(CPU)[0] == ""
    for row, column, bit in ((0, 0, 0), (511, 511, 3), (200, 7, 22), (3, 300, 30)):

        def flip(
            a: torch.Tensor, b: torch.Tensor, row: int = row, column: int = column, bit: int = bit
        ) -> torch.Tensor:
            product = a @ b
            product.view(torch.int32)[row, column] ^= 1 << bit
            return product

        assert check_product(CPU, flip)[0] == "1 of 512 rows of a matrix product are wrong"


def rank(path: Path, results: Path, place: Place, fault: str) -> None:
    """One rank's process. A faulty worker multiplies wrongly, sends other numbers than it should, or is late."""
    torch.set_num_threads(1)
    if fault == "late":
        time.sleep(0.5)
        results.joinpath("arrived").touch()
    node_check.ROUND_LIMIT = timedelta(seconds=LEAST_SECONDS)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        results.joinpath(f"began-{place.rank}").write_text(json.dumps(results.joinpath("arrived").exists()))
        return torch.mm(a, b) + (1 if fault == "product" else 0)

    if fault == "link":
        arange = torch.arange
        torch.arange = lambda *args, **options: arange(*args, **options).flip(0)  # type: ignore[assignment]
    try:
        check_nodes(PrefixStore("check", FileStore(str(path), place.world_size)), place, CPU, multiply)
        outcome = "healthy"
    except (RuntimeError, ConnectionError) as error:
        outcome = f"{type(error).__name__}: {error}"
    results.joinpath(str(place.rank)).write_text(json.dumps(outcome))


def outcomes(tmp_path: Path, world: int, local: int, broken: int | None, fault: str) -> list[str]:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(
            target=rank,
            args=(tmp_path / "store", tmp_path, Place(index, world, local), fault if index == broken else ""),
        )
        for index in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=LEAST_SECONDS)
        assert process.exitcode == 0
    return [json.loads((tmp_path / str(index)).read_text()) for index in range(world)]


def test_healthy_nodes_pass(tmp_path: Path) -> None:
    assert outcomes(tmp_path, 4, 1, None, "") == ["healthy"] * 4


def test_nobody_begins_before_a_rank_that_is_late(tmp_path: Path) -> None:
    """It still opens its data, perhaps for longer than an all-gather may take."""
    assert outcomes(tmp_path, 4, 1, 1, "late") == ["healthy"] * 4
    assert [json.loads((tmp_path / f"began-{index}").read_text()) for index in range(4)] == [True] * 4


def test_the_check_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "ARRIVAL_LIMIT", timedelta(seconds=0.2))
    check_nodes(FileStore(str(tmp_path / "store"), 2), Place(0, 2, 1), CPU)


def test_a_rank_that_computes_wrongly_fails_with_all_ranks_of_its_worker(tmp_path: Path) -> None:
    results = outcomes(tmp_path, 4, 2, 3, "product")
    assert results[2:] == ["NodeFaultError: node check: 512 of 512 rows of a matrix product are wrong"] * 2
    assert results[:2] == ["ConnectionError: connection closed: the node check found worker 1 at fault"] * 2


def test_a_worker_whose_data_arrive_changed_is_named_by_its_partners(tmp_path: Path) -> None:
    results = outcomes(tmp_path, 4, 1, 2, "link")
    assert results[2] == "NodeFaultError: node check: its all-gathers fail: other numbers arrive than were sent"
    assert {results[0], results[1], results[3]} == {
        "ConnectionError: connection closed: the node check found worker 2 at fault"
    }


SEVERAL_ROUNDS = timedelta(seconds=LEAST_SECONDS)


def in_threads(*calls: Any) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_nobody_begins_a_round_before_a_worker_that_is_late_in_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partner was broken, and its next partner must not take it for broken."""
    monkeypatch.setattr(node_check, "ROUND_LIMIT", SEVERAL_ROUNDS)
    order: list[int] = []

    def link(store: Any, place: Place, members: Any, device: torch.device, report: Any) -> None:
        first = not any(turn == place.rank for turn in order)
        if first and place.rank == 1:
            time.sleep(0.3)
        order.append(place.rank)
        report("")

    monkeypatch.setattr(node_check, "_check_link", link)
    store = dist.HashStore()
    in_threads(*[partial(check_nodes, store, Place(index, 3, 1), CPU) for index in range(3)])
    # Of three workers, the last one has no partner in the first round, and the first one none in the second.
    assert sorted(order[:2]) == [0, 1]
    assert sorted(order[2:]) == [1, 2]


class Gathering:
    """A back end of one of two ranks. The second one receives later, unless the first one has left."""

    def __init__(self, rank: int, left: threading.Event) -> None:
        self._rank, self._left = rank, left
        self.lost = False

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        def wait() -> None:
            self.lost = self._rank == 1 and self._left.wait(0.5)
            for rank, part in enumerate(outputs[0]):
                part.copy_(inputs[0] - self._rank + rank)

        return SimpleNamespace(wait=wait)


def test_a_rank_keeps_its_connections_until_its_partners_have_received_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_check, "ROUND_LIMIT", SEVERAL_ROUNDS)
    left = threading.Event()
    groups = [Gathering(rank, left) for rank in range(2)]

    @contextmanager
    def group(store: Any, rank: int, size: int, device: torch.device) -> Iterator[Any]:
        yield groups[rank]
        if rank == 0:
            left.set()

    monkeypatch.setattr(node_check, "_group", group)
    store, found = dist.HashStore(), {}

    def check(rank: int) -> None:
        found[rank] = node_check._check_round(store, Place(rank, 2, 1), CPU, 0)

    in_threads(partial(check, 0), partial(check, 1))
    assert found == {0: "", 1: ""}
    assert left.is_set()
    assert not groups[1].lost, "what the first rank had not sent yet"


def test_a_library_that_never_connects_does_not_hold_up_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "ROUND_LIMIT", timedelta(seconds=0.2))
    release = threading.Event()

    @contextmanager
    def group(*_: Any) -> Iterator[Any]:
        release.wait()
        raise RuntimeError("too late")
        yield

    monkeypatch.setattr(node_check, "_group", group)
    try:
        assert node_check._check_round(dist.HashStore(), Place(0, 2, 1), CPU, 0) == "no answer within 0 s"
    finally:
        release.set()


def test_other_groups_of_the_process_do_not_block_like_that_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a round's group is left behind while it connects."""
    seen: list[str | None] = []

    def make(*_: Any) -> str:
        seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        return "group"

    made = type("NCCL", (), {"Options": SimpleNamespace, "__new__": make})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with node_check._group(dist.HashStore(), 0, 2, torch.device("cuda")) as group:
        assert group == "group"
        assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert seen == ["1"]
