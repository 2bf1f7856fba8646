"""Small models in the published layout: configurations, and random weights under the published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from meshwright_worker.checkpoint.safetensors_format import write_tensors

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 260,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "rope_scaling": None, "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "rope_scaling": None, "head_dim": 16}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 24,
    "vocab_size": 260,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "rope_scaling": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}
MISTRAL: dict[str, Any] = {**LLAMA, "model_type": "mistral", "rope_scaling": None, "sliding_window": 6}
MIXTRAL_WINDOW: dict[str, Any] = {**MIXTRAL, "sliding_window": 5}
PHI3: dict[str, Any] = {**MISTRAL, "model_type": "phi3", "sliding_window": None, "pad_token_id": None}
_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
QWEN2_WINDOW: dict[str, Any] = {**QWEN2, **_WINDOW}
QWEN3_WINDOW: dict[str, Any] = {**QWEN3, **_WINDOW}
_PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
MINISTRAL: dict[str, Any] = {**MISTRAL, "model_type": "ministral", "layer_types": _PATTERN}
QWEN3_PATTERN: dict[str, Any] = {**QWEN3_WINDOW, "layer_types": _PATTERN}
GEMMA3: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "hidden_act")},
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
}
GEMMA3_LINEAR: dict[str, Any] = {
    **GEMMA3,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("head_dim", "rope_scaling")},
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
}
DEEPSEEK_LITE = {**DEEPSEEK, "q_lora_rank": None}
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "moe_layer_freq": 1}
DEEPSEEK_V2: dict[str, Any] = {
    **DEEPSEEK,
    **_EXPERTS,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
}
DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK,
    **_EXPERTS,
    "model_type": "deepseek_v3",
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1}
DEEPSEEK_YARN: dict[str, Any] = {**DEEPSEEK_V3, "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
QWEN3_YARN = {**QWEN3, "rope_scaling": _YARN}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 2,
    "norm_topk_prob": True,
}
QWEN3_MOE_WINDOW: dict[str, Any] = {**QWEN3_MOE, **_WINDOW}


def random_weights(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Weights of a configuration, all of a size that matters to the logits."""
    shapes = _gpt2(config) if config["model_type"] == "gpt2" else _llama(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) / (4 if len(shape) > 1 else 2)).to(dtype)
        for name, shape in shapes.items()
    }


def is_written_as(found: torch.Tensor, wanted: torch.Tensor, name: str, config: dict[str, Any]) -> bool:
    """Whether a tensor was written as it was read."""
    if config["model_type"] == "gemma3_text" and "norm" in name:
        # Training has 1 more, and so fewer digits of a number near 0.
        return found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-2, atol=1e-7)
    return torch.equal(found, wanted)


def write_model(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], files: int = 1) -> Path:
    """A model directory, with an index where there are several files."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_tensors(directory / "model.safetensors", weights, {"format": "pt"})
        return directory
    where = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[number::files]}
        write_tensors(directory / file, part)
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def _llama(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norms = ("input", "post_attention")
        norms += ("pre_feedforward", "post_feedforward") if config["model_type"] == "gemma3_text" else ()
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {f"{at}.{name}": shape for name, shape in _feed_forward(config, layer).items()}
        attention = _latent(config, hidden, heads) if "kv_lora_rank" in config else _plain(config, hidden, heads)
        shapes |= {f"{at}.self_attn.{name}": shape for name, shape in attention.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _feed_forward(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "mixtral":
        shapes: dict[str, tuple[int, ...]] = {"block_sparse_moe.gate.weight": (config["num_local_experts"], hidden)}
        for expert in range(config["num_local_experts"]):
            own = zip(("w1", "w3", "w2"), _swiglu(config, config["intermediate_size"]).values(), strict=True)
            shapes |= {f"block_sparse_moe.experts.{expert}.{name}.weight": shape for name, shape in own}
        return shapes
    dense = layer < config.get("first_k_dense_replace", 0) or (layer + 1) % config.get("decoder_sparse_step", 1)
    experts = config.get("n_routed_experts", config.get("num_experts", 0))
    if kind == "phi3":
        width = config["intermediate_size"]
        return {"mlp.gate_up_proj.weight": (2 * width, hidden), "mlp.down_proj.weight": (hidden, width)}
    if dense or not experts:
        return {f"mlp.{name}": shape for name, shape in _swiglu(config, config["intermediate_size"]).items()}
    width, shared = config["moe_intermediate_size"], config.get("n_shared_experts", 0)
    shapes = {"mlp.gate.weight": (experts, hidden)}
    if kind == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        shapes |= {f"mlp.experts.{expert}.{name}": shape for name, shape in _swiglu(config, width).items()}
    if shared:
        shapes |= {f"mlp.shared_experts.{name}": shape for name, shape in _swiglu(config, shared * width).items()}
    return shapes


def _swiglu(config: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    into, out = (width, config["hidden_size"]), (config["hidden_size"], width)
    return {"gate_proj.weight": into, "up_proj.weight": into, "down_proj.weight": out}


def _plain(config: dict[str, Any], hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
    size, kv_heads = config["head_dim"], config["num_key_value_heads"]
    outputs = {"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
    if config["model_type"] == "phi3":
        outputs = {"qkv_proj": sum(outputs.values())}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, hidden) for name, rows in outputs.items()}
    shapes["o_proj.weight"] = (hidden, heads * size)
    if config["model_type"] == "qwen2":
        shapes |= {f"{name}.bias": (rows,) for name, rows in outputs.items()}
    if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    return shapes


def _latent(config: dict[str, Any], hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, queries = config["kv_lora_rank"], config["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    if not queries:
        return shapes | {"q_proj.weight": (heads * (nope + rope), hidden)}
    return shapes | {
        "q_a_proj.weight": (queries, hidden),
        "q_a_layernorm.weight": (queries,),
        "q_b_proj.weight": (heads * (nope + rope), queries),
    }


def _gpt2(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    matrices = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        for name, shape in matrices.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{name}.weight": (hidden,), f"{at}.{name}.bias": (hidden,)}
    return shapes | {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}
