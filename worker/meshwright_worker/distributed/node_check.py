"""A check of the nodes before ranks start on a suspect one: a matrix product whose result is known, and all-gathers
between pairs of workers, in two rounds with other partners.

A wrong product shows its own rank's fault. A failed all-gather may be either partner's: a worker is at fault if it
never succeeds, and fails beside a partner that succeeds in the other round, or beside two partners. (DLRover's node
check has the same two rounds.) With two workers there is no other partner, so only products show a fault.

The check runs before the process groups are created, and uses only the generation's store: a node that cannot connect
would let the rendezvous of all ranks fail without saying whose fault it is.

All ranks begin a round together: a worker whose all-gather with a broken one takes all of its time would otherwise be
late for the next one, and its next partner would take it for broken too. No rank closes a round's connections before
all of its partners are done: NCCL may still send what a rank has handed over, and would drop it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from meshwright_worker.distributed.device import use_device
from meshwright_worker.rank.failures import NodeFaultError

log = logging.getLogger(__name__)

ROUNDS = 2
ARRIVAL_LIMIT = timedelta(seconds=300)
"""Limit of the wait for all ranks, some of which may still open their data. Then the rendezvous says who is missing."""
ROUND_LIMIT = timedelta(seconds=60)
"""Limit of an all-gather with the connection of its group, and of the wait for all ranks before it."""
LEAVE_LIMIT = timedelta(seconds=20)
"""Limit of the wait for partners that are not done yet, before a rank closes its connections to them."""
VERDICT_LIMIT = timedelta(seconds=300)
"""Limit of the wait for rank 0's verdict: longer than both rounds and its wait for the findings of missing ranks."""
_SLOW = 3.0
"""A worker is at fault if its products take this many times as long as the median worker's."""
_LEAST_WORKERS_FOR_SPEED = 3
_REPEATS = 5
_INNER = 256
"""Products of entries -1, 0 and 1 over so many terms are integers up to 256: exact in every precision, bf16 too."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Findings:
    """What a rank found in its check. Seconds are of the device, or of the process's CPU."""

    product_fault: str
    """Why its product is wrong; empty if it is right."""
    seconds: float
    """Its fastest product."""
    links: tuple[str | None, ...]
    """By round: why the all-gather failed; empty if it succeeded, None if the worker had no partner."""


def partners(worker: int, workers: int, turn: int) -> tuple[int, ...]:
    """The workers that exchange data with `worker` in a round, with itself, in their order: a pair, or itself alone.

    The second round's pairs are shifted by one, so with more than two workers no pair meets twice.
    """
    place = (worker - turn) % workers
    first = place - place % 2
    return tuple(sorted({(first + turn) % workers, (min(first + 1, workers - 1) + turn) % workers}))


def faults(findings: Mapping[int, Sequence[Findings]], workers: int) -> dict[int, str]:
    """Return the workers at fault, with the reason. `findings` has those of the ranks of each worker that answered.

    More than half of the workers are never at fault: the cause is elsewhere, such as in the network between all.
    """
    found = {
        worker: next((each.product_fault for each in ranks if each.product_fault), "")
        for worker, ranks in findings.items()
    }
    times = {worker: max(each.seconds for each in ranks) for worker, ranks in findings.items()}
    usual = median(times.values()) if len(times) >= _LEAST_WORKERS_FOR_SPEED else float("inf")
    for worker, seconds in times.items():
        if not found[worker] and seconds > _SLOW * usual:
            found[worker] = f"its matrix products take {seconds / usual:.1f} times as long as the median worker's"
    for worker, reason in _link_faults(findings, workers).items():
        found[worker] = found[worker] or reason
    at_fault = {worker: reason for worker, reason in sorted(found.items()) if reason}
    return at_fault if 2 * len(at_fault) <= len(findings) else {}


