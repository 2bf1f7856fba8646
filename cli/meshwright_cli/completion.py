"""Shell completion of names in the cluster. An error completes nothing, and shows nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from meshwright_cli.client.async_client import AsyncClient

TIMEOUT_SECONDS = 3.0


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of jobs in the namespace that the options before select."""

    async def names(client: AsyncClient) -> list[str]:
        return [job.name for job in await client.list()]

    return _ask(ctx, names, incomplete)


def complete_namespaces(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of namespaces."""
    from meshwright_cli.client.api_server import NAMESPACES

    async def names(client: AsyncClient) -> list[str]:
        return [item["metadata"]["name"] for item in (await client.server.collect(NAMESPACES))[0]]

    return _ask(ctx, names, incomplete)


def complete_contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Contexts of the kubeconfig file."""
    from meshwright_cli.client.kubeconfig import contexts

    try:
        return _matching(contexts(_path(ctx)), incomplete)
    except Exception:  # noqa: BLE001 - completion must not print a traceback into the command line
        return []


def complete_ranks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ranks of the job that is named before."""

    async def names(client: AsyncClient) -> list[str]:
        from meshwright_cli.client.objects import ranks_by_worker

        job = await client.get(str(ctx.params.get("job")))
        return [str(rank) for ranks in ranks_by_worker(job.status).values() for rank in ranks]

    return _ask(ctx, names, incomplete)


def _ask(ctx: click.Context, names: Any, incomplete: str) -> list[str]:
    from meshwright_cli.client.async_client import AsyncClient

    async def ask() -> list[str]:
        options = {"context": ctx.params.get("context"), "namespace": ctx.params.get("namespace")}
        async with AsyncClient(kubeconfig=_path(ctx), timeout=TIMEOUT_SECONDS, **options) as client:
            found: list[str] = await names(client)
            return found

    try:
        return _matching(asyncio.run(ask()), incomplete)
    except Exception:  # noqa: BLE001 - completion must not print a traceback into the command line
        return []


def _matching(names: list[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _path(ctx: click.Context) -> Path | None:
    path = ctx.params.get("kubeconfig")
    return Path(path) if path else None
