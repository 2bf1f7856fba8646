"""Choosing the next tokens from a model's logits."""

from __future__ import annotations

import torch

from meshwright_worker.inference.checks import check_temperature
from meshwright_worker.inference.model import CachedModel


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
    """Up to `count` tokens that go on from `prompt`; on a mesh the same ones on every rank.

    When the model remembers no more, it reads the last half of what it remembered again and goes on from there.

    Args:
        model: with nothing in its memory.
        prompt: at least one token; of a longer one than the model remembers, the last half of that many are read.
        count: how many tokens.
        temperature: divides the logits; 0 takes the likeliest token each time.
        seed: the same seed gives the same text.
        vocabulary: ids from here on are not taken: rows that only fill the embedding up. None takes all.
        end: the token that ends a document, and so the text; it is not among what is returned. None goes on after it.

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
    # The likeliest at 0, and in fp64: divided by a small temperature, logits would be infinite.
    scaled = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(torch.softmax(scaled, dim=-1).float(), 1, generator=generator))
