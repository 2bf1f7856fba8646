"""The bytes of every recorded checkpoint: `python -m tests.golden.checkpoint FILE` writes checksums, or compares.

Training comes to the same bits only on the same kind of CPU with the same build of torch, so checksums are not
committed: record them on one machine before a change and compare after it. With `--against` the command ends with code
1 when a file's bytes differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST
from tests.distributed.rank_pool import RankPool
from tests.golden.checkpoint.cases import CASES, Case, train, write_corpus

Sums = dict[str, dict[str, str]]
"""By case the loss and the CRC-32 of each file of the newest checkpoint."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.checkpoint", description=__doc__)
    parser.add_argument("file", type=Path, help="where checksums are kept")
    parser.add_argument("--against", action="store_true", help="compare with the file in place of writing it")
    parser.add_argument("-k", default="", help="train only cases whose name holds this")
    arguments = parser.parse_args()
    sums = _sums([case for case in CASES if arguments.k in case.name and not case.timed])
    if not arguments.against:
        arguments.file.write_text(json.dumps(sums, indent=1) + "\n")
        return 0
    before: Sums = json.loads(arguments.file.read_text())
    different = [name for name, files in sums.items() if before.get(name) != files]
    sys.stdout.write(f"{len(sums) - len(different)} of {len(sums)} checkpoints have the same bytes\n")
    sys.stdout.writelines(f"  {name}: {before.get(name)}, now {sums[name]}\n" for name in different)
    return 1 if different else 0


def _sums(cases: list[Case]) -> Sums:
    pool, sums = RankPool(timeout=600), {}
    try:
        with TemporaryDirectory() as directory:
            text = write_corpus(Path(directory) / "text")
            for case in cases:
                root = Path(directory) / case.name
                train(case, pool, root, text)
                sums[case.name] = _of(root)
                sys.stdout.write(f"[{len(sums)}/{len(cases)}] {case.name}\n")
    finally:
        pool.close()
    return sums


def _of(root: Path) -> dict[str, str]:
    directory = CheckpointDirectory(root)
    manifest = json.loads((directory.path(directory.steps()[0]) / MANIFEST).read_bytes())
    files = {name: f"{record['crc32']:08x}" for name, record in manifest["files"].items()}
    return {"loss": manifest["state"]["loss"], **files}


if __name__ == "__main__":
    sys.exit(main())
