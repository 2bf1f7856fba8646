"""Export a checkpoint of any layout as a Hugging Face model directory, in one process. Merges LoRA adapters.

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
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.export", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="A checkpoint, or a directory of checkpoints: exports the newest intact one.",
    )
    parser.add_argument("--output", type=Path, required=True, help="A new or empty directory.")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="fp32", help="Number format of the exported weights (default: fp32)."
    )
    parser.add_argument("--file-gib", type=float, default=4.0, help="Maximum size of one file, in GiB (default: 4).")
    parser.add_argument("--base", type=Path, help="With adapters: the base model, if it is not at its old path.")
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
