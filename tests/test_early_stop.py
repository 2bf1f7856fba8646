"""Programs of containers end at SIGTERM from their first moment on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

SLOW = """
import sys, time
print("imported", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("program", "code"), [("meshwright_worker", 143), ("meshwright_operator", 0)])
def test_sigterm_during_the_imports_ends_the_program(program: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "asyncio.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        process.send_signal(signal.SIGTERM)
        # Without the handler it would be the signal's number, and the first process of a container would go on.
        assert process.wait(patient(30)) == code
