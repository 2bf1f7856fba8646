"""Compiled layers compute what the others do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from meshwright.api.data import Packing
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.precision import Fp8Spec, Fp8Update
from meshwright.api.training import ActivationCheckpointing, OptimizerSpec, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.activations import layer_activations, requantizes, saved_bytes
from meshwright.planner.cost.memory import memory_by_stage
from meshwright.planner.workload import TrainingJob
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.models.layers import Linear
from meshwright_worker.models.split_backward import WeightGradStore, deferring_weight_grads
from meshwright_worker.optimizers import master_adamw
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.adamw_rule import ROW
from meshwright_worker.optimizers.bf16_adamw import BF16AdamW, _update_rows
from meshwright_worker.optimizers.master_adamw import MasterAdamW, launched_together
from meshwright_worker.parallel.parallelize import apply_memory_options, compile_layers
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.parallel.tensor.cross_entropy import ChunkedLoss, _compiled_pass, _whole_pass
from meshwright_worker.precision.fp8 import linear
from meshwright_worker.precision.fp8.linear import convert_to_fp8
from meshwright_worker.precision.fp8.quantize import QuantizedTensor, scaled_mm
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.trainer.micro_batches import COMPILED_LENGTHS, TrimLengths
from meshwright_worker.trainer.train import validate_run
from tests.distributed.configs import small_run
from tests.distributed.moe_models import MIXTURES
from tests.tiers import mostly_long

MODEL = Architecture(layers=2, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, vocab_size=64)
FP8_MODEL = MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 96, "head_size": 16, "value_size": 16})


def run(*, compiled: bool) -> list[torch.Tensor]:
    with torch.device("meta"):
        stage = DecoderStage(MODEL, torch.float64).double()
    init_weights(stage, MODEL, 0, torch.device("cpu"))
    if compiled:
        compile_layers(stage)
    tokens = torch.arange(32).view(2, 16)
    loss = stage(tokens, targets=tokens + 1)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in stage.parameters() if parameter.grad is not None)]


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_layer_recomputes_no_product_that_it_must_save() -> None:
    """Inductor runs `mm.out`, which a policy outside of compiled code does not know. Calls are counted."""
    model = MODEL.model_copy(update={"layers": 1})
    products = {}
    for how in (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL):
        torch.compiler.reset()
        with torch.device("meta"):
            stage = DecoderStage(model, torch.float32)
        init_weights(stage, model, 0, torch.device("cpu"))
        spec = TrainingSpec(
            steps=1, global_batch_size=2, sequence_length=16, activation_checkpointing=how, compile=True
        )
        apply_memory_options(stage, spec, torch.device("cpu"))
        batch = Batch.of(torch.arange(34).view(2, 17))
        # The backward pass of the first step is compiled while it runs.
        stage(batch.tokens, targets=batch.targets, token_metadata=batch.token_metadata).backward()
        loss = stage(batch.tokens, targets=batch.targets, token_metadata=batch.token_metadata)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss.backward()
        products[how] = sum(event.name == "aten::mm" for event in profiled.events())
    # Seven products of the layer and the output's, twice; of `Full` the layer's once more, all of them in one graph.
    assert list(products.values()) == [16, 16, 23]


def test_a_layer_that_breaks_its_graph_is_not_compiled_selectively(graphs: Graphs) -> None:
    model = MODEL.model_copy(update={"layers": 1, "mixture": MIXTURES["Mixtral"]})
    with torch.device("meta"):
        stage = DecoderStage(model, torch.float32)
    init_weights(stage, model, 0, torch.device("cpu"))
    compile_layers(stage, graphs, selective=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        stage(torch.arange(32).view(2, 16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor": 2}, "`parallelism.tensor: 2`"),
        ({"context": 2}, "`parallelism.context: 2`"),
        ({"packing": Packing.DOCUMENTS}, "`data.packing: Documents`"),
        ({"mixture": "Mixtral"}, "`model.mixture`"),
        ({"fp8": {"update": "Delayed"}}, "`training.fp8.update: Delayed`"),
        ({"pipeline": 2, "parallelism": {"schedule": "ZBH1"}}, "`parallelism.schedule: ZBH1`"),
    ],
)
def test_selective_checkpointing_of_layers_in_pieces_is_rejected(changes: dict[str, Any], named: str) -> None:
    changes = dict(changes)
    training = {"activation_checkpointing": "Selective", "compile": True, "fp8": changes.pop("fp8", None)}
    with pytest.raises(InvalidRunError, match=re.escape(named) + ".*`compile: false`"):
        validate_run(small_run(**changes, training=training))
    validate_run(small_run(**changes, training={**training, "compile": False}))
    validate_run(small_run(data=2, pipeline=2, training={**training, "fp8": None}))


@pytest.mark.long
@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients() -> None:
    for got, want in zip(run(compiled=True), run(compiled=False), strict=True):
        # Compiled cosines of the fp32 rotary table differ in the last digit.
        assert float((got - want).abs().max() / want.abs().max()) < 1e-6


def as_inductor_partitions(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """A back end that decides what to store as inductor does, and runs operators as they are."""
    # Inductor is imported here: every test process imports this file, and one runs its tests.
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, inner_compile=lambda part, *_, **__: make_boxed_func(part.forward))  # type: ignore[arg-type,return-value]


def stored_by_a_layer(job: TrainingJob, tokens: int, *, deferred: bool) -> float:
    """Bytes that a layer of a stage stores for its backward pass, parameters excepted."""
    model, spec = job.architecture, job.training
    with torch.device("meta"):
        stage = DecoderStage(model, torch.bfloat16).float()
    init_weights(stage, model, 0, torch.device("cpu"))
    if spec.fp8 is not None:
        convert_to_fp8(stage, spec.fp8, None)
    if spec.compile:
        selective = spec.checkpointing is ActivationCheckpointing.SELECTIVE
        compile_layers(stage, as_inductor_partitions, selective=selective)
    batch = Batch.of(torch.arange(tokens + 1).remainder(model.vocab_size).unsqueeze(0))
    masters = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    saved: dict[int, torch.Tensor] = {}

    @torch.compiler.disable
    def remember(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in masters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    assert stage.rotary is not None
    stage.rotary.table(tokens, x)  # which all layers share
    store = WeightGradStore() if deferred else None
    with deferring_weight_grads(store), torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        kept_alive = stage.run_layers([*stage.layers.values()], x, batch.token_metadata)
    assert kept_alive.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / model.layers


FP8 = {"scaling": "Tensorwise"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "schedule"),
    [
        ({"compile": False}, None),
        ({"compile": False, "fp8": FP8}, None),
        ({"compile": False, "fp8": {"scaling": "Rowwise"}}, None),
        ({"compile": True}, None),
        ({"compile": True, "fp8": FP8}, None),
        ({"compile": True, "fp8": FP8, "activation_checkpointing": "Selective"}, None),
        ({"compile": True, "fp8": {"scaling": "Rowwise"}}, None),
        ({"compile": True, "fp8": FP8}, "ZBH1"),
    ],
    ids=["eager", "fp8", "rowwise", "compiled", "compiled fp8", "selective fp8", "compiled rowwise", "deferred fp8"],
)
def test_layers_store_what_the_planner_counts(
    training: dict[str, Any], schedule: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a compiled layer computes again instead of storing it: torch decides, and bytes are counted."""
    if training.get("fp8") == FP8:
        monkeypatch.setattr(linear, "product", hardware_product)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "heads": 8, "kv_heads": 2, "vocab_size": 64}
    model, tokens = Architecture(layers=2, head_size=24, value_size=24, **sizes), 256
    settings = {"activation_checkpointing": "None", **training}
    spec = TrainingSpec(steps=1, global_batch_size=1, sequence_length=tokens, precision="bf16", **settings)
    parallelism = ParallelismSpec() if schedule is None else ParallelismSpec(schedule=schedule)
    job = TrainingJob.from_parts(model, spec, parallelism, 1)
    strategy = job.strategy(Layout(pipeline=1 if schedule is None else 2), 1)
    torch.compiler.reset()
    stored = stored_by_a_layer(job, tokens, deferred=schedule is not None)
    torch.compiler.reset()
    again = requantizes(strategy, job.runtime)
    layer = layer_activations(
        model, False, tokens, 1, False, job.training.precision, strategy.fp8, job.runtime, requantizes=again
    )
    # The first stage's copies of weights, without those of embedding and output matrix.
    tables = 2 * (2 * model.vocab_size * model.hidden_size) / strategy.pipeline
    weights = memory_by_stage(job.work, strategy, job.runtime)[0].parameters - tables
    per_layer = weights / (model.layers / strategy.pipeline) + tokens * saved_bytes(layer, 1, strategy)
    assert stored == pytest.approx(per_layer, rel=0.02)


