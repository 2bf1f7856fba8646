"""The stacks that Python's fault handler writes, which may be those of many threads. Pure."""

from __future__ import annotations

import re

_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)


def current_thread_first(text: str) -> str:
    """The stacks with the thread first that the signal interrupted, which is usually the one that trains."""
    head, *threads = _THREAD.split(text)
    return head + "".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))
