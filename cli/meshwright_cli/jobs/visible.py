"""Reads what is shown about a job besides the job itself. Who may not read it, still sees the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

from meshwright_cli.client.errors import ForbiddenError

Found = TypeVar("Found")


async def visible(reading: Awaitable[Found], hidden: list[str], what: str) -> Found | None:
    """What is read. None if it is forbidden; `what`, such as `list pods`, is then added to `hidden`."""
    try:
        return await reading
    except ForbiddenError:
        hidden.append(what)
        return None


def hidden_note(hidden: Sequence[str]) -> str:
    """What the user may not see. Empty if there is nothing."""
    return f"you may not {' or '.join(hidden)}, which are left out" if hidden else ""