class Graphs:
    """A back end of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.columns: list[set[object]] = []
        """Of each graph's matrices: numbers, or symbols where the graph serves any number."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        self.count += 1
        self.columns.append({one.shape[1] for one in inputs if isinstance(one, torch.Tensor) and one.ndim == 2})
        return graph.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def losses(spec: Fp8Spec, graphs: Graphs | None, layers: int = 2) -> list[float]:
    model = MODEL.model_copy(update={"layers": layers})
    with torch.device("meta"):
        stage = DecoderStage(model, torch.bfloat16).float()
    convert_to_fp8(stage, spec, None)
    init_weights(stage, model, 0, torch.device("cpu"))
    if graphs is not None:
        compile_layers(stage, graphs)
    batch = Batch.of(torch.arange(34).view(2, 17))
    found = []
    for _ in range(2):
        loss = stage(batch.tokens, targets=batch.targets, token_metadata=batch.token_metadata)
        loss.backward()
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter -= 1e-3 * parameter.grad
        found.append(float(loss.detach()))
    return found


def test_one_graph_serves_all_layers_and_batches(graphs: Graphs) -> None:
    # A graph a layer would take hours to compile, and torch gives up on a function after eight of them.
    assert losses(Fp8Spec(), graphs) == pytest.approx(losses(Fp8Spec(), None), rel=1e-3)
    assert graphs.count == 1


