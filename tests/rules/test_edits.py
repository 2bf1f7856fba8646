"""What an edit may change: the table, the rules in both languages, and the revision that restarts the gang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cel
import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.crd.definition import custom_resource_definition
from meshwright.rules.edits import (
    IMMUTABLE,
    IMMUTABLE_PATHS,
    LIVE,
    NEXT_START,
    Effect,
    effect_of,
    restarting_parts,
    with_live_fields,
)
from meshwright.rules.validation import check_edit
from tests.rules.specs import COMMAND, GOOD, changed

STARTED = {"observedGeneration": 1, "startTime": "2026-01-02T03:04:05Z"}
TRAINED = STARTED | {"step": 3}
SAVED = STARTED | {"checkpoint": {"step": 3, "time": "2026-01-02T03:04:05Z", "path": "/c"}}
CHECKPOINT = {"checkpoint": {"claimName": "c"}}
RESUMED = {"checkpoint": {"claimName": "c", "resumeFrom": "base-0a1b2c3d"}}

# (field that is blamed, the job as it runs, the edit)
REFUSED_EDITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {}, {"model.layers": 8}),
    ("model", {}, {"model.kvHeads": None}),
    ("model", {"model.kvHeads": None}, {"model.kvHeads": 2}),
    ("model", {}, {"model": {"preset": "llama-3-8b"}}),
    ("model", {}, {"model": None}),
    ("data", {}, {"data": {"source": "Files", "claimName": "texts"}}),
    ("data", {"data": {"source": "Files", "claimName": "a"}}, {"data.claimName": "b"}),
    ("data", {"data": {"source": "Files", "claimName": "a"}}, {"data.pattern": "*.txt"}),
    ("training", {}, {"training.seed": 1}),
    ("training", {}, {"training.sequenceLength": 64}),
    ("training", {}, {"training.initialWeights": "/models/other"}),
    (
        "training",
        {"training.initialWeights": "/models/a", "training.lora": {}},
        {"training.lora": {"initialAdapter": "/adapters/a"}},
    ),
    ("training", {"training.lora": {"rank": 4}}, {"training.lora": None}),
    ("training", {}, {"training": None}),
    ("checkpoint", CHECKPOINT, {"checkpoint": None}),
    ("checkpoint", CHECKPOINT, {"checkpoint.claimName": "d"}),
    ("managedBy", {}, {"managedBy": "example.com/other"}),
    ("managedBy", {"managedBy": "example.com/other"}, {"managedBy": None}),
    ("managedBy", {"managedBy": "example.com/other"}, {"managedBy": "meshwright.dev/operator"}),
]
FINE_EDITS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"training.steps": 1000, "training.optimizer": {"learningRate": 0.01}}),
    ({"training.optimizer": {"decaySteps": 50}}, {"training.steps": 1000}),
    ({"training.optimizer.decay": "Constant"}, {"training.optimizer": {"decay": "Linear", "decaySteps": 9}}),
    ({}, {"workers.image": "worker:2", "parallelism.tensor": 1}),
    ({}, {"suspend": True, "recovery": {"maxRestarts": 1}}),
    ({}, CHECKPOINT),
    (
        CHECKPOINT,
        {
            "checkpoint.everySteps": 7,
            "checkpoint.keep": 3,
            "checkpoint.staging": "Overlapped",
            "checkpoint.writer": "Process",
        },
    ),
    (CHECKPOINT, {"checkpoint.resumeFrom": "base-0a1b2c3d"}),
    (RESUMED, {"checkpoint.resumeFrom": "base-0a1b2c3d/step-00000010"}),
    (RESUMED, {"checkpoint.resumeFrom": None}),
    ({"managedBy": "meshwright.dev/operator"}, {"replicas": 1}),
]


def spec_of(changes: dict[str, Any]) -> ParallelTrainingJobSpec:
    return ParallelTrainingJobSpec.model_validate(changed(GOOD, changes))


def broken_in_cel(
    old: ParallelTrainingJobSpec, new: ParallelTrainingJobSpec, status: dict[str, Any] | None
) -> list[str]:
    """The fields that the API server blames, over whole objects with their defaults."""
    found = []
    for immutable in IMMUTABLE:
        was: dict[str, Any] = {"spec": old.wire()} | ({"status": status} if status is not None else {})
        now: dict[str, Any] = {"spec": new.wire()} | ({"status": status} if status is not None else {})
        if cel.compile(immutable.cel).execute({"self": now, "oldSelf": was}) is not True:
            found.append(immutable.field)
    return found


@pytest.mark.parametrize(("field", "before", "edit"), REFUSED_EDITS)
def test_an_edit_that_may_not_be_is_refused_in_both_languages(
    field: str, before: dict[str, Any], edit: dict[str, Any]
) -> None:
    old = spec_of(before)
    new = ParallelTrainingJobSpec.model_validate(changed(changed(GOOD, before), edit))
    assert [problem.field for problem in check_edit(old, new)] == [field]
    assert broken_in_cel(old, new, TRAINED) == broken_in_cel(old, new, SAVED) == [field]


@pytest.mark.parametrize(("before", "edit"), FINE_EDITS)
def test_other_edits_pass(before: dict[str, Any], edit: dict[str, Any]) -> None:
    old = spec_of(before)
    new = ParallelTrainingJobSpec.model_validate(changed(changed(GOOD, before), edit))
    assert check_edit(old, new) == []
    assert broken_in_cel(old, new, TRAINED) == []


@pytest.mark.parametrize("status", [None, {"observedGeneration": -1}, STARTED, STARTED | {"step": 0}])
def test_before_the_first_step_everything_but_the_manager_may_be_put_right(status: dict[str, Any] | None) -> None:
    for field, before, edit in REFUSED_EDITS:
        new = ParallelTrainingJobSpec.model_validate(changed(changed(GOOD, before), edit))
        assert broken_in_cel(spec_of(before), new, status) == (["managedBy"] if field == "managedBy" else [])


def test_a_command_reports_no_steps_so_its_start_counts() -> None:
    old, new = (spec_of({**COMMAND, "checkpoint": {"claimName": name}}) for name in ("a", "b"))
    assert broken_in_cel(old, new, STARTED) == ["checkpoint"]
    assert broken_in_cel(old, new, None) == []


def test_every_rule_on_edits_is_broken_by_a_case() -> None:
    assert {field for field, _, _ in REFUSED_EDITS} == {immutable.field for immutable in IMMUTABLE}


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every field of the spec that has no fields of its own."""
    for name, field in schema["properties"].items():
        inner = f"{path}.{name}".strip(".")
        if "properties" in field:
            yield from leaves(field, inner)
        else:
            yield inner


