"""Sources of credentials: a token, a file with a token, or an `exec` plugin of a cloud provider."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from meshwright_cli.client.errors import ConfigurationError

EARLY = timedelta(seconds=30)
"""Time before its expiry at which a credential is fetched again."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request sends."""

    authorization: str = field(default="", repr=False)
    """Value of the header `Authorization`; empty for none."""
    client_pem: str | None = field(default=None, repr=False)
    """Client certificate and private key, concatenated, if a plugin provides them."""


class Credentials(Protocol):
    """A source of credentials."""

    async def current(self) -> Credential:
        """The credential for the next request.

        Raises:
            ConfigurationError: there is none.
        """

    def forget(self) -> None:
        """The API server did not accept the last credential: get a new one for the next request, if there are more."""


@dataclass(frozen=True, slots=True)
class StaticToken:
    """A bearer token or basic credentials that do not change; neither for a client certificate."""

    token: str = field(default="", repr=False)
    basic: str = field(default="", repr=False)

    async def current(self) -> Credential:
        """The credential for the next request."""
        if self.basic:
            return Credential(f"Basic {self.basic}")
        return Credential(f"Bearer {self.token}" if self.token else "")

    def forget(self) -> None:
        """See `Credentials.forget`: there is no other one."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file with a bearer token that is replaced before it expires, such as that of a service account."""

    path: Path

    async def current(self) -> Credential:
        """The credential for the next request, read again each time."""
        try:
            return Credential(f"Bearer {(await asyncio.to_thread(self.path.read_text)).strip()}")
        except OSError as error:
            raise ConfigurationError(f"{self.path}: the token cannot be read: {error.strerror}") from error

    def forget(self) -> None:
        """See `Credentials.forget`: the file is read for each request."""


class ExecPlugin:
    """A program that prints an ExecCredential (`client.authentication.k8s.io`), as clusters of cloud providers use.

    Args:
        argv: the program and its arguments.
        environment: what it gets besides this process's environment.
        info: the ExecCredential that it gets, without `spec.interactive`.
        mode: `interactiveMode`, whether it may ask the user.
        hint: how to install it.
    """

    def __init__(
        self, argv: list[str], environment: Mapping[str, str], info: Mapping[str, Any], mode: str, hint: str
    ) -> None:
        self._argv = argv
        self._environment = environment
        self._info = info
        self._mode = mode
        self._hint = hint
        self._credential: Credential | None = None
        self._expires: datetime | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, plugin: Mapping[str, Any], file: Path, cluster: Mapping[str, Any]) -> ExecPlugin:
        """Read `users[].user.exec`. A relative command with a directory is relative to the kubeconfig file.

        `cluster` is what a plugin with `provideClusterInfo` gets to know of the cluster.
        """
        command = str(plugin.get("command") or "")
        if not command:
            raise ConfigurationError(f"{file}: `users[].user.exec` has no `command`")
        if os.sep in command and not os.path.isabs(command):
            command = str(file.parent / command)
        environment = {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
        version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
        spec = {"cluster": cluster} if plugin.get("provideClusterInfo") else {}
        return cls(
            [command, *(str(argument) for argument in plugin.get("args") or ())],
            environment,
            {"apiVersion": version, "kind": "ExecCredential", "spec": spec},
            str(plugin.get("interactiveMode") or "IfAvailable"),
            str(plugin.get("installHint") or "").strip(),
        )

    def forget(self) -> None:
        """Run the program again before the next request: the API server did not accept the credential."""
        self._credential = None

    async def current(self) -> Credential:
        """The credential for the next request. The program runs again shortly before the credential expires."""
        async with self._lock:
            expired = self._expires is not None and datetime.now(UTC) >= self._expires - EARLY
            if self._credential is None or expired:
                self._credential = self._parse(await self._run())
            return self._credential

    def _is_interactive(self) -> bool:
        """Whether the program may ask the user.

        Raises:
            ConfigurationError: it has to, and there is no terminal.
        """
        terminal = sys.stdin is not None and sys.stdin.isatty()
        if self._mode == "Always" and not terminal:
            raise ConfigurationError(
                f"the credential plugin `{self._argv[0]}` asks for input (`interactiveMode: Always`), and standard "
                "input is not a terminal: run the command in one"
            )
        return terminal and self._mode != "Never"

    async def _run(self) -> bytes:
        interactive = self._is_interactive()
        info = {**self._info, "spec": {**self._info["spec"], "interactive": interactive}}
        environment = {**os.environ, **self._environment, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=environment,
                stdin=None if interactive else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            hint = f". {self._hint}" if self._hint else ""
            raise ConfigurationError(
                f"the credential plugin `{self._argv[0]}` cannot be run: {error.strerror}{hint}"
            ) from error
        assert process.stdout is not None
        assert process.stderr is not None
        out, errors, _ = await asyncio.gather(
            process.stdout.read(), _read(process.stderr, shown=interactive), process.wait()
        )
        if process.returncode:
            text = errors.decode(errors="replace").strip()[-500:]
            raise ConfigurationError(
                f"the credential plugin `{self._argv[0]}` exited with code {process.returncode}: {text}"
            )
        return out

    def _parse(self, out: bytes) -> Credential:
        try:
            status = json.loads(out)["status"]
            expires = status.get("expirationTimestamp")
            self._expires = _in_utc(datetime.fromisoformat(expires)) if expires else None
            certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
            token = status.get("token")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"the credential plugin `{self._argv[0]}` printed no ExecCredential") from error
        if not token and not (certificate and key):
            raise ConfigurationError(
                f"the ExecCredential that the credential plugin `{self._argv[0]}` printed has neither a token nor a "
                "certificate with its key"
            )
        return Credential(f"Bearer {token}" if token else "", f"{certificate}\n{key}" if certificate and key else None)


async def _read(stream: asyncio.StreamReader, *, shown: bool) -> bytes:
    """All that a program writes; with `shown`, the user sees it at once, such as the code of a login in a browser."""
    parts = []
    while part := await stream.read(4096):
        parts.append(part)
        if shown:
            sys.stderr.write(part.decode(errors="replace"))
            sys.stderr.flush()
    return b"".join(parts)


def _in_utc(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)
