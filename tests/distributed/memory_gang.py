"""An agent of all ranks of a run, that recovers them in memory. The ranks are real processes of the fork server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.memory_recovery import keeping_ranks, plan_recovery
from meshwright.protocol.messages import HeldCopy, HeldState, MemoryCopies, MemoryRecovery
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.events import Event, EventQueue, RankExited, RankMessageReceived
from meshwright_worker.agent.fork_client import ForkServerClient
from meshwright_worker.agent.rank_process import RankHandle, supervise
from meshwright_worker.rank import messages
from meshwright_worker.rank.commands import encode_leave, encode_resume
from meshwright_worker.rank.task import Outcome
from tests.distributed.rank_pool import free_port, tasks_of
from tests.patience import patient

MODULE = "tests.distributed.fatal_runtime"
JOB = "team/lm"


Places = dict[int, str] | Callable[[int], dict[int, str]] | None
"""Rank -> where it dies or waits in the next generation; or that, given the step from which the generation goes on."""


@dataclass
class Gang:
    """The ranks of one run, and what they have told."""

    server: ForkServerClient
    run: NativeRun
    checkpoints: Path
    text: Path
    copies: MemoryCopies | None = None
    image: str | None = None
    """The image that ranks of the next generation say they run."""
    live: str = ""
    """The directory in which ranks write how many bytes of copies they had."""
    generation: int = 0
    ranks: dict[int, RankHandle] = field(default_factory=dict)
    inbox: EventQueue = field(default_factory=asyncio.Queue)
    lines: list[str] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    held: dict[int, messages.Held] = field(default_factory=dict)
    """What the ranks hold that have left the current generation."""
    leaving: list[tuple[int, float]] = field(default_factory=list)
    """Ranks that left a generation, and the seconds that they took."""
    memories: list[MemoryRecovery] = field(default_factory=list)
    states: list[dict[int, HeldState]] = field(default_factory=list)
    """What the ranks held before each recovery."""
    losses: dict[int, str] = field(default_factory=dict)
    """Step -> its loss, exactly, as rank 0 has told it last."""
    evaluations: dict[int, str] = field(default_factory=dict)
    """Step -> the loss of its evaluation, exactly."""
    exited: set[int] = field(default_factory=set)
    lost: bool = False
    """Whether a rank of the current generation has exited: its exit may arrive before other ranks' first messages."""
    _end_store: Callable[[], None] = lambda: None
    _supervisors: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(
        self,
        memory: MemoryRecovery | None = None,
        fatal: dict[int, str] | None = None,
        stall: dict[int, str] | None = None,
        deaf: Collection[int] = (),
    ) -> None:
        """Form a generation: of new processes, or with the ranks that keep theirs. `fatal` says where ranks die, and
        `stall` where they wait. Ranks in `deaf` do not hear of it, and hold their state since the one before.
        """
        self.generation += 1
        self.lost = False
        self.held = {rank: held for rank, held in self.held.items() if rank in deaf}
        self._end_store()
        port = free_port()
        world = self.run.layout.world_size
        self._end_store = await self.server.fork_store(port, world)
        kept = keeping_ranks(memory) if memory is not None else frozenset()
        for task in tasks_of(self.run, str(self.checkpoints), str(self.text), port=port):
            task = replace(task, generation=self.generation, in_memory=True, memory=memory, copies=self.copies)
            task = replace(task, job=JOB, image=self.image)
            environment = {"FATAL": (fatal or {}).get(task.rank, ""), "STALL": (stall or {}).get(task.rank, "")}
            environment["LIVE"] = self.live
            if task.rank in deaf:
                continue
            if task.rank in kept:
                handle = self.ranks[task.rank]
                assert handle.commands is not None
                handle.current.number = self.generation
                handle.commands.write(encode_resume(task, environment))
                continue
            assert task.rank not in self.ranks
            handle = self.ranks[task.rank] = await self.server.fork(task, environment)
            self._supervisors.append(
                asyncio.create_task(supervise(handle, self.generation, self.inbox, self.lines.append))
            )

    async def next_event(self) -> Event:
        return await asyncio.wait_for(self.inbox.get(), patient(60))

    async def until(self, done: Callable[[Event], bool]) -> Event:
        """Take events until one is the awaited one."""
        while True:
            event = await self.next_event()
            self._note(event)
            if done(event):
                return event

    def _note(self, event: Event) -> None:
        match event:
            case RankExited(rank=rank):
                self.ranks.pop(rank)
                self.held.pop(rank, None)
                self.exited.add(rank)
                self.lost = True
            case RankMessageReceived(rank=0, message=messages.StepDone(report=report)):
                self.losses[report.step] = report.loss.hex()
                if report.evaluation_loss is not None:
                    self.evaluations[report.step] = report.evaluation_loss.hex()
            case RankMessageReceived(rank=rank, message=messages.Finished(outcome=outcome)):
                self.outcomes[rank] = outcome
            case RankMessageReceived(rank=rank, message=messages.Held() as held):
                self.held[rank] = held
                self.leaving.append((rank, held.seconds))

    async def trains(self) -> None:
        """Wait until every rank of the current generation has its state."""
        running: set[int] = set()
        while len(running) < self.run.layout.world_size:
            event = await self.until(lambda event: isinstance(event, RankMessageReceived))
            if isinstance(event, RankMessageReceived) and isinstance(event.message, messages.Running):
                running.add(event.rank)

    async def leave(self) -> dict[int, HeldState]:
        """Let all live ranks leave their generation; what each holds."""
        for handle in self.ranks.values():
            assert handle.commands is not None
            handle.commands.write(encode_leave(self.generation))
        while set(self.ranks) - set(self.held):
            self._note(await self.next_event())
        return {
            rank: HeldState(
                step=one.step, reduced=one.reduced, copies=[HeldCopy(rank=of, step=step) for of, step in one.copies]
            )
            for rank, one in self.held.items()
        }

    async def recover(self, fatal: Places = None, stall: Places = None) -> None:
        """Wait for a rank to die, and go on without it."""
        await self.until_lost()
        states = await self.leave()
        self.states.append(states)
        memory = plan_recovery(self.run, self.generation, states)
        assert isinstance(memory, MemoryRecovery), memory
        self.memories.append(memory)
        kept = keeping_ranks(memory)
        for rank in set(self.ranks) - kept:
            self.ranks[rank].kill()
            await self.until(lambda event, rank=rank: isinstance(event, RankExited) and event.rank == rank)  # type: ignore[misc]
        await self.start(memory, _from(memory, fatal), _from(memory, stall))

    async def resize(self, run: NativeRun, goes_on: dict[int, int], fatal: Places = None, stall: Places = None) -> None:
        """Let all ranks leave, and go on with another number of replicas.

        Args:
            run: The run with that number.
            goes_on: Rank -> its number in the next generation, of those that go on if they live.
            fatal: Where ranks die next.
            stall: Where ranks wait next.
        """
        states = await self.leave()
        self.states.append(states)
        memory = plan_recovery(
            run, self.generation, {goes_on[rank]: states[rank] for rank in states if rank in goes_on}
        )
        assert isinstance(memory, MemoryRecovery), memory
        self.memories.append(memory)
        for rank in set(self.ranks) - set(goes_on):
            self.ranks[rank].kill()
            await self.until(lambda event, rank=rank: isinstance(event, RankExited) and event.rank == rank)  # type: ignore[misc]
        self.ranks = {goes_on[rank]: handle for rank, handle in self.ranks.items()}
        for rank, handle in self.ranks.items():
            handle.current.rank = rank
        assert set(self.ranks) == keeping_ranks(memory)
        self.run = run
        await self.start(memory, _from(memory, fatal), _from(memory, stall))

    async def until_lost(self) -> None:
        """Wait until a rank has died."""
        while not self.lost:
            self._note(await self.next_event())

    async def until_step(self, step: int) -> None:
        """Wait until rank 0 has completed a step."""

        def done(event: Event) -> bool:
            message = event.message if isinstance(event, RankMessageReceived) and event.rank == 0 else None
            return isinstance(message, messages.StepDone) and message.report.step >= step

        await self.until(done)

    async def until_saved(self, step: int) -> None:
        """Wait until the checkpoint of a step is complete."""

        def done(event: Event) -> bool:
            message = event.message if isinstance(event, RankMessageReceived) else None
            return isinstance(message, messages.CheckpointSaved) and message.step == step

        await self.until(done)

    async def finish(self) -> None:
        """Wait until every rank has completed the run."""
        while self.ranks:
            event = await self.until(lambda event: isinstance(event, RankExited))
            assert isinstance(event, RankExited)
            assert event.code == 0, (event, self.lines[-40:])

    def end(self) -> None:
        """End what is left of it."""
        self._end_store()
        for handle in self.ranks.values():
            handle.kill()
        for task in self._supervisors:
            task.cancel()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: handle.pid for rank, handle in self.ranks.items()}


def _from(memory: MemoryRecovery, places: Places) -> dict[int, str] | None:
    return places(memory.step) if callable(places) else places


@asynccontextmanager
async def gang_of(
    run: NativeRun, checkpoints: Path, text: Path, copies: MemoryCopies | None = None
) -> AsyncIterator[Gang]:
    """A gang that is started already; its processes end with the block."""
    async with rank_server() as server:
        gang = Gang(server, run, checkpoints, text, copies)
        try:
            yield gang
        finally:
            gang.end()


@asynccontextmanager
async def rank_server() -> AsyncIterator[ForkServerClient]:
    """A fork server of ranks, for one gang after the other. Its processes end with the block."""
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    server = ForkServerClient({**environment, "TORCH_CPP_LOG_LEVEL": "FATAL"}, MODULE)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
