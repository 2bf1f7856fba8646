"""What ruff, mypy and import-linter say of the whole tree: as tests, so that they run beside the others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    ["ruff check .", "ruff format --check .", "lint-imports", pytest.param("mypy", marks=pytest.mark.slow)],
)
def test_nothing_is_found(command):
    program, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
