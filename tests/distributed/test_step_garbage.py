"""Ranks collect garbage after the same steps, and between them never."""

from __future__ import annotations

import gc
from pathlib import Path

from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.train import train
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

STEPS = 6


def collections(task: RankTask) -> tuple[list[int], bool]:
    """The last completed step at each collection of a run, and whether Python collects by itself after it."""
    recorder, found = Recorder(), list[int]()

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(recorder.reports[-1].step if recorder.reports else 0)

    before = gc.get_threshold()
    gc.callbacks.append(watch)
    gc.set_threshold(50)
    try:
        train(task, recorder)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(watch)
    return found, gc.isenabled()


def test_ranks_collect_garbage_after_the_same_steps(pool: RankPool, text: Path) -> None:
    run = small_run(data=2, steps=STEPS, training={"garbage_collection_steps": 2}).model_copy(
        update={"checkpoint": None}
    )
    for found, enabled in pool.run(collections, run, data_dir=text):
        assert [step for step in found if 0 < step < STEPS] == [2, 4]
        assert enabled


def test_python_collects_whenever_there_are_enough_objects(pool: RankPool, text: Path) -> None:
    run = small_run(data=2, steps=STEPS).model_copy(update={"checkpoint": None})
    for found, _ in pool.run(collections, run, data_dir=text):
        assert len([step for step in found if 0 < step < STEPS]) > STEPS
