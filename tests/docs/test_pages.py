"""Every block of README and docs is tagged, and shows what really comes out."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.docs.blocks import FIGURE, ROOT, UNSHOWN, Block, all_blocks, pages
from tests.docs.check import lacking, outcome, problems
from tests.docs.commands import problems_in_prose
from tests.docs.scenes import Sandboxes
from tests.docs.transcript import difference

BLOCKS = all_blocks()
SHOWN = [
    pytest.param(block, marks=pytest.mark.long if block.is_long else (), id=str(block))
    for block in BLOCKS
    if block.tag not in (UNSHOWN, FIGURE, "")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    async with Sandboxes() as made:
        yield made


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_tagged_and_names_what_there_is(block: Block) -> None:
    assert problems(block) == []


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_prose_exist(path) -> None:
    assert problems_in_prose(path.read_text()) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("block", SHOWN)
async def test_a_block_shows_what_comes_out(block: Block, sandboxes: Sandboxes) -> None:
    if missing := lacking(block):
        pytest.skip(f"no {' and no '.join(missing)} on the PATH")
    lines = await outcome(block, sandboxes)
    assert lines == block.lines, f"{difference(block.lines, lines)}\n`make docs-output` writes the page again"
