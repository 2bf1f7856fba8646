"""Recording exact losses: what counts as a difference between two runs of the matrix."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from tests.parity.losses import Numbers, RankNumbers, Recorded, as_json, compare, digest, hexadecimal, joined, report


def numbers(loss: float = 0.1) -> dict[Precision, Numbers]:
    ranks = [RankNumbers(hexadecimal([loss, 0.2]), "gradients", f"parameters of {rank}") for rank in range(2)]
    return {Precision.FP64: Numbers([hexadecimal([0.1, 0.2])], ranks)}


def stored() -> dict[str, Any]:
    rows = {
        "tensor parallelism tensor=2": Recorded("tensor parallelism", numbers()),
        "tensor parallelism tensor=4": Recorded("tensor parallelism", numbers(0.3)),
        "asynchronous SGD data=2": Recorded("asynchronous SGD", numbers(), timed=True),
        "experts tensor=3": Recorded("experts", {}, refused="3 does not divide 4"),
    }
    return json.loads(json.dumps(as_json(rows)))


def renamed(content: dict[str, Any]) -> dict[str, Any]:
    return {
        **content,
        **{
            part: {name.replace("tensor=", "tp="): row for name, row in content[part].items()}
            for part in ("rows", "refused")
        },
    }


def test_a_run_is_like_itself() -> None:
    found = compare(stored(), stored())
    assert found.empty
    assert (found.compared, found.timed, found.renamed) == (2, 1, 0)
    assert report(found) == [
        "2 of 2 rows have the same losses, gradients and parameters, bit for bit",
        "1 rows follow the clock and were not compared",
    ]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ranks", [["0x1.999999999999ap-4", "0x1.999999999999ap-3"]], "fp64 ranks"),
        ("reference", [["0x1.999999999999bp-4", "0x1.999999999999ap-3"]], "fp64 reference"),
        ("gradients", "other", "fp64 gradients"),
        ("parameters", "other", "fp64 parameters"),
    ],
)
def test_a_row_with_other_numbers_is_listed(field: str, value: object, said: str) -> None:
    fresh = stored()
    fresh["rows"]["tensor parallelism tensor=2"]["fp64"][field] = value
    found = compare(stored(), fresh)
    assert not found.empty
    assert found.rows == [f"tensor parallelism tensor=2: {said}"]
    assert report(found)[0].startswith("1 of 2 rows")


def test_a_loss_is_exact() -> None:
    assert float.fromhex(hexadecimal([0.1])[0]) == 0.1
    assert hexadecimal([0.1 + 0.2]) != hexadecimal([0.3])


def test_rows_that_follow_the_clock_are_not_compared() -> None:
    fresh = stored()
    fresh["rows"]["asynchronous SGD data=2"]["fp64"]["gradients"] = "other"
    assert compare(stored(), fresh).empty


def test_rows_of_only_one_side_are_differences() -> None:
    fresh = stored()
    row = fresh["rows"].pop("tensor parallelism tensor=4")
    assert compare(stored(), fresh).missing == ["tensor parallelism tensor=4"]
    assert compare(fresh, stored()).added == ["tensor parallelism tensor=4"]
    assert compare(stored(), {**fresh, "rows": {**fresh["rows"], "other": {**row, "technique": "other"}}}).added == [
        "other"
    ]
    assert compare(stored(), fresh, "tensor=2").missing == []


def test_rows_whose_options_have_other_names_are_compared_by_position() -> None:
    found = compare(stored(), renamed(stored()))
    assert found.empty
    assert (found.compared, found.renamed) == (2, 3)
    changed = copy.deepcopy(stored())
    changed["rows"]["tensor parallelism tensor=4"]["fp64"]["gradients"] = "other"
    assert compare(stored(), renamed(changed)).rows == ["tensor parallelism tp=4: fp64 gradients"]


def test_a_run_in_parts_is_the_run() -> None:
    order = [*stored()["rows"], *stored()["refused"]]
    parts = [{**stored(), "rows": {name: stored()["rows"][name]}, "refused": {}} for name in reversed(stored()["rows"])]
    found: Any = {**stored(), "rows": {}}
    for part in parts:
        found = joined(found, part, order)
    assert found == stored()
    assert list(found["rows"]) == list(stored()["rows"])
    assert list(joined(found, {**stored(), "rows": {"of no case": {}}}, order)["rows"]) == list(stored()["rows"])


def test_another_message_of_a_rejection_is_listed_and_not_a_failure() -> None:
    fresh = stored()
    fresh["refused"]["experts tensor=3"]["text"] = "4 is not divisible by 3"
    found = compare(stored(), fresh)
    assert found.empty
    assert found.texts == ["experts tensor=3: 4 is not divisible by 3"]
    del fresh["refused"]["experts tensor=3"]
    assert compare(stored(), fresh).missing == ["experts tensor=3"]


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0])},
        {"b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)},
        {"a": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)},
        {"a": torch.tensor([1.0, 2.015625], dtype=torch.bfloat16)},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "b": torch.empty(0)},
    ],
)
def test_a_digest_is_of_names_types_shapes_and_every_bit(other: dict[str, torch.Tensor]) -> None:
    tensors = {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    assert digest(tensors) == digest({"a": torch.tensor([1.0, 0.0, 2.0], dtype=torch.bfloat16)[::2]})
    assert digest(tensors) != digest(other)
    assert digest({"a": torch.tensor(-0.0)}) != digest({"a": torch.tensor(0.0)})
