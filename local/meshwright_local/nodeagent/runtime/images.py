"""Images of this cluster: directories of this machine, by the name that a pod's container has.

The image `NAME` is the directory `images/NAME` of the cluster's directory, if it exists: `rootfs` in it is the root of
its containers, and `config.json`, which may be left out, has the fields `Env`, `Entrypoint`, `Cmd` and `WorkingDir` of
the `config` of an OCI image. Containers of every other image see the files of the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright_local.nodeagent.sandbox import PodSpecError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Value of PATH for an image that does not say it, as container runtimes set it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*(/[A-Za-z0-9][A-Za-z0-9._:@-]*)*")


@dataclass(frozen=True, slots=True)
class Image:
    """An image that has its own root directory."""

    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    working_directory: str = "/"


def find_image(directory: Path | None, name: str) -> Image | None:
    """The image of this name; None if there is no directory for it.

    Raises:
        PodSpecError: its configuration cannot be read.
    """
    if directory is None or not _NAME.fullmatch(name):
        return None
    place = directory / name
    if not (place / "rootfs").is_dir():
        return None
    path = place / "config.json"
    try:
        config = json.loads(path.read_text())["config"] if path.exists() else {}
        variables = dict(entry.split("=", 1) for entry in config.get("Env") or ())
        return Image(
            root=(place / "rootfs").resolve(),
            environment=variables,
            entrypoint=tuple(config.get("Entrypoint") or ()),
            command=tuple(config.get("Cmd") or ()),
            working_directory=config.get("WorkingDir") or "/",
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise PodSpecError(f"image {name!r}: {path} is not valid: {error!r}", "ErrImagePull") from None
