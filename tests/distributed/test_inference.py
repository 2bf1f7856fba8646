"""Generation with the model split over ranks: the logits of one process, and its text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.inference.model import (
    CachedModel,
    check_layout,
    inference_run,
    load_full_model,
    load_sharded_model,
)
from meshwright_worker.inference.sampling import sample
from meshwright_worker.models.moe import iter_moe_layers
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool, free_port
from tests.parity.cases.models import GEMMA, GPT, LATENT_QUERIES, QWEN3, YARN
from tests.tiers import mostly_long

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {**GPT, "tie_embeddings": True},
    "qwen": QWEN3,
    "gemma": GEMMA,
    "latent": {**LATENT_QUERIES, **YARN},
    "lora": {"training": {"lora": {"rank": 2}, "steps": 2}},
}
MIXED: dict[str, dict[str, Any]] = {
    "Mixtral": {"mixture": "Mixtral"},
    "Switch": {"mixture": "Switch"},
    "DeepSeek-V3": {"mixture": "DeepSeek-V3", **LATENT_QUERIES},
}
CUTS = [5, 1, 1, 3]


def tokens_to_read() -> torch.Tensor:
    return torch.randint(0, 260, (2, sum(CUTS)), generator=torch.Generator().manual_seed(5))


def generate_split(task: RankTask, directory: str) -> tuple[torch.Tensor, list[int], int]:
    """Logits of a text read in pieces, a text that is sampled, and how many parameters this rank holds."""
    checkpoint, manifest = find_checkpoint(Path(directory))
    with join_mesh(task) as mesh:
        model = load_sharded_model(checkpoint, manifest, task.run, mesh, 16)
        logits = torch.cat([model.read(part) for part in tokens_to_read().split(CUTS, dim=1)], dim=1)
        model.clear()
        written = sample(model, [100, 101], 20, 0.8, 1)
        held = sum(parameter.numel() for parameter in model._stage.parameters())
        return logits, written, held


def experts_held(model: CachedModel) -> int:
    return sum(
        expert.numel() for _, mixture in iter_moe_layers(model._stage) for expert in mixture.experts.parameters()
    )


def generate_spread(task: RankTask, directory: str) -> tuple[torch.Tensor, list[int], int]:
    """As `generate_split`, but what is counted are the experts' parameters."""
    checkpoint, manifest = find_checkpoint(Path(directory))
    with join_mesh(task) as mesh:
        model = load_sharded_model(checkpoint, manifest, task.run, mesh, 16)
        logits = torch.cat([model.read(part) for part in tokens_to_read().split(CUTS, dim=1)], dim=1)
        model.clear()
        return logits, sample(model, [100, 101], 20, 0.8, 1), experts_held(model)


def generate_apart(task: RankTask, directory: str) -> list[int]:
    """The text of ranks whose logits differ far more than rounding lets them; the end is what only some would write."""
    checkpoint, manifest = find_checkpoint(Path(directory))
    with join_mesh(task) as mesh:
        model = load_sharded_model(checkpoint, manifest, task.run, mesh, 16)
        written = sample(model, [100, 101], 4, 0.8, 1)
        with torch.no_grad():
            model._stage.output.weight.mul_(1 - mesh.rank)
        model.clear()
        return written + sample(model, [100, 101], 8, 0.8, 1, end=written[2])


def split_run(directory: Path, **layout: int) -> NativeRun:
    run = small_run(**layout)
    _, manifest = find_checkpoint(directory)
    return inference_run(manifest, run.layout, Precision.FP64)


def checkpoint_of(pool: RankPool, text: Path, directory: Path, model: dict[str, Any]) -> Path:
    pool.run(train_fully, small_run(**{"steps": 2, **model}), checkpoint_dir=directory, data_dir=text)
    return directory


