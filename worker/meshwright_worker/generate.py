"""Text from a checkpoint, whatever layout wrote it: in one process on the CPU, or with the model split over ranks.

Run as `python -m meshwright_worker.generate --checkpoint DIR --prompt "def " --tokens 200`. Split over two GPUs, so
that none holds the whole model: `torchrun --nproc-per-node 2 -m meshwright_worker.generate --tensor 2 ...`; rank 0
writes the text.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from meshwright.api.precision import Precision
from meshwright.layout import Layout
from meshwright_worker.checkpoint.manifest import Manifest
from meshwright_worker.checkpoint.whole import find_checkpoint
from meshwright_worker.data.tokenizer import decode, encode
from meshwright_worker.generation.model import load_split, load_whole, run_of
from meshwright_worker.generation.sample import sample
from meshwright_worker.mesh import joined
from meshwright_worker.torchrun import task_from_environment


def main() -> None:
    """The command line."""
    parser = _parser()
    arguments = parser.parse_args()
    if not arguments.prompt:
        parser.error("--prompt must not be empty")
    try:
        checkpoint, manifest = find_checkpoint(arguments.checkpoint)
        written = _write(arguments, checkpoint, manifest)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stdout.write(arguments.prompt + decode(written) + "\n")


def _write(arguments: argparse.Namespace, checkpoint: Path, manifest: Manifest) -> list[int]:
    layout = Layout(arguments.tensor, arguments.pipeline, arguments.expert, expert=arguments.expert)
    precision, capacity = Precision(arguments.precision), manifest.sequence_length
    prompt = encode(arguments.prompt)
    if layout.world_size == 1:
        whole = load_whole(checkpoint, manifest, precision, capacity)
        return sample(whole, prompt, arguments.tokens, arguments.temperature, arguments.seed)
    task = task_from_environment(run_of(manifest, layout, precision))
    with joined(task) as mesh:
        split = load_split(checkpoint, manifest, task.run, mesh, capacity)
        return sample(split, prompt, arguments.tokens, arguments.temperature, arguments.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.generate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or the directory of several")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=200, help="how many bytes to write")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp64"], default="fp32", help="format of compute")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that each layer is split over")
    parser.add_argument("--pipeline", type=int, default=1, help="stages that the layers are split into")
    parser.add_argument("--expert", type=int, default=1, help="ranks that a layer's experts are spread over")
    return parser


if __name__ == "__main__":
    main()
