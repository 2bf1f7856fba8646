"""A module with everything in it that is easily split wrongly, and what ranks do with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.api.training import OptimizerSpec
from meshwright_worker.custom_module.compare import differences
from meshwright_worker.custom_module.plan import ParallelPlan
from meshwright_worker.custom_module.trainer import CustomModuleTrainer
from meshwright_worker.distributed.mesh import TENSOR, Mesh
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.loss_anomalies import DivergedError
from tests.distributed.cases import whole_of
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh

STEPS = range(1, 4)
WIDTH, HEADS, VOCABULARY, ROWS, LENGTH = 6, 2, 12, 8, 5
RARE = 11
SPEC = OptimizerSpec(learning_rate=1e-2, gradient_clip=0.05)

PLAN = ParallelPlan(
    regions=("layers.*.mixer",),
    column=("layers.*.mixer.inputs.*",),
    row=("layers.*.mixer.output",),
    gathered=("head",),
    vocabulary=("tokens",),
    partial=("layers.*.mixer.norm", "layers.*.mixer.scale"),
    blocks=("layers.*.mixer",),
)


class Mixer(nn.Module):
    """Heads with a norm, an argument by name that has a gradient, and dropout and a scale after the last matrix."""

    def __init__(self, dropout: float, inner: float) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.inner = nn.Dropout(inner)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.dropped = torch.empty(0)

    def forward(self, x: torch.Tensor, *, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        query, value = (
            project(y).unflatten(-1, (-1, WIDTH // HEADS))
            for project, y in zip(self.inputs, (x, memory["values"]), strict=True)
        )
        mixed = self.inner(torch.tanh(self.norm(query)) * value)
        if self.training:
            self.dropped = mixed.detach() == 0
        return self.dropout(self.output(mixed.flatten(-2))) * self.scale


class Layer(nn.Module):
    def __init__(self, norm: nn.Module, dropout: float, inner: float) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(dropout, inner), norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dropout(self.mixer(x, memory={"values": memory})))


class Tangle(nn.Module):
    """A tied head, a norm that layers share, a batch norm, frozen weights, padding, a parameter of one element."""

    def __init__(
        self,
        dropout: float = 0.0,
        inner: float = 0.0,
        *,
        batch_norm: bool = True,
        rare: bool = False,
        transposed: bool = False,
        between: int = WIDTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.fixed = nn.Linear(WIDTH, between).requires_grad_(False)
        self.remember = nn.Linear(between, WIDTH)
        if transposed:
            self.remember.weight = nn.Parameter(self.remember.weight.detach().t().contiguous().t())
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
        shared = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(shared, dropout, inner) for _ in range(2))
        self.rare = nn.Linear(WIDTH, WIDTH) if rare else None
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.rare is not None and bool((tokens == RARE).any()):
            x = self.rare(x)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        memory = self.remember(self.fixed(x))
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x) * self.temperature


class Recomputed(nn.Module):
    """Regions that end with their `row` layer, with dropout before it, computed again in the backward pass."""

    PLAN = ParallelPlan(regions=("layers.*",), column=("layers.*.0",), row=("layers.*.3",))

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(x)


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


def tangle_loss(module: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    targets = tokens.roll(-1, dims=1)
    logits = module(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


def rows_of(step: int, rare_in: int | None = None) -> torch.Tensor:
    """The tokens of a step, int64 [rows, length]; with `rare_in` one row alone has the rare one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, RARE, (ROWS, LENGTH), generator=generator)
    if rare_in is not None:
        tokens[rare_in, 0] = RARE
    return tokens


@dataclass
class Ran:
    """One rank's view; of its parameters the gradients of the first step and the values at the end, whole."""

    losses: list[float] = field(default_factory=list)
    evaluated: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """What dropout between the split matrices made 0, of the last micro-batch and layer."""
    held: int = 0


def trainer_of(
    mesh: Mesh, build: Callable[[], nn.Module], plan: ParallelPlan, zero: int, **more: Any
) -> CustomModuleTrainer:
    torch.manual_seed(0)
    return CustomModuleTrainer(
        build(), plan, tangle_loss, mesh, **{"steps": 8, "optimizer": SPEC, "zero_stage": zero, **more}
    )