@pytest.mark.long
def test_lengths_of_cut_rows_need_few_graphs(graphs: Graphs) -> None:
    with torch.device("meta"):
        stage = DecoderStage(MODEL, torch.float32)
    init_weights(stage, MODEL, 0, torch.device("cpu"))
    cut = TrimLengths(unit=4, min_length=4, whole=4 * COMPILED_LENGTHS)
    batches = [
        Batch.of(torch.arange(2 * (length + 1)).view(2, -1) % 64)
        for length in (cut.length(needed) for needed in (16, 3, 9, 6, 5, 12, 1, 15))
    ]

    def all_losses() -> list[float]:
        return [
            float(stage(one.tokens, targets=one.targets, token_metadata=one.token_metadata).detach()) for one in batches
        ]

    plain = all_losses()
    compile_layers(stage, graphs)
    assert all_losses() == pytest.approx(plain, rel=1e-5)
    assert graphs.count <= COMPILED_LENGTHS


@pytest.mark.long
def test_delayed_scales_stay_out_of_graphs(graphs: Graphs) -> None:
    spec = Fp8Spec(update=Fp8Update.DELAYED)
    assert losses(spec, graphs, layers=1) == pytest.approx(losses(spec, None, layers=1), rel=1e-3)
    assert graphs.count > 1


def optimizer_shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> list[ParameterShard]:
    """Parameters from -1 to 1."""
    made = {name: torch.linspace(-1, 1, math.prod(shape)).view(shape) for name, shape in shapes.items()}
    parameters = {name: nn.Parameter(tensor.to(dtype)) for name, tensor in made.items()}
    return [ParameterShard(name, p, p.detach(), None, True, False, False) for name, p in parameters.items()]


