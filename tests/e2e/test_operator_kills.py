"""The operator is killed at random moments while jobs are placed, start, train, fail and finish.

The ranks keep journals of their own, so that what is checked is what ran, not what the operator believes. A few kills
in the long tier; `make chaos` says how many otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.api import conditions
from meshwright_local.kube.resources import CLAIMS, JOBS
from meshwright_local.nodeagent.volumes import claim_directory
from tests.e2e.local_stack import NAMESPACE, Stage, eventually, holds, processes, tiny
from tests.randomness import first_seed, runs

KILLS = runs(3)
SEED = first_seed(7)
LONGEST_LIFE = 6.0
"""Seconds that an operator leads before it is killed, at most. The next one waits out its lease."""
ENDS_WITHIN = 600
AT_ONCE = 4
"""Jobs of two workers each on four nodes that take one worker each: half of them wait for room."""

# One line at the begin and one at the end; a rank that is killed writes no end. `fails` ends with an error in the
# first generation, `hopeless` in every one, but not before all four ranks have begun: that would end them unseen.
RANK = """
import os, signal, sys, time
path, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank, generation = os.environ["RANK"], os.environ["MESHWRIGHT_GENERATION"]
def note(word):
    with open(path, "a") as journal:
        journal.write(f"{word} {rank} {generation} {os.getpid()} {time.time()}\\n")
signal.signal(signal.SIGTERM, lambda *_: (note("end"), os._exit(143)))
note("begin")
time.sleep(seconds)
fails = rank == "0" and (kind == "hopeless" or kind == "fails" and generation == "1")
while fails and sum(line.startswith("begin") and line.split()[2] == generation for line in open(path)) < 4:
    time.sleep(0.05)
note("end")
sys.exit(3 if fails else 0)
"""
CLAIM = "journals"
MOUNT = "/journals"
KINDS = ("works", "works", "fails", "hopeless")


@dataclass(frozen=True)
class Run:
    """One process of a rank, as it wrote itself down."""

    rank: int
    generation: int
    pid: int
    begin: float
    end: float


@dataclass
class Submitted:
    """A job and what its ranks will do."""

    name: str
    kind: str
    journal: Path
    """On this machine; pods see it below `MOUNT`."""

    def manifest(self, seconds: float) -> list[dict[str, Any]]:
        script, journal = f"{MOUNT}/rank.py", f"{MOUNT}/{self.journal.name}"
        items = tiny(
            self.name,
            model=None,
            data=None,
            training=None,
            checkpoint=None,
            replicas=2,
            parallelism={"tensor": 2, "microBatches": None},
            runtime={"command": ["python", script, journal, self.kind, str(seconds)]},
            workers={"volumes": [{"name": "journals", "mountPath": MOUNT, "claimName": CLAIM}]},
            recovery={"maxRestarts": 1},
        )
        return items[1:]

    def runs(self) -> list[Run]:
        """Every process that ever was a rank of the job."""
        begun: dict[str, tuple[int, int, int, float]] = {}
        found: list[Run] = []
        for line in self.journal.read_text().splitlines() if self.journal.exists() else ():
            word, rank, generation, pid, when = line.split()
            if word == "begin":
                begun[pid] = (int(rank), int(generation), int(pid), float(when))
            else:
                found.append(Run(*begun.pop(pid), end=float(when)))
        return found + [Run(*rest, end=float("inf")) for rest in begun.values()]


class Feed:
    """Keeps some jobs in the cluster and sees each to its end."""

    def __init__(self, stage: Stage, directory: Path, chance: random.Random) -> None:
        self.stage = stage
        self.directory = directory
        self.chance = chance
        self.ended: list[Submitted] = []
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Until told to stop; then the jobs that were begun end."""
        (self.directory / "rank.py").write_text(RANK)
        numbers = itertools.count()

        async def line() -> None:
            while not self.stop.is_set():
                number = next(numbers)
                job = Submitted(f"kill{number}", KINDS[number % len(KINDS)], self.directory / f"kill{number}.journal")
                await self.stage.apply(job.manifest(self.chance.uniform(0.5, 4.0)))
                await self.see_to_its_end(job)
                self.ended.append(job)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(line())

    async def see_to_its_end(self, job: Submitted) -> None:
        def over(status: Any) -> bool:
            return holds(conditions.COMPLETE)(status) or holds(conditions.FAILED)(status)

        status = await self.stage.until(job.name, over, "ended", ENDS_WITHIN)
        uid = (await self.stage.client.get(JOBS, job.name, NAMESPACE))["metadata"]["uid"]
        await self.check(job, status)
        await self.stage.delete(job.name)
        assert not processes(uid)

    async def check(self, job: Submitted, status: Any) -> None:
        """What the ranks wrote is what such a job does when nobody kills the operator."""
        runs = job.runs()
        by_rank: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for run in runs:
            by_rank[run.rank, run.generation].append(run)
        twice = {key: found for key, found in by_rank.items() if len(found) > 1}
        assert not twice, f"{job.name}: more than one process for (rank, generation) {twice}"
        generations = {"works": 1, "fails": 2, "hopeless": 2}[job.kind]
        story = f"{job.name} ({job.kind}): {sorted(by_rank)} {status.wire()}"
        assert set(by_rank) == {(rank, g) for rank in range(4) for g in range(1, generations + 1)}, story
        ends = conditions.FAILED if job.kind == "hopeless" else conditions.COMPLETE
        assert holds(ends)(status), story
        causes = {r.cause: r.count for r in status.restarts}
        assert causes == ({} if job.kind == "works" else {"RankFailure": 1}), story


async def directory_of(stage: Stage) -> Path:
    """Where the journals' claim lies on this machine."""

    async def bound() -> bool:
        claim = await stage.client.get(CLAIMS, CLAIM, NAMESPACE)
        return bool((claim.get("status") or {}).get("phase") == "Bound")

    await eventually("the claim has a volume", bound)
    return await claim_directory(stage.client, NAMESPACE, CLAIM)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(ENDS_WITHIN + 40 * KILLS)
async def test_no_moment_of_death_harms_a_worker(stage: Stage) -> None:
    chance = random.Random(SEED)
    await stage.apply(tiny(CLAIM)[:1])
    feed = Feed(stage, await directory_of(stage), chance)
    feeding = asyncio.create_task(feed.run())
    try:
        for _ in range(KILLS):
            await asyncio.sleep(chance.uniform(0.2, LONGEST_LIFE))
            if feeding.done():
                break
            await stage.kill_operator()
            await stage.start_operator()
        feed.stop.set()
        await feeding
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    kinds = [job.kind for job in feed.ended]
    assert len(kinds) >= AT_ONCE
    assert {"works", "fails", "hopeless"} <= set(kinds)
