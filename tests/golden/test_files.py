"""The comparison itself: what it accepts, what it reports, and that the same value always gives the same bytes."""

from __future__ import annotations

import pytest

from tests.golden import files


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.delenv(files.RECORD, raising=False)
    return tmp_path


def record(monkeypatch, path, value):
    monkeypatch.setenv(files.RECORD, "1")
    files.check(path, value)
    monkeypatch.delenv(files.RECORD)


@pytest.mark.parametrize(
    ("path", "value"),
    [("a/b.jsonl", {"two": [1, 2.5], "one": {"z": None, "a": "ü"}}), ("a.json", [1, {"b": True}]), ("a.txt", "x\ny\n")],
)
def test_what_was_recorded_is_accepted(monkeypatch, path, value):
    record(monkeypatch, path, value)
    files.check(path, value)


def test_a_case_is_a_line_and_keys_are_sorted(monkeypatch, directory):
    record(monkeypatch, "a.jsonl", {"two": 2, "one": {"z": 1, "a": (1.5, "ü")}})
    assert (directory / "a.jsonl").read_text("utf-8") == '{"one":{"a":[1.5,"ü"],"z":1}}\n{"two":2}\n'


def test_a_file_that_is_not_recorded_fails():
    with pytest.raises(AssertionError, match="none.json is not recorded"):
        files.check("none.json", 1)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"one": {"a": 1, "b": [1.0, 2.1]}}, "one.b[1]: was 2.0, is 2.1"),
        ({"one": {"a": 1.0, "b": [1.0, 2.0]}}, "one.a: was 1, is 1.0"),
        ({"one": {"a": True, "b": [1.0, 2.0]}}, "one.a: was 1, is true"),
        ({"one": {"a": 1, "b": [1.0]}}, "one.b: was [1.0,2.0], is [1.0]"),
        ({"one": {"b": [1.0, 2.0]}}, "one.a: missing, was 1"),
        ({"one": {"a": 1, "b": [1.0, 2.0]}, "two": 2}, "two: new, is 2"),
        ({}, "one: missing"),
    ],
)
def test_a_change_is_named(monkeypatch, now, message):
    record(monkeypatch, "a.jsonl", {"one": {"a": 1, "b": [1.0, 2.0]}})
    with pytest.raises(AssertionError) as failed:
        files.check("a.jsonl", now)
    assert message in str(failed.value)


def test_the_last_bits_of_a_float_may_differ_between_machines(monkeypatch):
    record(monkeypatch, "a.json", 0.1 + 0.2)
    files.check("a.json", 0.3)
    with pytest.raises(AssertionError):
        files.check("a.json", 0.3 + 1e-10)


def test_what_is_0_but_for_rounding_is_0(monkeypatch):
    record(monkeypatch, "a.json", 0.0)
    files.check("a.json", 2.5e-16)
    with pytest.raises(AssertionError):
        files.check("a.json", 1e-9)


def test_a_sample_is_compared_and_never_recorded(monkeypatch, directory):
    record(monkeypatch, "a.jsonl", {"one": 1, "two": 2, "three": (3,)})
    files.check_sample("a.jsonl", {"three": (3,), "one": 1})
    with pytest.raises(AssertionError, match="two: was 2, is 3"):
        files.check_sample("a.jsonl", {"two": 3})
    with pytest.raises(AssertionError, match="four: new, is 4"):
        files.check_sample("a.jsonl", {"four": 4})
    before = (directory / "a.jsonl").read_bytes()
    monkeypatch.setenv(files.RECORD, "1")
    files.check_sample("a.jsonl", {"two": 3})
    assert (directory / "a.jsonl").read_bytes() == before


def test_a_change_of_text_is_shown_as_a_diff(monkeypatch):
    record(monkeypatch, "a.txt", "one\ntwo\n")
    with pytest.raises(AssertionError) as failed:
        files.check("a.txt", "one\nthree\n")
    assert "-two\n+three" in str(failed.value)
    with pytest.raises(AssertionError, match="ends of lines"):
        files.check("a.txt", "one\ntwo")
