"""Shared by the readers and writers of all families: a model type, and the fields that most of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec
from meshwright.api.model_parts import Activation
from meshwright.models.architecture import Architecture
from meshwright.models.differences import differing_fields
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields
from meshwright.models.huggingface.rope_scaling import read_scaling, write_scaling

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_ACTIVATION_NAMES = {
    Activation.SILU: "silu",
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu_new",
    Activation.RELU: "relu",
}
_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
TRAINING_FIELDS = {"balancing", "auxiliary_weight", "z_loss_weight", "bias_rate"}
"""Fields of a mixture that do not change logits, except the biases of `balancing: Bias`."""


@dataclass(frozen=True)
class ExpertTensors:
    """The names of the published tensors of a mixture of experts."""

    block: str = "mlp"
    """Name of the mixture within its layer."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class ModelType:
    """A `model_type` of transformers: reader and writer of its configuration, and the names of its tensors."""

    name: str
    """`model_type`."""
    model_class: str
    """`architectures`."""
    read: Callable[[ConfigFields], Architecture]
    """Return the architecture of a configuration with `defaults` filled in."""
    write: Callable[[Architecture], dict[str, Any]] | None = None
    """Return the fields of an architecture except `model_type` and `architectures`.

    Raises ConfigError if the type does not have this shape. None for a type that is only read.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for fields that are left out, if they differ from the readers' defaults.

    A field that is null is not left out.
    """
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Fields that transformers 5 renamed: new name -> old name."""
    built: bool = True
    """Whether the runtime builds models of this type. Others are only counted."""
    prefix: str = "model"
    """Prefix of the names of published tensors, except the output projection."""
    experts: ExpertTensors = ExpertTensors()
    """Names of the tensors of its mixtures."""
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    """Names of the published norms of a layer by the runtime's."""
    norm_offset: float = 0.0
    """How much less the published weights of norms are than the runtime's."""
    fused: bool = False
    """Whether queries, keys and values are one published tensor, and the two matrices of SwiGLU another."""

    def fields(self, config: Mapping[str, Any]) -> ConfigFields:
        """Return the configuration's fields with the type's defaults, under the names that the readers use."""
        renamed = {old: config[new] for new, old in self.renamed.items() if new in config}
        return ConfigFields({**self.defaults, **renamed, **config})


def read_activation(fields: ConfigFields, name: str, default: str) -> Activation:
    """Return the activation in the field `name`.

    Raises:
        ConfigError: the runtime does not build the activation.
    """
    value = fields.text(name) or default
    if value not in _ACTIVATIONS:
        raise ConfigError(f"activation {value!r} is not supported: use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def activation_name(activation: Activation) -> str:
    """Return the name of an activation in transformers."""
    return _ACTIVATION_NAMES[activation]


def read_numbers(fields: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """Return the fields that Llama and DeepSeek have in common, as fields of an Architecture.

    Raises:
        ConfigError: a field is missing or has the wrong type, or the runtime does not build it.
    """
    # transformers 5 moved the base into the scaling, and still reads files that have it outside.
    theta, rope = fields.real("rope_theta", 10000.0), fields.section("rope_scaling", "rope_parameters")
    return {
        "heads": fields.number("num_attention_heads"),
        "layers": fields.number("num_hidden_layers"),
        "hidden_size": fields.number("hidden_size"),
        "intermediate_size": fields.number("intermediate_size"),
        "vocab_size": fields.number("vocab_size"),
        "rope_theta": theta if rope is None else rope.real("rope_theta", theta),
        "norm_epsilon": fields.real("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "activation": read_activation(fields, "hidden_act", "silu"),
        "rope_scaling": read_scaling(rope, latent=latent),
    }


def write_numbers(model: Architecture) -> dict[str, Any]:
    """The reverse of `read_numbers`."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": activation_name(model.activation),
        "rope_scaling": write_scaling(model.rope_scaling, latent=model.latent is not None),
    }


def check_mixture_fields(mixture: MixtureSpec, name: str, fields: set[str]) -> None:
    """Raise an error if a mixture differs from the defaults in fields other than these.

    Raises:
        ConfigError: it differs. The message has the `name` of the most similar family.
    """
    like = MixtureSpec(**mixture.model_dump(include=fields)).model_dump(mode="json", exclude=TRAINING_FIELDS)
    here = mixture.model_dump(mode="json", exclude=TRAINING_FIELDS)
    if mixture.balancing is Balancing.BIAS:
        like["balancing"], here["balancing"] = Balancing.AUXILIARY.value, mixture.balancing.value
    if unlike := differing_fields(like, here, "here", "mixture."):
        raise ConfigError(other_mixture(name, "; ".join(unlike)))


def other_mixture(name: str, difference: str) -> str:
    """Why a mixture is not written: the most similar family, and how that differs."""
    return f"no Hugging Face model type that can be written has this mixture; the most similar is {name}: {difference}"
