"""Text from a checkpoint, in one process on the CPU, whatever layout wrote it.

Run as `python -m meshwright_worker.generate --checkpoint DIR --prompt "def " --tokens 200`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.loader import load_tensors
from meshwright_worker.checkpoint.manifest import Manifest, read_manifest
from meshwright_worker.checkpoint.tensors import MODEL
from meshwright_worker.data.tokenizer import VOCABULARY, decode, encode
from meshwright_worker.models.initialize import materialize
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.precision import PARAMETER_DTYPE


def load_model(path: Path) -> tuple[DecoderStage, Manifest]:
    """The whole model of a checkpoint, or of the newest one of a job's directory.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        CheckpointMismatchError: it cannot be loaded.
    """
    steps = CheckpointDirectory(path).steps()
    if steps:
        path = CheckpointDirectory(path).path(steps[0])
    manifest = read_manifest(path)
    if manifest is None:
        raise FileNotFoundError(f"`--checkpoint {path}` holds no complete checkpoint")
    with torch.device("meta"):
        model = DecoderStage(manifest.architecture, PARAMETER_DTYPE)
    materialize(model, torch.device("cpu"))
    parameters = {f"{MODEL}.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    buffers = {f"{MODEL}.{name}": buffer for name, buffer in model.named_buffers()}
    load_tensors({**parameters, **buffers}, path, None)
    return model.eval(), manifest


@torch.no_grad()
def sample(
    model: DecoderStage, prompt: list[int], count: int, context: int, temperature: float, seed: int
) -> list[int]:
    """`count` tokens that go on from `prompt`.

    Args:
        model: the whole model.
        prompt: at least one token.
        count: how many tokens.
        context: how many of the last tokens the model sees: the length that it was trained on.
        temperature: divides the logits; 0 takes the likeliest token each time.
        seed: the same seed gives the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1, :VOCABULARY].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.generate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or the directory of several")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=200, help="how many bytes to write")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not arguments.prompt:
        parser.error("--prompt must not be empty")
    try:
        model, manifest = load_model(arguments.checkpoint)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    written = sample(
        model,
        encode(arguments.prompt),
        arguments.tokens,
        manifest.sequence_length,
        arguments.temperature,
        arguments.seed,
    )
    sys.stdout.write(arguments.prompt + decode(written) + "\n")


if __name__ == "__main__":
    main()
