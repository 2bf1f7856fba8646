"""Follows a job for `meshwright open`: reads it again and again, and keeps the steps that it saw."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import MeshwrightError
from meshwright_cli.report.cluster_source import Stored, read_job
from meshwright_cli.report.history import History, HistoryFileError, Mark, Point, read_history
from meshwright_cli.report.inputs import ReportInputs
from meshwright_cli.report.page import REFRESH_SECONDS, page_of, render


class LiveReport:
    """The page of a job, as of the last time that it was read.

    Args:
        client: reads the job, with the rights of the user's kubeconfig.
        name: the job.
        history_file: the tracker's file. Without it, the curves have the steps that were seen.
    """

    def __init__(self, client: AsyncClient, name: str, history_file: Path | None = None) -> None:
        self._client, self._name, self._history_file = client, name, history_file
        self._inputs: ReportInputs | None = None
        self._history = History()
        self._stored: Stored = {}
        self._generation = 0
        self._page = ""

    @property
    def page(self) -> str:
        """The page."""
        return self._page

    async def update(self) -> None:
        """Read the job, and make its page. If it cannot be read later on, the page stays, with a note.

        Raises:
            MeshwrightError: the job cannot be read the first time.
        """
        try:
            found = await read_job(self._client, self._name, datetime.now(UTC), self._stored)
        except MeshwrightError as error:
            if self._inputs is None:
                raise
            self._page = self._render(replace(self._inputs, notes=(f"Not updated since then: {error}",)))
            return
        self._inputs = found
        self._page = self._render(found)

    async def follow(self) -> None:
        """Update the page for ever."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self.update()

    def _render(self, found: ReportInputs) -> str:
        if found.status is not None:
            self._history, self._generation = seen(self._history, self._generation, found.status)
        history, notes = self._history, found.notes
        if self._history_file is not None:
            try:
                history = read_history(self._history_file)
                notes = (*notes, history.note) if history.note else notes
            except HistoryFileError as error:
                notes = (*notes, str(error))
        return render(page_of(replace(found, history=history, notes=notes), live=True))


def seen(history: History, generation: int, status: ParallelTrainingJobStatus) -> tuple[History, int]:
    """Return the history with the step of a status, and the mesh generation that it is about.

    A later generation than before is a restart or a rescale, and is marked at the last step that was seen.
    """
    mesh = status.mesh
    now = mesh.generation if mesh is not None else generation
    if generation and mesh is not None and now > generation:
        last = history.points[-1].step if history.points else status.step or 0
        history = history.with_marks([Mark(last, mesh.cause or "Restart", f"generation {now}")])
    if status.step is None or not status.loss:
        return history, now
    try:
        loss = float(status.loss)
    except ValueError:
        return history, now
    if history.points and history.points[-1].step == status.step:
        return history, now
    return history.with_point(Point(status.step, loss, tokens_per_second=status.tokens_per_second)), now
