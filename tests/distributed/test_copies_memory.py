"""The memory that copies of recovery in memory take: what the planner expects, and what real ranks have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.copies import rank_copies_bytes
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.messages import MemoryCopies
from meshwright.protocol.run_config import NativeRun
from tests.distributed.memory_gang import gang_of
from tests.distributed.memory_kills import Kill, run_of

pytestmark = pytest.mark.long

STEPS = 9
EVERY = 2
MODEL = {"hidden_size": 64, "intermediate_size": 128, "layers": 4}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"data": 4, "zero": 3}, id="sharded"),
        pytest.param({"data": 4, "zero": 2, "replicas": {"strategy": "ZeRO"}}, id="flat"),
        pytest.param({"data": 2, "pipeline": 2, "zero": 1}, id="pipeline"),
        pytest.param({"data": 4, "zero": 3, "replicas": {"shard_size": 2}}, id="hsdp"),
        pytest.param(
            {"data": 4, "zero": 3, "training": {"lora": {"rank": 8}}, "optimizer": {"weight_decay": 0.0}}, id="lora"
        ),
    ],
)
async def test_copies_take_the_memory_that_pods_request(options: dict[str, Any], tmp_path: Path, text: Path) -> None:
    run = run_of(STEPS, **MODEL, **options)
    live = tmp_path / "live"
    live.mkdir()
    async with gang_of(run, tmp_path / "run", text, MemoryCopies(every_steps=EVERY, shift=2)) as gang:
        gang.live = str(live)
        # Ranks that go on have copies of the generation before, besides the first of the new one.
        await gang.start(fatal=Kill(5, "backward", (3,)).fatal(1))
        await gang.trains()
        await gang.recover()
        await gang.finish()
    most = max(int(file.read_text()) for file in live.iterdir())
    assert most == pytest.approx(expected_of(run), rel=0.1)


def expected_of(run: NativeRun) -> float:
    """What the planner expects."""
    job = TrainingJob.from_parts(run.architecture, run.training, run.parallelism, run.layout.data)
    strategy = job.strategy(run.layout, run.micro_batches, zero_stage=run.parallelism.zero_stage)
    return rank_copies_bytes(run.architecture, strategy, job.runtime)
