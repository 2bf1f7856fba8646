"""The runs whose checkpoints are recorded: one for each thing that changes what a checkpoint holds, or how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from meshwright.api.precision import Precision
from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.custom_module_cases import train_tangle
from tests.distributed.rank_pool import RankPool
from tests.parity.cases.models import GPT, LATENT_QUERIES, QWEN3
from tests.pretrained import published

SCRATCH = gettempdir()
SMALL = {"bucket_elements": 4000}
LORA = {"lora": {"rank": 3, "targets": ["Query", "Value", "Output"]}}
STEPS = 2


@dataclass(frozen=True)
class Case:
    """A run, by arguments of `small_run`; with `config` of that published model."""

    name: str
    """Also of its file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    """Whether it is in the default tier."""
    config: Mapping[str, Any] | None = None
    own_module: bool = False
    """Whether it trains a module that is none of the runtime's."""
    timed: bool = False
    """Whether the order of updates follows the clock, so that the numbers differ from one run to the next."""

    def run(self) -> NativeRun:
        """As small as it can be: every layer is some ten tensors more in the file."""
        run = small_run(**{"layers": 1, "steps": STEPS, "every": 1, **self.options})
        if self.config is None:
            return run
        return run.model_copy(update={"architecture": architecture_from_config(dict(self.config))})


def train(case: Case, pool: RankPool, root: Path, text: Path) -> None:
    """Train the case's steps, each with a checkpoint below `root`."""
    run = case.run()
    if case.own_module:
        zero = run.parallelism.zero_stage
        pool.run(train_tangle, run, zero, range(1, STEPS + 1), {"batch_norm": run.tensor == 1}, checkpoint_dir=root)
        return
    answers = pool.run(train_fully, run, checkpoint_dir=root, data_dir=text)
    assert {outcome for outcome, _ in answers} == {Outcome.COMPLETE}


def write_corpus(root: Path) -> Path:
    """A text for everyone, and the same again for each island that reads a directory of its own."""
    for directory in (root, root / "island-0", root / "island-1"):
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(3):
            lines = (f"def function_{number}_{line}(x):\n    return x * {line * number}\n" for line in range(20))
            (directory / f"part{number}.py").write_text("".join(lines))
    return root


def _islands(method: str, **options: Any) -> dict[str, Any]:
    return {"data": 2, "outer": {"method": method, "islands": 2, "every_steps": 1, **options}}


def _schedule(name: str, **options: Any) -> dict[str, Any]:
    return {"layers": 2, "pipeline": 2, "parallelism": {"schedule": name}, **options}


def _compressed(name: str, **options: Any) -> dict[str, Any]:
    return {"data": 2, "replicas": {**SMALL, "compression": name, **options}}


