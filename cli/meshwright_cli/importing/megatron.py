"""Reads the arguments of Megatron-LM, from a file with a command line or a shell script that has one."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Iterator
from typing import Any

from meshwright.api.model_parts import RopeScaling
from meshwright.planner.frameworks.megatron_lm import CONTEXT_COMMUNICATION, DECAYS, LAST_DECAYS, ROPE_LIMITS
from meshwright_cli.importing.settings import (
    Imported,
    ImportFileError,
    Settings,
    default_left_out,
    micro_batches,
    replicas_of,
    without_none,
)

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=([^\s(].*?)?\s*$")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|([A-Za-z_][A-Za-z0-9_]*))")
_FLAGS_OF_VARIABLE = re.compile(r"([A-Za-z_]\w*)\+?=\(?((?:.*\s)?--[a-zA-Z].*)", re.DOTALL)
"""A word that assigns flags to a variable."""
_QUOTED_FLAGS = re.compile(r"(?:.*\s)?--[a-zA-Z].*\s.*", re.DOTALL)
"""A word that has several words itself, with flags."""
_VALUED = re.compile(
    r"(-size|-layers|-heads|-groups|-length|-experts|-iters|-samples|-embeddings|-topk|-dim|^seed|^(min-)?lr)$"
)
"""Flags that a variable follows as their value. After others it may have further flags."""
_CONTEXT = {name: str(method) for method, name in CONTEXT_COMMUNICATION.items()}
_OF_THE_LAUNCHER = frozenset(
    {"rdzv-backend", "rdzv-endpoint", "rdzv-id", "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port"}
)
_WITHOUT_EFFECT = frozenset(
    {
        *("use-mcore-models", "overlap-grad-reduce", "overlap-param-gather", "use-flash-attn", "attention-backend"),
        *("moe-token-dispatcher-type", "moe-grouped-gemm", "no-masked-softmax-fusion", "use-tp-pp-dp-mapping"),
        *("log-interval", "log-throughput", "distributed-timeout-minutes"),
    }
)
"""Flags of what Meshwright does itself, in its own way."""
_DECAYS, _LAST_DECAYS = default_left_out(DECAYS), default_left_out(LAST_DECAYS)
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def is_megatron(text: str) -> bool:
    """Whether the text has arguments of Megatron-LM."""
    return "--num-layers" in text or "--tensor-model-parallel-size" in text


def arguments(text: str) -> dict[str, Any]:
    """The flags of a text and their values, `True` for a flag without one. Variables of the script are replaced.

    Raises:
        ImportFileError: quotes do not match.
    """
    variables: dict[str, str] = {}
    found: dict[str, Any] = {}
    begun = ""
    for part in text.replace("\\\n", " ").splitlines():
        line = begun + _replaced(part, variables)
        try:
            words = _words(line, variables)
        except ValueError:
            begun = f"{line}\n"  # a quote that a later line closes
            continue
        begun = ""
        assignment = _ASSIGNMENT.match(line)
        if assignment and "--" not in line:
            _assign(variables, assignment[1], assignment[2] or "")
            continue
        for flag, values in _flags(words):
            found[flag] = True if not values else values[0] if len(values) == 1 else values
    if begun:
        raise ImportFileError(f"quotes do not match: {begun.strip():.80}")
    return found


def _assign(variables: dict[str, str], name: str, value: str) -> None:
    """Remember the value of a variable, without its quotes. The output of a command is unknown."""
    variables[name] = f"${{{name}}}"
    if "`" not in value and "$(" not in value:
        with contextlib.suppress(ValueError):  # a quote that a later line closes
            variables[name] = "".join(shlex.split(value, comments=True)[:1])


def _words(line: str, variables: dict[str, str]) -> list[str]:
    """Words of a shell, those of quoted flags too (`ARGS="--num-layers 24 --bf16"`). Their variable is then empty.

    Raises:
        ValueError: quotes do not match.
    """
    found = []
    for word in shlex.split(line, comments=True):
        assigned = _FLAGS_OF_VARIABLE.fullmatch(word)
        if assigned:
            found += _words(assigned[2], variables)
            variables[assigned[1]] = ""
        else:
            found += _words(word, variables) if _QUOTED_FLAGS.fullmatch(word) else [word]
    return found


def _replaced(line: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, line)


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    flag, values = "", list[str]()
    for word in words:
        word = word.strip("()") if word in ("(", ")") else word
        name, equals, rest = word.partition("=")
        if re.fullmatch(r"--[a-zA-Z][\w-]*", name):
            if flag:
                yield flag, values
            flag, values = name[2:].replace("_", "-"), [rest] if equals else []
        elif flag and word and not word.endswith(".py") and (not word.startswith("${") or _VALUED.search(flag)):
            values.append(word.rstrip(")"))
    if flag:
        yield flag, values


def read(text: str, gpus: int | None) -> Imported:
    """Read arguments.

    Args:
        text: a command line, or a script.
        gpus: number of GPUs of the run. Defaults to that of torchrun's flags.

    Raises:
        ImportFileError: a value has the wrong type, or the batch does not divide.
    """
    found, notes = Settings(arguments(text)), ["the data is named by paths of Megatron's format: set spec.data"]
    unknown = sorted(
        name
        for name, value in found.values.items()
        if name not in ("save", "load") and isinstance(value, str) and "$" in value
    )
    notes += [f"the value of --{name} is a variable that the file does not set" for name in unknown]
    found.values = {name: value for name, value in found.values.items() if name not in unknown}
    tensor = found.integer("tensor-model-parallel-size", 1) or 1
    pipeline = found.integer("pipeline-model-parallel-size", 1) or 1
    context = found.integer("context-parallel-size", 1) or 1
    world = gpus or _world(found)
    replicas = replicas_of(world, tensor=tensor, pipeline=pipeline, context=context) if world else None
    if replicas is None:
        notes.append("the number of replicas is unknown: use --gpus")
    batch = found.integer("global-batch-size")
    micro = found.integer("micro-batch-size")
    found.read |= _OF_THE_LAUNCHER | _WITHOUT_EFFECT
    spec = {
        "replicas": replicas,
        "model": _model(found, tensor, notes),
        "parallelism": {
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context if context > 1 else None,
            "contextMethod": _CONTEXT.get(str(found.get("cp-comm-type", "p2p"))) if context > 1 else None,
            **_experts(found, tensor),
            "sequence": None if found.flag("sequence-parallel") or tensor == 1 else False,
            "microBatches": micro_batches(batch, micro, replicas),
            "zeroStage": _stage(found, notes),
            **_stages(found, pipeline),
        },
        "training": _training(found, batch),
        "checkpoint": _checkpoint(found),
        "workers": {"gpusPerWorker": _gpus_of_a_node(found, world)},
    }
    return Imported("Megatron-LM", without_none(spec), [f"--{name}" for name in found.unread], notes)


def _world(found: Settings) -> int | None:
    """The number of GPUs that torchrun's flags state."""
    local, nodes = found.get("nproc-per-node"), found.get("nnodes", 1)
    return int(local) * int(nodes) if str(local).isdecimal() and str(nodes).isdecimal() else None


