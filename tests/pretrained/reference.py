"""Published models' forward passes in plain torch, written from their own code and sharing none of the runtime's.

They take a dictionary of tensors by published names, and the published configuration.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

Weights = dict[str, torch.Tensor]


def llama(weights: Weights, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Llama, Mistral, Mixtral, Phi-3, Qwen2 and Qwen3: logits [batch, length, vocabulary] of tokens [batch, length]."""
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens]
    batch, length = tokens.shape
    cos, sin = _rotation(config, size, length, x.dtype)
    for layer in range(config["num_hidden_layers"]):
        w = {n.removeprefix(f"model.layers.{layer}."): t for n, t in weights.items() if f".layers.{layer}." in n}
        w |= _apart(w, heads * size, kv_heads * size)
        h = _rms(x, w["input_layernorm.weight"], eps)
        q, k, v = (
            F.linear(h, w[f"self_attn.{n}_proj.weight"], w.get(f"self_attn.{n}_proj.bias")).view(
                batch, length, -1, size
            )
            for n in "qkv"
        )
        if "self_attn.q_norm.weight" in w:
            q, k = _rms(q, w["self_attn.q_norm.weight"], eps), _rms(k, w["self_attn.k_norm.weight"], eps)
        q, k = q * cos + _half(q) * sin, k * cos + _half(k) * sin
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        x = x + F.linear(_attend(q, k, v, _window(config, layer)), w["self_attn.o_proj.weight"])
        h = _rms(x, w["post_attention_layernorm.weight"], eps)
        if "num_local_experts" in config:
            x = x + _mixtral(h, w, config)
        elif "mlp.gate.weight" in w:
            scores = F.linear(h, w["mlp.gate.weight"]).softmax(-1)
            best, chosen = scores.topk(config["num_experts_per_tok"], dim=-1)
            x = x + _experts(h, w, chosen, best / best.sum(-1, keepdim=True))
        else:
            x = x + _swiglu(h, w, "mlp")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return F.linear(_rms(x, weights["model.norm.weight"], eps), head)


