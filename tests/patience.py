"""How long tests wait for a condition.

A limit only decides when a test gives up. On a busy machine the import of torch alone may take a minute, so no limit is
shorter than `LEAST_SECONDS`; a test whose condition holds earlier goes on at once.
"""

from __future__ import annotations

LEAST_SECONDS = 240.0


def patient(seconds: float) -> float:
    """The limit to use where `seconds` would be enough on an idle machine."""
    return max(seconds, LEAST_SECONDS)