def _gpus_of_a_node(found: Settings, world: int | None) -> int | None:
    """The ranks of a node by torchrun's flags, if all nodes have as many."""
    local = str(found.get("nproc-per-node"))
    return int(local) if local.isdecimal() and int(local) and world and world % int(local) == 0 else None


def _experts(found: Settings, tensor: int) -> dict[str, Any]:
    of_tensor = found.integer("expert-tensor-parallel-size", tensor)
    if of_tensor not in (1, tensor):
        found.read.discard("expert-tensor-parallel-size")
    has_experts = "num-experts" in found.values and tensor > 1
    expert = found.integer("expert-model-parallel-size")
    return {"expert": expert, "expertTensor": of_tensor != 1 if has_experts else None}


def _stage(found: Settings, notes: list[str]) -> int | None:
    sharding = str(found.get("data-parallel-sharding-strategy", "no_shard"))
    distributed = found.flag("use-distributed-optimizer")
    if found.flag("use-megatron-fsdp") or found.flag("use-custom-fsdp"):
        return _SHARDING.get(sharding, 0)
    if found.flag("use-torch-fsdp2"):
        return 3
    if distributed and (found.integer("expert-model-parallel-size") or 1) > 1:
        notes.append("the planner chooses the ZeRO stage: shards of stage 1 do not split experts over ranks")
        return None
    return 1 if distributed else 0


