"""What pods of an image of the job's choice send to the machine of the user who runs a command."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from meshwright_cli.client import profiling
from meshwright_cli.client.checkpoints.transfer import PodDirectory
from meshwright_cli.client.errors import RejectedError
from meshwright_cli.client.objects import Job, JobEvent
from meshwright_cli.client.profiling import read_trace
from meshwright_cli.jobs.access import CommandError
from meshwright_cli.text import log_line

DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of no bytes."""
ESCAPES = "\x1b]52;c;cm0gLXJmIC8=\x07done\x1b[2J\x9b1A"
"""Would set the clipboard, clear the screen and move the cursor."""


def copy(monkeypatch: pytest.MonkeyPatch, target: Path, listed: bytes, content: bytes = b"") -> int:
    async def output(_: PodDirectory, *command: str) -> AsyncIterator[bytes]:
        yield listed if len(command) == 4 else content

    monkeypatch.setattr(PodDirectory, "_output", output)
    directory: Any = PodDirectory(None, "default", "pod", "/out")  # type: ignore[arg-type]
    return asyncio.run(directory.copy_to(target, lambda *_: None))


@pytest.mark.parametrize(
    "name", ["../stolen", "a/../../stolen", "/tmp/stolen", "..", "", ".", "a\\..\\stolen", "a\x1b[2J", "a\nb"]
)
def test_a_pod_writes_only_below_the_directory_that_the_user_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    listed = json.dumps([["config.json", 0, DIGEST], [name, 0, DIGEST]]).encode()
    with pytest.raises(RejectedError, match="names a file that is not below the directory") as found:
        copy(monkeypatch, target, listed)
    assert "\x1b" not in str(found.value)
    assert list(tmp_path.rglob("*")) == [], "nothing was written"


@pytest.mark.parametrize("listed", [b"", b"{}x", b"[1]", b'[["a"]]', b"[" * 100_000, b'[["a", "many", ""]]'])
def test_what_is_no_list_of_files_is_rejected(listed: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="does not send a list of files"):
        copy(monkeypatch, tmp_path, listed)


def test_a_file_is_no_longer_than_the_pod_has_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = json.dumps([["model.safetensors", 3, DIGEST]]).encode()
    with pytest.raises(RejectedError, match="has more bytes than"):
        copy(monkeypatch, tmp_path, listed, b"x" * 100)


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"[" * 100_000, b'{"a": "' + b"x" * 5000 + b'"}'])
def test_a_trace_is_a_json_object_of_bounded_size(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MAX_TRACE_BYTES", 1000)
    with pytest.raises(RejectedError, match="rank 3 has sent no trace"):
        read_trace(base64.b64encode(gzip.compress(text)), 3)
    with pytest.raises(RejectedError, match="rank 3 has sent no trace"):
        read_trace(b"bm90IGd6aXA=", 3)
    assert read_trace(base64.b64encode(gzip.compress(b'{"traceEvents": []}')), 3) == {"traceEvents": []}


def test_a_terminal_obeys_nothing_that_a_pod_says() -> None:
    ready = {"type": "Ready", "status": "False", "reason": "Failed", "message": ESCAPES}
    ready |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    job = Job({"metadata": {"name": "a"}, "spec": {}, "status": {"conditions": [ready]}})
    event = JobEvent.of({"metadata": {"name": "e"}, "reason": ESCAPES, "message": ESCAPES})
    error = CommandError(RejectedError(ESCAPES))
    for text in (job.message, event.reason, event.message, error.message):
        assert text == "?]52;c;cm0gLXJmIC8=?done?[2J?1A"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step 1 loss 2.0", "step 1 loss 2.0"),
        ("\x1b[1;31mred\x1b[0m\ttext", "\x1b[1;31mred\x1b[0m\ttext\x1b[0m"),
        (ESCAPES, "?]52;c;cm0gLXJmIC8=?done?[2J?1A"),
        (" 10 %\r 20 %\r", " 20 %"),
    ],
)
def test_a_log_keeps_its_colors_and_no_other_sequences(line: str, shown: str) -> None:
    assert log_line(line) == shown
