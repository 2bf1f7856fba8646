"""A checkpoint as a Hugging Face model directory, in one process, whatever layout wrote it; adapters are merged.

Run as `python -m meshwright_worker.export --checkpoint DIR --output DIR --dtype bf16`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.pretrained.hf_export import export

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GIBIBYTE = 1024**3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or the directory of several")
    parser.add_argument("--output", type=Path, required=True, help="a new or empty directory")
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="format of the weights")
    parser.add_argument("--file-gib", type=float, default=4.0, help="the most that one file may hold, in GiB")
    parser.add_argument("--base", type=Path, help="the model that training began from: of adapters, if it moved")
    arguments = parser.parse_args()
    try:
        checkpoint, manifest = find_checkpoint(arguments.checkpoint)
        files = export(
            checkpoint,
            manifest,
            arguments.output,
            dtype=_DTYPES[arguments.dtype],
            file_bytes=int(arguments.file_gib * _GIBIBYTE),
            base=arguments.base,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write(f"step {manifest.state.step}: {len(files)} file(s) in {arguments.output}\n")


if __name__ == "__main__":
    main()
