"""What the ranks of the tests of spread experts run."""

from __future__ import annotations

import torch

from meshwright_worker.data.batch import Batch, TokenMetadata
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.models.moe import MixtureOfExperts
from meshwright_worker.parallel.expert.dispatch import AllToAllDispatchPlan
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer


def routed_rows(task: RankTask) -> list[tuple[int, int, int]]:
    """Of each mixture, for one micro-batch: rows that this rank sends, keeps for itself, and computes."""
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        (stage,) = trainer.stages
        found: list[tuple[int, int, int]] = []
        plan = AllToAllDispatchPlan.dispatch

        def watched(dispatch_plan: AllToAllDispatchPlan, rows: torch.Tensor) -> torch.Tensor:
            arrived = plan(dispatch_plan, rows)
            kept = dispatch_plan.out.send[dispatch_plan.out.group.rank()]
            found.append((len(rows), kept, len(arrived)))
            return arrived

        AllToAllDispatchPlan.dispatch = watched  # type: ignore[method-assign]
        try:
            generator = torch.Generator().manual_seed(mesh.rank)
            tokens = torch.randint(0, model.vocab_size, (2, training.sequence_length), generator=generator)
            stage.module(tokens, targets=tokens, token_metadata=TokenMetadata())
        finally:
            AllToAllDispatchPlan.dispatch = plan  # type: ignore[method-assign]
        return found


def mixture_by_halves(task: RankTask) -> dict[str, float]:
    """One mixture by `forward`, and by its steps with exchanges that are begun and awaited apart, forward and backward.

    Returns the largest difference of each gradient between the two.
    """
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        module = next(m for m in trainer.stages[0].module.modules() if isinstance(m, MixtureOfExperts))
        generator = torch.Generator().manual_seed(mesh.rank)
        shape = (2, training.sequence_length, model.hidden_size)
        x = torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        given = torch.randn(*shape, dtype=torch.float64, generator=generator)
        module(x).backward(given)
        want = _taken(module, x)
        _halves(module, x, given)
        got = _taken(module, x)
        return {name: float((got[name] - want[name]).abs().max()) for name in want}


def _taken(module: MixtureOfExperts, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"x": x, **dict(module.named_parameters())}
    gradients = {}
    for name, tensor in found.items():
        assert tensor.grad is not None
        gradients[name] = tensor.grad.clone()
        tensor.grad = None
    return gradients


def _halves(module: MixtureOfExperts, x: torch.Tensor, given: torch.Tensor) -> None:
    """As a schedule that overlaps does: autograd ends before each exchange and begins again after it."""
    routed = module.route(x)
    dispatch_plan = routed.dispatch_plan
    assert isinstance(dispatch_plan, AllToAllDispatchPlan)
    dispatch = dispatch_plan.out.begin(routed.rows)
    # Here a schedule computes another micro-batch.
    arrived = dispatch.wait().requires_grad_()
    computed = dispatch_plan.before_combine(module.experts(dispatch_plan.after_dispatch(arrived), dispatch_plan.counts))
    back = dispatch_plan.out.reversed().begin(computed)
    returned = back.wait().requires_grad_()
    module.finish(x, routed, returned).backward(given)
    assert returned.grad is not None
    gradient = dispatch_plan.out.begin(returned.grad)
    computed.backward(gradient.wait())
    assert arrived.grad is not None
    gradient = dispatch_plan.out.reversed().begin(arrived.grad)
    routed.rows.backward(gradient.wait())


def biased_batch(task: RankTask, steps: int) -> list[tuple[float, ...]]:
    """The imbalance of each mixture, step by step, on one batch again and again, from biases that leave much to do."""
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        for bias in trainer.buffers.values():
            bias += torch.linspace(0.4, -0.4, len(bias))
        generator = torch.Generator().manual_seed(0)
        samples = torch.randint(
            0, model.vocab_size, (training.global_batch_size, training.sequence_length + 1), generator=generator
        )
        share = len(samples) // mesh.layout.data
        batch = Batch.of(samples[mesh.coordinates.data * share :][:share])
        results = [trainer.step(number, batch) for number in range(1, steps + 1)]
        return [tuple(load.imbalance for load in result.experts) for result in results]
