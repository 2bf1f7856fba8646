"""A day of jobs and of failures of nodes, from a seed: the same for rigid and for elastic jobs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from meshwright.api import labels
from meshwright.api.objects import KubeObject

NODES = 64
GPUS = 8
"""GPUs of a node, and of a replica, which has a whole node."""
DAY = 86400.0
PAUSE_SECONDS = 600
"""`elastic.pauseSeconds` of every job."""
SIZES = {1: 4, 2: 5, 4: 6, 8: 5, 16: 3, 32: 1}
"""Replicas of a job, and how frequent they are."""
URGENT_SHARE = 0.15
FILL_SHARE = 1.0
MOST = (2, 4)
"""`elastic.maxReplicas` of a job is one of these times its replicas."""
LONGEST = 4.0
"""Length of the longest job, in typical lengths."""
WAITING_AT_FIRST = 0.2
"""Share of the jobs that are there when the day begins."""
NODE_FAILURES = 8.0
"""Failures of nodes in a day."""
SHORTEST_REPAIR, LONGEST_REPAIR = 900.0, 7200.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job of the day."""

    name: str
    arrives: float
    """Seconds since the beginning of the day."""
    replicas: int
    work: float
    """Replica-seconds of training that it needs."""
    priority: int
    least: int
    """`elastic.minReplicas`."""
    most: int
    """`elastic.maxReplicas`."""
    fill: bool

    def body(self, *, elastic: bool) -> KubeObject:
        """The job's object."""
        spec: KubeObject = {
            "replicas": self.replicas,
            "priority": self.priority,
            "model": {"layers": 4, "hiddenSize": 1024, "intermediateSize": 2048, "heads": 8, "vocabSize": 320},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 10**6, "globalBatchSize": 1920, "sequenceLength": 64},
            "parallelism": {"tensor": GPUS, "pipeline": 1, "microBatches": 1},
            "workers": {"image": "meshwright-worker", "gpusPerWorker": GPUS},
            "recovery": {"maxRestarts": 100_000},
            "checkpoint": {"claimName": "checkpoints"},
        }
        if elastic:
            spec["elastic"] = {
                "minReplicas": self.least,
                "maxReplicas": self.most,
                "fill": self.fill,
                "pauseSeconds": PAUSE_SECONDS,
            }
        return {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "metadata": {"name": self.name},
            "spec": spec,
        }


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that is down for a while."""

    node: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What happens on one day."""

    arrivals: tuple[Arrival, ...]
    outages: tuple[Outage, ...]

    @property
    def work(self) -> float:
        """Replica-seconds of all jobs."""
        return sum(arrival.work for arrival in self.arrivals)


def trace(seed: int, jobs: int, load: float, hours: float) -> Trace:
    """The trace of a day.

    Args:
        seed: The same seed gives the same day.
        jobs: The number of jobs.
        load: Work of all jobs, as a share of the GPU time of the day.
        hours: Length of the day.
    """
    draw = random.Random(seed)
    day = hours * 3600.0
    sizes = draw.choices(list(SIZES), list(SIZES.values()), k=jobs)
    lengths = [min(LONGEST, max(0.2, draw.lognormvariate(0.0, 0.8))) for _ in sizes]
    scale = load * NODES * day / sum(size * length for size, length in zip(sizes, lengths, strict=True))
    arrivals = []
    for number, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        arrives = 0.0 if draw.random() < WAITING_AT_FIRST else draw.uniform(0.0, day)
        urgent = draw.random() < URGENT_SHARE
        arrivals.append(
            Arrival(
                name=f"job-{number:03d}",
                arrives=round(arrives, 1),
                replicas=size,
                work=round(size * length * scale, 1),
                priority=10 if urgent else 0,
                least=max(1, size // 4),
                most=min(NODES, draw.choice(MOST) * size),
                fill=draw.random() < FILL_SHARE,
            )
        )
    return Trace(tuple(sorted(arrivals, key=lambda one: (one.arrives, one.name))), _outages(draw, day))


def _outages(draw: random.Random, day: float) -> tuple[Outage, ...]:
    """Failures of nodes, of which none is down twice at once."""
    found: list[Outage] = []
    begins = 0.0
    while (begins := begins + draw.expovariate(NODE_FAILURES / DAY)) < day:
        node = f"n{draw.randrange(NODES)}"
        ends = begins + draw.uniform(SHORTEST_REPAIR, LONGEST_REPAIR)
        if all(other.node != node or other.ends < begins for other in found):
            found.append(Outage(node, round(begins, 1), round(ends, 1)))
    return tuple(found)
