"""Reads the arguments of Megatron-LM, from a file with a command line or a shell script that has one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from meshwright.planner.frameworks.megatron_lm import CONTEXT_COMMUNICATION, DECAYS, LAST_DECAYS
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
_FLAGS_OF_VARIABLE = re.compile(r"([A-Za-z_]\w*)\+?=((?:.*\s)?--[a-zA-Z].*)", re.DOTALL)
"""A word that assigns flags to a variable."""
_QUOTED_FLAGS = re.compile(r"(?:.*\s)?--[a-zA-Z].*\s.*", re.DOTALL)
"""A word that has several words itself, with flags."""
_CONTEXT = {name: str(method) for method, name in CONTEXT_COMMUNICATION.items()}
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
            variables[assignment[1]] = (assignment[2] or "").strip("\"'")
            continue
        for flag, values in _flags(words):
            found[flag] = True if not values else values[0] if len(values) == 1 else values
    if begun:
        raise ImportFileError(f"quotes do not match: {begun.strip():.80}")
    return found


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
        elif flag and word and not word.endswith(".py") and not word.startswith("${"):
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
    spec = {
        "replicas": replicas,
        "model": _model(found, tensor, notes),
        "parallelism": {
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context if context > 1 else None,
            "contextMethod": _CONTEXT.get(str(found.get("cp-comm-type", "p2p"))) if context > 1 else None,
            "expert": found.integer("expert-model-parallel-size"),
            "sequence": None if found.flag("sequence-parallel") or tensor == 1 else False,
            "microBatches": micro_batches(batch, micro, replicas),
            "zeroStage": _stage(found),
            **_stages(found, pipeline),
        },
        "training": _training(found, batch),
        "checkpoint": _checkpoint(found),
    }
    return Imported("Megatron-LM", without_none(spec), [f"--{name}" for name in found.unread], notes)


def _world(found: Settings) -> int | None:
    """The number of GPUs that torchrun's flags state."""
    local, nodes = found.get("nproc-per-node"), found.get("nnodes", 1)
    return int(local) * int(nodes) if str(local).isdecimal() and str(nodes).isdecimal() else None


def _stage(found: Settings) -> int:
    sharding = str(found.get("data-parallel-sharding-strategy", "no_shard"))
    distributed = found.flag("use-distributed-optimizer")
    if found.flag("use-megatron-fsdp") or found.flag("use-custom-fsdp"):
        return _SHARDING.get(sharding, 0)
    if found.flag("use-torch-fsdp2"):
        return 3
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
    experts = found.integer("num-experts")
    mixture = {
        "experts": experts,
        "perToken": found.integer("moe-router-topk", 2),
        "intermediateSize": found.integer("moe-ffn-hidden-size") or intermediate,
    }
    return {
        "layers": found.integer("num-layers"),
        "hiddenSize": hidden,
        "intermediateSize": intermediate,
        "heads": heads,
        "kvHeads": groups,
        "headSize": found.integer("kv-channels"),
        "vocabSize": _vocabulary(found, tensor, notes),
        "gated": gated,
        "activation": "SiLU" if gated else "GELUTanh",
        "norm": "RMSNorm" if found.get("normalization", "LayerNorm") == "RMSNorm" else "LayerNorm",
        "normEpsilon": found.number("norm-epsilon"),
        "biases": biases,
        "attentionBiases": True if found.flag("add-qkv-bias") and not biases else None,
        "queryKeyNorms": True if found.flag("qk-layernorm") else None,
        "positions": positions if learned else None,
        "ropeTheta": None if learned else found.integer("rotary-base"),
        "tieEmbeddings": not found.flag("untie-embeddings-and-output-weights"),
        "mixture": mixture if experts else None,
    }


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
        "steps": found.integer("train-iters"),
        "globalBatchSize": batch,
        "sequenceLength": found.integer("seq-length"),
        "seed": found.integer("seed"),
        "precision": "bf16" if found.flag("bf16") else "fp16" if found.flag("fp16") else "fp32",
        "fp8": _fp8(found),
        "dropout": found.number("hidden-dropout", 0.1),
        "attentionDropout": found.number("attention-dropout", 0.1),
        "activationCheckpointing": recomputation,
        "checkpointEvery": grouped if recomputation == "EveryK" else None,
        "optimizer": {
            "learningRate": found.number("lr"),
            "minLearningRate": found.number("min-lr"),
            **_schedule(found),
            "weightDecay": found.number("weight-decay", 0.01),
            "beta1": found.number("adam-beta1"),
            "beta2": found.number("adam-beta2", 0.999),
            "gradientClip": found.number("clip-grad"),
            "offload": "CPU" if found.flag("optimizer-cpu-offload") else None,
        },
    }


def _schedule(found: Settings) -> dict[str, Any]:
    """Warm-up and decay. `--lr-decay-iters` has an equivalent only if it is the length of the run."""
    warm_up, steps = found.integer("lr-warmup-iters"), found.integer("train-iters")
    if found.integer("lr-decay-iters") not in (None, steps):
        found.read.discard("lr-decay-iters")
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
