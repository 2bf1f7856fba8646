"""Rules on the model."""

from __future__ import annotations

import re

from meshwright.api.data import Tokenizer
from meshwright.api.model import ModelSpec
from meshwright.api.model_parts import Norm
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.data.tokenizers import BYTE_VOCABULARY
from meshwright.rules.facts import Facts, ModelFacts
from meshwright.rules.rule import Rule, divides

_NUMBERS = [name for name in ModelSpec.model_fields if name not in ("preset", "hugging_face")]
_ANY_NUMBER = " || ".join(f"has(self.model.{ModelSpec.model_fields[name].alias or name})" for name in _NUMBERS)


_NO_MODEL = ModelSpec(preset="none")
"""A model that breaks no rule."""


def _model(facts: Facts) -> ModelFacts:
    """The model's sizes. All are None if there is no model."""
    return facts.model if facts.model is not None else _NO_MODEL


def _model_spec(spec: ParallelTrainingJobSpec) -> ModelSpec:
    return spec.model if spec.model is not None else _NO_MODEL


def _preset_alone(spec: ParallelTrainingJobSpec) -> bool:
    model = _model_spec(spec)
    return model.preset is None or model == ModelSpec(preset=model.preset)


def _configuration_alone(spec: ParallelTrainingJobSpec) -> bool:
    model = _model_spec(spec)
    return model.hugging_face is None or all(getattr(model, name) is None for name in _NUMBERS)


def _is_configuration(spec: ParallelTrainingJobSpec) -> bool:
    text = _model_spec(spec).hugging_face
    return text is None or (re.match(r"[ \t\r\n]*[{]", text) is not None and '"model_type"' in text)


def _numbers_complete(spec: ParallelTrainingJobSpec) -> bool:
    m = _model_spec(spec)
    needed = (m.layers, m.hidden_size, m.intermediate_size, m.heads, m.vocab_size)
    return m.preset is not None or m.hugging_face is not None or None not in needed


def _vocabulary_holds_bytes(facts: Facts) -> bool:
    size = _model(facts).vocab_size
    byte = facts.data is not None and facts.data.tokenizer is Tokenizer.BYTE
    return not byte or size is None or size >= BYTE_VOCABULARY


def _latent_alone(facts: Facts) -> bool:
    m = _model(facts)
    if m.latent is None:
        return True
    grouped = m.kv_heads is not None and m.heads is not None and m.kv_heads != m.heads
    others = grouped or m.positions or m.biases or m.attention_biases or m.query_key_norms
    return m.latent.rope_size % 2 == 0 and not others


def _scaling_is_possible(facts: Facts) -> bool:
    m = _model(facts)
    scaling = m.rope_scaling
    return scaling is None or (not m.positions and scaling.high_frequency_factor > scaling.low_frequency_factor)


def _positions_suffice(facts: Facts) -> bool:
    rows = _model(facts).positions
    return not rows or facts.training is None or rows >= facts.training.sequence_length


