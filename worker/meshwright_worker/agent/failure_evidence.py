"""Records what failed ranks leave behind: on the checkpoint volume, and shorter in the agent's reports.

The volume may not answer, so a thread writes to it and nobody waits for long. Failures to write are logged: they never
change what happens to a job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from meshwright.api import labels
from meshwright.api.objects import pod_name
from meshwright.printable import printable
from meshwright.protocol.messages import FailureEvidence, FailureKind
from meshwright_worker.agent.mesh_generation import Failure, MeshGeneration
from meshwright_worker.agent.rank_process import RankOutput
from meshwright_worker.agent.settings import Settings
from meshwright_worker.agent.volume_writes import VolumeWrites
from meshwright_worker.evidence.directory import record_path, write_record
from meshwright_worker.evidence.masking import Masker
from meshwright_worker.evidence.record import HANG, FailureRecord, current_thread_first
from meshwright_worker.evidence.tail_buffer import LOG_BYTES, last_lines

log = logging.getLogger(__name__)

EXCERPT_BYTES = 3072
"""Bytes of the log, and of the stacks, in a report. Escaped as JSON they may take twice that."""
REPORT_SECONDS = 300.0
"""How long reports contain the latest failure."""
RECORDS_PER_GENERATION = 4
"""Ranks of one worker that are recorded on the volume if they fail by themselves in the same generation."""
DUMP_SECONDS = 1.0
"""How long ranks may take to write their stacks before they are killed."""
MAX_HUNG_WORKER = 64
"""Workers from this index on record only the rank that hangs, and not their ranks that wait for it."""


class EvidenceRecorder:
    """The failures of this pod's ranks."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings = settings
        secrets = environment.get(labels.ENV_SECRET_VARIABLES, "").split(",")
        self._masker = Masker(environment, {labels.ENV_TOKEN, *secrets})
        self._latest: FailureEvidence | None = None
        self._latest_at = 0.0
        self._recorded: dict[int, set[int]] = {}
        self._writer = threading.Lock()
        self._writes = VolumeWrites()

    def mask(self, text: str) -> str:
        """The text without secrets."""
        return self._masker.mask(text)

    def for_report(self, now: float) -> FailureEvidence | None:
        """The latest failure, for a report. `now` is monotonic seconds."""
        return self._latest if now - self._latest_at < REPORT_SECONDS else None

    def rank_failed(self, generation: MeshGeneration, rank: int, written: RankOutput, now: float) -> None:
        """Record a failure of a rank: called when it reports one, and again when its process has exited."""
        failure = next((failure for failure in generation.failures if failure.rank == rank), None)
        if failure is None:
            return
        record = self._record(generation, rank, written, now, failure)
        if generation.failure is not None and generation.failure.rank == rank:
            self._report(record, now)
        exited = generation.ranks[rank].exit_code is not None
        if exited and failure.kind is not FailureKind.PEER_LOST:
            self._write(record)

    def ranks_hung(
        self, generation: MeshGeneration, written: Callable[[int], RankOutput], now: float, named: int | None
    ) -> None:
        """Record ranks that are about to be killed because they make no progress; `named` is the likely cause."""
        behind = min(generation.live, key=lambda rank: (generation.ranks[rank].step or -1, rank), default=None)
        chosen = {rank for rank in (named, behind) if rank in generation.ranks}
        for rank in sorted(chosen):
            if rank == named or self._settings.worker < MAX_HUNG_WORKER:
                record = self._record(generation, rank, written(rank), now, None)
                self._write(record)
                if rank == named or named not in generation.ranks:
                    self._report(record, now)

    async def flush(self) -> None:
        """Wait until everything is written, for a limited time."""
        await self._writes.flush()

    def _record(
        self, generation: MeshGeneration, rank: int, written: RankOutput, now: float, failure: Failure | None
    ) -> FailureRecord:
        settings, view = self._settings, generation.ranks[rank]
        idle = max(0.0, now - view.last_message_at)
        message = failure.message if failure is not None else f"no progress for {idle:.0f} s"
        stacks = current_thread_first(written.stacks.text())
        log_text = written.log.text()
        return FailureRecord(
            job=settings.job,
            namespace=settings.namespace,
            pod=pod_name(settings.job, settings.worker, settings.incarnation),
            worker=settings.worker,
            incarnation=settings.incarnation,
            generation=generation.number,
            rank=rank,
            kind=failure.kind.value if failure is not None else HANG,
            message=self.mask(message),
            time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            exit_code=view.exit_code,
            step=view.step,
            idle_seconds=round(idle, 3),
            process_state=view.process_state if failure is None else "",
            phases=tuple(view.phases),
            log=last_lines(self.mask(log_text), LOG_BYTES, cut=written.log.cut),
            stacks=last_lines(self.mask(stacks), LOG_BYTES, cut=written.stacks.cut),
        )

    def _report(self, record: FailureRecord, now: float) -> None:
        root = self._settings.checkpoint_dir
        self._latest_at = now
        self._latest = FailureEvidence(
            generation=record.generation,
            rank=record.rank,
            kind=record.kind,
            log=last_lines(printable(record.log), EXCERPT_BYTES),
            stacks=printable(record.stacks).encode()[:EXCERPT_BYTES].decode(errors="ignore"),
            path=str(record_path(root, record.generation, record.rank))[:1024] if root else "",
        )

    def _write(self, record: FailureRecord) -> None:
        root = self._settings.checkpoint_dir
        recorded = self._recorded.setdefault(record.generation, set())
        if root is None or record.rank in recorded or len(recorded) >= RECORDS_PER_GENERATION:
            return
        recorded.add(record.rank)

        def write() -> None:
            try:
                with self._writer:
                    path = write_record(root, record)
                log.info("failure recorded rank=%d generation=%d path=%s", record.rank, record.generation, path)
            except OSError as error:
                log.warning("failure of rank %d not recorded: %s", record.rank, error)

        self._writes.start("failure-record", write)
