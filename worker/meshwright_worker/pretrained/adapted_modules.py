"""Which modules of a published model have adapters, in the words of PEFT.

An adapter of the runtime belongs to one of its matrices; one of PEFT belongs to a module of transformers. Queries, keys
and values of GPT-2 and Phi-3 are three matrices of one module, and the two matrices of Phi-3's SwiGLU are of one, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.model_type import ModelType
from meshwright_worker.models.lora import is_adapter
from meshwright_worker.pretrained.hf_export import published_name
from meshwright_worker.pretrained.name_mapping import TensorSource, parameter_sources

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module of the published model with an adapter."""

    name: str
    """Its path in transformers, such as `model.layers.0.self_attn.q_proj`."""
    matrices: Mapping[str, TensorSource]
    """The runtime's matrices that it contains, by their path, such as `layers.0.attention.query`."""

    @property
    def transposed(self) -> bool:
        """Whether the module stores its weight as [inputs, outputs]."""
        return any(source.transposed for source in self.matrices.values())

    @property
    def parts(self) -> int:
        """Matrices that the module contains in full, with those that have no adapter."""
        return next(iter(self.matrices.values())).parts

    @property
    def down(self) -> str:
        """Name of its A, [rank, inputs], in a file of PEFT."""
        return f"base_model.model.{self.name}.lora_A.weight"

    @property
    def up(self) -> str:
        """Name of its B, [outputs, rank], in a file of PEFT."""
        return f"base_model.model.{self.name}.lora_B.weight"


def adapted_modules(model: Architecture, model_type: ModelType, parameters: Collection[str]) -> list[AdaptedModule]:
    """Return the modules of a model, published as `model_type`, whose matrices have adapters among the `parameters`, in
    the model's order.
    """
    matrices = {name.rpartition(".")[0] for name in parameters if is_adapter(name)}
    modules: dict[str, dict[str, TensorSource]] = {}
    for name, source in parameter_sources(model, model_type).items():
        path = name.removesuffix(WEIGHT)
        if path in matrices and isinstance(source, TensorSource):
            module = published_name(model_type, source.tensor).removesuffix(WEIGHT)
            modules.setdefault(module, {})[path] = source
    return [AdaptedModule(name, parts) for name, parts in modules.items()]
