"""Golden files: recorded behavior that a change either keeps, or changes in the same commit with a reason.

`check("planner/plans.jsonl", cases)` compares a value with a committed file next to this module. The suffix decides the
form: `.jsonl` holds a mapping, one line a case, so that a diff shows the cases that changed; `.json` holds one value;
any other suffix holds text. With MESHWRIGHT_RECORD_GOLDENS=1 in the environment `check` writes the file instead.
`check_sample` compares a few cases of a file that only a long test compares in full.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
RECORD = "MESHWRIGHT_RECORD_GOLDENS"
SAME_FLOAT = 1e-12
"""Relative, and absolute for what is 0 but for rounding. C libraries differ in the last bits of log and pow, releases
of Python in how they add up. Files hold every digit, so a recording shows more."""
MAX_SHOWN = 12
"""Differences in a failure's message."""


def check(path: str, value: Any) -> None:
    """Compare `value` with the golden file at `path`, relative to this directory.

    Raises:
        AssertionError: they differ, or there is no such file. The message names the cases and fields that changed.
    """
    file = ROOT / path
    if os.environ.get(RECORD) == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(encode(path, value), encoding="utf-8")
        return
    assert file.is_file(), f"{path} is not recorded: run this test with {RECORD}=1"
    expected, actual = file.read_text(encoding="utf-8"), encode(path, value)
    if actual == expected:
        return
    if file.suffix in (".json", ".jsonl"):
        changes = list(differences("", decode(path, expected), decode(path, actual)))
    else:
        diff = difflib.unified_diff(expected.splitlines(), actual.splitlines(), "recorded", "now", "", "", 1, "")
        changes = list(diff) or ["only the ends of lines"]
    _report(path, changes)


def check_sample(path: str, cases: Mapping[str, Any]) -> None:
    """Compare some cases of a `.jsonl` file that another test records. This never records them.

    The file of a long test is compared rarely. Its sample fails as soon as the code changes what the file has and only
    the files of other tests were recorded.

    Raises:
        AssertionError: a case differs or is not in the file.
    """
    if os.environ.get(RECORD) == "1":
        return
    recorded = decode(path, (ROOT / path).read_text(encoding="utf-8"))
    now = decode(path, encode(path, cases))
    _report(path, list(differences("", {case: recorded[case] for case in now if case in recorded}, now)))


def _report(path: str, changes: list[str]) -> None:
    more = f"\n... and {len(changes) - MAX_SHOWN} more" if len(changes) > MAX_SHOWN else ""
    assert not changes, f"{path} differs in {len(changes)} places:\n" + "\n".join(changes[:MAX_SHOWN]) + more


def encode(path: str, value: Any) -> str:
    """The content of a golden file. The same value gives the same bytes in every process."""
    if path.endswith(".jsonl"):
        return "".join(f"{canonical({case: value[case]})}\n" for case in sorted(value))
    if path.endswith(".json"):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    assert isinstance(value, str), f"{path}: a file of this suffix holds text"
    return value


def decode(path: str, content: str) -> Any:
    """What `encode` made the content of."""
    if path.endswith(".jsonl"):
        return {case: value for line in content.splitlines() for case, value in json.loads(line).items()}
    return json.loads(content) if path.endswith(".json") else content


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def differences(where: str, expected: Any, actual: Any) -> Iterator[str]:
    """A line for each place at which two decoded values differ."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key in sorted({*expected, *actual}):
            inner = f"{where}.{key}" if where else key
            if key not in actual:
                yield f"{inner}: missing, was {_short(expected[key])}"
            elif key not in expected:
                yield f"{inner}: new, is {_short(actual[key])}"
            else:
                yield from differences(inner, expected[key], actual[key])
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(f"{where}[{index}]", one, other)
    elif type(expected) is not type(actual) or not _same(expected, actual):
        yield f"{where}: was {_short(expected)}, is {_short(actual)}"


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float):
        return math.isclose(expected, actual, rel_tol=SAME_FLOAT, abs_tol=SAME_FLOAT)
    return bool(expected == actual)


def _short(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