def _heads_have_even_widths(facts: Facts) -> bool:
    model = _model(facts)
    heads, hidden = model.heads, model.hidden_size
    if heads is None or hidden is None or model.head_size not in (None, hidden // heads):
        return True
    return hidden % (2 * heads) == 0


def _window_distinguishes_layers(facts: Facts) -> bool:
    m = _model(facts)
    return bool(m.sliding_window) or not (m.full_attention_every or m.window_rope_theta)


MODEL_FORM_RULES: tuple[Rule[ParallelTrainingJobSpec], ...] = (
    Rule(
        "model.preset",
        "is not supported with other fields of `model`: remove them, or replace `preset` with the sizes of the model",
        f"!has(self.model) || !has(self.model.preset) || !(has(self.model.huggingFace) || {_ANY_NUMBER})",
        _preset_alone,
    ),
    Rule(
        "model.huggingFace",
        "is not supported with other fields of `model`: remove them, or print the configuration as fields with "
        "`meshwright model`, and change those",
        f"!has(self.model) || !has(self.model.huggingFace) || !({_ANY_NUMBER})",
        _configuration_alone,
    ),
    Rule(
        "model.huggingFace",
        "must be the content of a model's `config.json`: a JSON object with `model_type`",
        "!has(self.model) || !has(self.model.huggingFace) || (self.model.huggingFace.matches('^[ \\\\t\\\\r\\\\n]*[{]')"
        " && self.model.huggingFace.contains('\"model_type\"'))",
        _is_configuration,
    ),
    Rule(
        "model",
        "must have a `preset`, a `huggingFace` configuration, or all of `layers`, `hiddenSize`, "
        "`intermediateSize`, `heads` and `vocabSize`",
        "!has(self.model) || has(self.model.preset) || has(self.model.huggingFace)"
        " || (has(self.model.layers) && has(self.model.hiddenSize)"
        " && has(self.model.intermediateSize) && has(self.model.heads) && has(self.model.vocabSize))",
        _numbers_complete,
    ),
)
"""Rules on which fields describe the model."""

MODEL_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "model.kvHeads",
        "must divide `model.heads`, because each key and value head serves the same number of query heads",
        "!has(self.model) || !has(self.model.heads) || !has(self.model.kvHeads)"
        " || self.model.heads % self.model.kvHeads == 0",
        lambda facts: divides(_model(facts).kv_heads, _model(facts).heads),
    ),
    Rule(
        "model.hiddenSize",
        "must be a multiple of twice `model.heads`, because rotary positions rotate pairs of a head's elements: "
        "change it, or set `headSize` to an even number",
        "!has(self.model) || !has(self.model.heads) || !has(self.model.hiddenSize)"
        " || (has(self.model.headSize) && self.model.headSize != self.model.hiddenSize / self.model.heads)"
        " || self.model.hiddenSize % (2 * self.model.heads) == 0",
        _heads_have_even_widths,
    ),
    Rule(
        "model.headSize",
        "must be even, because rotary positions rotate pairs of elements",
        "!has(self.model) || !has(self.model.headSize) || self.model.headSize % 2 == 0",
        lambda facts: divides(2, _model(facts).head_size),
    ),
    Rule(
        "model.biases",
        "needs `model.norm: LayerNorm`, because RMSNorm has no bias: change the norm, or use `attentionBiases` for "
        "biases of attention only",
        "!has(self.model) || !has(self.model.biases) || !self.model.biases"
        " || (has(self.model.norm) && self.model.norm == 'LayerNorm')",
        lambda facts: not _model(facts).biases or _model(facts).norm is Norm.LAYER_NORM,
    ),
    Rule(
        "model.latent",
        "is not supported with `kvHeads` below `heads`, `positions`, `biases`, `attentionBiases` or "
        "`queryKeyNorms`, and its `ropeSize` must be even: remove these fields",
        "!has(self.model) || !has(self.model.latent) || (self.model.latent.ropeSize % 2 == 0"
        " && (!has(self.model.kvHeads) || !has(self.model.heads) || self.model.kvHeads == self.model.heads)"
        " && (!has(self.model.positions) || self.model.positions == 0)"
        " && (!has(self.model.biases) || !self.model.biases)"
        " && (!has(self.model.attentionBiases) || !self.model.attentionBiases)"
        " && (!has(self.model.queryKeyNorms) || !self.model.queryKeyNorms))",
        _latent_alone,
    ),
    Rule(
        "model.ropeScaling",
        "needs rotary positions (`positions: 0`), and a `highFrequencyFactor` above `lowFrequencyFactor`",
        "!has(self.model) || !has(self.model.ropeScaling)"
        " || ((!has(self.model.positions) || self.model.positions == 0)"
        " && self.model.ropeScaling.highFrequencyFactor > self.model.ropeScaling.lowFrequencyFactor)",
        _scaling_is_possible,
    ),
    Rule(
        "model.slidingWindow",
        "must be set with `fullAttentionEvery` and `windowRopeTheta`, which tell layers apart by it: set it, or remove "
        "those",
        "!has(self.model) || (has(self.model.slidingWindow) && self.model.slidingWindow > 0)"
        " || ((!has(self.model.fullAttentionEvery) || self.model.fullAttentionEvery == 0)"
        " && (!has(self.model.windowRopeTheta) || self.model.windowRopeTheta == 0))",
        _window_distinguishes_layers,
    ),
    Rule(
        "model.positions",
        "must be at least `training.sequenceLength`, because each position of a sequence needs a row",
        "!has(self.model) || !has(self.model.positions) || self.model.positions == 0 || !has(self.training)"
        " || self.model.positions >= self.training.sequenceLength",
        _positions_suffice,
    ),
    Rule(
        "model.vocabSize",
        f"must be at least {BYTE_VOCABULARY} with `data.tokenizer: Byte`, for the 256 byte values and a document "
        "separator",
        "!has(self.model) || !has(self.model.vocabSize) || !has(self.data) || self.data.tokenizer != 'Byte'"
        f" || self.model.vocabSize >= {BYTE_VOCABULARY}",
        _vocabulary_holds_bytes,
    ),
)
