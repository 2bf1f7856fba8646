"""From a container's spec to the command that is run: environment, arguments, directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.local.nodeagent import environment, volumes
from meshwright.local.nodeagent.context import PodContext
from meshwright.local.nodeagent.paths import PathMap
from meshwright.local.nodeagent.process import ProcessSpec
from meshwright.local.resources import Object

TERMINATION_LOG = "/dev/termination-log"
_LONGEST_MESSAGE = 4096


class NoCommandError(Exception):
    """The spec leaves the command to the image, and there are no images here."""


class CommandLine:
    """A container's resolved environment; makes its main command and those that are run beside it."""

    def __init__(self, context: PodContext, container: Object, env: dict[str, str], paths: PathMap) -> None:
        self._context = context
        self._container = container
        self._values = env
        self._paths = paths
        base = environment.base(context.pod, context.home, context.temporary)
        self._env = {**base, **{name: paths.text(value) for name, value in env.items()}}

    @classmethod
    async def resolve(cls, context: PodContext, container: Object) -> CommandLine:
        """Read everything the container's spec refers to.

        Raises:
            MissingReferenceError, FieldError, VolumeError: See there.
        """
        env = await environment.stated(context.pod, container, context.place, context.references)
        mounts = volumes.mounts(container, context.volumes, env)
        message = termination_file(context, container)
        mounts.setdefault(container.get("terminationMessagePath") or TERMINATION_LOG, message)
        return cls(context, container, env, PathMap(mounts))

    def main(self, log: Path) -> ProcessSpec:
        """The container's own command.

        Raises:
            NoCommandError: There is none.
        """
        words = [*(self._container.get("command") or ()), *(self._container.get("args") or ())]
        if not self._container.get("command"):
            raise NoCommandError("no command specified: pods here run no images, so state spec.containers[].command")
        return ProcessSpec(self._words(words), self._env, self._cwd(), log)

    def beside(self, words: Sequence[str], *, tty: bool = False) -> ProcessSpec:
        """A command run in the container's environment, by a probe, a hook or `kubectl exec`."""
        return ProcessSpec(self._paths.texts(words), self._env, self._cwd(), tty=tty)

    def _words(self, words: Sequence[str]) -> list[str]:
        return [self._paths.text(environment.expand(word, self._values)) for word in words]

    def _cwd(self) -> Path:
        wanted = self._container.get("workingDir")
        if not wanted:
            return self._context.home
        real = self._paths.path(wanted) or Path(wanted)
        if not real.is_dir():
            # A container runtime makes a missing working directory in the container's own file system.
            real = self._context.home / wanted.lstrip("/")
            real.mkdir(parents=True, exist_ok=True)
        return real


def termination_file(context: PodContext, container: Object) -> Path:
    """The file that stands for `terminationMessagePath`."""
    return context.directory / "messages" / str(container["name"])


def termination_message(context: PodContext, container: Object, code: int, log: Path) -> str:
    """What the container left there; with FallbackToLogsOnError the end of its log if it failed and left nothing."""
    try:
        content = termination_file(context, container).read_bytes()[:_LONGEST_MESSAGE]
    except OSError:
        content = b""
    if not content and code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
        try:
            records = log.read_bytes()[-_LONGEST_MESSAGE:].splitlines()[-80:]
        except OSError:
            records = []
        content = b"\n".join(record.split(b" ", 3)[-1] for record in records)[-2048:]
    return content.decode(errors="replace")
