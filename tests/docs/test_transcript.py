"""Output is compared line by line, `...` stands for anything, and what is written again matches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.docs.transcript import ANY, TranscriptError, exchanges, matches, updated, written

OUTPUT = ["plan  TP 2 x DP 4", "step 1 takes 24.5 s", "reason one", "reason two", "total 7"]


def test_a_transcript_is_commands_with_output_and_back() -> None:
    text = "$ cat a \\\n>   b\none\n\n> quoted\n$ true"
    found = exchanges(text)
    assert [(each.command, each.output) for each in found] == [
        ("cat a \\\n  b", ["one", "", "> quoted"]),
        ("true", []),
    ]
    assert written(found) == text
    with pytest.raises(TranscriptError, match="begins with"):
        exchanges("output\n$ true")


@pytest.mark.parametrize(
    "expected",
    [
        OUTPUT,
        [*OUTPUT, ""],
        [ANY],
        [ANY, "total 7"],
        ["plan  TP 2 x DP 4", "  ..."],
        ["plan ...", ANY, "reason two", ANY],
        [ANY, "step ... takes ... s", "reason one", ANY],
        [*OUTPUT, ANY],
    ],
)
def test_what_was_left_out_may_be_anything(expected: list[str]) -> None:
    assert matches(expected, OUTPUT)
    assert updated(expected, OUTPUT) == [line for line in expected if line]


@pytest.mark.parametrize(
    "expected",
    [
        [],
        OUTPUT[:-1],
        OUTPUT[1:],
        [*OUTPUT, "more"],
        [*OUTPUT[:1], "step 1 takes 24.6 s", *OUTPUT[2:]],
        ["plan  TP 2 x DP 4", "total 7"],
        [ANY, "reason two", "reason one", ANY],
        [ANY, "reason three", ANY],
    ],
)
def test_other_output_does_not_match_and_is_written_again(expected: list[str]) -> None:
    assert not matches(expected, OUTPUT)
    assert matches(updated(expected, OUTPUT), OUTPUT)
    assert updated(expected, OUTPUT) != expected


def test_measured_numbers_differ_and_nothing_else_does() -> None:
    shown = ["[ 0:01] node rack0-node1 ready, 7s old, 1,234 bytes at 127.0.0.1:80  ▁▂▃", "digest 75d0"]
    assert matches(
        shown, ["[12:59] node rack0-node1 ready, 2m3s old, 5 bytes at 10.1.1.1:9999  █▁▁", "digest 75d0"], measured=True
    )
    for other in ("rack0-node2", "digest 75d1", "TP 4"):
        changed = [line.replace("rack0-node1", other).replace("digest 75d0", other) for line in shown]
        assert not matches(shown, changed, measured=True)
    assert not matches(["plan TP 2"], ["plan TP 4"], measured=True)
    assert not matches(["took 2 s"], ["took 3 s"])


def test_a_page_that_is_written_again_shows_as_much_as_before() -> None:
    shown = ["plan  TP 2 x DP 4", "step 1 takes 99.9 s", ANY, "reason two", "total 6"]
    assert updated(shown, OUTPUT) == ["plan  TP 2 x DP 4", "step 1 takes 24.5 s", ANY, "reason two", "total 7"]
    assert updated(["head", "old fact", "  ..."], ["head", "new thing", "more"]) == ["head", "new thing", "  ..."]
    assert updated([], OUTPUT) == OUTPUT


LINES = st.lists(st.sampled_from(["a", "b 1", "b 2", "c", ""]), max_size=8)


@settings(max_examples=50)
@given(LINES, st.lists(st.sampled_from(["a", "b 1", "b ...", "c", ANY]), max_size=8))
def test_what_is_written_again_matches(actual: list[str], shown: list[str]) -> None:
    assert matches(updated(shown, actual), actual)
