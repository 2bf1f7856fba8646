"""Writes the output that the documentation shows again: `python -m tests.docs [PAGE | PAGE:LINE]...`.

Without arguments all pages, but not the blocks that run with the long tests; those are named one by one or by `--long`.
Exit status 1 when a block does not work, which its author must repair.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, Block, all_blocks
from tests.docs.check import FAILURES, lacking, outcome, problems
from tests.docs.scenes import Sandboxes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
    parser.add_argument("--long", action="store_true", help="the blocks of the long tests too")
    parser.add_argument("where", nargs="*", help="a page such as docs/planning.md, or a block: README.md:21")
    arguments = parser.parse_args()
    chosen = [
        block
        for block in all_blocks()
        if str(block) in arguments.where
        or (block.page in arguments.where or not arguments.where)
        and (arguments.long or not block.is_long)
    ]
    sys.exit(asyncio.run(write_again(chosen, ROOT)))


async def write_again(chosen: list[Block], root: Path) -> int:
    """Run and render blocks and write what they show into their pages; 1 when one does not work, else 0."""
    failed = 0
    async with Sandboxes() as sandboxes:
        # Backwards, so that the lines of the blocks that follow stay where they are.
        for block in reversed(chosen):
            wrong = problems(block)
            if wrong or lacking(block):
                print(f"{block}: {'; '.join(wrong) or 'left out, needs ' + ' and '.join(lacking(block))}")
                failed |= bool(wrong)
                continue
            try:
                lines = await outcome(block, sandboxes)
            except FAILURES as error:
                print(f"{block}: {error}")
                failed = 1
                continue
            if lines != block.lines:
                replace_lines(root / block.page, block, lines)
                print(f"{block}: written again")
    return failed


def replace_lines(path: Path, block: Block, lines: list[str]) -> None:
    """Put lines in the place of a block's own."""
    page = path.read_text().split("\n")
    page[block.line : block.line + len(block.lines)] = [f"{block.indent}{line}".rstrip() for line in lines]
    path.write_text("\n".join(page))


if __name__ == "__main__":
    main()
