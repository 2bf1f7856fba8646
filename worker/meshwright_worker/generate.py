"""Generate text with a checkpoint of any layout, in one process or with the model split over ranks.

Run as `python -m meshwright_worker.generate --checkpoint DIR --prompt "def " --tokens 200`. To split the model over two
GPUs: `torchrun --nproc-per-node 2 -m meshwright_worker.generate --tensor 2 ...`. Rank 0 prints the text. It uses the
run's tokenizer, and stops when the model ends the document.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from meshwright.api.precision import Precision
from meshwright.data.tokenizers import Tokenizer
from meshwright.layout import Layout
from meshwright_worker.checkpoint.files import CheckpointPath
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.loader import find_checkpoint_on_mesh
from meshwright_worker.checkpoint.manifest import Manifest
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.inference.checkpoint_tokenizer import BYTES, tokenizer_for
from meshwright_worker.inference.model import CachedModel, inference_run, load_full_model, load_sharded_model
from meshwright_worker.inference.sampling import check_temperature, sample
from meshwright_worker.pretrained.base_fingerprint import base_of_adapters, check_base
from meshwright_worker.rank.torchrun import task_from_environment


def main() -> None:
    """Run the command line."""
    parser = _parser()
    arguments = parser.parse_args()
    if not arguments.prompt:
        parser.error("--prompt must not be empty")
    try:
        check_temperature(arguments.temperature)
        layout = Layout(arguments.tensor, arguments.pipeline, arguments.expert, expert=arguments.expert)
        # If the model is split, each rank verifies a part of the files after the process group is initialized.
        checkpoint, manifest = find_checkpoint(arguments.checkpoint, verify=layout.world_size == 1, best=arguments.best)
        manifest = _with_base(manifest, arguments.base)
        tokenizer = tokenizer_for(manifest, arguments.tokenizer)
        (prompt,) = tokenizer.encode([arguments.prompt])
        if not prompt:
            parser.error(f"--prompt {arguments.prompt!r} has no tokens: pass a longer text")
        generated = _generate(arguments, layout, checkpoint, manifest, tokenizer, prompt)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")  # the usage would not help
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stdout.write(arguments.prompt + continuation(tokenizer, prompt, generated) + "\n")


def continuation(tokenizer: Tokenizer, prompt: list[int], generated: list[int]) -> str:
    """Return the text generated after a prompt: decoded separately, its first token may lose a leading space."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *generated])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(generated)


def _generate(
    arguments: argparse.Namespace,
    layout: Layout,
    checkpoint: CheckpointPath,
    manifest: Manifest,
    tokenizer: Tokenizer,
    prompt: list[int],
) -> list[int]:
    precision, capacity = Precision(arguments.precision), manifest.sequence_length

    def generate_tokens(model: CachedModel) -> list[int]:
        count, temperature, seed = arguments.tokens, arguments.temperature, arguments.seed
        end = None if arguments.past_end else tokenizer.separator
        return sample(model, prompt, count, temperature, seed, vocabulary=tokenizer.vocabulary, end=end)

    if layout.world_size == 1:
        device = torch.device("cpu") if arguments.cpu else None
        return generate_tokens(load_full_model(checkpoint, manifest, precision, capacity, device))
    task = task_from_environment(inference_run(manifest, layout, precision))
    with join_mesh(task) as mesh:
        checkpoint, found = find_checkpoint_on_mesh(arguments.checkpoint, mesh, best=arguments.best)
        manifest = _with_base(found, arguments.base)
        return generate_tokens(load_sharded_model(checkpoint, manifest, task.run, mesh, capacity))


def _with_base(manifest: Manifest, base: Path | None) -> Manifest:
    """The manifest with the base model of its adapters at another path, which has been checked to be the same model.

    Raises:
        ValueError: the checkpoint has no adapters, or those of another model.
    """
    if base is not None and manifest.lora is None:
        raise ValueError("--base: the checkpoint contains the full model and no adapters: leave it out")
    directory = base_of_adapters(manifest, base)
    if directory is not None:
        check_base(manifest, directory)
    return manifest if base is None else manifest.model_copy(update={"initial_weights": str(base)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.generate", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="A checkpoint, or a directory or URI of checkpoints: uses the newest intact one.",
    )
    parser.add_argument("--best", action="store_true", help="Use the checkpoint with the lowest evaluation loss.")
    parser.add_argument(
        "--tokenizer", help=f"Path of the run's tokenizer.json or SentencePiece model, if it has moved, or `{BYTES}`."
    )
    parser.add_argument("--base", type=Path, help="With adapters: the base model, if it is not at its old path.")
    parser.add_argument("--prompt", default="def ", help="Text to continue (default: `def `).")
    parser.add_argument("--tokens", type=int, default=200, help="Maximum number of tokens to generate (default: 200).")
    parser.add_argument("--past-end", action="store_true", help="Continue with the next document after one ends.")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="Sampling temperature (default: 0.7). With 0: always the likeliest token.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sampling (default: 0).")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp64"],
        default="fp32",
        help="Number format of computation (default: fp32).",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="Compute on the CPU. Has no effect if the model is split over ranks."
    )
    parser.add_argument(
        "--tensor", type=int, default=1, help="Number of ranks that each layer is split over (default: 1)."
    )
    parser.add_argument("--pipeline", type=int, default=1, help="Number of pipeline stages (default: 1).")
    parser.add_argument(
        "--expert",
        type=int,
        default=1,
        help="Number of ranks that a layer's experts are distributed over (default: 1).",
    )
    return parser


if __name__ == "__main__":
    main()