def _apart(w: Weights, queries: int, keys: int) -> Weights:
    """The matrices of Phi-3's fused tensors."""
    if "self_attn.qkv_proj.weight" not in w:
        return {}
    q, k, v = w["self_attn.qkv_proj.weight"].split([queries, keys, keys])
    gate, up = w["mlp.gate_up_proj.weight"].chunk(2)
    attention = {"self_attn.q_proj.weight": q, "self_attn.k_proj.weight": k, "self_attn.v_proj.weight": v}
    return {**attention, "mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


def _window(config: dict[str, Any], layer: int) -> int:
    if config.get("layer_types", ["sliding_attention"] * (layer + 1))[layer] != "sliding_attention":
        return 0
    return int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0


def _mixtral(x: torch.Tensor, w: Weights, config: dict[str, Any]) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    scores = F.linear(x, w["block_sparse_moe.gate.weight"]).softmax(-1)
    best, chosen = scores.topk(config["num_experts_per_tok"], dim=-1)
    weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
    mixed = torch.zeros_like(x)
    for expert in range(config["num_local_experts"]):
        w1, w2, w3 = (w[f"block_sparse_moe.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
        mixed += weights[..., expert, None] * F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
    return mixed


def _swiglu(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _experts(x: torch.Tensor, w: Weights, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Token by token and choice by choice."""
    mixed = torch.zeros_like(x)
    for at in torch.cartesian_prod(*(torch.arange(size) for size in chosen.shape)).tolist():
        row, place, choice = at
        expert = _swiglu(x[row, place], w, f"mlp.experts.{int(chosen[row, place, choice])}")
        mixed[row, place] += weights[row, place, choice] * expert
    return mixed


def _deepseek_mixture(x: torch.Tensor, w: Weights, config: dict[str, Any]) -> torch.Tensor:
    """V2's `MoEGate` (group_limited_greedy) and V3's (noaux_tc), with their shared experts."""
    logits = F.linear(x, w["mlp.gate.weight"])
    third = config["model_type"] == "deepseek_v3"
    scores = logits.sigmoid() if third else logits.softmax(-1)
    wanted = scores + w["mlp.gate.e_score_correction_bias"] if third else scores
    grouped = wanted.unflatten(-1, (config["n_group"], -1))
    of_group = grouped.topk(2, dim=-1).values.sum(-1) if third else grouped.amax(-1)
    best = of_group.topk(config["topk_group"], dim=-1).indices
    allowed = torch.zeros_like(of_group).scatter(-1, best, 1.0).bool().unsqueeze(-1).expand_as(grouped).flatten(-2)
    chosen = wanted.masked_fill(~allowed, float("-inf")).topk(config["num_experts_per_tok"], dim=-1).indices
    weights = scores.gather(-1, chosen)
    if config["norm_topk_prob"]:
        weights = weights / weights.sum(-1, keepdim=True)
    routed = _experts(x, w, chosen, weights * config["routed_scaling_factor"])
    return routed + _swiglu(x, w, "mlp.shared_experts")


def gemma(weights: Weights, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Gemma 3: logits [batch, length, vocabulary]. Norms are published as differences from 1."""
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps, every = config["rms_norm_eps"], config["sliding_window_pattern"]
    batch, length = tokens.shape
    local, factor = config["rope_local_base_freq"], (config["rope_scaling"] or {"factor": 1.0})["factor"]
    x = weights["model.embed_tokens.weight"][tokens] * config["hidden_size"] ** 0.5
    for layer in range(config["num_hidden_layers"]):
        w = {n.removeprefix(f"model.layers.{layer}."): t for n, t in weights.items() if f".layers.{layer}." in n}
        h = _rms(x, 1 + w["input_layernorm.weight"], eps)
        q, k, v = (F.linear(h, w[f"self_attn.{n}_proj.weight"]).view(batch, length, -1, size) for n in "qkv")
        q, k = (_rms(t, 1 + w[f"self_attn.{n}_norm.weight"], eps) for n, t in (("q", q), ("k", k)))
        slides = (layer + 1) % every > 0
        theta, divisor = (local, 1.0) if slides else (config["rope_theta"], factor)
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size) / divisor
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)[None, :, None]
        q, k = (t * angles.cos().to(x.dtype) + _half(t) * angles.sin().to(x.dtype) for t in (q, k))
        q = q * (size / config["query_pre_attn_scalar"]) ** 0.5
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        attended = F.linear(_attend(q, k, v, config["sliding_window"] if slides else 0), w["self_attn.o_proj.weight"])
        x = x + _rms(attended, 1 + w["post_attention_layernorm.weight"], eps)
        h = _rms(x, 1 + w["pre_feedforward_layernorm.weight"], eps)
        gate, up, down = (w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        fed = F.linear(F.gelu(F.linear(h, gate), approximate="tanh") * F.linear(h, up), down)
        x = x + _rms(fed, 1 + w["post_feedforward_layernorm.weight"], eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return F.linear(_rms(x, 1 + weights["model.norm.weight"], eps), head)


def gpt2(weights: Weights, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2: logits [batch, length, vocabulary]."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    batch, length = tokens.shape
    size = config["n_embd"] // config["n_head"]
    x = weights["wte.weight"][tokens] + weights["wpe.weight"][:length]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def matrix(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    for layer in range(config["n_layer"]):
        at = f"h.{layer}"
        q, k, v = (
            t.view(batch, length, -1, size) for t in matrix(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, dim=-1)
        )
        x = x + matrix(_attend(q, k, v), f"{at}.attn.c_proj")
        h = matrix(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + matrix(h, f"{at}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


def deepseek(weights: Weights, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V2 and V3: neighbors are turned as complex numbers."""
    nope, rope, width = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    eps, rank = config["rms_norm_eps"], config["kv_lora_rank"]
    batch, length = tokens.shape
    x = weights["model.embed_tokens.weight"][tokens]
    steps = config["rope_theta"] ** -(torch.arange(0, rope, 2, dtype=torch.float32) / rope)
    scaling, scores = config.get("rope_scaling"), 1.0
    if scaling:
        steps = _yarn(config, rope)
        scores = (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0) ** 2
    angles = torch.outer(torch.arange(length), steps)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[None, :, None]

    def turned(t: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    for layer in range(config["num_hidden_layers"]):
        w = {n.removeprefix(f"model.layers.{layer}."): t for n, t in weights.items() if f".layers.{layer}." in n}
        h = _rms(x, w["input_layernorm.weight"], eps)
        if config["q_lora_rank"]:
            narrow = _rms(F.linear(h, w["self_attn.q_a_proj.weight"]), w["self_attn.q_a_layernorm.weight"], eps)
            q = F.linear(narrow, w["self_attn.q_b_proj.weight"])
        else:
            q = F.linear(h, w["self_attn.q_proj.weight"])
        q = q.view(batch, length, -1, nope + rope)
        latent, shared = F.linear(h, w["self_attn.kv_a_proj_with_mqa.weight"]).split((rank, rope), dim=-1)
        latent = _rms(latent, w["self_attn.kv_a_layernorm.weight"], eps)
        kv = F.linear(latent, w["self_attn.kv_b_proj.weight"]).view(batch, length, -1, nope + width)
        shared = turned(shared.unsqueeze(2)).expand(-1, -1, q.shape[2], -1)
        q = torch.cat((q[..., :nope], turned(q[..., nope:])), dim=-1) * scores
        k = torch.cat((kv[..., :nope], shared), dim=-1)
        x = x + F.linear(_attend(q, k, kv[..., nope:]), w["self_attn.o_proj.weight"])
        h = _rms(x, w["post_attention_layernorm.weight"], eps)
        x = x + (_deepseek_mixture(h, w, config) if "mlp.gate.weight" in w else _swiglu(h, w, "mlp"))
    return F.linear(_rms(x, weights["model.norm.weight"], eps), weights["lm_head.weight"])


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotation(config: dict[str, Any], size: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaling, attention = config.get("rope_scaling"), 1.0
    if scaling and scaling.get("type") == "yarn":
        frequencies, attention = _yarn(config, size), 0.1 * math.log(scaling["factor"]) + 1.0
    elif scaling:
        frequencies = torch.tensor([_llama3(float(f), scaling) for f in frequencies], dtype=torch.float32)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    return both.cos().to(dtype) * attention, both.sin().to(dtype) * attention


def _yarn(config: dict[str, Any], size: int) -> torch.Tensor:
    """As in DeepSeek's `YarnRotaryEmbedding`, frequency by frequency."""
    scaling, base = config["rope_scaling"], config["rope_theta"]
    length = scaling["original_max_position_embeddings"]
    low, high = (
        size * math.log(length / (scaling[name] * 2 * math.pi)) / (2 * math.log(base))
        for name in ("beta_fast", "beta_slow")
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
    found = []
    for number in range(size // 2):
        kept = 1 - min(1.0, max(0.0, (number - low) / (high - low)))
        frequency = base ** -(2 * number / size)
        found.append(frequency * kept + frequency / scaling["factor"] * (1 - kept))
    return torch.tensor(found, dtype=torch.float32)


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    """As in Llama 3.1's own `apply_scaling`."""
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < old / high:
        return frequency
    if wavelength > old / low:
        return frequency / factor
    smooth = (old / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0) -> torch.Tensor:
    length = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    index = torch.arange(length)
    back = index.unsqueeze(1) - index
    scores = scores.masked_fill((back < 0) | (back >= (window or length)), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