def share_of(mesh: Mesh, tokens: torch.Tensor, batches: int) -> list[torch.Tensor]:
    """This replica's micro-batches, of `batches` in all."""
    dealt = list(tokens.chunk(batches))
    share = batches // mesh.layout.data
    return dealt[mesh.coordinates.data * share :][:share]


def watch(trainer: CustomModuleTrainer, ran: Ran) -> None:
    """Keep the gradients of the next update, whole."""
    optimizer = trainer._parallel_module.optimizer
    update = optimizer.step

    def watched(gradients: list[torch.Tensor], rate: float) -> None:
        if not ran.gradients:
            ran.gradients = {s.name: whole_of(s, g) for s, g in zip(trainer.shards, gradients, strict=True)}
        update(gradients, rate)

    optimizer.step = watched  # type: ignore[method-assign]


@uses_kept_mesh
def train_tangle(
    task: RankTask,
    zero: int,
    steps: range,
    module: dict[str, Any],
    plan: ParallelPlan = PLAN,
    dtype: torch.dtype = torch.float64,
    rare_in: int | None = None,
) -> Ran:
    """Some steps in four micro-batches, after loading what is in the checkpoint directory, if there is one."""
    ran = Ran()
    with kept_mesh(task) as mesh:
        trainer = trainer_of(mesh, lambda: Tangle(**module).to(dtype), plan, zero)
        watch(trainer, ran)
        if task.checkpoint_dir is not None:
            assert trainer.load(task.checkpoint_dir) == steps.start - 1
        for step in steps:
            ran.losses.append(trainer.step(step, share_of(mesh, rows_of(step, rare_in), 4)))
        if task.checkpoint_dir is not None:
            trainer.save(task.checkpoint_dir, steps[-1])
        ran.evaluated = trainer.evaluate(share_of(mesh, rows_of(0), 4))
        ran.parameters = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        ran.buffers = {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}
        mixer = trainer.module.get_submodule("layers.1.mixer")
        assert isinstance(mixer, Mixer)
        ran.dropped = mixer.dropped
        ran.held = sum(shard.local.untyped_storage().nbytes() for shard in trainer.shards)
    return ran