def _stages(found: Settings, pipeline: int) -> dict[str, Any]:
    virtual = found.integer("num-virtual-stages-per-pipeline-rank")
    per_stage, layers = found.integer("num-layers-per-virtual-pipeline-stage"), found.integer("num-layers")
    if per_stage and layers and pipeline > 1:
        virtual = layers // (pipeline * per_stage)
    if pipeline == 1:
        return {}
    return (
        {"schedule": "Interleaved1F1B", "virtualStages": virtual} if virtual and virtual > 1 else {"schedule": "1F1B"}
    )


def _vocabulary(found: Settings, tensor: int, notes: list[str]) -> int | None:
    """The size of the vocabulary, padded as Megatron does it."""
    padded, size = found.integer("padded-vocab-size"), found.integer("vocab-size")
    unit = (found.integer("make-vocab-size-divisible-by", 128) or 128) * tensor
    if padded is None and size is not None:
        # This tokenizer adds one token for the end of a document.
        tokens = size + (found.values.get("tokenizer-type") == "NullTokenizer")
        padded = -(-tokens // unit) * unit
        if padded != tokens:
            notes.append(f"the vocabulary of {tokens} tokens is padded to {padded}")
    return padded


def _model(found: Settings, tensor: int, notes: list[str]) -> dict[str, Any]:
    heads, hidden = found.integer("num-attention-heads"), found.integer("hidden-size")
    intermediate = found.integer("ffn-hidden-size") or (4 * hidden if hidden else None)
    gated, groups = found.flag("swiglu"), found.integer("num-query-groups")
    found.get("group-query-attention")
    learned = found.get("position-embedding-type", "learned_absolute") == "learned_absolute"
    positions = found.integer("max-position-embeddings")
    biases = not found.flag("disable-bias-linear")
    latent = _latent(found)
    return {
        "layers": found.integer("num-layers"),
        "hiddenSize": hidden,
        "intermediateSize": intermediate,
        "heads": heads,
        "kvHeads": groups,
        "headSize": found.integer("qk-head-dim", 128) if latent else found.integer("kv-channels"),
        "valueSize": found.integer("v-head-dim", 128) if latent else None,
        "latent": latent,
        "vocabSize": _vocabulary(found, tensor, notes),
        "gated": gated,
        "activation": "SiLU" if gated else "GELUTanh",
        "norm": "RMSNorm" if found.get("normalization", "LayerNorm") == "RMSNorm" else "LayerNorm",
        "normEpsilon": found.number("norm-epsilon"),
        "biases": biases,
        "attentionBiases": True if found.flag("add-qkv-bias") and not biases else None,
        "queryKeyNorms": True if found.flag("qk-layernorm") and not latent else None,
        "positions": positions if learned else None,
        "ropeTheta": None if learned else found.integer("rotary-base"),
        "ropeScaling": None if learned else _rope_scaling(found, latent is not None),
        "tieEmbeddings": not found.flag("untie-embeddings-and-output-weights"),
        **_sliding_window(found),
        "mixture": _mixture(found, intermediate, notes),
    }


def _sliding_window(found: Settings) -> dict[str, Any]:
    """Number of keys that a token attends to, of `--window-size BEFORE,AFTER`, and the layers that attend to all."""
    sizes = re.findall(r"-?\d+", str(found.get("window-size", "")))
    every = str(found.get("window-attn-skip-freq", 0))
    if not sizes or int(sizes[0]) < 0:
        return {}
    if not every.isdecimal():  # a list of layers
        found.read -= {"window-size", "window-attn-skip-freq"}
        return {}
    return {"slidingWindow": int(sizes[0]) + 1, "fullAttentionEvery": int(every) or None}


def _latent(found: Settings) -> dict[str, Any] | None:
    if not found.flag("multi-latent-attention"):
        return None
    return {
        "kvRank": found.integer("kv-lora-rank", 32),
        "queryRank": found.integer("q-lora-rank"),
        "ropeSize": found.integer("qk-pos-emb-head-dim", 64),
    }


def _rope_scaling(found: Settings, latent: bool) -> dict[str, Any] | None:
    """How rotary positions are rescaled: as in Llama 3.1, or by YaRN with latent attention."""
    if not latent:
        used = found.flag("use-rope-scaling")
        return {"kind": "Llama3", "factor": found.number("rope-scaling-factor", 8.0)} if used else None
    factor = found.number("rotary-scaling-factor", 1.0) or 1.0
    scale, of_scores = found.number("mscale", 1.0), found.number("mscale-all-dim", 0.0) or 0.0
    if factor == 1:
        return None
    if scale != of_scores:
        found.read -= {"mscale", "mscale-all-dim"}
    low, high, length = ROPE_LIMITS[RopeScaling.YARN, True]
    return {
        "kind": "YaRN",
        "factor": factor,
        "lowFrequencyFactor": low,
        "highFrequencyFactor": high,
        "originalLength": length,
        "scoreFactor": round((0.1 * of_scores * math.log(factor) + 1) ** 2, 9),
    }


def _mixture(found: Settings, intermediate: int | None, notes: list[str]) -> dict[str, Any] | None:
    experts = found.integer("num-experts")
    if not experts:
        return None
    softmax = found.get("moe-router-score-function", "softmax") == "softmax"
    return {
        "experts": experts,
        "perToken": found.integer("moe-router-topk", 2),
        "intermediateSize": found.integer("moe-ffn-hidden-size") or intermediate,
        "sharedIntermediateSize": found.integer("moe-shared-expert-intermediate-size"),
        "denseLayers": _dense_layers(found),
        "router": None if softmax else "Sigmoid",
        "renormalize": False if found.flag("moe-router-pre-softmax") and softmax else None,
        "scaling": found.number("moe-router-topk-scaling-factor"),
        "groups": found.integer("moe-router-num-groups"),
        "groupsPerToken": found.integer("moe-router-group-topk"),
        "capacityFactor": found.number("moe-expert-capacity-factor"),
        "zLossWeight": found.number("moe-z-loss-coeff"),
        **_balancing(found, notes),
    }


def _dense_layers(found: Settings) -> int | None:
    """The first layers without a mixture, of a pattern such as `([0]*3+[1]*58)`. Other patterns have no equivalent."""
    pattern = str(found.get("moe-layer-freq", "1")).replace(" ", "").strip("\"'()")
    if (first := re.fullmatch(r"\[0\]\*(\d+)\+\[1\]\*\d+", pattern)) is not None:
        return int(first[1])
    if pattern not in ("1", "[1]*" + str(found.values.get("num-layers"))):
        found.read.discard("moe-layer-freq")
    return None


def _balancing(found: Settings, notes: list[str]) -> dict[str, Any]:
    """What balances the experts. Megatron-LM's auxiliary loss has no weight by default."""
    kind, weight = str(found.get("moe-router-load-balancing-type", "aux_loss")), found.number("moe-aux-loss-coeff", 0.0)
    auxiliary = bool(weight) and kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
    if auxiliary and kind != "seq_aux_loss":
        notes.append(f"the auxiliary loss is over each sequence, as with `seq_aux_loss`: {kind} is over more tokens")
    if kind not in ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"):
        found.read.discard("moe-router-load-balancing-type")
    if found.flag("moe-router-enable-expert-bias"):
        rate = found.number("moe-router-bias-update-rate")
        return {"balancing": "Bias", "biasRate": rate, "auxiliaryWeight": weight if auxiliary else None}
    return {"balancing": "Auxiliary", "auxiliaryWeight": weight} if auxiliary else {"balancing": "None"}


def _loss_scale(found: Settings) -> dict[str, Any]:
    """The dynamic scale. A fixed one has no equivalent."""
    initial = found.number("initial-loss-scale")
    return {"initial": None if initial is None else int(initial), "growthInterval": found.integer("loss-scale-window")}


def _fp8(found: Settings) -> dict[str, Any] | None:
    """Products in fp8: formats and recipes of Transformer Engine that a job has too."""
    recipe = found.values.get("fp8-recipe", "delayed")
    if found.values.get("fp8-format") != "hybrid" or recipe not in ("delayed", "tensorwise"):
        return None
    found.read |= {"fp8-format", "fp8-recipe"}
    if recipe == "tensorwise":
        return {"scaling": "Tensorwise", "update": "Dynamic"}
    return {"scaling": "Tensorwise", "update": "Delayed", "history": found.integer("fp8-amax-history-len", 1)}


def _training(found: Settings, batch: int | None) -> dict[str, Any]:
    granularity, grouped = found.get("recompute-granularity"), found.integer("recompute-num-layers", 1) or 1
    granularity = "selective" if found.flag("recompute-activations") else granularity
    uniform = found.get("recompute-method", "uniform") == "uniform"
    recomputation = {"selective": "Selective", "full": "Full"}.get(str(granularity), "None")
    if recomputation == "Full" and grouped > 1 and uniform:
        recomputation = "EveryK"
    return {
        "steps": _steps(found, batch),
        "globalBatchSize": batch,
        "sequenceLength": found.integer("seq-length"),
        "seed": found.integer("seed"),
        "precision": "bf16" if found.flag("bf16") else "fp16" if found.flag("fp16") else "fp32",
        "lossScale": _loss_scale(found) if found.flag("fp16") else None,
        "fp8": _fp8(found),
        "dropout": found.number("hidden-dropout", 0.1),
        "attentionDropout": found.number("attention-dropout", 0.1),
        "activationCheckpointing": recomputation,
        "checkpointEvery": grouped if recomputation == "EveryK" else None,
        "optimizer": {
            "learningRate": found.number("lr"),
            "minLearningRate": found.number("min-lr"),
            **_schedule(found, batch),
            "weightDecay": found.number("weight-decay", 0.01),
            "beta1": found.number("adam-beta1"),
            "beta2": found.number("adam-beta2", 0.999),
            "gradientClip": found.number("clip-grad"),
            "offload": "CPU" if found.flag("optimizer-cpu-offload") else None,
        },
    }


def _steps(found: Settings, batch: int | None) -> int | None:
    """The length of the run, which may be in samples."""
    samples = found.integer("train-samples")
    return samples // batch if samples and batch else found.integer("train-iters")


def _schedule(found: Settings, batch: int | None) -> dict[str, Any]:
    """Warm-up and decay. A length of the decay has an equivalent only if it is that of the run."""
    warm_up, steps = found.integer("lr-warmup-iters"), found.integer("train-iters")
    if batch and (samples := found.integer("lr-warmup-samples")):
        warm_up = -(-samples // batch)
    for flag, run in (("lr-decay-iters", steps), ("lr-decay-samples", found.integer("train-samples"))):
        if found.integer(flag) not in (None, run):
            found.read.discard(flag)
    style = str(found.get("lr-decay-style", "linear"))
    if style == "WSD":
        form = str(found.get("lr-wsd-decay-style", "exponential"))
        if form not in _LAST_DECAYS:
            found.read -= {"lr-decay-style", "lr-wsd-decay-style"}
        length = found.integer("lr-wsd-decay-iters")
        return {"warmupSteps": warm_up, "decay": _LAST_DECAYS.get(form), "decaySteps": length}
    if style not in _DECAYS:
        found.read.discard("lr-decay-style")
    if style == "inverse-square-root":
        warm_up = warm_up or 1
    return {"warmupSteps": warm_up, "decay": _DECAYS.get(style)}


def _checkpoint(found: Settings) -> dict[str, Any] | None:
    interval = found.integer("save-interval")
    found.get("load")
    return {"claimName": "checkpoints", "everySteps": interval} if found.get("save") else None