LAYOUTS = [
    Case("one-rank"),
    Case("ddp", {"data": 2}, quick=True),
    Case("zero-1", {"data": 2, "zero": 1}, quick=True),
    Case("zero-2", {"data": 2, "zero": 2}),
    Case("zero-2-fsdp", {"data": 2, "zero": 2, "replicas": {"strategy": "SHARD_GRAD_OP"}}),
    Case("zero-3", {"data": 2, "zero": 3}, quick=True),
    Case("tensor", {"tensor": 2}, quick=True),
    Case("tensor-without-sequence", {"tensor": 2, "sequence": False}),
    Case("pipeline", {"pipeline": 2, "layers": 2}, quick=True),
    Case("pipeline-tied-embeddings", {"pipeline": 2, "layers": 2, "tie_embeddings": True}),
    Case("pipeline-interleaved", _schedule("Interleaved1F1B", layers=4)),
    Case("pipeline-dualpipe", _schedule("DualPipe", micro_batches=4)),
    Case("pipeline-pipedream", _schedule("PipeDream", micro_batches=1, clip=0.0)),
    Case("pipeline-pipedream-2bw", _schedule("PipeDream2BW", clip=0.0)),
    Case("context", {"context": 2}),
    Case("context-zero-3", {"context": 2, "zero": 3}),
    Case("experts", {"mixture": "Mixtral", "data": 2, "expert": 2}, quick=True),
    Case("experts-zero-3", {"mixture": "Mixtral", "data": 2, "expert": 2, "zero": 3}),
    Case("experts-tensor", {"mixture": "DeepSeek-V3", "tensor": 2, "layers": 2}),
    Case("experts-tensor-whole", {"mixture": "Mixtral", "tensor": 2, "parallelism": {"expert_tensor": False}}),
    Case("four-ranks-tensor-pipeline", {"tensor": 2, "pipeline": 2, "layers": 2}),
    Case("four-ranks-tensor-zero-3", {"tensor": 2, "data": 2, "zero": 3}),
    Case("four-ranks-hybrid-shards", {"data": 4, "zero": 3, "replicas": {"shard_size": 2}}),
    Case("four-ranks-secondary-shards", {"data": 4, "zero": 3, "replicas": {"reshard_size": 2}}),
    Case("four-ranks-experts-pipeline", {"mixture": "Mixtral", "data": 2, "expert": 2, "pipeline": 2, "layers": 2}),
]
TRAINING = [
    Case("lora", {"training": LORA}, quick=True),
    Case("lora-tensor", {"training": LORA, "tensor": 2}),
    Case("lora-zero-3", {"training": LORA, "data": 2, "zero": 3}),
    Case("optimizer-offload", {"optimizer": {"offload": "CPU"}}),
    Case("optimizer-offload-file", {"optimizer": {"offload": "File", "offload_path": SCRATCH}, "data": 2, "zero": 1}),
    Case("parameter-offload", {"data": 2, "zero": 3, "training": {"parameter_offload": True}}, quick=True),
    Case(
        "parameter-offload-file",
        {"data": 2, "zero": 3, "training": {"parameter_offload": True, "parameter_offload_path": SCRATCH}},
    ),
    Case("muon", {"optimizer": {"name": "Muon"}}),
    Case("muon-zero-3", {"optimizer": {"name": "Muon"}, "data": 2, "zero": 3}),
    Case("bf16", {"precision": Precision.BF16}),
    Case("bf16-alone", {"precision": Precision.BF16, "training": {"master_weights": False}}, quick=True),
    Case("fp16", {"precision": Precision.FP16}),
    Case("fp8-delayed", {"training": {"fp8": {"update": "Delayed", "history": 2}}}),
    Case("gradients-topk", _compressed("TopK", compression_density=0.1)),
    Case("gradients-powersgd", _compressed("PowerSGD", compression_rank=2)),
    Case("local-sgd", _islands("LocalSGD")),
    Case("federated-averaging", _islands("FedAvg")),
    Case("diloco", _islands("DiLoCo", learning_rate=0.6, momentum=0.8), quick=True),
    Case("asynchronous-sgd", _islands("AsyncSGD", staleness=1), timed=True),
]
MODELS = [
    Case("gpt", GPT),
    Case("query-key-norms", QWEN3),
    Case("latent-queries", {**LATENT_QUERIES, "tensor": 2}),
    Case("own-module-tensor", {"tensor": 2}, own_module=True),
    Case("own-module-zero-3", {"data": 2, "zero": 3}, own_module=True, quick=True),
]
FAMILIES = [
    Case("llama", config={**published.LLAMA, "num_hidden_layers": 1}, quick=True),
    Case("qwen2", config={**published.QWEN2, "num_hidden_layers": 1}),
    Case("qwen3", config={**published.QWEN3, "num_hidden_layers": 1}),
    Case("qwen3-yarn", config={**published.QWEN3_YARN, "num_hidden_layers": 1}),
    Case("qwen3-moe", config={**published.QWEN3_MOE, "num_hidden_layers": 2}),
    Case("gpt2", config={**published.GPT2, "n_layer": 1}, quick=True),
    Case("mixtral", config={**published.MIXTRAL, "num_hidden_layers": 1}),
    Case("deepseek", config={**published.DEEPSEEK, "num_hidden_layers": 1}),
    Case("deepseek-lite", config={**published.DEEPSEEK_LITE, "num_hidden_layers": 1}),
    Case("deepseek-v2", config={**published.DEEPSEEK_V2, "num_hidden_layers": 2}),
    Case("deepseek-v3", config={**published.DEEPSEEK_V3, "num_hidden_layers": 2}, quick=True),
    Case("deepseek-v3-yarn", config={**published.DEEPSEEK_YARN, "num_hidden_layers": 2}),
]
"""One a kind of published model; each is exported too."""
CASES = [*LAYOUTS, *TRAINING, *MODELS, *FAMILIES]
