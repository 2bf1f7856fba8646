"""A recovery cause is one declaration: nothing else names the one below, and the operator restarts a gang for it."""

from __future__ import annotations

import pytest

from meshwright.protocol.messages import Progress, WorkerReport
from meshwright_operator.decide import failure_detection, restart_policy
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import Interruption, RestartCause
from meshwright_operator.kube.pod_info import Pod
from tests.operator.test_gang_races import small
from tests.operator.world import Agent, World

LARGEST_LOSS = 100.0


def find_divergence(observed: Observed) -> Interruption | None:
    """A loss that no training recovers from by itself."""
    for worker, received in observed.agents.reports.items():
        progress = received.report.progress
        current = received.report.generation == observed.mesh.generation
        if current and progress is not None and progress.loss > LARGEST_LOSS:
            return Interruption(DIVERGED, f"worker {worker} reports the loss {progress.loss:.0f}")
    return None


DIVERGED = RestartCause("Diverged", limited=True, backs_off=True, event="LossDiverged", detect=find_divergence)


class DivergingAgent(Agent):
    """Rank 0 diverges in the generations below `stable_from`, some seconds after their start."""

    stable_from = 2

    def report(self) -> WorkerReport:
        """The report, with the loss that belongs to it."""
        report = super().report()
        if report.progress is not None and report.progress.step >= 5 and report.generation < self.stable_from:
            report.progress = Progress(step=report.progress.step, loss=1e6, step_seconds=1.0)
        return report


class DivergingWorld(World):
    """A cluster whose agents diverge."""

    def agent(self, pod: Pod, address: str) -> Agent:
        """The agent of a pod that starts."""
        return DivergingAgent(pod, pod.owner, address)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declares the cause, for one test."""
    causes = dict(restart_policy.CAUSES)
    monkeypatch.setattr(restart_policy, "CAUSES", causes)
    monkeypatch.setattr(failure_detection, "CAUSES", causes)
    restart_policy.declare(DIVERGED)


def restarts_by_cause(world: World, job: str) -> dict[str, float]:
    """The samples of `ptj_job_restarts_total` of a job, by the label `cause`."""
    samples = [sample for family in world.operators[0].jobs.collect() for sample in family.samples]
    found = [s for s in samples if s.name == "ptj_job_restarts_total" and s.labels["job_name"] == job]
    return {sample.labels["cause"]: sample.value for sample in found}


async def test_a_gang_restarts_for_a_cause_of_one_declaration() -> None:
    world = DivergingWorld(1, nodes=2, work=40.0)
    world.submit(small("toy", 2))
    for _ in range(60):
        await world.tick()
        if "LossDiverged" in world.operators[0].notes.reasons("toy"):
            break
    event = next(note for name, note in world.operators[0].notes.notes if note.reason == "LossDiverged")
    assert (event.type, event.message) == ("Warning", "worker 0 reports the loss 1000000")
    ready = world.condition("toy", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Restarting")
    await world.run(3)
    status = world.status("toy")
    assert (status["mesh"]["generation"], status["mesh"]["cause"]) == (2, "Diverged")
    assert status["restarts"] == [{"cause": "Diverged", "count": 1}]
    assert (status["restartCount"], status["restartsTowardLimit"]) == (1, 1)
    assert restarts_by_cause(world, "toy") == {"Diverged": 1}
    assert {pod.name for pod in world.pods()} == {"toy-w0-0", "toy-w1-0"}, "no pod is replaced"
    await world.run(60)
    assert world.true("toy", "Complete")


async def test_it_backs_off_and_uses_up_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DivergingAgent, "stable_from", 100)
    world = DivergingWorld(1, nodes=2, work=40.0)
    world.submit(small("toy", 2, recovery={"maxRestarts": 2}))
    for _ in range(120):
        await world.tick()
        if world.true("toy", "Failed"):
            break
    failed = world.condition("toy", "Failed")
    assert failed["reason"] == "RestartLimitReached"
    limit = "All 2 restarts allowed by `recovery.maxRestarts` are used"
    assert failed["message"] == f"worker 0 reports the loss 1000000. {limit}"
    generations = sorted({generation for _, generation, _, _ in world.started})
    assert generations == [1, 2, 3]
