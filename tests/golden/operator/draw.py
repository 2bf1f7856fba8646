"""Draws the specs of the golden files: `python -m tests.golden.operator.draw`. It ran once.

Each spec is a random walk: it takes the moves that leave it valid and that the operator can start. The result is
committed, so that the code under test cannot change its own inputs. For a new field, add a move and append a few specs;
never replace the specs that are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

from meshwright.api.objects import KubeObject
from tests import definition
from tests.golden.files import ROOT, encode
from tests.golden.operator.moves import BASE, COMMAND, MALFORMED, NATIVE, OF_COMMANDS, PARALLELISM, applied
from tests.golden.operator.specs import FOLDER, cases, outcome, problems
from tests.rules.broken_specs import CASES

SPECS, EDITS, UNPLANNED = 300, 150, 25
LARGEST_WORLD = 48
PRODUCTS = ("", "", "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-40GB")


def main() -> None:
    """Writes `specs.jsonl`, `invalid.jsonl` and `edits.jsonl`."""
    valid, unplanned = draw_valid()
    never = sorted(set(schema_values()) - {found for case in valid.values() for found in values_of(case["spec"])})
    assert not never, f"no spec has {never}"
    write("specs.jsonl", valid)
    write("invalid.jsonl", draw_invalid(valid) | unplanned)
    write("edits.jsonl", draw_edits(valid))


def draw_valid() -> tuple[dict[str, KubeObject], dict[str, KubeObject]]:
    """Specs that the operator starts, and some valid ones that it refuses or cannot plan."""
    valid: dict[str, KubeObject] = {}
    refused: dict[str, KubeObject] = {}
    missing, seed = set(schema_values()), 0
    while len(valid) < SPECS:
        seed += 1
        case, last = walk(Random(f"spec {seed}"), missing)
        new = missing & set(values_of(case["spec"]))
        # While some value is missing, the last third takes only specs that add one.
        if len(valid) > SPECS * 2 // 3 and missing and not new and seed < 3 * SPECS:
            continue
        missing -= new
        valid[f"{len(valid):03}"] = case
        print(
            f"{time.process_time():.0f} s: seed {seed}, {len(valid)} specs, {len(missing)} values missing", flush=True
        )
        if last is not None and len(refused) < UNPLANNED:
            refused[f"u{len(refused):03}"] = last
    return valid, refused


def walk(chance: Random, missing: set[str]) -> tuple[KubeObject, KubeObject | None]:
    """A spec that the operator starts, and the last valid spec on the way that it did not start."""
    command = chance.random() < 0.12
    spec = COMMAND if command else BASE
    nodes: KubeObject = {
        "gpus": chance.choice((4, 8, 8)),
        "per_rack": chance.choice((1, 2, 4)),
        "product": chance.choice(PRODUCTS),
        "labels": {"pool": "training"},
    }
    nodes["count"] = 64 // nodes["gpus"]
    failed = None
    for _ in range(chance.randint(4, 8)):
        tried, taken = spec, 0
        for _ in range(12):
            moves = chance.choice(OF_COMMANDS if command else NATIVE)
            wanted = [move for move in moves if missing & set(values_of(applied({}, move)))]
            candidate = applied(tried, chance.choice(wanted if wanted and chance.random() < 0.7 else moves))
            if sound(candidate) and (not idle(candidate) or chance.random() < 0.1):
                tried, taken = candidate, taken + 1
            if taken == 3:
                break
        case = {"nodes": nodes, "spec": tried}
        if trains(case):
            spec = tried
        else:
            failed = case
    return {"nodes": nodes, "spec": spec}, failed


def sound(spec: KubeObject) -> bool:
    """Whether the spec breaks no rule and is small enough to run."""
    broken, _ = problems(spec)
    p = spec.get("parallelism", {})
    least = spec.get("replicas", 1) * (p.get("tensor") or 1) * (p.get("pipeline") or 1) * (p.get("context") or 1)
    return broken == {"rules": []} and least <= LARGEST_WORLD


def trains(case: KubeObject) -> bool:
    """Whether the operator starts the ranks, or the spec asks it not to."""
    found, _ = outcome("train", case)
    plan = found["status"].get("plan") or {}
    return (idle(case["spec"]) or found["document"] is not None) and plan.get("worldSize", 0) <= LARGEST_WORLD


def idle(spec: KubeObject) -> bool:
    """Whether the spec asks the operator to start nothing."""
    return bool(spec.get("suspend")) or spec.get("managedBy") == "example.com/other"


def draw_invalid(valid: dict[str, KubeObject]) -> dict[str, KubeObject]:
    """Specs that break each rule at least once, and specs that do not fit the schema."""
    found: dict[str, KubeObject] = {}
    for number, (base, changes, field) in enumerate(CASES):
        chance = Random(f"rule {number}")
        plain = applied(base, changes)
        for name in chance.sample(sorted(valid), 10):
            candidate = applied(valid[name]["spec"], changes)
            broken, _ = problems(candidate)
            if set(problems(plain)[0]["rules"]) <= set(broken.get("rules", ())):
                plain = candidate
                break
        found[f"r{number:03}"] = {"nodes": {"count": 8, "gpus": 8}, "spec": plain}
        assert field in str(problems(plain)[0])
    for number, move in enumerate(MALFORMED):
        name = Random(f"schema {number}").choice(sorted(valid))
        candidate = applied(valid[name]["spec"], move)
        if "schema" in problems(candidate)[0]:
            found[f"s{number:03}"] = {"nodes": {"count": 8, "gpus": 8}, "spec": candidate}
    return found


def draw_edits(valid: dict[str, KubeObject]) -> dict[str, KubeObject]:
    """Edits of started jobs, one move each."""
    found: dict[str, KubeObject] = {}
    seed = 0
    while len(found) < EDITS:
        seed += 1
        chance = Random(f"edit {seed}")
        name = chance.choice(sorted(valid))
        move = chance.choice(chance.choice((*NATIVE, PARALLELISM)))
        after = applied(valid[name]["spec"], move)
        if after != valid[name]["spec"] and "schema" not in problems(after)[0]:
            found[f"{len(found):03}"] = {"of": name, "change": move}
    return found


def schema_values() -> Iterator[str]:
    """Every field of the CRD's spec, and every value of an enumeration."""
    schema = definition.committed()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    yield from _schema_values(schema, "")


def _schema_values(schema: KubeObject, path: str) -> Iterator[str]:
    if path:
        yield path
    for name, below in schema.get("properties", {}).items():
        yield from _schema_values(below, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from _schema_values(schema["items"], f"{path}[]")
    for value in schema.get("enum", ()):
        yield f"{path}={value}"


def values_of(value: Any, path: str = "") -> Iterator[str]:
    """The fields that a spec sets, and their scalar values."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, below in value.items():
            yield from values_of(below, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for item in value:
            yield from values_of(item, f"{path}[]")
    else:
        yield f"{path}={value}"


def write(name: str, value: dict[str, Any]) -> None:
    """Writes inputs in the format of golden files."""
    (FOLDER / name).write_text(encode(name, value), encoding="utf-8")
    assert cases(name) == value
    print(f"{ROOT.name}/operator/{name}: {len(value)}")


if __name__ == "__main__":
    main()