def refused(attempt: Callable[[], object]) -> str:
    """The error's text; the empty one where there was none."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


@uses_kept_mesh
def try_what_is_wrong(task: RankTask) -> dict[str, str]:
    """On two ranks that work on one batch together, what each says of input that is wrong on one of them."""
    with kept_mesh(task) as mesh:

        def build() -> nn.Module:
            return Tangle(batch_norm=False)

        def unlike() -> nn.Module:
            torch.manual_seed(mesh.rank)
            return build()

        batch = rows_of(1)
        said = {"weights": refused(lambda: trainer_of(mesh, unlike, PLAN, 0))}
        trainer = trainer_of(mesh, build, PLAN, 0)
        before = [shard.local.clone() for shard in trainer.shards]
        said["batch"] = refused(lambda: trainer.step(1, [rows_of(mesh.rank)]))
        said["count"] = refused(lambda: trainer.step(1, [batch] * (1 + mesh.rank)))
        said["none"] = refused(lambda: trainer.step(1, []))
        said["token"] = _index_error(lambda: trainer.step(1, [batch.clone().fill_(VOCABULARY)]))
        trainer = trainer_of(mesh, build, PLAN, 0)
        trainer.module.register_buffer("mine", torch.tensor(float(mesh.rank)))
        said["buffer"] = refused(lambda: trainer.step(1, [batch]))
        said["changed"] = "".join(
            shard.name for shard, old in zip(trainer.shards, before, strict=True) if not torch.equal(shard.local, old)
        )
        trainer = trainer_of(mesh, lambda: Tangle(rare=True, batch_norm=False), PLAN, 0)
        said["unused"] = refused(lambda: trainer.step(1, [batch]))
        trainer = trainer_of(mesh, build, PLAN, 0)
        trainer.module.get_submodule("fixed").requires_grad_(True)
        said["thawed"] = refused(lambda: trainer.step(1, [batch]))
        trainer._loss = lambda module, tokens: tangle_loss(module, tokens)[0]  # type: ignore[assignment,return-value]
        said["mean"] = refused(lambda: trainer.step(1, [batch]))
        trainer._loss = lambda module, tokens: (module(tokens), tokens.numel())
        said["unsummed"] = refused(lambda: trainer.evaluate([batch]))
        many = (1 << 24) + 1  # more than fp32 counts
        trainer._loss = lambda *_: (torch.tensor(float(many), dtype=torch.float64), many)
        said["many"] = str(trainer.evaluate([batch]))
        said["optimizer"] = refused(lambda: trainer_of(mesh, build, PLAN, 0, optimizer=OptimizerSpec(name="Muon")))
        said["offload"] = refused(lambda: trainer_of(mesh, build, PLAN, 0, optimizer=OptimizerSpec(offload="CPU")))
        split = nn.Linear(2, 2)
        split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh.device_mesh[TENSOR]))
        said["split"] = refused(lambda: trainer_of(mesh, lambda: split, ParallelPlan(), 0))
        said["extra"] = refused(lambda: trainer_of(mesh, lambda: nn.Sequential(Extra(1, 1)), ParallelPlan(), 0))
        return said


def _index_error(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except IndexError as error:
        return str(error)
    return ""


@uses_kept_mesh
def diverge_and_go_on(task: RankTask, zero: int) -> tuple[list[float], list[float]]:
    """The losses of two steps, and of the same with one between that diverges on one rank's batch."""
    losses: tuple[list[float], list[float]] = ([], [])
    with kept_mesh(task) as mesh:
        for diverges, told in zip((False, True), losses, strict=True):
            trainer = trainer_of(mesh, Tangle, PLAN, zero)
            told.append(trainer.step(1, share_of(mesh, rows_of(1), 4)))
            if diverges:
                trainer._loss = lambda module, batch: (
                    tangle_loss(module, batch)[0] * (math.inf if mesh.coordinates.data == 0 else 1.0),
                    1,
                )
                try:
                    trainer.step(2, share_of(mesh, rows_of(7), 4))
                except DivergedError:
                    trainer._loss = tangle_loss
            told.append(trainer.step(2, share_of(mesh, rows_of(2), 4)))
            told.append(trainer.evaluate(share_of(mesh, rows_of(0), 4)))
    return losses


@uses_kept_mesh
def recompute_dropout(task: RankTask) -> tuple[list[float], list[float]]:
    """The losses of some steps without and with activation checkpointing."""
    with kept_mesh(task) as mesh:
        told = []
        for recompute in (False, True):
            trainer = trainer_of(mesh, lambda recompute=recompute: Recomputed(recompute), Recomputed.PLAN, 0)
            told.append([trainer.step(step, [rows_of(step)]) for step in STEPS])
    return told[0], told[1]


@uses_kept_mesh
def call_a_part(task: RankTask) -> None:
    """A step whose loss calls a part of a module that FSDP shards."""
    with kept_mesh(task) as mesh:
        trainer = trainer_of(mesh, lambda: Tangle(batch_norm=False), PLAN, 3)
        trainer._loss = lambda module, tokens: (module.get_submodule("head")(torch.ones(1, WIDTH)).sum(), 1)
        trainer.step(1, [rows_of(1)])


class Careless(nn.Module):
    """A module whose region has its residual connection inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tangle = Tangle(batch_norm=False)
        self.tangle.layers[0].mixer.register_forward_hook(lambda _, inputs, output: output + inputs[0])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tangle(tokens)


@uses_kept_mesh
def compare_plans(task: RankTask) -> tuple[dict[str, float], dict[str, float]]:
    """How far a right plan is from its module, and one that has a residual connection in a region."""
    below = {name: tuple(f"tangle.{one}" for one in getattr(PLAN, name)) for name in PLAN.__dataclass_fields__}
    with kept_mesh(task) as mesh:
        torch.manual_seed(0)
        right = differences(Tangle(), PLAN, tangle_loss, rows_of(1), mesh)
        return right, differences(Careless(), ParallelPlan(**below), tangle_loss, rows_of(1), mesh)