def _link_faults(findings: Mapping[int, Sequence[Findings]], workers: int) -> dict[int, str]:
    """The workers whose all-gathers failed because of themselves, with the error."""
    failures: dict[int, list[tuple[frozenset[int], str]]] = {worker: [] for worker in findings}
    healthy: set[int] = set()
    for worker, ranks in findings.items():
        for turn in range(ROUNDS):
            errors = [each.links[turn] for each in ranks]
            if None in errors:
                continue
            others = frozenset(partners(worker, workers, turn)) - {worker}
            error = next((error for error in errors if error), "")
            if error and others <= findings.keys():
                failures[worker].append((others, error))
            elif not error:
                healthy.add(worker)
    return {
        worker: f"its all-gathers fail: {failed[0][1]}"
        for worker, failed in failures.items()
        if failed
        and worker not in healthy
        and (any(others <= healthy for others, _ in failed) or len({others for others, _ in failed}) > 1)
    }


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among the workers, all of which have the same number of ranks."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def worker(self) -> int:
        """The position of its worker."""
        return self.rank // self.local_world_size

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.world_size // self.local_world_size


def check_nodes(store: Store, place: Place, device: torch.device, multiply: Multiply = torch.mm) -> None:
    """Check this rank's node together with all ranks of the generation. Collective, over `store` alone.

    Raises:
        NodeFaultError: this rank's worker is at fault.
        ConnectionError: another worker is.
    """
    if not _all_arrive(store, place, "check", ARRIVAL_LIMIT):
        log.warning("node check: not all ranks have arrived")
        return
    started = time.monotonic()
    fault, seconds = check_product(device, multiply)
    links = tuple(_check_round(store, place, device, turn) for turn in range(ROUNDS))
    store.set(f"findings/{place.rank}", json.dumps(asdict(Findings(fault, seconds, links))))
    if place.rank == 0:
        verdict = faults(_collect(store, place), place.workers)
        store.set("verdict", json.dumps(verdict))
        log.info("node check: %s, %.1f s", verdict or "no worker is at fault", time.monotonic() - started)
    else:
        verdict = _await_verdict(store)
    if not verdict:
        return
    _await_readers(store, place)
    if place.worker in verdict:
        raise NodeFaultError(f"node check: {verdict[place.worker]}")
    raise ConnectionError(f"connection closed: the node check found worker {', '.join(map(str, verdict))} at fault")


def _all_arrive(store: Store, place: Place, where: str, limit: timedelta) -> bool:
    """Wait for all ranks: a rank that comes late must not look like one that cannot be reached."""
    store.add(f"{where}/arrived", 1)
    if place.rank > 0:
        try:
            store.wait([f"{where}/begin"], limit)
        except (RuntimeError, dist.DistError):
            return False
        return bool(store.get(f"{where}/begin") == b"yes")
    deadline = time.monotonic() + limit.total_seconds()
    while store.add(f"{where}/arrived", 0) < place.world_size:
        if time.monotonic() > deadline:
            store.set(f"{where}/begin", "no")
            return False
        time.sleep(0.02)
    store.set(f"{where}/begin", "yes")
    return True


def check_product(device: torch.device, multiply: Multiply = torch.mm) -> tuple[str, float]:
    """Multiply matrices of small integers. The product has integers, and the sums of its rows are known.

    Returns:
        Why the product is wrong, or an empty string, and the seconds of the fastest one.
    """
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, shape, generator=generator) for shape in ((size, _INNER), (_INNER, size)))
    expected = left @ right.sum(dim=1)
    a, b = left.to(device, dtype), right.to(device, dtype)
    fastest, wrong = float("inf"), 0
    for _ in range(_REPEATS):
        product, seconds = _timed(multiply, a, b)
        fastest = min(fastest, seconds)
        sums = product.sum(dim=1, dtype=torch.float64).cpu()
        wrong = max(wrong, int(((sums != expected) | (product != product.round()).any(dim=1).cpu()).sum()))
    return f"{wrong} of {size} rows of a matrix product are wrong" if wrong else "", fastest


