"""What a plan's names mean in a module, and which plans are refused: no rank is needed to say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from meshwright.layout import Layout
from meshwright_worker.custom_module.fsdp import check_fsdp_units
from meshwright_worker.custom_module.parallelize import check_plan
from meshwright_worker.custom_module.plan import ParallelPlan, PlanError
from meshwright_worker.custom_module.plan_resolution import Role, resolve
from meshwright_worker.custom_module.tensor_parallel import check_sizes
from meshwright_worker.distributed.mesh import Mesh
from tests.distributed.custom_module_cases import PLAN, Tangle


class Pair(nn.Module):
    """A sub-layer that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Odd(nn.Linear):
    """A linear layer that is more than one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    """What tests change: eleven layers in a list of lists, a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(nn.ModuleList(Pair() for _ in range(11)) for _ in range(2))
        self.table, self.head = nn.Embedding(12, 6), nn.Linear(6, 12)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.LayerNorm(6)


SPLIT = ParallelPlan(
    regions=("stacks.*.*",),
    column=("stacks.*.*.up",),
    row=("stacks.*.*.down",),
    gathered=("head",),
    vocabulary=("table",),
    blocks=("stacks.*.*",),
)


def test_a_star_is_one_name_of_any_length() -> None:
    parts = resolve(Model(), SPLIT)
    assert list(parts.regions) == [f"stacks.{stack}.{layer}" for stack in range(2) for layer in range(11)]
    assert list(parts.blocks) == list(parts.regions)
    assert len(parts.column) == len(parts.row) == 22
    assert list(resolve(Model(), ParallelPlan(blocks=("stacks.0.1?",))).blocks) == ["stacks.0.10"]


def test_every_parameter_has_a_role() -> None:
    roles = resolve(Tangle(), PLAN).roles
    assert roles["tokens.weight"] is roles["head.weight"] is roles["head.bias"] is Role.ROWS
    assert roles["layers.1.mixer.output.weight"] is Role.COLUMNS
    assert roles["layers.1.mixer.output.bias"] is roles["layers.0.mixer.scale"] is Role.PARTIAL
    assert roles["layers.0.norm.weight"] is roles["layers.1.norm.weight"] is roles["fixed.weight"] is Role.WHOLE


def test_what_is_in_two_places_is_named_once() -> None:
    model = Model()
    model.stacks[1] = model.stacks[0]
    parts = resolve(model, SPLIT)
    assert len(parts.regions) == len(parts.column) == len(parts.blocks) == 11
    check_fsdp_units(model, parts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"column": ("stacks.*.nothing",)}, "`column`: no module is called `stacks.*.nothing`"),
        ({"vocabulary": ("tabel",)}, "no module is called `tabel`; there is `table`"),
        ({"blocks": ("1.*",)}, "no module is called `1.*`; there is `stacks.1.*`"),
        ({"row": ("norm",)}, "`row`: `norm` is a LayerNorm, not a Linear"),
        ({"blocks": ("stacks.*",)}, "`blocks`: `stacks.0` is a ModuleList"),
        ({"partial": ("norm",)}, "`partial`: `norm.weight` is outside of regions"),
        ({"partial": ("nothing",)}, "`partial`: no module or parameter is called `nothing`"),
        ({"partial": ("stacks.*.*.up",)}, "`partial`: `stacks.0.0.up.weight` is split by another entry"),
        ({"regions": ("stacks.0.*",)}, "`column`: `stacks.1.0.up` is in no region"),
        ({"column": ()}, "`stacks.0.0` has no `column` layer"),
        ({"regions": ("stacks.*.*", "stacks.*")}, "`regions`: `stacks.0.0` is in `stacks.0`"),
        ({"row": ("stacks.*.*.down", "stacks.0.0.up")}, "`stacks.0.0.up` is named by `column` and by `row`"),
        ({"gathered": ("stacks.0.0.up",)}, "`gathered`: `stacks.0.0.up` is in the region"),
        ({"gathered": ("head", "attention.out_proj")}, "`attention` is an nn.MultiheadAttention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_plan_that_does_not_fit_is_rejected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        resolve(Model(), replace(SPLIT, **changes))
    assert said in str(error.value)


def with_scale(model: Model) -> None:
    model.stacks[0][3].register_parameter("scale", nn.Parameter(torch.ones(6)))


def with_odd_layer(model: Model) -> None:
    model.head = Odd(6, 12)


def with_norm_of_weights(model: Model) -> None:
    nn.utils.parametrizations.weight_norm(model.head)


def with_sparse_table(model: Model) -> None:
    model.table = nn.Embedding(12, 6, sparse=True)


def with_tie_of_rows_and_columns(model: Model) -> None:
    model.stacks[0][0].down = nn.Linear(6, 12)
    model.stacks[0][0].down.weight = model.head.weight


def with_norm_in_and_out(model: Model) -> None:
    model.stacks[0][0].add_module("norm", model.norm)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_scale, "`stacks.0.3.scale` is in the region `stacks.0.3`"),
        (with_odd_layer, "`head` is a Odd whose own computation a split"),
        (with_norm_of_weights, "`head` is a ParametrizedLinear whose own computation"),
        (with_sparse_table, "`table` has `sparse`"),
        (with_tie_of_rows_and_columns, "`stacks.0.0.down.weight` and `head.weight` are one parameter"),
        (with_norm_in_and_out, "`partial`: `norm.weight` is outside of regions"),
    ],
)
def test_a_module_that_a_plan_cannot_split_is_rejected(change: Any, said: str) -> None:
    model = Model()
    change(model)
    plan = replace(SPLIT, partial=("stacks.*.*.norm", "norm")) if change is with_norm_in_and_out else SPLIT
    with pytest.raises(PlanError) as error:
        resolve(model, plan)
    assert said in str(error.value)


