"""Home directory, user name and caches of processes with a user id that the image does not know."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright_worker.agent.home import user_variables
from tests.patience import patient

UID = 54321
DROPS = ("--reuid", str(UID), "--regid", str(UID), "--clear-groups")
READS = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
"""The user may read every file, because this machine's Python may be in the home directory of another one."""

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root with setpriv can become another user"
)


def as_unknown_user(code: str, environment: dict[str, str], seconds: float = 60) -> str:
    """What the code prints in a process of a user without an entry."""
    command = ["setpriv", *DROPS, *READS, sys.executable, "-c", code]
    plain = {"PATH": os.environ["PATH"], "HOME": "/", **environment}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=patient(seconds), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """A directory that every user reaches and may write to."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent != parent.parent and parent.stat().st_uid == os.getuid() and parent.parts[:2] == ("/", "tmp"):
            parent.chmod(parent.stat().st_mode | 0o755)
    tmp_path.chmod(0o1777)
    return tmp_path


VARIABLES = """
import json, os
from meshwright_worker.agent.home import user_variables
print(json.dumps(user_variables(os.environ)))
"""


@needs_root
def test_a_user_without_an_entry_gets_a_name_a_home_and_caches(temporary: Path) -> None:
    got = json.loads(as_unknown_user(VARIABLES, {"TMPDIR": str(temporary)}))
    home = temporary / f"meshwright-home-{UID}"
    assert got == {
        "USER": "meshwright",
        "LOGNAME": "meshwright",
        "HOME": str(home),
        "XDG_CACHE_HOME": f"{home}/.cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/.cache/torchinductor",
        "TRITON_CACHE_DIR": f"{home}/.cache/triton",
        "HF_HOME": f"{home}/.cache/huggingface",
    }
    assert (home.stat().st_uid, home.stat().st_mode & 0o777) == (UID, 0o700)
    assert json.loads(as_unknown_user(VARIABLES, {"TMPDIR": str(temporary)})) == got, "it is the same at each start"


@needs_root
def test_what_the_pod_says_stays(temporary: Path) -> None:
    (temporary / "chosen").mkdir()
    (temporary / "chosen").chmod(0o777)
    (temporary / "files").mkdir(mode=0o755)
    chosen = {"TMPDIR": str(temporary), "USER": "ada", "HOME": str(temporary / "chosen")}
    assert json.loads(as_unknown_user(VARIABLES, chosen)) == {}
    read_only = {**chosen, "HOME": str(temporary / "files"), "HF_HOME": "/models"}
    got = json.loads(as_unknown_user(VARIABLES, read_only))
    assert set(got) == {"XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


@needs_root
def test_a_directory_that_another_user_made_is_not_used(temporary: Path) -> None:
    (temporary / f"meshwright-home-{UID}").mkdir(mode=0o777)
    got = json.loads(as_unknown_user(VARIABLES, {"TMPDIR": str(temporary)}))
    assert not got["HOME"].startswith(str(temporary))
    shutil.rmtree(got["HOME"])


def test_a_user_with_a_name_and_a_home_keeps_them(tmp_path: Path) -> None:
    assert user_variables({"HOME": str(tmp_path), "USER": "ada"}) == {}
    assert user_variables({"HOME": "/", "USER": "ada", "TMPDIR": str(tmp_path)})["HOME"].startswith(str(tmp_path))


COMPILES = """
import getpass, os
from meshwright_worker.agent.server_process import process_environment
os.environ.update(process_environment(os.environ))
import torch
torch.set_num_threads(1)
compiled = torch.compile(lambda x: (x * 2).sin().sum(-1))
x = torch.arange(64.0).reshape(8, 8)
assert torch.allclose(compiled(x), (x * 2).sin().sum(-1))
cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
made = [name for _, _, names in os.walk(cache) for name in names if name.endswith(".so")]
assert made, cache
print(getpass.getuser(), os.getuid())
"""


@pytest.mark.long
@needs_root
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_for_a_user_without_an_entry(temporary: Path) -> None:
    # One compiling process: others would be started without the right to read Python.
    environment = {"TMPDIR": str(temporary), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert as_unknown_user(COMPILES, environment, 240).split() == ["meshwright", str(UID)]
