"""What the status says of the latest failure, and that it outlives the pod."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState, FailureEvidence, FailureKind, WorkerReport
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.operator.builders import agents, crashed, failed, observed, placement, pod, report, spec
from tests.operator.test_hang_detection import received, trains


def evidence(rank: int = 5, generation: int = 1, log: str = "LookupError: boom\n", **fields: str) -> FailureEvidence:
    return FailureEvidence(generation=generation, rank=rank, kind="Error", log=log, path="/c/failures/x", **fields)


def after(reports: list[WorkerReport], status: ParallelTrainingJobStatus | None = None) -> ParallelTrainingJobStatus:
    return decide(observed(status=status, received=agents(reports, halted_seconds=3))).status


def test_a_failed_rank_is_recorded_with_the_end_of_its_log() -> None:
    raised = failed(2, FailureKind.ERROR, "LookupError: boom").model_copy(update={"evidence": evidence()})
    failure = after([raised]).last_failure
    assert failure is not None
    assert (failure.cause, failure.generation, failure.worker, failure.rank) == ("RankFailure", 1, 2, 5)
    assert (failure.pod, failure.node) == ("train-w2-0", "n2")
    assert (failure.log, failure.path) == ("LookupError: boom\n", "/c/failures/x")
    assert failure.message == "Worker 2: LookupError: boom"


def test_a_rank_that_wrote_nothing_is_named_too() -> None:
    killed = failed(2, FailureKind.ERROR, "killed").model_copy(update={"evidence": evidence(log="")})
    failure = after([killed]).last_failure
    assert failure is not None
    assert (failure.rank, failure.path, failure.log) == (5, "/c/failures/x", "")


@pytest.mark.parametrize(
    ("late", "log"),
    [
        (evidence(log="LookupError: boom\nand more\n"), "LookupError: boom\nand more\n"),
        (evidence(log=""), "LookupError: boom\n"),
        (evidence(generation=2, log="of another generation" * 9), "LookupError: boom\n"),
        (evidence(rank=4, log="of another rank" * 9), "LookupError: boom\n"),
    ],
    ids=["more", "less", "another generation", "another rank"],
)
def test_a_later_report_completes_the_record(late: FailureEvidence, log: str) -> None:
    status = after([failed(2, FailureKind.ERROR, "boom").model_copy(update={"evidence": evidence()})])
    failure = after([report(2, AgentState.IDLE, evidence=late)], status).last_failure
    assert failure is not None
    assert failure.log == log


def test_a_lost_pod_is_no_failure_of_the_job() -> None:
    assert decide(observed([pod(0), pod(1), pod(3)])).status.last_failure is None


def test_a_crashed_pod_is_recorded_without_a_rank() -> None:
    failure = decide(observed([pod(0), pod(1), crashed(2), pod(3)])).status.last_failure
    assert failure is not None
    assert (failure.cause, failure.worker, failure.rank, failure.log) == ("PodFailed", 2, None, "")


def test_agents_learn_which_rank_hung_with_the_next_generation() -> None:
    hangs = [trains(worker, 2000.0, step=7 if worker != 1 else 6) for worker in range(4)]
    seen = observed(received=received(hangs))
    decision = decide(seen)
    failure = decision.status.last_failure
    assert failure is not None
    assert (failure.cause, failure.rank) == ("Hang", 2)
    assert decision.mesh.generation == 2, "formed at once: the status before knows nothing of the hang"
    formed = document(seen, decision.mesh, failure)
    assert formed is not None
    assert formed.hung_rank == 2
    later = decision.mesh.model_copy(update={"generation": 3, "cause": "PodLost"})
    next_one = document(seen, later, failure)
    assert next_one is not None
    assert next_one.hung_rank is None


def test_agents_know_which_variables_are_secrets() -> None:
    env = [
        {"name": "PLAIN", "value": "x"},
        {"name": "HF", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "mode"}}},
    ]
    made = spec(workers={"image": "i", "env": env})
    context = PodContext("train", "default", "uid", made, "r", "https://operator", "secret")
    variables = worker_pod(context, placement().workers[0])["spec"]["containers"][0]["env"]
    assert [v["value"] for v in variables if v["name"] == "MESHWRIGHT_SECRET_VARIABLES"] == ["HF"]
    context = replace(context, spec=spec())
    variables = worker_pod(context, placement().workers[0])["spec"]["containers"][0]["env"]
    assert not [v for v in variables if v["name"] == "MESHWRIGHT_SECRET_VARIABLES"]
