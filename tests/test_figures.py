"""Numbers as text."""

import pytest

from meshwright.figures import counted, format_decimal_bytes, format_number
from meshwright.planner.units import GIB, format_bytes


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0"),
        (0.012345, 3, "0.0123"),
        (8.0, 3, "8"),
        (12.345, 3, "12.3"),
        (999.4, 3, "999"),
        (999.6, 3, "1,000"),
        (1234.5, 3, "1,234"),
        (120.0, 2, "120"),
        (50_000.0, 2, "50,000"),
        (-1234.0, 3, "-1,234"),
        (float("inf"), 3, "inf"),
    ],
)
def test_a_number_has_no_exponent(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (0.25, "0.25 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (12_340, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999_999, "1 GB"),
        (1.5e9, "1.5 GB"),
        (405e9 * 12, "4.86 TB"),
        (2e18, "2,000 PB"),
    ],
)
def test_bytes_have_three_digits_in_a_unit_that_is_not_larger(count: float, text: str) -> None:
    assert format_decimal_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (58.4 * GIB, "58.4 GiB"),
        (999.7 * GIB, "1,000 GiB"),
        (1023 * GIB, "1,023 GiB"),
    ],
)
def test_binary_units_have_up_to_four_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "pod", "0 pods"), (1, "pod", "1 pod"), (2, "pod", "2 pods"), (1, "micro-batch", "1 micro-batch"),
     (4, "micro-batch", "4 micro-batches")],
)  # fmt: skip
def test_a_number_has_its_noun_in_the_singular_or_plural(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
