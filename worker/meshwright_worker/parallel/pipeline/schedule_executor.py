"""Runs a step by any schedule: this rank's slots in order, with their receives and sends.

A stage's output goes to the next stage as soon as it is computed, on another rank or on this one. Shapes follow from
the micro-batch's tokens, which every stage has, so micro-batches may differ in rows and length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from meshwright.schedules.actions import Action, ActionKind, Schedule
from meshwright_worker.data.batch import Batch
from meshwright_worker.parallel.data.fsdp import (
    disable_gradient_sync,
    enable_gradient_sync,
    reduce_gradients,
    reshard,
    upcast_gradients,
)
from meshwright_worker.parallel.overlapped_passes import run_overlapped
from meshwright_worker.parallel.pipeline.p2p import P2PChannels, PendingReceive
from meshwright_worker.parallel.pipeline.rank_program import Message, ScheduledSlot, forward_only, rank_program
from meshwright_worker.parallel.pipeline.slot_times import SlotRecorder
from meshwright_worker.parallel.pipeline.stage import PipelineStage

log = logging.getLogger(__name__)

Key = tuple[bool, int, int]


class ScheduleExecutor:
    """The executor of a rank in a pipeline.

    Args:
        pipeline_stages: this rank's stages, by their index in the model.
        schedule: of a step.
        rank: this rank's index in the pipeline.
        channels: to the other ranks.
        width: of the hidden states.
        slices: number of parts that the positions of hidden states are split into over a tensor group.
        reduces_each: whether FSDP reduces gradients in each micro-batch, not only in the last one.
        recorder: times the slots of some steps.
    """

    bubble: float | None = None

    def __init__(
        self,
        pipeline_stages: Sequence[PipelineStage],
        schedule: Schedule,
        rank: int,
        channels: P2PChannels,
        *,
        width: int,
        slices: int,
        reduces_each: bool = False,
        recorder: SlotRecorder | None = None,
    ) -> None:
        self.recorder = recorder
        self._reduces_each = reduces_each
        self._pipeline_stages: Mapping[int, PipelineStage] = {
            pipeline_stage.stage.index: pipeline_stage for pipeline_stage in pipeline_stages
        }
        self._rank, self._channels = rank, channels
        self._width, self._slices = width, slices
        self.set_schedule(schedule)

    def set_schedule(self, schedule: Schedule) -> None:
        """Use this schedule from the next step on; every rank of the pipeline must call this between the same two
        steps.

        Raises:
            KeyError: the schedule gives this rank a stage that it does not have.
        """
        self.schedule = schedule
        self._train_program = rank_program(schedule, self._rank)
        self._eval_program = rank_program(forward_only(schedule), self._rank)
        actions = schedule.actions(self._rank)
        self._split = {(a.stage, a.micro_batch) for a in actions if a.kind is ActionKind.INPUT}
        backwards = [action for action in actions if action.kind is not ActionKind.FORWARD]
        self._last = {index: [a for a in backwards if a.stage == index][-1] for index in self._pipeline_stages}

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.run`."""
        for pipeline_stage in self._pipeline_stages.values():
            disable_gradient_sync(pipeline_stage.stage.module)
        return self._run_program(self._train_program, micro_batches)

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`."""
        total = self._run_program(self._eval_program, micro_batches)
        for pipeline_stage in self._pipeline_stages.values():
            reshard(pipeline_stage.stage.module)
        return total

    def _run_program(self, scheduled_slots: Sequence[ScheduledSlot], micro_batches: Sequence[Batch]) -> torch.Tensor:
        training = scheduled_slots is self._train_program
        recorder = self.recorder if training and self.recorder is not None and self.recorder.running else None
        step = _Step(self, micro_batches, recorder)
        for index, turn in enumerate(scheduled_slots):
            try:
                if recorder is not None:
                    recorder.begin_slot(turn.slot)
                step.turn(turn, training=training)
                if recorder is not None:
                    recorder.end_slot()
            except BaseException as error:
                error.add_note(_describe_position(scheduled_slots, index, self.schedule.name))
                raise
        self._channels.flush()
        return step.total


class _Step:
    """One step in progress."""

    def __init__(
        self, executor: ScheduleExecutor, micro_batches: Sequence[Batch], recorder: SlotRecorder | None
    ) -> None:
        self._executor, self._recorder = executor, recorder
        self._parts = micro_batches
        self._pending_receives: dict[Key, PendingReceive] = {}
        self._local_outputs: dict[Key, torch.Tensor] = {}
        self.total = torch.zeros((), device=micro_batches[0].tokens.device)

    def turn(self, turn: ScheduledSlot, *, training: bool) -> None:
        """Run one slot."""
        for coming in turn.receive:
            self._post(coming)
        run = self._train if training else self._evaluate
        outputs: dict[Action, torch.Tensor | None] = {}
        passes = [partial(self._run_action, run, turn, outputs, action) for action in turn.slot]
        if len(passes) == 2:
            run_overlapped(*passes)
        else:
            passes[0]()

    def _run_action(
        self,
        run: Callable[[Action], torch.Tensor | None],
        turn: ScheduledSlot,
        outputs: dict[Action, torch.Tensor | None],
        action: Action,
    ) -> None:
        outputs[action] = run(action)
        # Overlapped passes may end in any order, but receivers rely on the order of the slot.
        for done, message in zip(turn.slot, turn.sends, strict=True):
            if done not in outputs:
                return
            tensor = outputs[done]
            if message is not None and tensor is not None:
                self._deliver(message, tensor)
                outputs[done] = None

    def _train(self, action: Action) -> torch.Tensor | None:
        executor = self._executor
        kind, index, m = action
        pipeline_stage = executor._pipeline_stages[index]
        last = executor._last[index] == action
        if kind is ActionKind.FORWARD:
            split = (index, m) in executor._split
            return self._add_loss(
                pipeline_stage, pipeline_stage.forward(m, self._parts[m], self._receive(False, index, m), split=split)
            )
        if kind is ActionKind.WEIGHT:
            pipeline_stage.weight(m, reduce=executor._reduces_each, last=last)
            if executor._reduces_each:
                return None
            upcast_gradients(pipeline_stage.stage.module)
            if last:
                reduce_gradients(pipeline_stage.stage.module)
            return None
        if last or (executor._reduces_each and kind is ActionKind.BACKWARD):
            enable_gradient_sync(pipeline_stage.stage.module, last=last)
        return pipeline_stage.backward(m, self._receive(True, index, m))

    def _evaluate(self, action: Action) -> torch.Tensor:
        _, index, m = action
        pipeline_stage = self._executor._pipeline_stages[index]
        return self._add_loss(pipeline_stage, pipeline_stage.evaluate(self._parts[m], self._receive(False, index, m)))

    def _add_loss(self, pipeline_stage: PipelineStage, output: torch.Tensor) -> torch.Tensor:
        if pipeline_stage.stage.module.is_last:
            self.total = self.total + output
        return output

    def _post(self, message: Message) -> None:
        executor = self._executor
        rows, length = self._parts[message.micro_batch].tokens.shape
        shape = (rows, length // executor._slices, executor._width)
        dtype = executor._pipeline_stages[message.stage].stage.module.compute
        self._pending_receives[message.key] = executor._channels.post_receive(message.source, shape, dtype)

    def _deliver(self, message: Message, tensor: torch.Tensor) -> None:
        if message.target == message.source:
            self._local_outputs[message.key] = tensor
        else:
            self._executor._channels.send(tensor, message.target)

    def _receive(self, gradient: bool, stage: int, micro_batch: int) -> torch.Tensor | None:
        key = gradient, stage, micro_batch
        if key in self._local_outputs:
            return self._local_outputs.pop(key)
        pending = self._pending_receives.pop(key, None)
        if pending is None:
            return None
        return pending.wait() if self._recorder is None else self._recorder.wait(pending.wait)


def _describe_position(scheduled_slots: Sequence[ScheduledSlot], index: int, name: str) -> str:
    """Describe the rank's current action in its sequence of actions."""
    texts = ["+".join(str(action) for action in turn.slot) for turn in scheduled_slots]
    texts[index] = f">>> {texts[index]} <<<"
    first, last = max(0, index - 4), index + 5
    return f"in schedule `{name}`, slot {index + 1} of {len(scheduled_slots)}: {' '.join(texts[first:last])}"
