"""What a simulation assumes: kinds of failures, the time of each phase of a recovery, and the times of saves.

The defaults are published or measured numbers of large jobs; each docstring names the source. All times are in seconds.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel, ShortText

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Spread(ApiModel):
    """A time with a log-normal distribution."""

    median: Positive
    """Median in seconds."""
    sigma: Annotated[float, Field(ge=0, le=3)]
    """Standard deviation of the logarithm: 0.5 without people, 2.2 with people, 2.7 for repairs."""
    longest: Positive | None = None
    """A longer time counts as this one: a node that is not repaired in it is replaced."""

    @property
    def mean(self) -> float:
        """The expected seconds."""
        whole = self.median * math.exp(self.sigma**2 / 2.0)
        if self.longest is None or not self.sigma:
            return whole if self.longest is None else min(whole, self.longest)
        below = math.log(self.longest / self.median) / self.sigma
        normal = NormalDist()
        return whole * normal.cdf(below - self.sigma) + self.longest * (1.0 - normal.cdf(below))


Duration = NotNegative | Spread
"""Seconds, or `{median, sigma, longest}` of a log-normal distribution."""


def mean(duration: Duration) -> float:
    """The expected seconds."""
    return duration if isinstance(duration, float) else duration.mean


def sample(duration: Duration, draw: random.Random) -> float:
    """Seconds of one occurrence."""
    if isinstance(duration, float):
        return duration
    seconds = duration.median * math.exp(duration.sigma * draw.gauss(0.0, 1.0))
    return seconds if duration.longest is None else min(seconds, duration.longest)


class FaultKind(ApiModel):
    """A kind of failure, and what it takes away."""

    share: Annotated[float, Field(ge=0, le=100)]
    """How often it occurs, relative to `--mtbf`: 0.25 is a quarter of all failures. Planned stops come on top."""
    cause: ShortText
    """The cause of the restart in `status.restarts`."""
    nodes: Annotated[int, Field(ge=0, le=1000)] = 0
    """Nodes that it takes away until they are repaired. 0: the ranks restart in their pods."""
    detection: Duration | None = None
    """Time from the failure to the operator's decision. Without it, that of a hang: `recovery.hangTimeoutSeconds`."""
    repair: Duration = Spread(median=36000.0, sigma=2.7, longest=30 * 86400.0)
    """Time until the nodes are available again: median 10 h, 10% above 14 days (arXiv 2402.06194), at most 30."""
    restart: Duration | None = None
    """Time from the decision to the next step. Without it, it is the sum of the phases."""
    pods: bool = False
    """Whether pods are replaced although no node is lost."""
    silent: bool = False
    """Whether training continues, with wrong values, until it is detected. What was trained since is repeated."""
    planned: bool = False
    """Whether the ranks save a checkpoint before they stop: no step is repeated."""


Share = Annotated[float, Field(ge=0, lt=1)]

DEFAULT_FAULTS: dict[str, FaultKind] = {
    "process": FaultKind(share=0.65, cause="RankFailure", detection=3.0),
    "node": FaultKind(share=0.25, cause="NodeLost", nodes=1, detection=60.0),
    "hang": FaultKind(share=0.05, cause="Hang"),
    "corruption": FaultKind(
        share=0.03, cause="RankFailure", nodes=1, detection=Spread(median=600.0, sigma=1.5), silent=True
    ),
    "rack": FaultKind(share=0.02, cause="NodeLost", nodes=4, detection=60.0, repair=Spread(median=7200.0, sigma=1.0)),
    "maintenance": FaultKind(share=0.1, cause="NodeDrained", nodes=1, detection=0.0, repair=3600.0, planned=True),
}
"""75% of stops need no other node (arXiv 2401.00134), planned stops are 10% more (arXiv 2407.21783, table 5)."""


class Phases(ApiModel):
    """Seconds of the phases of a start, as in the events `Started` and `Recovered`."""

    place: Duration = 1.0
    """To choose a node and create the pod."""
    pod: Duration = 120.0
    """Of one new pod until its agent is ready: scheduling, image, volumes (DLRover at 1,000 GPUs: 2 min)."""
    all_pods: Duration = 300.0
    """Of new pods for every worker."""
    spawn: Duration = 30.0
    """To start the ranks' processes in a pod."""
    rendezvous: Duration | None = None
    """To form the process groups. Without it, 0.5 s and 1 ms for each GPU (arXiv 2402.15627)."""
    load: Duration = 120.0
    """To load a checkpoint from the volume (405B on 8,960 GPUs: 129 s, arXiv 2407.20143)."""
    load_from_memory: Duration = 15.0
    """To load the state from the memory of another node."""
    first_step: Duration = 0.0
    """What the first step takes longer than later ones, such as for compilation."""
    regroup: Duration | None = None
    """For ranks that stay to leave their process groups and form new ones. Without it, `rendezvous` and 12 ms: 4 and 8
    ranks took 0.6 to 0.7 s from the decision to the next step (`benchmarks/results/recovery-4.json`, `-8.json`).
    """


class Saves(ApiModel):
    """Seconds of a checkpoint."""

    stall: NotNegative = 0.3
    """Time for which training stands still: 0.3 s if a copy is written while it continues, 40 to 240 s if not."""
    durable: NotNegative = 60.0
    """Time from the end of the stall until the checkpoint is complete (20 to 220 s)."""


class MemoryTier(ApiModel):
    """Copies of the state in the memory of other nodes."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 1
    """Steps between two copies."""
    overhead: Share = 0.009
    """Share of the training time that copies cost (arXiv 2509.16293: below 0.9% for a copy in every step)."""
    durable: NotNegative = 0.0
    """Time until a copy is complete."""


class Inputs(ApiModel):
    """Everything that a simulation assumes, apart from the job, its nodes and its failure rate."""

    faults: Annotated[dict[ShortText, FaultKind], Field(min_length=1, max_length=32)] = DEFAULT_FAULTS
    """Kinds of failures. A name that is left out does not occur, if any is given."""
    phases: Phases = Phases()
    saves: Saves = Saves()
    memory: MemoryTier = MemoryTier()
    start: Duration = 300.0
    """From the nodes to the first step of the job."""
    save_before_stop: Duration = 30.0
    """Of the checkpoint before a planned stop or a resize."""
