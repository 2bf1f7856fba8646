"""The error that a rank records where torchrun's variables say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshwright_worker.command.error_file import MAX_LINES, recorded_error, with_recorded_error

RECORDED = {"message": {"message": "KeyError: 'weights'", "extraInfo": {"py_callstack": "...", "timestamp": "0"}}}
"""As `@record` writes it."""


def written(directory: Path, text: str) -> Path:
    path = directory / "error.json"
    path.write_text(text)
    return path


def test_the_error_comes_last_unless_the_output_has_it(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(RECORDED))
    assert with_recorded_error(["closing", "bye"], path) == ("closing", "bye", "KeyError: 'weights'")
    shown = ["[rank0]: KeyError: 'weights'", "bye"]
    assert with_recorded_error(shown, path) == tuple(shown)
    assert with_recorded_error(["bye"], None) == ("bye",)


def test_an_error_may_be_a_text_and_is_bounded(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"message": "\n".join(f"line {n}" for n in range(1000))}))
    assert recorded_error(path) == [f"line {n}" for n in range(MAX_LINES)]


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"message": 3}', '{"message": {}}', "\xff"])
def test_a_file_that_is_not_valid_changes_nothing(tmp_path: Path, text: str) -> None:
    assert with_recorded_error(["bye"], written(tmp_path, text)) == ("bye",)
    assert recorded_error(tmp_path / "missing") == []


def test_a_file_name_that_is_not_utf8_can_be_reported(tmp_path: Path) -> None:
    name = os.fsdecode(b"/data/caf\xe9.txt")
    path = written(tmp_path, json.dumps({"message": {"message": f"cannot read {name}\nbye"}}))
    assert recorded_error(path) == ["cannot read /data/caf?.txt", "bye"]
