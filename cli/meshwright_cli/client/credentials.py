"""Sources of credentials: a token, a file with a token, or an `exec` plugin of a cloud provider."""

from __future__ import annotations

import asyncio
import json
import os
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


class ExecPlugin:
    """A program that prints an ExecCredential (`client.authentication.k8s.io`), as clusters of cloud providers use."""

    def __init__(
        self, command: str, arguments: list[str], environment: Mapping[str, str], info: str, hint: str
    ) -> None:
        self._argv = [command, *arguments]
        self._environment = environment
        self._info = info
        self._hint = hint
        self._credential: Credential | None = None
        self._expires: datetime | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, plugin: Mapping[str, Any], file: Path) -> ExecPlugin:
        """Read `users[].user.exec`. A relative command with a directory is relative to the kubeconfig file."""
        command = str(plugin.get("command") or "")
        if not command:
            raise ConfigurationError(f"{file}: `users[].user.exec` has no `command`")
        if os.sep in command and not os.path.isabs(command):
            command = str(file.parent / command)
        environment = {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
        version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        arguments = [str(argument) for argument in plugin.get("args") or ()]
        return cls(command, arguments, environment, json.dumps(info), str(plugin.get("installHint") or "").strip())

    async def current(self) -> Credential:
        """The credential for the next request. The program runs again shortly before the credential expires."""
        async with self._lock:
            expired = self._expires is not None and datetime.now(UTC) >= self._expires - EARLY
            if self._credential is None or expired:
                self._credential = self._parse(await self._run())
            return self._credential

    async def _run(self) -> bytes:
        environment = {**os.environ, **self._environment, "KUBERNETES_EXEC_INFO": self._info}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            hint = f". {self._hint}" if self._hint else ""
            raise ConfigurationError(
                f"the credential plugin `{self._argv[0]}` cannot be run: {error.strerror}{hint}"
            ) from error
        out, errors = await process.communicate()
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
            self._expires = datetime.fromisoformat(expires) if expires else None
            certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
            token = status.get("token")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"the credential plugin `{self._argv[0]}` printed no ExecCredential") from error
        return Credential(f"Bearer {token}" if token else "", f"{certificate}\n{key}" if certificate and key else None)
