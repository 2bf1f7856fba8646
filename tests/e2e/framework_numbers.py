"""The numbers of a job's status, compared with those that its script printed. Pure."""

from __future__ import annotations

import asyncio
import json
import math
import re
import statistics
from dataclasses import dataclass

from meshwright.api.status import ParallelTrainingJobStatus
from tests.e2e.local_stack import Stage

WINDOW = 20
"""Steps whose mean time the status has."""
RANK = re.compile(r"^\[rank \d+\] ")
"""What the log of a pod has before each line of a rank."""
CLOCKS = 0.2
"""How much the median of throughputs may differ between the script's clock and the agent's, on a busy machine."""


@dataclass(frozen=True)
class Shown:
    """What the status showed at a moment."""

    step: int
    total_steps: int | None
    loss: str
    tokens_per_second: int | None
    eta_seconds: int | None


@dataclass(frozen=True)
class Printed:
    """What the script printed about a step."""

    step: int
    total_steps: int
    loss: float
    tokens: int
    time: float


class History:
    """Every status that a job showed while the block ran, without repetitions."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name
        self.shown: list[Shown] = []

    async def __aenter__(self) -> History:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            if self._stage.operator.process.returncode is not None:  # as Kubernetes does, on a very busy machine
                await self._stage.start_operator()
            self._add(await self._stage.status(self._name))
            await asyncio.sleep(0.3)

    def _add(self, status: ParallelTrainingJobStatus) -> None:
        if status.step is None:
            return
        now = Shown(status.step, status.total_steps, status.loss, status.tokens_per_second, status.eta_seconds)
        if not self.shown or self.shown[-1] != now:
            self.shown.append(now)


def printed_steps(output: str) -> list[list[Printed]]:
    """The lines of steps, of each start of the script."""
    starts: list[list[Printed]] = []
    for line in (RANK.sub("", text) for text in output.splitlines()):
        if "resumed after step" in line:
            starts.append([])
        elif line.startswith('{"') and starts and "total_steps" in (fields := json.loads(line)):
            chosen = {name: fields[name] for name in Printed.__dataclass_fields__}
            starts[-1].append(Printed(**chosen))
    return starts


def losses(output: str) -> dict[int, float]:
    """The loss of each step, of the newest start that did it."""
    return {one.step: one.loss for steps in printed_steps(output) for one in steps}


def compare(history: list[Shown], output: str) -> None:
    """STEP and LOSS are the script's own. Throughput and ETA have the mean time of its last steps.

    ETA is the number of steps that are left times the mean time of a step, and throughput the tokens of a step over the
    same mean, both rounded down: they determine each other exactly.
    """
    starts = printed_steps(output)
    ratios = []
    for shown in history:
        own = [(steps, index) for steps in starts for index, one in enumerate(steps) if one.step == shown.step]
        assert own, f"the script did not print step {shown.step}"
        printed = [steps[index] for steps, index in own]
        assert shown.loss in {f"{one.loss:.6g}" for one in printed}, shown
        assert shown.total_steps == printed[0].total_steps, shown
        if not shown.tokens_per_second:
            continue
        left = printed[0].total_steps - shown.step
        slow, fast = (left * printed[0].tokens / (shown.tokens_per_second + more) for more in (0, 1))
        assert shown.eta_seconds is not None
        assert math.floor(fast) <= shown.eta_seconds <= slow, shown
        measured = [one for place in own if (one := _throughput(*place))]
        if measured:
            ratios.append(min((shown.tokens_per_second / one for one in measured), key=lambda ratio: abs(ratio - 1)))
    assert len({shown.step for shown in history}) > 1, "the status showed one step only"
    assert ratios, "the status never had a throughput"
    assert abs(statistics.median(ratios) - 1) < CLOCKS, sorted(ratios)


def _throughput(steps: list[Printed], index: int) -> float | None:
    """Tokens per second at a step, by the script's clock: over the last steps of this start."""
    first = max(0, index - WINDOW)
    seconds = steps[index].time - steps[first].time
    return (index - first) * steps[index].tokens / seconds if seconds > 0 else None