def _timed(multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A product and its seconds: of the GPU, or of this process's CPUs, which other processes do not lengthen."""
    if a.device.type != "cuda":
        started = time.process_time()
        return multiply(a, b), time.process_time() - started
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    product = multiply(a, b)
    end.record()
    end.synchronize()
    return product, begin.elapsed_time(end) / 1000


def _check_round(store: Store, place: Place, device: torch.device, turn: int) -> str | None:
    """Gather known numbers from all ranks of the partners; returns why that failed, None without a partner.

    The library may wait without a limit while it connects: then the thread is left behind, and that is the answer.
    """
    if not _all_arrive(store, place, f"round-{turn}", ROUND_LIMIT):
        log.warning("node check: not all ranks have come to round %d", turn)
    members = partners(place.worker, place.workers, turn)
    if len(members) == 1:
        return None
    found: list[str] = []

    def check() -> None:
        use_device(device)
        _check_link(PrefixStore(f"round-{turn}/{members[0]}", store), place, members, device, found.append)

    thread = threading.Thread(target=check, name=f"node check, round {turn}", daemon=True)
    thread.start()
    thread.join(ROUND_LIMIT.total_seconds())
    return found[0] if found else f"no answer within {ROUND_LIMIT.total_seconds():.0f} s"


def _check_link(
    store: Store, place: Place, members: Sequence[int], device: torch.device, report: Callable[[str], None]
) -> None:
    """Gather the numbers, and report why that failed before the connections are closed."""
    ranks = [worker * place.local_world_size + local for worker in members for local in range(place.local_world_size)]
    numbers = 2**24 if device.type == "cuda" else 2**18
    try:
        with _group(store, ranks.index(place.rank), len(ranks), device) as group:
            sent = torch.arange(numbers, dtype=torch.int32, device=device)
            received = [torch.empty_like(sent) for _ in ranks]
            group.allgather([received], [sent + place.rank]).wait()
            intact = all(torch.equal(part, sent + rank) for rank, part in zip(ranks, received, strict=True))
            report("" if intact else "other numbers arrive than were sent")
            _count_done(store, len(ranks))
            with suppress(RuntimeError, dist.DistError):
                store.wait(["done"], LEAVE_LIMIT)
    except (RuntimeError, dist.DistError) as error:
        report(str(error).strip().splitlines()[0][:300])
        with suppress(RuntimeError, dist.DistError):
            _count_done(store, len(ranks))


def _count_done(store: Store, ranks: int) -> None:
    """Count a rank that needs the connections of its round no more; the last one tells all others."""
    if store.add("count", 1) == ranks:
        store.set("done", "yes")


@contextmanager
def _group(store: Store, rank: int, size: int, device: torch.device) -> Iterator[Any]:
    """A back end of its own: torch's groups are made from that of all ranks, which does not exist yet."""
    if device.type != "cuda":
        yield dist.ProcessGroupGloo(store, rank, size, ROUND_LIMIT)
        return
    # Otherwise a collective whose time is up ends the process. The group reads it when it is made, and later ones must
    # not read it, also if this one is left behind.
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = ROUND_LIMIT
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
    yield group


def _collect(store: Store, place: Place) -> dict[int, list[Findings]]:
    """The findings of every worker of which all ranks answer in time."""
    deadline = time.monotonic() + (ROUNDS * ROUND_LIMIT).total_seconds()
    found: dict[int, list[Findings]] = {}
    for worker in range(place.workers):
        first = worker * place.local_world_size
        keys = [f"findings/{rank}" for rank in range(first, first + place.local_world_size)]
        try:
            store.wait(keys, timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except (RuntimeError, dist.DistError):
            log.warning("node check: worker %d has not answered", worker)
            continue
        found[worker] = [Findings(**json.loads(store.get(key))) for key in keys]
    return found


def _await_verdict(store: Store) -> dict[int, str]:
    """Rank 0's verdict. Without one in time, the rendezvous shows what is wrong with rank 0."""
    try:
        store.wait(["verdict"], VERDICT_LIMIT)
    except (RuntimeError, dist.DistError):
        log.warning("node check: no verdict from rank 0")
        return {}
    return {int(worker): reason for worker, reason in json.loads(store.get("verdict")).items()}


def _await_readers(store: Store, place: Place) -> None:
    """Rank 0 has the store: it waits until all other ranks have read the verdict, or for 10 seconds."""
    store.add("readers", 1)
    deadline = time.monotonic() + 10
    while place.rank == 0 and store.add("readers", 0) < place.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
