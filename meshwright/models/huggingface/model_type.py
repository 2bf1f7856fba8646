"""What the readers and writers of all families share: a model type, and the fields that most of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec
from meshwright.api.model_parts import Activation
from meshwright.models.architecture import Architecture
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
TRAINING_FIELDS = {"balancing", "auxiliary_weight", "z_loss_weight", "bias_rate"}
"""Fields of a mixture that change no logit, but for the biases of `balancing: Bias`."""


@dataclass(frozen=True)
class ExpertTensors:
    """What the published tensors of a mixture of experts are called."""

    block: str = "mlp"
    """The mixture within its layer."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class ModelType:
    """A `model_type` of transformers: how its configuration is read and written, and what its tensors are called."""

    name: str
    """`model_type`."""
    model_class: str
    """`architectures`."""
    read: Callable[[ConfigFields], Architecture]
    """The architecture that a configuration describes, with `defaults` filled in."""
    write: Callable[[Architecture], dict[str, Any]] | None = None
    """The fields of an architecture but `model_type` and `architectures`, or a ConfigError where the type has no such
    shape; None for a type that is only read."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that are left out, where it differs from what most types have in common, which
    the readers know. A field that is null is not left out."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """What transformers 5 writes under another name than its predecessors: new name to old."""
    built: bool = True
    """Whether the runtime builds models of this type; others are counted."""
    prefix: str = "model"
    """What the names of published tensors begin with, but that of the output projection."""
    experts: ExpertTensors = ExpertTensors()
    """What the tensors of its mixtures are called."""

    def fields(self, config: Mapping[str, Any]) -> ConfigFields:
        """The configuration with the type's defaults, under the names that the readers know."""
        renamed = {old: config[new] for new, old in self.renamed.items() if new in config}
        return ConfigFields({**self.defaults, **renamed, **config})


def read_activation(fields: ConfigFields, name: str, default: str) -> Activation:
    """The activation that the field `name` holds.

    Raises:
        ConfigError: the runtime does not build it.
    """
    value = fields.text(name) or default
    if value not in _ACTIVATIONS:
        raise ConfigError(f"activation {value!r} is not built by this runtime: known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def activation_name(activation: Activation) -> str:
    """What transformers calls an activation."""
    return _ACTIVATION_NAMES[activation]


def read_numbers(fields: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """The fields that Llama and DeepSeek have in common, as an Architecture's.

    Raises:
        ConfigError: one is missing or of a wrong type, or the runtime does not build it.
    """
    # transformers 5 moved the base in with the scaling, and still reads files that have it outside.
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
    """Refuse a mixture that differs from the defaults in other fields than these.

    Raises:
        ConfigError: it does; the message has the `name` of the nearest family.
    """
    plain = MixtureSpec(**mixture.model_dump(include=fields))
    unlike = plain.model_dump(exclude=TRAINING_FIELDS) != mixture.model_dump(exclude=TRAINING_FIELDS)
    if unlike or mixture.balancing is Balancing.BIAS:
        raise ConfigError(f"no Hugging Face model type that is written has this mixture; {name} is the nearest")
