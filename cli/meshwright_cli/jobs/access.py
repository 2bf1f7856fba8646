"""The options of every command that uses a cluster, and how its errors become messages and exit codes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright.printable import printable
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import MeshwrightError
from meshwright_cli.completion import complete_contexts, complete_namespaces

T = TypeVar("T")


class CommandError(click.ClickException):
    """An error with the exit code of its cause."""

    def __init__(self, error: MeshwrightError) -> None:
        super().__init__(printable(str(error)))
        self.code = int(error.exit_code)

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """The code that the process exits with."""
        return self.code


@dataclass(frozen=True, slots=True)
class Access:
    """The cluster and the namespace that the options select."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None

    def client(self) -> AsyncClient:
        """A client for the event loop that runs.

        Raises:
            ConfigurationError: there is no usable kubeconfig.
        """
        return AsyncClient(kubeconfig=self.kubeconfig, context=self.context, namespace=self.namespace)

    def run(self, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run a coroutine with a client.

        Raises:
            CommandError: for each error of the client.
        """

        async def with_client() -> T:
            async with self.client() as client:
                return await work(client)

        try:
            return asyncio.run(with_client())
        except MeshwrightError as error:
            raise CommandError(error) from error


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select cluster and namespace. The command gets them as `access`."""

    @click.option(
        "-n", "--namespace", help="Namespace. Defaults to that of the context.", shell_complete=complete_namespaces
    )
    @click.option("--context", help="Context of the kubeconfig file.", shell_complete=complete_contexts)
    @click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Kubeconfig file. Defaults to KUBECONFIG, then to ~/.kube/config.",
    )
    @functools.wraps(function)
    def with_access(
        *args: Any, namespace: str | None, context: str | None, kubeconfig: Path | None, **more: Any
    ) -> Any:
        return function(*args, access=Access(kubeconfig, context, namespace), **more)

    return with_access
