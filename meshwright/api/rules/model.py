"""Rules on the model's numbers."""

from __future__ import annotations

from meshwright.api.data import Tokenizer
from meshwright.api.rules.rule import Rule, divides
from meshwright.api.spec import ModelSpec
from meshwright.api.spec import ParallelTrainingJobSpec as Spec

BYTE_VOCABULARY = 257
"""The 256 byte values and the document separator."""


def _model(spec: Spec) -> ModelSpec:
    """The model; where there is none, one that every rule lets pass."""
    return spec.model if spec.model is not None else ModelSpec(preset="none")


def _preset_alone(spec: Spec) -> bool:
    model = _model(spec)
    return model.preset is None or model == ModelSpec(preset=model.preset)


def _numbers_complete(spec: Spec) -> bool:
    m = _model(spec)
    needed = (m.layers, m.hidden_size, m.intermediate_size, m.heads, m.vocab_size)
    return m.preset is not None or None not in needed


def _vocabulary_holds_bytes(spec: Spec) -> bool:
    size = _model(spec).vocab_size
    byte = spec.data is not None and spec.data.tokenizer is Tokenizer.BYTE
    return not byte or size is None or size >= BYTE_VOCABULARY


def _twice(number: int | None) -> int | None:
    return None if number is None else 2 * number


MODEL_RULES = (
    Rule(
        "model.preset",
        "excludes every other field of `model`: remove them, or remove `preset` and describe the model in numbers",
        "!has(self.model) || !has(self.model.preset) || !(has(self.model.layers) || has(self.model.hiddenSize)"
        " || has(self.model.intermediateSize) || has(self.model.heads) || has(self.model.kvHeads)"
        " || has(self.model.vocabSize) || has(self.model.ropeTheta) || has(self.model.tieEmbeddings))",
        _preset_alone,
    ),
    Rule(
        "model",
        "must name a `preset`, or give `layers`, `hiddenSize`, `intermediateSize`, `heads` and `vocabSize`",
        "!has(self.model) || has(self.model.preset) || (has(self.model.layers) && has(self.model.hiddenSize)"
        " && has(self.model.intermediateSize) && has(self.model.heads) && has(self.model.vocabSize))",
        _numbers_complete,
    ),
    Rule(
        "model.kvHeads",
        "must divide `model.heads`: each key and value head serves the same number of query heads",
        "!has(self.model) || !has(self.model.heads) || !has(self.model.kvHeads)"
        " || self.model.heads % self.model.kvHeads == 0",
        lambda spec: divides(_model(spec).kv_heads, _model(spec).heads),
    ),
    Rule(
        "model.hiddenSize",
        "must be divisible by twice `model.heads`: a head has an even width, since rotary positions turn pairs",
        "!has(self.model) || !has(self.model.heads) || !has(self.model.hiddenSize)"
        " || self.model.hiddenSize % (2 * self.model.heads) == 0",
        lambda spec: divides(_twice(_model(spec).heads), _model(spec).hidden_size),
    ),
    Rule(
        "model.vocabSize",
        "must be at least 257 with `data.tokenizer: Byte`: the 256 byte values and a document separator",
        "!has(self.model) || !has(self.model.vocabSize) || !has(self.data) || self.data.tokenizer != 'Byte'"
        " || self.model.vocabSize >= 257",
        _vocabulary_holds_bytes,
    ),
)
