"""Plans of models with mixtures of experts: how they are spread, what a rank needs, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.api.mixture import MixtureSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import make_plan
from meshwright_worker.trainer.train import validate_run
from tests.planner.builders import inventory, racks, spec_of
from tests.planner.test_memory import activations_of_a_layer, first, job, kept_by_autograd, one_thread

__all__ = ["one_thread"]

MIXTRAL = PRESETS["mixtral-8x7b"]
H100 = inventory(*racks(4, 4, 8))
JOB: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b"},
    "replicas": 8,
    "training": {"steps": 1, "globalBatchSize": 64, "sequenceLength": 4096, "precision": "bf16"},
    "workers": {"image": "worker", "gpusPerWorker": 8},
}


def test_experts_are_spread_when_replicas_do_not_hold_them_all() -> None:
    plan = make_plan(spec_of(**JOB), H100)
    assert plan.layout.expert > 1
    assert MIXTRAL.mixture is not None
    assert MIXTRAL.mixture.experts % plan.layout.expert == 0
    assert plan.summary.endswith(f", EP {plan.layout.expert}")
    assert plan.to_status().expert == plan.layout.expert
    assert any(reason.startswith(f"EP {plan.layout.expert}: ") for reason in plan.reasons)
    spec = spec_of(**JOB, data={"source": "PythonStdlib"})
    run = plan.run_config(spec)
    assert run.expert == plan.layout.expert
    validate_run(run)


def test_a_degree_that_is_set_is_kept_and_so_is_a_running_jobs() -> None:
    stated = make_plan(spec_of(**JOB, parallelism={"tensor": 8, "expert": 4}), H100)
    assert stated.layout.expert == 4
    assert "EP 4: set by `parallelism.expert`" in stated.reasons
    running = make_plan(spec_of(**JOB), H100, keep=stated.to_status())
    assert running.layout == stated.layout
    assert not stated.allows_replicas(6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallelism": {"expert": 3}}, "must divide `replicas`"),
        ({"parallelism": {"expert": 16}, "replicas": 16}, "must divide `model.mixture.experts`"),
        ({"parallelism": {"expert": 2}, "model": {"preset": "llama-3-8b"}}, "needs a model with experts"),
    ],
)
def test_what_cannot_be_spread_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=r"spec\.parallelism\.expert: .*") as caught:
        make_plan(spec_of(**{**JOB, **changes}), H100)
    assert text in str(caught.value)


def test_zero_shards_experts_over_their_own_replicas() -> None:
    asked: dict[str, Any] = {"parallelism": {"zero_stage": 2}, "precision": "bf16", "sequence_length": 4096}
    whole, spread = (first(MIXTRAL, Layout(data=8, expert=expert), **asked) for expert in (1, 8))
    # Spread over all replicas or sharded over them, an expert's state takes an eighth; only gathered copies differ.
    assert spread.optimizer == pytest.approx(whole.optimizer)
    assert spread.gathered < whole.gathered / 3


SMALL = Architecture(
    layers=3,
    hidden_size=256,
    intermediate_size=512,
    heads=8,
    kv_heads=2,
    vocab_size=512,
    mixture=MixtureSpec(experts=8, per_token=2, intermediate_size=384, shared_intermediate_size=128, z_loss_weight=0.1),
)


def test_a_mixture_keeps_about_what_autograd_keeps_of_the_real_one() -> None:
    more = SMALL.model_copy(update={"layers": 4})
    measured = kept_by_autograd(more, torch.float32) - kept_by_autograd(SMALL, torch.float32)
    asked = job(SMALL, sequence_length=64, rows=2)
    assert 128 * activations_of_a_layer(asked, mixture=True) == pytest.approx(measured, rel=0.1)