def test_a_tie_that_is_split_in_only_one_place_is_rejected() -> None:
    model = Model()
    model.head.weight = model.table.weight
    resolve(model, SPLIT)
    with pytest.raises(PlanError, match="`table.weight` and `head.weight` are one parameter.* `gathered`"):
        resolve(model, replace(SPLIT, gathered=()))


def test_zero_units_do_not_share_parameters() -> None:
    model = Model()
    model.stacks[0][1].up.weight = model.stacks[0][0].up.weight
    with pytest.raises(PlanError, match=r"`stacks.0.0.up.weight` and `stacks.0.1.up.weight` are one parameter, in"):
        check_fsdp_units(model, resolve(model, SPLIT))
    check_fsdp_units(model, resolve(model, replace(SPLIT, blocks=("stacks.1.*",))))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(PlanError, match=r"`scalar` has the shape \[\]"):
        check_fsdp_units(model, resolve(model, SPLIT))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (4, "the 6 inputs of `narrow`"),
        (
            5,
            "the 12 outputs of `stacks.0.0.up` do not divide over 5 ranks: the nearest tensor degrees that do are 4, 6",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(ranks: int, said: str) -> None:
    parts = resolve(Model(), SPLIT)
    if ranks == 4:
        parts = replace(parts, row={"narrow": nn.Linear(6, 6)})
    with pytest.raises(PlanError) as error:
        check_sizes(parts, ranks)
    assert said in str(error.value)
    assert "the nearest size is" in str(error.value)


def mesh_of(islands: object = None, **layout: int) -> Mesh:
    unused: Any = None
    return Mesh(
        Layout(**layout), 0, torch.device("cpu"), unused, unused, None, cast(Any, islands), unused, unused, unused
    )


@pytest.mark.parametrize(
    ("mesh", "zero", "said"),
    [
        (mesh_of(pipeline=2), 0, "`pipeline`, `context` and `expert` must be 1, got 2, 1 and 1"),
        (mesh_of(context=2), 0, "tensor and data dimensions only"),
        (mesh_of(islands=object()), 0, "`training.outer` is not supported"),
        (mesh_of(), 4, "`zero_stage` must be one of 0, 1, 2, 3, got 4"),
        (mesh_of(tensor=5), 0, "do not divide over 5 ranks"),
    ],
    ids=["pipeline", "context", "islands", "stage", "sizes"],
)
def test_a_mesh_or_stage_that_does_not_fit_is_rejected(mesh: Mesh, zero: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_plan(Model(), SPLIT, mesh, zero)


def test_formats_are_one_that_can_be_trained() -> None:
    check_plan(Model().double(), SPLIT, mesh_of(), 0)
    mixed = Model()
    mixed.norm.bfloat16()
    with pytest.raises(ValueError, match=r"`stacks.0.0.up.weight` is torch.float32 and `norm.weight` is"):
        check_plan(mixed, SPLIT, mesh_of(), 0)
    mixed.norm.requires_grad_(False)
    check_plan(mixed, SPLIT, mesh_of(), 0)
    with pytest.raises(ValueError, match=r"is torch.float16: trained parameters must be fp64, fp32 or bf16"):
        check_plan(Model().half(), SPLIT, mesh_of(), 0)
    with pytest.raises(ValueError, match="all are frozen"):
        check_plan(Model().requires_grad_(False), SPLIT, mesh_of(), 0)


def test_scalars_are_rejected_only_by_zero() -> None:
    model = Model()
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    check_plan(model, SPLIT, mesh_of(), 0)
    for stage in (1, 2, 3):
        with pytest.raises(PlanError, match=r"`scalar` has the shape \[\]"):
            check_plan(model, SPLIT, mesh_of(), stage)


def test_gradients_that_parts_would_not_get_are_rejected() -> None:
    model = Model()
    model.norm.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match=r"`norm.weight` has a hook on its gradient"):
        check_plan(model, SPLIT, mesh_of(), 0)
    sparse = Model()
    sparse.add_module("more", nn.Embedding(12, 6, sparse=True))
    with pytest.raises(ValueError, match="`more` has sparse gradients"):
        check_plan(sparse, SPLIT, mesh_of(), 0)


def test_an_entry_is_a_tuple() -> None:
    with pytest.raises(PlanError, match="`regions` is a tuple of names"):
        ParallelPlan(regions="layers.*.attention")  # type: ignore[arg-type]
