"""The revision of a spec: what it depends on, and that a later version computes the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules import revision, spec_defaults
from meshwright.rules.edits import LIVE, NEXT_START
from meshwright.rules.revision import (
    revision_of_fields,
    scheme_of,
    with_defaults,
    without_defaults,
    without_later_defaults,
)
from meshwright.rules.spec_defaults import DEFAULTS, NO_RESTART, SCHEME
from tests.rules.specs import COMMAND, GOOD, changed

MIXTURE = {
    "model.mixture": {"experts": 4, "perToken": 2, "intermediateSize": 64},
    "workers.env": [{"name": "A"}, {"name": "B", "value": "2"}],
    "workers.tolerations": [{"key": "gpu"}],
    "training.evaluation": {},
    "data.mixture": [{"path": "a"}, {"path": "b", "weight": 2.5}],
}
RECORDED = Path(__file__).parent.parent / "compatibility" / "0.1.0" / "revisions.json"
"""Written by `python -m tests.compatibility.record`."""
SPECS = [GOOD, COMMAND, changed(GOOD, MIXTURE)]


def models(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """The classes in an annotation, and whether they are items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    elif get_origin(annotation) is list:
        yield from ((model, True) for model, _ in models(get_args(annotation)[0]))
    else:
        for part in get_args(annotation):
            yield from models(part)


def defaults_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path -> default of every field of the API."""
    for name, info in model.model_fields.items():
        path, default = prefix + (info.alias or name), info.default
        if default is not PydanticUndefined and default is not None:
            yield path, {} if isinstance(default, BaseModel) else json.loads(json.dumps(default))
        for inner, listed in models(info.annotation):
            yield from defaults_of(inner, f"{path}{'[]' if listed else ''}.")


def test_the_newest_scheme_has_the_defaults_of_the_api() -> None:
    """A changed default, or a new field with one, needs a new scheme: jobs that run keep theirs."""
    assert dict(defaults_of(ParallelTrainingJobSpec)) == dict(DEFAULTS[SCHEME])
    assert set(NO_RESTART[SCHEME]) == {*LIVE, *NEXT_START, "managedBy"}
    assert set(NO_RESTART) == set(DEFAULTS)


def test_the_first_scheme_never_changes() -> None:
    """Jobs of version 0.1.0 have these revisions in their status and in their pods' labels."""
    recorded = json.loads(RECORDED.read_text())
    assert [revision_of_fields(spec, 1) for spec in SPECS] == recorded


@pytest.mark.parametrize("fields", SPECS)
def test_the_form_of_a_spec_does_not_matter(fields: dict[str, Any]) -> None:
    spec = ParallelTrainingJobSpec.model_validate(fields)
    short = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    full = spec.model_dump(mode="json", by_alias=True)
    shuffled = dict(reversed(full.items()))
    forms = [fields, short, full, shuffled, spec.wire(), with_defaults(fields), without_defaults(full, SCHEME)]
    assert len({revision_of_fields(form) for form in forms}) == 1
    assert ParallelTrainingJobSpec.model_validate(with_defaults(fields)) == spec
    assert ParallelTrainingJobSpec.model_validate(without_defaults(full, SCHEME)) == spec


def test_numbers_have_one_form() -> None:
    one, other = (changed(GOOD, {"training.dropout": value}) for value in (0, 0.0))
    assert revision_of_fields(one) == revision_of_fields(other) == revision_of_fields(GOOD)


def test_the_scheme_is_read_from_a_revision() -> None:
    assert [scheme_of(text) for text in ("1-abc", "12-f", "", "abc", "x-1", "-1", "9" * 40 + "-a")] == [
        1,
        12,
        None,
        None,
        None,
        None,
        None,
    ]


def test_a_later_version_with_other_defaults_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [revision_of_fields(spec) for spec in SPECS]
    later = {**DEFAULTS[SCHEME], "workers.terminationGracePeriodSeconds": 90, "training.newField": 5}
    newest = SCHEME + 1
    tables = {**DEFAULTS, newest: later}
    for module in (revision, spec_defaults):
        monkeypatch.setattr(module, "DEFAULTS", tables)
        monkeypatch.setattr(module, "SCHEME", newest)
    monkeypatch.setattr(revision, "NO_RESTART", {**NO_RESTART, newest: NO_RESTART[SCHEME]})
    revision._tree.cache_clear()
    try:
        assert [revision_of_fields(spec, SCHEME) for spec in SPECS] == before
        running = with_defaults(GOOD, SCHEME)
        # The API server added the new field's default to the object; the old default was stored in it before.
        stored = changed(GOOD, {"training.newField": 5, "workers.terminationGracePeriodSeconds": 60})
        assert revision_of_fields(without_later_defaults(stored, running), SCHEME) == before[0]
        for edit in ({"training.newField": 6}, {"workers.terminationGracePeriodSeconds": 90}):
            edited = without_later_defaults(changed(stored, edit), running)
            assert revision_of_fields(edited, SCHEME) != before[0]
    finally:
        revision._tree.cache_clear()


def test_a_job_of_the_first_scheme_keeps_what_the_planner_now_chooses() -> None:
    """An object that an older API server stored has the old defaults, and one that it did not default gets them."""
    asked = changed(GOOD, {"parallelism.zeroStage": None})
    running = with_defaults(asked, 1)
    assert (running["parallelism"]["zeroStage"], running["parallelism"]["contextMethod"]) == (0, "RingZigZag")
    for stored in (asked, running):
        assert revision_of_fields(without_later_defaults(stored, running), 1) == revision_of_fields(running, 1)
    assert "zeroStage" not in with_defaults(asked)["parallelism"]
    assert revision_of_fields(running) != revision_of_fields(asked)