def spec_schema() -> dict[str, Any]:
    version = custom_resource_definition()["spec"]["versions"][0]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def test_the_table_names_only_fields_that_exist() -> None:
    paths = list(leaves(spec_schema()))
    for entry in (*LIVE, *NEXT_START, *IMMUTABLE_PATHS):
        assert any(path == entry or path.startswith(f"{entry}.") for path in paths), entry


@pytest.mark.parametrize(
    ("edit", "effect"),
    [
        ({"suspend": True}, Effect.LIVE),
        ({"activeDeadlineSeconds": 5}, Effect.LIVE),
        ({"ttlSecondsAfterFinished": 5}, Effect.LIVE),
        ({"recovery.maxRestarts": 3}, Effect.LIVE),
        ({"recovery.exitCodes": [{"values": [3], "action": "Ignore"}]}, Effect.LIVE),
        ({"priority": 3}, Effect.LIVE),
        ({"checkpoint.everySteps": 3}, Effect.NEXT_START),
        ({"checkpoint.keep": 3}, Effect.NEXT_START),
        ({"checkpoint.every": "Auto"}, Effect.NEXT_START),
        ({"checkpoint.keepFor": "7d"}, Effect.NEXT_START),
        ({"checkpoint.keepBest": 2}, Effect.NEXT_START),
        ({"checkpoint.writer": "Process"}, Effect.NEXT_START),
        ({"workers.image": "worker:2"}, Effect.RESTART),
        ({"workers.env": [{"name": "A", "value": "b"}]}, Effect.RESTART),
        ({"workers.imagePullSecrets": [{"name": "s"}]}, Effect.RESTART),
        ({"training.steps": 7}, Effect.RESTART),
        ({"checkpoint.resumeFrom": "base-0a1b2c3d"}, Effect.RESTART),
        ({"training.optimizer.learningRate": 0.5}, Effect.RESTART),
        ({"training.optimizer.decay": "Constant"}, Effect.RESTART),
        ({"training.optimizer.decaySteps": 50}, Effect.RESTART),
        ({"parallelism.tensor": 1}, Effect.RESTART),
        ({"replicas": 1}, Effect.RESTART),
        ({"priorityClassName": "high"}, Effect.RESTART),
        ({"model.layers": 8}, Effect.REJECTED),
        ({"training.seed": 8}, Effect.REJECTED),
        ({"managedBy": "example.com/other"}, Effect.REJECTED),
    ],
)
def test_an_edit_restarts_the_gang_just_where_the_table_says(edit: dict[str, Any], effect: Effect) -> None:
    old = spec_of(CHECKPOINT)
    new = ParallelTrainingJobSpec.model_validate(changed(changed(GOOD, CHECKPOINT), edit))
    (path,) = edit
    assert effect_of(path) is effect
    if effect is not Effect.REJECTED:
        assert (restarting_parts(old) != restarting_parts(new)) == (effect is Effect.RESTART)


def test_what_takes_effect_at_once_can_be_taken_alone() -> None:
    running = spec_of({"workers.image": "old"})
    wanted = spec_of({"workers.image": "new", "suspend": True, "recovery.maxRestarts": 3, "priority": 2})
    merged = with_live_fields(running, wanted)
    assert (merged.workers.image, merged.suspend, merged.recovery.max_restarts, merged.priority) == ("old", True, 3, 2)
    assert restarting_parts(merged) == restarting_parts(running)


def test_a_command_can_be_edited() -> None:
    old = ParallelTrainingJobSpec.model_validate(COMMAND)
    new = ParallelTrainingJobSpec.model_validate(changed(COMMAND, {"runtime.command": ["python", "other.py"]}))
    assert check_edit(old, new) == broken_in_cel(old, new, TRAINED) == []
    assert restarting_parts(old) != restarting_parts(new)


@pytest.mark.parametrize(
    ("running", "wanted"),
    [
        ({}, {"elastic": {"minReplicas": 1}, "replicas": 3}),
        ({"elastic": {"minReplicas": 1}}, {"elastic": None, "replicas": 3}),
        ({"elastic": {"minReplicas": 1}}, {"elastic": {"fill": True, "maxReplicas": 9}, "replicas": 3}),
        ({"elastic": {"scaledBatch": {"replicas": 2, "learningRate": "Linear"}}}, {"elastic": {"minReplicas": 1}}),
        ({}, {"recovery": {"inMemory": True}, "priority": 3, "workers.image": "worker:2"}),
    ],
)
def test_what_takes_effect_at_once_never_changes_the_revision(running: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Otherwise the spec in effect would not be known after it: it is stored with its revision."""
    before, after = spec_of({**CHECKPOINT, **running}), spec_of({**CHECKPOINT, **running, **wanted})
    assert restarting_parts(with_live_fields(before, after)) == restarting_parts(before)
