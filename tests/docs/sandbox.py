"""A home directory with a checkout in it, where the commands of one block run as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright_local.daemon import daemon_pid
from tests.docs import programs
from tests.docs.blocks import ROOT

SECONDS = 1200
LEFT_OUT = {"KUBECONFIG", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "XDG_STATE_HOME", "PYTEST_CURRENT_TEST"}
_MARK = "end-of-command-58c1"


class CommandFailedError(AssertionError):
    """A command of a block ended with another exit code than 0. The message holds its output."""


@dataclass
class Sandbox:
    """The home `~`, and in it the checkout `~/meshwright`: links into the repository, and whatever commands write."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    """Variables beside those that every command gets."""
    words: dict[str, str] = field(default_factory=dict)
    """What takes the place of a placeholder such as NAME."""
    prelude: str = ""
    """Python that runs before a block of Python."""

    def __post_init__(self) -> None:
        self.checkout.mkdir(parents=True)
        for path in ROOT.iterdir():
            if not path.name.startswith("."):
                (self.checkout / path.name).symlink_to(path)
        shutil.copy(ROOT / "examples" / "ten-line.yaml", self.checkout / "job.yaml")
        self._install()

    @property
    def checkout(self) -> Path:
        """Where commands run."""
        return self.home / "meshwright"

    @property
    def state(self) -> Path:
        """Where `meshwright local` keeps its cluster."""
        return self.home / ".local" / "state" / "meshwright"

    def python(self, program: str) -> str:
        """Run a program; its output.

        Raises:
            CommandFailedError: it failed.
        """
        path = self.checkout / "block.py"
        path.write_text(self.prelude + self._filled(program))
        return self._run(["python", str(path)])

    def bash(self, script: str) -> str:
        """Run commands in one shell, up to the first that fails; their output, stderr too.

        Raises:
            CommandFailedError: one failed.
        """
        return self._run(["bash", "-e", "-o", "pipefail", "-c", self._filled(script)])

    def transcript(self, commands: list[str]) -> list[list[str]]:
        """Run commands in one shell; the lines that each printed.

        Raises:
            CommandFailedError: one failed.
        """
        script = "".join(f"{self._filled(command)}\nprintf '{_MARK} %s\\n' $?\n" for command in commands)
        outputs, output = [], ""
        for line in self._run(["bash", "-o", "pipefail", "-c", script]).splitlines():
            before, mark, code = line.partition(_MARK)
            output += before + ("" if mark else "\n")
            if mark:
                if code.strip() != "0":
                    raise CommandFailedError(f"`{commands[len(outputs)]}` ended with {code.strip()}:\n{output}")
                outputs.append(output.splitlines())
                output = ""
        return outputs

    def close(self) -> None:
        """Stop the cluster that commands started."""
        cluster = self.state / "cluster"
        if cluster.exists() and daemon_pid(cluster) is not None:
            self.bash("meshwright local down")

    def _run(self, argv: list[str]) -> str:
        process = subprocess.Popen(
            argv, cwd=self.checkout, env=self._environment(), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        output = output.replace(str(self.home), "~")
        if process.returncode:
            raise CommandFailedError(f"exit code {process.returncode}:\n{output}")
        return output

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        path = [str(self._programs), str(Path(sys.executable).parent), kept["PATH"]]
        fixed = {"HOME": str(self.home), "PATH": os.pathsep.join(path), "COLUMNS": "120", "PYTHONUTF8": "1"}
        return {**kept, **fixed, **self.environment}

    def _filled(self, text: str) -> str:
        for word, value in self.words.items():
            text = re.sub(rf"\b{word}\b", value, text)
        return text

    @property
    def _programs(self) -> Path:
        return self.checkout / ".venv" / "bin"

    def _install(self) -> None:
        """Our programs as `make setup` installs them, and its stamp."""
        self._programs.mkdir(parents=True)
        for name in ("python", "python3"):
            _executable(self._programs / name, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        for name, target in programs.scripts().items():
            module, _, function = target.partition(":")
            # The kernel takes no interpreter whose path has a space: to a shell, the second line is a command.
            code = f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            start = f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n"
            _executable(self._programs / name, start + code)
        (self._programs / "activate").write_text(f'PATH="{self._programs}:$PATH"\n')
        (self.checkout / ".venv" / ".setup-done").touch()


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