def slopes(shards: list[ParameterShard], step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Their gradients at a step."""
    return [torch.linspace(1, -2, shard.local.numel()).view(shard.shape).to(dtype) * step for shard in shards]


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        pytest.param({"a": (12, 8), "b": (8, 20), "c": (30, 4)}, 1, marks=pytest.mark.long),
        ({"a": (64, 32), "b": (2, 6, 512), "c": (30, 4), "d": (512,)}, 2),
    ],
    ids=["any sizes", "whole rows"],
)
def test_one_graph_serves_the_updates_of_all_matrices(
    graphs: Graphs, shapes: dict[str, tuple[int, ...]], count: int
) -> None:
    """And another one those of `as_rows`, in which a kernel can load several numbers at a time."""
    ours, theirs = (optimizer_shards(shapes, torch.bfloat16) for _ in range(2))
    compiled, plain = (BF16AdamW(found, OptimizerSpec(), seed=0) for found in (ours, theirs))
    compiled._compiles = True
    compiled._update_rows = torch.compile(_update_rows, backend=graphs, dynamic=True, fullgraph=True)
    for step in range(1, 5):
        compiled.step(slopes(ours, step, torch.bfloat16), 1e-2 / step)
        plain.step(slopes(theirs, step, torch.bfloat16), 1e-2 / step)
    assert all(torch.equal(mine.local, other.local) for mine, other in zip(ours, theirs, strict=True))
    assert graphs.count == count
    assert ({ROW} in graphs.columns) == (count == 2)


@pytest.mark.parametrize(
    "gradients", mostly_long([torch.float32, torch.bfloat16], lambda gradients: gradients is torch.bfloat16)
)
def test_compiled_updates_of_master_weights_are_torchs(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, gradients: torch.dtype
) -> None:
    """One graph for eight shards of one size and one for each other, which scale gradients; also after a load."""
    monkeypatch.setattr(master_adamw, "_WORTH", 2048)
    monkeypatch.setattr(
        master_adamw, "compiled", lambda update: torch.compile(update, backend=graphs, dynamic=True, fullgraph=True)
    )
    shapes = {"a": (64, 32), "b": (2, 6, 512), "small": (2, 512), "odd": (600, 7), "vector": (8192,)}
    shapes |= {f"layer {number}": (32, 64) for number in range(8)} | {
        f"wide {number}": (16, 256) for number in range(8)
    }
    ours, theirs = (optimizer_shards(shapes, torch.float32) for _ in range(2))
    spec = OptimizerSpec(weight_decay=0.1)
    compiled, plain = MasterAdamW(ours, spec, compiles=True), AdamW(theirs, spec)
    for step in range(1, 9):
        compiled.factor = 0.3
        compiled.step(slopes(ours, step, gradients), 1e-2 / step)
        plain.step([slope.float() * 0.3 for slope in slopes(theirs, step, gradients)], 1e-2 / step)
        if step == 4:
            compiled.set_step_count(100)
            plain.set_step_count(100)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.local, other.local, rtol=1e-5, atol=1e-6)
        for name, moment in compiled.moments(mine).items():
            torch.testing.assert_close(moment, plain.moments(other)[name], rtol=1e-5, atol=1e-7)
    assert graphs.columns == [{ROW}] * 2
    assert compiled.factor == 1.0


def test_compiled_updates_are_dropped_if_their_factor_is_not_finite(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for every factor, of which the host knows none."""
    monkeypatch.setattr(master_adamw, "_WORTH", 2048)
    monkeypatch.setattr(
        master_adamw, "compiled", lambda update: torch.compile(update, backend=graphs, dynamic=True, fullgraph=True)
    )
    ours, theirs = (optimizer_shards({"a": (64, 32), "small": (2, 512)}, torch.float32) for _ in range(2))
    early, plain = MasterAdamW(ours, OptimizerSpec(), compiles=True), AdamW(theirs, OptimizerSpec())
    for step, factor in enumerate([0.3, math.nan, 0.5, math.inf, 0.7], 1):
        early.step_if_finite(slopes(ours, step, torch.bfloat16), 1e-2, torch.tensor(factor, dtype=torch.float64))
        if math.isfinite(factor):
            plain.step([slope.float() * factor for slope in slopes(theirs, step, torch.bfloat16)], 1e-2)
        else:
            early.withdraw()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.local, other.local, rtol=1e-5, atol=1e-6)
    assert graphs.count == 1


def test_shards_of_one_kind_are_updated_together() -> None:
    kinds = [*"aaabaaaaaaaaabaaaaaaaac"]
    groups = launched_together(range(len(kinds)), kinds.__getitem__)
    assert sorted(number for group in groups for number in group) == [*range(len(kinds))]
    assert [len(group) for group in groups] == [8, 8, 1, 1, 1, 1, 1, 1, 1]
    assert all(len({kinds[number] for number in group}) == 1 for group in groups)


