"""Displays of a demo: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright_cli.demo.line_view import LineWriter
from meshwright_cli.demo.live_view import render_live_view
from meshwright_cli.demo.loss_curve import LossCurve
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.text import clock, kubectl_hint


class Display(Protocol):
    """Displays messages and the state of the job. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def announce(self, text: str) -> None:
        """Display what the demo does."""

    def show(self, now: Snapshot, curve: LossCurve) -> None:
        """Display the state of the job."""


class LiveDisplay:
    """A live view that is redrawn in place, with messages above it."""

    def __init__(self, console: Console, kubeconfig: Path) -> None:
        self._console = console
        self._kubeconfig = kubeconfig
        self._last: tuple[Snapshot, LossCurve] | None = None
        self._started = time.monotonic()
        self._latest = ""
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._last is not None:
            self._draw(*self._last, hint="")  # the cluster is about to stop
        self._live.stop()

    def announce(self, text: str) -> None:
        """Print a message above the live view, and show it there until the next one."""
        self._latest = text
        self._console.print(Text.assemble((f"[{clock(time.monotonic() - self._started):>5}] ", "dim"), (text, "bold")))

    def show(self, now: Snapshot, curve: LossCurve) -> None:
        """Redraw the live view."""
        self._last = now, curve
        self._draw(now, curve, kubectl_hint(self._kubeconfig, self._console.width, Path.home()))

    def _draw(self, now: Snapshot, curve: LossCurve, hint: str) -> None:
        elapsed = time.monotonic() - self._started
        height = self._console.height
        view = render_live_view(now, curve, elapsed, datetime.now(UTC), hint, self._latest, height)
        self._live.update(view, refresh=True)


class LineDisplay:
    """Plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._writer = LineWriter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def announce(self, text: str) -> None:
        """Print a message."""
        self._line(f"[{clock(time.monotonic() - self._started):>5}] {text}")

    def show(self, now: Snapshot, curve: LossCurve) -> None:
        """Print what has changed."""
        for line in self._writer.lines(now, time.monotonic() - self._started):
            self._line(line)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def choose_display(console: Console, kubeconfig: Path) -> Display:
    """A live view if the output is a terminal that is large enough, else plain lines."""
    if console.is_terminal and not console.is_dumb_terminal and console.height >= 20:
        return LiveDisplay(console, kubeconfig)
    return LineDisplay(console)
