"""Export a checkpoint of any layout as a Hugging Face model directory, in one process.

Merges LoRA adapters into the model, or with `--adapter` exports only them, in the format of PEFT.

Run as `python -m meshwright_worker.export --checkpoint DIR --output DIR --dtype bf16`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch

from meshwright.data.files import open_directory, split_uri
from meshwright_worker.checkpoint.files import CheckpointPath
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.manifest import Manifest, TokenizerRecord
from meshwright_worker.checkpoint.provenance import EXPORT_RECORD, export_record
from meshwright_worker.pretrained.adapter_export import export_adapter
from meshwright_worker.pretrained.base_tokenizer import FILE_OF, copy_companions
from meshwright_worker.pretrained.hf_export import base_model_dir, export

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GIBIBYTE = 1024**3
_FILE_GIB = 4.0


def main() -> None:
    """Run the command line."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        checkpoint, manifest = find_checkpoint(arguments.checkpoint, best=arguments.best)
        files = _export(arguments, checkpoint, manifest)
        state, record = manifest.state, manifest.provenance
        base = manifest.base_fingerprint if arguments.adapter else None
        content = export_record(str(checkpoint), state.step, state.digest, record, base)
        (arguments.output / EXPORT_RECORD).write_text(content, encoding="utf-8")
        tokenizer = _write_tokenizer(manifest.tokenizer, arguments.tokenizer, arguments.output)
        model = base_model_dir(manifest, arguments.base)
        if model is not None and manifest.tokenizer is not None:
            tokenizer = ", ".join([tokenizer, *copy_companions(model, manifest.tokenizer, arguments.output)])
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")  # the usage would not help
    sys.stdout.write(f"step {manifest.state.step}: {len(files)} file(s) in {arguments.output}; {tokenizer}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.export", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="A checkpoint, or a directory or URI of checkpoints: exports the newest intact one.",
    )
    parser.add_argument("--best", action="store_true", help="Export the checkpoint with the lowest evaluation loss.")
    parser.add_argument("--output", type=Path, required=True, help="A new or empty directory.")
    parser.add_argument(
        "--adapter", action="store_true", help="Export only the LoRA adapters, as PEFT and inference servers read them."
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="fp32", help="Number format of the exported weights (default: fp32)."
    )
    parser.add_argument("--file-gib", type=float, help="Maximum size of one file, in GiB (default: 4).")
    parser.add_argument("--tokenizer", type=Path, help="The run's tokenizer file, if it is not at its old path.")
    parser.add_argument(
        "--base",
        type=Path,
        help="With adapters: the base model, if it is not at its old path. With --adapter it may be a name.",
    )
    return parser


def _export(arguments: argparse.Namespace, checkpoint: CheckpointPath, manifest: Manifest) -> list[str]:
    """Write the weights; the names of their files.

    Raises:
        ValueError: the checkpoint cannot be exported with these options.
        OSError: a file cannot be read or written.
    """
    output, base, dtype = arguments.output, arguments.base, _DTYPES[arguments.dtype]
    if arguments.adapter:
        if arguments.file_gib is not None:
            raise ValueError("--file-gib is not supported with --adapter: PEFT reads adapters from one file")
        return export_adapter(checkpoint, manifest, output, dtype=dtype, base=base)
    file_gib = _FILE_GIB if arguments.file_gib is None else arguments.file_gib
    return export(checkpoint, manifest, output, dtype=dtype, file_bytes=int(file_gib * _GIBIBYTE), base=base)


def _write_tokenizer(record: TokenizerRecord | None, option: Path | None, output: Path) -> str:
    """Copy the run's tokenizer next to the weights, under the name that transformers expects. Return what was done.

    Raises:
        ValueError: the file that `--tokenizer` names is another tokenizer.
    """
    if record is None or record.file is None:
        return "the tokens are bytes, without a tokenizer file" if record is not None else "the tokenizer is not known"
    directory, name = split_uri(str(option or record.file))
    try:
        with open_directory(directory or ".").open(name) as file:
            content = file.read()
    except (OSError, ValueError) as error:
        if option is not None:
            raise
        return f"without the tokenizer, whose file is not at its old path ({error}): pass it with `--tokenizer FILE`"
    if record.identity.rpartition("/")[2] != hashlib.sha256(content).hexdigest()[:32]:
        raise ValueError(f"{option or record.file} is not the tokenizer of the run (`{record.identity}`)")
    target = output / FILE_OF[record.kind]
    target.write_bytes(content)
    return f"tokenizer in {target.name}"


if __name__ == "__main__":
    main()
