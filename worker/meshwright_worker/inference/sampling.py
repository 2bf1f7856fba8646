"""Samples the next tokens from a model's logits."""

from __future__ import annotations

from math import inf

import torch

from meshwright_worker.inference.model import CachedModel
from meshwright_worker.rank.failures import InvalidRunError


def sample(
    model: CachedModel,
    prompt: list[int],
    count: int,
    temperature: float,
    seed: int,
    *,
    vocabulary: int | None = None,
    end: int | None = None,
) -> list[int]:
    """Return up to `count` tokens that continue `prompt`; on a mesh the same ones on every rank.

    When the cache is full, the last half of its tokens is processed again and generation continues from there.

    Args:
        model: with an empty cache.
        prompt: at least one token; if it does not fit the cache, only the last tokens are read, half the cache's
            capacity.
        count: maximum number of tokens.
        temperature: divides the logits; 0 always takes the most likely token.
        seed: the same seed gives the same text.
        vocabulary: ids from here on are never sampled: such rows only pad the embedding. None allows all.
        end: the token that ends a document, and so the text; it is not returned. None continues after it.

    Raises:
        InvalidRunError: see `check_temperature`.
    """
    check_temperature(temperature)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    next_input = tokens
    for _ in range(count):
        if model.length + len(next_input) > model.capacity:
            model.clear()
            next_input = tokens[-max(1, model.capacity // 2) :]
        logits = model.read(torch.tensor([next_input]))[0, -1, :vocabulary].cpu()
        tokens.append(model.broadcast_token(_sample_token(logits, temperature, generator)))
        if tokens[-1] == end:
            return tokens[len(prompt) : -1]
        next_input = tokens[-1:]
    return tokens[len(prompt) :]


def _sample_token(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Take the most likely token at 0; divide in fp64, since a small temperature could make fp32 logits infinite.
    scaled = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(torch.softmax(scaled, dim=-1).float(), 1, generator=generator))


def check_temperature(temperature: float) -> None:
    """Reject a temperature that logits cannot be divided by.

    Raises:
        InvalidRunError: it is negative, infinite or not a number.
    """
    if not 0 <= temperature < inf:
        raise InvalidRunError(
            f"`--temperature {temperature}` must be 0, which takes the likeliest token each time, or a positive number "
            "such as 0.7"
        )