@pytest.mark.parametrize("vocabulary", [48, 512, 600])
def test_the_sums_of_a_vocabularys_parts_are_those_of_all_of_it(vocabulary: int) -> None:
    """Also with logits whose exponentials overflow, and a vocabulary that is no multiple of a part's columns."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(9, vocabulary, generator=generator, dtype=torch.float64) * 400).requires_grad_()
    targets = torch.randint(0, vocabulary, (9,), generator=generator)
    counts = torch.arange(9) % 4 > 0
    want = nn.functional.cross_entropy(logits, targets.where(counts, IGNORED), reduction="sum", ignore_index=IGNORED)
    want.backward()
    loss, gradient = _whole_pass(logits.detach(), targets, counts)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(gradient, logits.grad)


DTYPES = mostly_long([torch.float64, torch.float32, torch.bfloat16], lambda dtype: dtype is not torch.float32)


def chunked(dtype: torch.dtype, backend: object = None, chunk: int = 5) -> list[torch.Tensor]:
    """Loss and gradients of a loss on 28 tokens in chunks, some without a target."""
    generator = torch.Generator().manual_seed(4)
    hidden = (torch.randn(2, 14, 8, generator=generator) * 4).to(dtype).requires_grad_()
    output = Linear(8, 48)
    with torch.no_grad():
        output.weight.copy_(torch.randn(48, 8, generator=generator))
    output = output.double() if dtype is torch.float64 else output
    targets = torch.randint(0, 48, (2, 14), generator=generator)
    targets[0, 3:6] = IGNORED
    loss = ChunkedLoss(chunk)
    if backend is not None:
        loss.compile_passes(backend)  # type: ignore[arg-type]
    value = loss(hidden, output, targets)
    value.backward()
    assert hidden.grad is not None
    assert output.weight.grad is not None
    return [value.detach(), hidden.grad, output.weight.grad]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_passes_of_a_chunked_loss_compute_the_same(graphs: Graphs, dtype: torch.dtype) -> None:
    for got, want in zip(chunked(dtype, graphs), chunked(dtype), strict=True):
        torch.testing.assert_close(got, want)
    assert graphs.count == 3, "of whole chunks, of the last, and of what scales the gradient of the matrix"


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_chunk_computes_the_same_as_several(graphs: Graphs, dtype: torch.dtype) -> None:
    """Its gradient of the matrix stays in the format of the product until the backward pass."""
    want = chunked(dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for got in (chunked(dtype, chunk=28), chunked(dtype, graphs, chunk=99)):
        torch.testing.assert_close(got, want, **tolerance)
        assert got[2].dtype is want[2].dtype
    assert graphs.count == 2


@pytest.mark.long
@pytest.mark.slow
def test_inductor_stores_no_wide_copy_of_a_chunks_logits() -> None:
    """It fuses every pass over them: only the gradient is allocated, in the format of the logits."""
    torch.compiler.reset()
    passes = _compiled_pass("inductor")
    logits, targets = torch.randn(64, 1000).to(torch.bfloat16), torch.randint(0, 1000, (64,))
    passes(logits, targets, 0, None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _, gradient = passes(logits, targets, 0, None)
    assert gradient.dtype is torch.bfloat16
    assert max(event.cpu_memory_usage for event in profiled.events()) < 1.5 * gradient.nbytes


@pytest.mark.long
def test_a_compiled_layer_learns_through_the_hardwares_fp8_product(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of compiled layers, as on a GPU with such products."""
    monkeypatch.setattr(linear, "product", hardware_product)
    gradients = {}
    for compiled in (False, True):
        with torch.device("meta"):
            stage = DecoderStage(FP8_MODEL, torch.bfloat16)
        init_weights(stage, FP8_MODEL, 0, torch.device("cpu"))
        convert_to_fp8(stage, Fp8Spec(), None)
        if compiled:
            compile_layers(stage, graphs)
        tokens = torch.arange(32).view(2, 16)
        stage(tokens, targets=tokens + 1).backward()
        gradients[compiled] = {name: parameter.grad for name, parameter in stage.named_parameters()}
    for name, want in gradients[False].items():
        got = gradients[True][name]
        assert got is not None, name
        assert want is not None, name
        assert float((got - want).norm() / want.norm()) < 0.05, name


def hardware_product(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, *, native: bool = False, fast: bool = False
) -> torch.Tensor:
    return scaled_mm(a, b, dtype)
