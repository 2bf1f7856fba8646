"""A run is of one kind: what the wire says decides, once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from meshwright.api.data import Packing
from meshwright.api.training import OuterMethod, OuterSpec
from meshwright.protocol.messages import MeshDocument, parse_message
from meshwright.protocol.run_config import CommandRun, NativeRun, RunConfig
from tests.distributed.configs import small_run
from tests.runs import command_run

PARSER: TypeAdapter[NativeRun | CommandRun] = TypeAdapter(RunConfig)
NATIVE = small_run(tensor=2, pipeline=2, packing=Packing.DOCUMENTS)
COMMAND = command_run(["python", "train.py"], 4)


@pytest.mark.parametrize("run", [NATIVE, COMMAND], ids=["native", "command"])
def test_the_wire_form_is_read_as_the_kind_that_wrote_it(run: NativeRun | CommandRun) -> None:
    wire = run.wire()
    assert ("command" in wire) == ("training" not in wire) == isinstance(run, CommandRun)
    assert PARSER.validate_python(wire) == run
    assert PARSER.validate_json(json.dumps(wire)) == run
    assert PARSER.validate_python(run) is run


@pytest.mark.parametrize("left_out", ["architecture", "data", "training"])
def test_a_native_run_is_complete(left_out: str) -> None:
    wire = {name: value for name, value in NATIVE.wire().items() if name != left_out}
    with pytest.raises(ValidationError, match=left_out):
        PARSER.validate_python(wire)


def test_a_run_is_never_of_both_kinds() -> None:
    with pytest.raises(ValidationError, match="architecture"):
        PARSER.validate_python({**NATIVE.wire(), "command": ["python"]})


@pytest.mark.parametrize("run", [NATIVE, COMMAND], ids=["native", "command"])
def test_what_a_newer_operator_adds_to_a_run_is_ignored(run: NativeRun | CommandRun) -> None:
    document: dict[str, Any] = {
        "generation": 1,
        "worldSize": run.layout.world_size,
        "masterAddress": "10.0.0.7",
        "masterPort": 29500,
        "members": [],
        "run": {**run.wire(), "newer": 1, "parallelism": {**run.parallelism.wire(), "newest": {"a": 2}}},
    }
    assert parse_message(MeshDocument, json.dumps(document).encode()).run == run


def test_degrees_stand_once_in_memory_and_twice_on_the_wire() -> None:
    assert NATIVE.degrees == {"tensor": 2, "pipeline": 2, "context": 1, "expert": 1, "micro_batches": 2}
    assert all(getattr(NATIVE.parallelism, name) is None for name in NATIVE.degrees)
    wire = NATIVE.model_copy(update={"tensor": 4}).wire()
    assert isinstance(wire["parallelism"], dict)
    assert (wire["tensor"], wire["parallelism"]["tensor"], wire["parallelism"]["microBatches"]) == (4, 4, 2)
    with pytest.raises(ValidationError, match="`parallelism` has tensor 4, and the run has 2"):
        PARSER.validate_python({**wire, "tensor": 2})


def test_what_a_run_says_of_its_groups_and_rows() -> None:
    assert (NATIVE.islands, NATIVE.packs_documents) == (1, True)
    assert (COMMAND.islands, COMMAND.packs_documents, COMMAND.deterministic) == (1, False, True)
    outer = OuterSpec(method=OuterMethod.DILOCO)
    apart = small_run(data=4, training={"outer": outer, "deterministic": False})
    assert (apart.islands, apart.deterministic) == (4, False)
    halves = small_run(data=4, training={"outer": outer.model_copy(update={"islands": 2})})
    assert halves.islands == 2
