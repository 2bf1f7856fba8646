"""Copies the files of a directory out of a pod, through the `exec` subresource.

A connection that is cut is opened again, and continues where the file ends here. Sizes and checksums are compared.
The pod runs an image of the job's choice: what it says is checked before anything is written.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import aiohttp

from meshwright.printable import printable
from meshwright_cli.client.errors import RejectedError, UnreachableError

if TYPE_CHECKING:
    from meshwright_cli.client.api_server import ApiServer

TRIES = 5
"""Connections in a row that bring no byte of a file, before the transfer fails."""
RETRY_SECONDS = 1.0
MAX_LIST_BYTES = 64 << 20
"""Largest list of files that a pod may send."""
_STDOUT, _STDERR, _STATUS = 1, 2, 3
_LIST = """
import hashlib, json, os, sys
root, found = sys.argv[1], []
for folder, _, names in os.walk(root):
    for name in sorted(names):
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.append([os.path.relpath(path, root), os.path.getsize(path), digest])
print(json.dumps(sorted(found)))
"""
_SEND = """
import shutil, sys
with open(sys.argv[1], "rb") as file:
    file.seek(int(sys.argv[2]))
    shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
"""
"""These run in the pod, with the Python of its image."""


@dataclass(frozen=True, slots=True)
class PodDirectory:
    """A directory in a pod that runs."""

    server: ApiServer
    namespace: str
    pod: str
    path: str

    async def copy_to(self, target: Path, progress: Callable[[str, int], None]) -> int:
        """Copy every file to a local directory; the number of bytes.

        Args:
            target: the local directory.
            progress: called with the name and size of each file that is complete.

        Raises:
            RejectedError: a file has another checksum than in the pod, the pod names files outside of the directory,
                or its container has ended.
            UnreachableError: the connection is cut again and again.
        """
        listed = b""
        async for block in self._output("python", "-c", _LIST, self.path):
            listed += block
            if len(listed) > MAX_LIST_BYTES:
                raise RejectedError(f"pod {self.pod} sends a list of files of more than {MAX_LIST_BYTES:,} bytes")
        total = 0
        for name, size, digest in self._files(listed):
            await self._copy_file(name, size, digest, target)
            progress(name, size)
            total += size
        return total

    def _files(self, listed: bytes) -> list[tuple[str, int, str]]:
        """Name, size and checksum of each file.

        Raises:
            RejectedError: it is not such a list, or a name is not that of a file below the directory.
        """
        try:
            found = [(str(name), int(size), str(digest)) for name, size, digest in json.loads(listed)]
        except (ValueError, TypeError, RecursionError):
            raise RejectedError(f"pod {self.pod} does not send a list of files: check the job's image") from None
        for name, _, _ in found:
            path = PurePosixPath(name)
            # A drive, or a backslash, is a separator only on Windows.
            if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or not name.isprintable():
                text = f"pod {self.pod} names a file that is not below the directory: {printable(name)}"
                raise RejectedError(f"{text}. Nothing of it is written. Check the job's image")
        return found

    async def _copy_file(self, name: str, size: int, digest: str, target: Path) -> None:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part, checksum = path.with_name(f"{path.name}.part"), hashlib.sha256()
        received, failures = 0, 0
        with part.open("wb") as file:
            while received < size:
                before = received
                try:
                    async for block in self._output("python", "-c", _SEND, f"{self.path}/{name}", str(received)):
                        file.write(block)
                        checksum.update(block)
                        received += len(block)
                        if received > size:
                            raise RejectedError(f"{name} has more bytes than pod {self.pod} has said: export again")
                except UnreachableError:
                    failures = failures + 1 if received == before else 0
                    if failures >= TRIES:
                        raise
                    await asyncio.sleep(RETRY_SECONDS)
        if received != size or checksum.hexdigest() != digest:
            raise RejectedError(f"{name} has another checksum here than in pod {self.pod}: export again")
        part.replace(path)

    async def _output(self, *command: str) -> AsyncIterator[bytes]:
        """Yield what a command in the pod prints.

        Raises:
            RejectedError: it fails; the message has the last line of its errors.
            UnreachableError: the connection ends before the command.
        """
        errors = b""
        async with self.server.exec(self.namespace, self.pod, command) as socket:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, content = message.data[0], message.data[1:]
                if channel == _STDOUT and content:
                    yield content
                elif channel == _STDERR:
                    errors = (errors + content)[-4096:]
                elif channel == _STATUS:
                    _check(content, errors)
                    return
        raise UnreachableError(f"the connection to pod {self.pod} ended before the transfer")


def _check(content: bytes, errors: bytes) -> None:
    status = json.loads(content)
    if status.get("status") != "Success":
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise RejectedError(f"the transfer failed: {(last or [status.get('message') or 'unknown error'])[0]}")
