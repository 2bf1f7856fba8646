"""Every case, gathered from the modules of `cases`: one module an area of techniques, each with a list `CASES`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from tests.parity.case import Case


def all_cases() -> list[Case]:
    """Raises ValueError when two cases have the same name."""
    directory = Path(__file__).parent / "cases"
    modules = sorted(module.name for module in pkgutil.iter_modules([str(directory)]))
    cases = [case for name in modules for case in importlib.import_module(f"tests.parity.cases.{name}").CASES]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two cases have the same name: {', '.join(twice)}")
    return cases
