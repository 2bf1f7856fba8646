from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshwright_cli.main import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    directory.mkdir()
    (directory / "a.jsonl").write_text('{"body": "hello"}\n{"body": "world"}\n')
    return directory


def test_tokenize_verify_show(text: Path, tmp_path: Path) -> None:
    target = tmp_path / "tokens"
    written = run("tokenize", text, target, "--format", "JSONLines", "--field", "body")
    assert written.exit_code == 0, written.output
    assert "2 documents, 12 tokens of a vocabulary of 257 in 1 shards (uint16)" in written.output
    assert "intact: 2 documents" in run("verify", target).output
    assert run("show", target).output.endswith("hello\nworld\n\n")
    shown = json.loads(run("show", target, "--start", 6, "--count", 3, "-o", "json").output)
    assert shown["tokens"] == list(b"wor")


def test_damage_is_reported(text: Path, tmp_path: Path) -> None:
    target = tmp_path / "tokens"
    run("tokenize", text, target, "--format", "JSONLines", "--field", "body")
    shard = target / "00000.tokens"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    found = run("verify", target)
    assert found.exit_code == 1
    assert "1 shards are damaged" in found.output
    assert "00000.tokens" in found.output


def test_corrupt_records_fail_or_are_listed(text: Path, tmp_path: Path) -> None:
    with (text / "a.jsonl").open("a") as file:
        file.write("broken\n")
    options = ("--format", "JSONLines", "--field", "body")
    failed = run("tokenize", text, tmp_path / "one", *options)
    assert failed.exit_code == 1
    assert "a.jsonl:3: not JSON" in failed.output
    written = run("tokenize", text, tmp_path / "two", *options, "--skip-corrupt")
    assert written.exit_code == 0
    assert "skipped: a.jsonl:3" in written.output
    assert "1 records skipped" in written.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokenizer", "BPE"), "needs --tokenizer-file"),
        (("--format", "JSONLines"), "set --field to another"),
        (("--pattern", "*.md"), "no file matches --pattern *.md, or"),
    ],
)
def test_errors_name_options(text: Path, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    found = run("tokenize", text, tmp_path / "tokens", *arguments)
    assert found.exit_code == 1
    assert says in found.output


def test_names_are_printed_as_they_are(text: Path, tmp_path: Path) -> None:
    for name in ("wiki[en].jsonl", "a[", ":smile:.jsonl"):
        (text / name).write_text("broken\n")
    (text / "x[").mkdir()
    (text / "x[" / "b].jsonl").write_text("broken\n")  # `x[/b].jsonl`
    found = run("tokenize", text, tmp_path / "tokens", "--format", "JSONLines", "--field", "body", "--skip-corrupt")
    assert found.exit_code == 0, found.output
    for name in ("wiki[en].jsonl", "a[", ":smile:.jsonl", "x[/b].jsonl"):
        assert f"skipped: {name}:1" in found.output


def test_what_the_system_refuses_is_one_line(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    full = tmp_path / "full"
    full.mkdir()
    (full / "00000.tokens").symlink_to("/dev/full")
    (tmp_path / "loop").symlink_to("loop")
    for target, says in (("file", "file is a file"), ("full", "No space left"), ("loop/x", "Too many levels")):
        found = run("tokenize", text, tmp_path / target)
        assert found.exit_code == 1
        assert isinstance(found.exception, SystemExit), found.exception
        assert says in found.output
        assert found.output.count("\n") == 1


def test_tokens_are_not_written_next_to_other_files(text: Path, tmp_path: Path) -> None:
    options = ("--format", "JSONLines", "--field", "body")
    found = run("tokenize", text, text, *options)
    assert (found.exit_code, [path.name for path in text.iterdir()]) == (1, ["a.jsonl"])
    assert "contains `a.jsonl`: choose a new or an empty directory" in found.output
    interrupted = tmp_path / "tokens"
    interrupted.mkdir()
    (interrupted / "00007.tokens").write_bytes(b"12")
    assert run("tokenize", text, interrupted, *options).exit_code == 0


def test_the_tokenizers_file_is_not_text(text: Path, tmp_path: Path, bpe_file: Path) -> None:
    (text / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    options = ("--tokenizer", "BPE", "--tokenizer-file", text / "tokenizer.json")
    assert "1 documents" in run("tokenize", text, tmp_path / "tokens", *options).output


def test_no_document_says_why(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    (source / "a.txt").write_bytes(b"caf\xe9")
    found = run("tokenize", source, tmp_path / "tokens", "--skip-corrupt")
    assert "no text in a.txt: its only record cannot be read (a.txt: not UTF-8 at byte 3)" in found.output
    assert "matches" not in found.output
    (source / "a.txt").write_text('{"text": ""}\n' * 3)
    found = run("tokenize", source, tmp_path / "tokens", "--format", "JSONLines")
    assert "no text in a.txt: every record is empty" in found.output


def test_tokens_are_no_text(text: Path, tmp_path: Path) -> None:
    options = ("--format", "JSONLines", "--field", "body")
    assert run("tokenize", text, text / "tokens", *options, "--pattern", "*.jsonl").exit_code == 0
    found = run("tokenize", text, tmp_path / "again")
    assert found.exit_code == 1
    assert "tokens/meshwright-tokens.json: its directory has tokens, which are no text: exclude it" in found.output
    assert not (tmp_path / "again").exists()
