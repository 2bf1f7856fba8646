"""`meshwright data upload`: which files are sent, and the program that receives them, run here and not in a pod."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshwright_cli.commands.data_upload import _files, _Kubectl, _send
from meshwright_cli.main import main


class Here(_Kubectl):
    """Runs what kubectl would run in the pod."""

    def __init__(self) -> None:
        pass

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """See `_Kubectl.start`."""
        pipe = subprocess.PIPE
        return subprocess.Popen(words[words.index("--") + 1 :], stdin=pipe, stdout=pipe, stderr=pipe)


def sent(directory: Path, target: Path) -> dict[str, bytes]:
    """Send a directory to another one, and return what is there."""
    out, received = _send(Here(), "pod", directory, _files(directory), str(target))
    assert out == received
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def test_files_with_two_names_and_names_that_are_no_utf_8_are_sent(tmp_path: Path) -> None:
    source = tmp_path / "text"
    (source / "part").mkdir(parents=True)
    (source / "a.txt").write_text("once")
    os.link(source / "a.txt", source / "part" / "b.txt")
    (tmp_path / "elsewhere").write_text("upon")
    (source / "c.txt").symlink_to("../elsewhere")
    odd = os.fsdecode(b"caf\xe9\n.txt")
    (source / odd).write_text("a time")
    (source / ".hidden").write_text("no")
    expected = {"a.txt": b"once", "part/b.txt": b"once", "c.txt": b"upon", odd: b"a time"}
    assert sent(source, tmp_path / "claim") == expected


@pytest.mark.parametrize(
    ("target", "says"), [("other", "link is a link to a directory"), ("nowhere", "link is a link without a target")]
)
def test_links_whose_text_would_be_missing_are_errors(tmp_path: Path, target: str, says: str) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("once")
    (tmp_path / "other").mkdir()
    (tmp_path / "text" / "link").symlink_to(tmp_path / target)
    with pytest.raises(click.ClickException, match=says):
        _files(tmp_path / "text")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("once")
    files = _files(tmp_path / "text")
    (tmp_path / "text" / "a.txt").unlink()
    with pytest.raises(click.ClickException, match=r"a\.txt: No such file or directory"):
        _send(Here(), "pod", tmp_path / "text", files, str(tmp_path / "claim"))


def test_a_directory_on_the_claim_is_not_part_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once")
    told = CliRunner().invoke(main, ["data", "upload", str(tmp_path), "text/books"])
    assert (told.exit_code, "pass a directory on it with --to: `text --to books`" in told.output) == (1, True)
