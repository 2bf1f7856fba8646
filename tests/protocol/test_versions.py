"""Releases of agent and operator differ: versions are negotiated, and each side survives what the other one adds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.lora import LoraSpec
from meshwright.api.model_parts import RopeScaling, RopeScalingSpec
from meshwright.api.training import OptimizerSpec
from meshwright.protocol import versions
from meshwright.protocol.messages import (
    RUN_VERSION,
    AgentState,
    FailureKind,
    MeshRequest,
    ReportReply,
    WorkerReport,
    parse_mesh_document,
    parse_message,
    run_version_of,
)
from meshwright.protocol.run_config import NativeRun, UnsupportedRun
from meshwright.protocol.versions import VersionError, negotiate
from meshwright_worker.agent.state_machine import AgentStateMachine, StartRanks, build_report
from tests.operator.test_coordinator import mesh_document

HELLO = {"worker": 1, "incarnation": 0, "podUid": "uid", "address": "10.0.0.1", "storePort": 20000}
REPORT: dict[str, Any] = {"worker": 1, "incarnation": 0, "podUid": "uid", "generation": 1, "state": "Running"}


@pytest.mark.parametrize(
    ("ours", "header", "version"),
    [
        ((1, 1), None, 1),
        ((1, 1), "1", 1),
        ((1, 1), "1-4", 1),
        ((1, 3), "1", 1),
        ((1, 3), None, 1),
        ((1, 3), "2-9", 3),
        ((2, 3), "1-2", 2),
    ],
)
def test_both_use_the_highest_common_version(
    monkeypatch: pytest.MonkeyPatch, ours: tuple[int, int], header: str | None, version: int
) -> None:
    monkeypatch.setattr(versions, "OLDEST", ours[0])
    monkeypatch.setattr(versions, "NEWEST", ours[1])
    assert negotiate(header) == version


@pytest.mark.parametrize("header", ["2", "2-9", "0", "", "x", "1-", "9-2", "1" * 400, "١"])
def test_without_a_common_version_the_error_says_so(header: str) -> None:
    with pytest.raises(VersionError):
        negotiate(header)


def test_the_version_of_the_first_release_is_supported() -> None:
    assert versions.OLDEST == 1


def test_the_coordinator_ignores_what_a_newer_agent_adds() -> None:
    hello = parse_message(MeshRequest, json.dumps({**HELLO, "newField": {"a": [1]}}).encode())
    assert hello == MeshRequest.model_validate(HELLO)
    process = {"rank": 2, "pid": 7, "newField": 1}
    newer = {**REPORT, "ranks": [process], "newField": [1], "progress": {"step": 1, "loss": 2.0, "newField": 1}}
    report = parse_message(WorkerReport, json.dumps(newer).encode())
    assert (report.ranks[0].pid, report.progress and report.progress.loss) == (7, 2.0)
    assert "newField" not in json.dumps(report.wire())


def test_unknown_values_are_read_as_safe_ones() -> None:
    newer = {**REPORT, "state": "Meditating", "failure": "CosmicRay"}
    report = parse_message(WorkerReport, json.dumps(newer).encode())
    assert (report.state, report.failure) == (AgentState.STARTING, FailureKind.ERROR)
    for wrong in ({"state": 3}, {"failure": ["Error"]}, {"state": None}):
        with pytest.raises(ValueError, match="Input should be"):
            parse_message(WorkerReport, json.dumps({**REPORT, **wrong}).encode())


def document(**changes: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(mesh_document().wire()))
    run = changes.pop("run", {})
    return {**body, **changes, "run": {**body["run"], **run}}


def test_an_agent_ignores_what_a_newer_operator_adds() -> None:
    newer = document(newField=1, run={"newField": 2})
    newer["run"]["training"]["newField"] = 3
    newer["members"][0]["newField"] = 4
    assert parse_mesh_document(json.dumps(newer).encode()) == mesh_document()
    assert parse_message(ReportReply, b'{"generation": 3, "newField": 1}').generation == 3


@pytest.mark.parametrize(
    "newer",
    [
        {"runVersion": RUN_VERSION + 1},
        {"run": {"parallelism": {"schedule": "ScheduleOfTheFuture"}}},
        {"run": {"training": {"steps": "as many as needed"}}},
    ],
    ids=["run version", "unknown schedule", "unreadable"],
)
def test_a_run_of_a_newer_release_is_rejected_by_name(newer: dict[str, Any]) -> None:
    received = parse_mesh_document(json.dumps(document(**newer)).encode())
    assert isinstance(received.run, UnsupportedRun)
    member = received.members[0]
    agent = AgentStateMachine(member.worker, member.incarnation, "uid", drain_seconds=1.0)
    (start,) = agent.on_mesh(received, 0.0)
    assert isinstance(start, StartRanks)
    assert agent.on_rejected_run(received.generation, received.run.reason, 0.0) == []
    report = build_report(agent)
    assert (report.state, report.failure, report.generation) == (AgentState.FAILED, FailureKind.REJECTED, 1)
    assert "this worker image cannot execute the run" in report.message
    # The next generation may be one that it can execute.
    again = parse_mesh_document(json.dumps(document(generation=2)).encode())
    assert isinstance(again.run, NativeRun)
    assert isinstance(agent.on_mesh(again, 1.0)[0], StartRanks)


@pytest.mark.parametrize(
    ("optimizer", "version"),
    [
        ({}, 1),
        ({"decay": "Cosine"}, 1),
        ({"minLearningRate": 1e-5, "warmupSteps": 1}, 1),
        ({"decay": "Linear"}, 3),
        ({"decay": "Constant"}, 3),
        ({"decaySteps": 1}, 3),
    ],
)
def test_images_that_would_train_with_other_rates_reject_the_run(optimizer: dict[str, Any], version: int) -> None:
    run = mesh_document().run
    assert isinstance(run, NativeRun)
    training = run.training.model_copy(update={"optimizer": OptimizerSpec.model_validate(optimizer)})
    assert run_version_of(run.model_copy(update={"training": training}), None) == version


def test_images_that_would_train_a_new_adapter_reject_the_run() -> None:
    run = mesh_document().run
    assert isinstance(run, NativeRun)
    for lora, version in (({}, 1), ({"initial_adapter": "/adapters/a"}, 4)):
        training = run.training.model_copy(update={"lora": LoraSpec.model_validate(lora)})
        assert run_version_of(run.model_copy(update={"training": training}), None) == version


@pytest.mark.parametrize(
    "change",
    [
        {"output_norms": True},
        {"embedding_factor": 2.0},
        {"window_rope_theta": 100.0, "sliding_window": 1 << 20},
        {"rope_scaling": RopeScalingSpec(kind=RopeScaling.LINEAR, factor=2)},
    ],
)
def test_images_that_would_leave_out_a_part_of_the_model_reject_the_run(change: dict[str, Any]) -> None:
    run = mesh_document().run
    assert isinstance(run, NativeRun)
    model = run.architecture.model_copy(update=change)
    assert run_version_of(run.model_copy(update={"architecture": model}), None) == 4


def test_images_that_would_attend_to_all_keys_reject_the_run() -> None:
    run = mesh_document().run
    assert isinstance(run, NativeRun)
    length = run.training.sequence_length
    for window, version in ((0, 1), (length, 1), (length - 1, 4)):
        model = run.architecture.model_copy(update={"sliding_window": window})
        assert run_version_of(run.model_copy(update={"architecture": model}), None) == version


def test_images_that_would_begin_at_step_0_reject_the_run() -> None:
    run = mesh_document().run
    assert isinstance(run, NativeRun)
    for resume_from, version in ((None, 1), ("base-0a1b2c3d", 4)):
        checkpoint = CheckpointSpec(claim_name="c", resume_from=resume_from)
        assert run_version_of(run.model_copy(update={"checkpoint": checkpoint}), None) == version


@pytest.mark.parametrize(
    ("checkpoint", "version"),
    [
        ({}, 1),
        ({"keep": 3, "keepEverySteps": 5, "store": {"keep": 2}}, 1),
        ({"keepBest": 1}, 4),
        ({"keepBest": 1, "resumeFrom": "base-0a1b2c3d"}, 4),
        ({"store": {"keepBest": 2}}, 4),
    ],
)
def test_images_that_would_remove_the_best_checkpoints_reject_the_run(checkpoint: dict[str, Any], version: int) -> None:
    run = mesh_document().run
    assert isinstance(run, NativeRun)
    saves = CheckpointSpec.model_validate({"claimName": "c", "uri": "s3://b/c", **checkpoint})
    assert run_version_of(run.model_copy(update={"checkpoint": saves}), None) == version


def test_what_is_not_a_mesh_document_is_an_error() -> None:
    for body in (b"[]", b"{", b'{"generation": "many"}'):
        with pytest.raises(ValueError, match="JSON|invalid|Input|object|property name|validation"):
            parse_mesh_document(body)
