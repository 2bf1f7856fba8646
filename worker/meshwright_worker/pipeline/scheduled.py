"""Runs a step by any schedule: this rank's slots in order, with what they receive and send.

A stage's output goes to the next stage as soon as it is there, to another rank or within this one. Shapes follow from
the micro-batch's own tokens, which every stage has, so micro-batches may differ in rows and length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from meshwright.schedules.actions import Action, Kind, Schedule
from meshwright_worker.data.batch import Batch
from meshwright_worker.pipeline.channels import Channels, Pending
from meshwright_worker.pipeline.chunk import Chunk
from meshwright_worker.pipeline.overlap import both
from meshwright_worker.pipeline.program import Message, Turn, forward_only, program
from meshwright_worker.pipeline.sharded import (
    hold_gradients,
    reduce_in_next_backward,
    reduce_now,
    reshard,
    widen_gradients,
)

log = logging.getLogger(__name__)

Key = tuple[bool, int, int]


class Scheduled:
    """The executor of a rank in a pipeline.

    Args:
        chunks: this rank's stages, by their number in the model.
        schedule: of a step.
        rank: this rank among the pipeline's.
        channels: to the other ones.
        width: of the hidden states.
        slices: into how many parts the positions of hidden states are split over a tensor group.
    """

    bubble: float | None = None

    def __init__(
        self,
        chunks: Sequence[Chunk],
        schedule: Schedule,
        rank: int,
        channels: Channels,
        *,
        width: int,
        slices: int,
    ) -> None:
        self._chunks: Mapping[int, Chunk] = {chunk.stage.index: chunk for chunk in chunks}
        self._rank, self._channels = rank, channels
        self._width, self._slices = width, slices
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Run steps by this schedule from now on; every rank of the pipeline must be told between the same two steps.

        Raises:
            KeyError: it gives this rank a stage that it does not hold.
        """
        self.schedule = schedule
        self._turns = program(schedule, self._rank)
        self._evaluation = program(forward_only(schedule), self._rank)
        actions = schedule.actions(self._rank)
        self._split = {(a.stage, a.micro_batch) for a in actions if a.kind is Kind.INPUT}
        backwards = [action for action in actions if action.kind is not Kind.FORWARD]
        self._last = {index: [a for a in backwards if a.stage == index][-1] for index in self._chunks}

    def run(self, parts: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.run`."""
        for chunk in self._chunks.values():
            hold_gradients(chunk.stage.module)
        return self._go(self._turns, parts)

    def evaluate(self, parts: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`."""
        total = self._go(self._evaluation, parts)
        for chunk in self._chunks.values():
            reshard(chunk.stage.module)
        return total

    def _go(self, turns: Sequence[Turn], parts: Sequence[Batch]) -> torch.Tensor:
        step = _Step(self, parts)
        for index, turn in enumerate(turns):
            try:
                step.turn(turn, training=turns is self._turns)
            except BaseException as error:
                error.add_note(_where(turns, index, self.schedule.name))
                raise
        self._channels.flush()
        return step.total


class _Step:
    """One step under way."""

    def __init__(self, executor: Scheduled, parts: Sequence[Batch]) -> None:
        self._executor = executor
        self._parts = parts
        self._coming: dict[Key, Pending] = {}
        self._here: dict[Key, torch.Tensor] = {}
        self.total = torch.zeros((), device=parts[0].tokens.device)

    def turn(self, turn: Turn, *, training: bool) -> None:
        """Run one slot."""
        for coming in turn.receive:
            self._post(coming)
        run = self._train if training else self._evaluate
        made: dict[Action, torch.Tensor | None] = {}
        passes = [partial(self._act, run, turn, made, action) for action in turn.slot]
        if len(passes) == 2:
            both(*passes)
        else:
            passes[0]()

    def _act(
        self,
        run: Callable[[Action], torch.Tensor | None],
        turn: Turn,
        made: dict[Action, torch.Tensor | None],
        action: Action,
    ) -> None:
        made[action] = run(action)
        # Of two passes that take turns either may end first; receivers count on the order of the slot.
        for done, message in zip(turn.slot, turn.hand_over, strict=True):
            if done not in made:
                return
            tensor = made[done]
            if message is not None and tensor is not None:
                self._give(message, tensor)
                made[done] = None

    def _train(self, action: Action) -> torch.Tensor | None:
        executor = self._executor
        kind, index, m = action
        chunk = executor._chunks[index]
        last = executor._last[index] == action
        if kind is Kind.FORWARD:
            split = (index, m) in executor._split
            return self._passed(chunk, chunk.forward(m, self._parts[m], self._take(False, index, m), split=split))
        if kind is Kind.WEIGHT:
            chunk.weight(m)
            widen_gradients(chunk.stage.module)
            if last:
                reduce_now(chunk.stage.module)
            return None
        if last:
            reduce_in_next_backward(chunk.stage.module)
        return chunk.backward(m, self._take(True, index, m))

    def _evaluate(self, action: Action) -> torch.Tensor:
        _, index, m = action
        chunk = self._executor._chunks[index]
        return self._passed(chunk, chunk.evaluate(self._parts[m], self._take(False, index, m)))

    def _passed(self, chunk: Chunk, output: torch.Tensor) -> torch.Tensor:
        if chunk.stage.module.is_last:
            self.total = self.total + output
        return output

    def _post(self, message: Message) -> None:
        executor = self._executor
        rows, length = self._parts[message.micro_batch].tokens.shape
        shape = (rows, length // executor._slices, executor._width)
        dtype = executor._chunks[message.stage].stage.module.compute
        self._coming[message.key] = executor._channels.post(message.source, shape, dtype)

    def _give(self, message: Message, tensor: torch.Tensor) -> None:
        if message.target == message.source:
            self._here[message.key] = tensor
        else:
            self._executor._channels.send(tensor, message.target)

    def _take(self, gradient: bool, stage: int, micro_batch: int) -> torch.Tensor | None:
        key = gradient, stage, micro_batch
        if key in self._here:
            return self._here.pop(key)
        pending = self._coming.pop(key, None)
        return pending.wait() if pending is not None else None


def _where(turns: Sequence[Turn], index: int, name: str) -> str:
    """What a rank was at, among what it was about to do."""
    texts = ["+".join(str(action) for action in turn.slot) for turn in turns]
    texts[index] = f">>> {texts[index]} <<<"
    first, last = max(0, index - 4), index + 5
    return f"in schedule `{name}`, slot {index + 1} of {len(turns)}: {' '.join(texts[first:last])}"
