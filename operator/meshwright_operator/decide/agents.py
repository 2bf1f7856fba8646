"""The state of a job's agents at one moment: the coordinator builds it, and decisions read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.protocol.messages import DEFAULT_REPORT_SECONDS, WorkerReport
from meshwright_operator.decide import report_interval
from meshwright_operator.decide.stragglers import ComputeTimes


@dataclass(frozen=True, slots=True)
class WaitingAgent:
    """An agent that waits for the next generation."""

    incarnation: int
    address: str
    store_port: int
    preparing: bool = False
    """Whether it still imports the training runtime: its ranks would start later than those of the others."""
    holds_state: bool = False
    """Whether its ranks can hold their state when a generation is interrupted."""
    lighthouse_port: int | None = None
    """Port on which it would run, or runs, the lighthouse of replica groups."""
    generation: int = 0
    """The newest generation of which it has the document; 0 before its first."""


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A worker's last report."""

    report: WorkerReport
    age: float
    """Seconds since it arrived."""
    halted_seconds: float
    """Seconds since the first report that the ranks of this generation failed or paused; 0 in other states."""
    interval: float = DEFAULT_REPORT_SECONDS
    """The interval of reports that the agent follows."""

    @property
    def fresh(self) -> bool:
        """Whether the report is up to date."""
        return report_interval.is_fresh(self.age, self.interval)


@dataclass(frozen=True, slots=True)
class Agents:
    """What the coordinator knows about a job's agents at one moment."""

    waiting_agents: Mapping[int, WaitingAgent] = field(default_factory=dict)
    """Worker index -> its agent, which polls for the next generation."""
    reports: Mapping[int, ReceivedReport] = field(default_factory=dict)
    """Worker index -> its last report, of any generation."""
    newest_generation: int = 0
    """The highest generation that an agent has reported."""
    listening_seconds: float = 0.0
    """Seconds for which the coordinator could have received reports of this job.

    An agent without a report since then has been silent for this long.
    """
    compute: ComputeTimes | None = None
    """The compute times of the job's ranks, compared every few seconds."""
