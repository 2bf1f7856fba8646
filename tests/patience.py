"""How long tests wait for a condition.

A limit only decides when a test gives up. On a busy machine the import of torch alone may take a minute, so no limit is
shorter than `LEAST_SECONDS`; a test whose condition holds earlier goes on at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LEAST_SECONDS = 240.0


def patient(seconds: float) -> float:
    """The limit to use where `seconds` would be enough on an idle machine."""
    return max(seconds, LEAST_SECONDS)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds that nothing tells of."""
    async with asyncio.timeout(LEAST_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)