@pytest.fixture(scope="module", params=mostly_long(MODELS, lambda name: name in ("gpt", "latent", "lora")))
def trained(
    request: pytest.FixtureRequest, pool: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return checkpoint_of(pool, text, tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def mixed(request: pytest.FixtureRequest, pool: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(pool, text, tmp_path_factory.mktemp(request.param), MIXED[request.param])


@pytest.mark.parametrize(
    "layout",
    mostly_long([{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}], lambda found: len(found) == 2),
    ids=str,
)
def test_split_logits_are_those_of_one_process(pool: RankPool, trained: Path, layout: dict[str, int]) -> None:
    checkpoint, manifest = find_checkpoint(trained)
    alone = load_full_model(checkpoint, manifest, Precision.FP64, 16)
    want = alone.read(tokens_to_read())
    alone.clear()
    text = sample(alone, [100, 101], 20, 0.8, 1)
    whole = sum(parameter.numel() for parameter in alone._stage.parameters())
    for logits, written, held in pool.run(generate_split, split_run(trained, **layout), str(trained)):
        torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-7)
        assert written == text
        assert held < whole * 0.8


@pytest.mark.parametrize(
    ("mixed", "beside"),
    mostly_long(
        [
            ("Mixtral", {}),
            ("DeepSeek-V3", {"tensor": 2}),
            ("DeepSeek-V3", {"pipeline": 2}),
            ("DeepSeek-V3", {"tensor": 2, "pipeline": 2}),
        ],
        lambda case: case[1] == {"tensor": 2},
    ),
    ids=str,
    indirect=["mixed"],
)
def test_spread_experts_give_the_logits_of_one_process(pool: RankPool, mixed: Path, beside: dict[str, int]) -> None:
    checkpoint, manifest = find_checkpoint(mixed)
    alone = load_full_model(checkpoint, manifest, Precision.FP64, 16)
    want = alone.read(tokens_to_read())
    alone.clear()
    text = sample(alone, [100, 101], 20, 0.8, 1)
    run = split_run(mixed, data=2, expert=2, **beside)
    answers = pool.run(generate_spread, run, str(mixed))
    for logits, written, _ in answers:
        torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-7)
        assert written == text
    # Every expert is on one rank of a replica of the dense layers, and nowhere else.
    assert sum(held for _, _, held in answers) == experts_held(alone)


@pytest.mark.parametrize("mixed", ["Mixtral"], indirect=True)
def test_ranks_with_other_logits_write_the_text_of_rank_0(pool: RankPool, mixed: Path) -> None:
    first, second = pool.run(generate_apart, split_run(mixed, data=2, expert=2), str(mixed))
    assert first == second
    assert first[:2] == first[4:]


@pytest.mark.parametrize("mixed", ["Switch"], indirect=True)
def test_no_token_of_a_prompt_is_dropped_however_it_is_cut(mixed: Path) -> None:
    checkpoint, manifest = find_checkpoint(mixed)
    alone = load_full_model(checkpoint, manifest, Precision.FP64, 16)
    want = alone.read(tokens_to_read())
    alone.clear()
    cut = torch.cat([alone.read(part) for part in tokens_to_read().split(1, dim=1)], dim=1)
    torch.testing.assert_close(cut, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"data": 3, "expert": 3}, "`--expert 3`.*nearest that fit: 2, 4"),
        ({"tensor": 3}, "`--tensor 3` must divide the model's `heads: 4`"),
        ({"pipeline": 4}, "`--pipeline 4` needs a layer a stage; at most 3"),
    ],
)
def test_a_layout_that_does_not_fit_is_rejected_before_ranks_connect(layout: dict[str, int], named: str) -> None:
    run = small_run(**layout)
    model = small_run(mixture="Mixtral").architecture
    assert model is not None
    with pytest.raises(InvalidRunError, match=named):
        check_layout(run.layout, model)


@pytest.mark.long
def test_ranks_started_by_torchrun_write_what_one_process_writes(trained: Path) -> None:
    if "llama" not in trained.name:
        pytest.skip("one model shows the command line")
    command = ["-m", "meshwright_worker.generate", "--checkpoint", str(trained), "--tokens", "12", "--temperature", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    alone = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, env=environment, timeout=240
    )
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, *command, "--tensor", "2"],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **environment,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    written = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert written == [alone.stdout, ""]
