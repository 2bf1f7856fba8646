"""Every legal pair of techniques, in as few rows as were found; and every illegal one. See `tests.parity.pairs`."""

from __future__ import annotations

from tests.parity.pairs import stored

CASES = stored()
