"""The page of `meshwright report` in headless Chromium: no error, no network, no serious fault, no overflow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright_cli.report.history import read_history
from meshwright_cli.report.inputs import inputs_of_job
from meshwright_cli.report.page import page_of, render
from tests.cli.browser import Tab, axe_source, chromium, tab
from tests.cli.report_samples import NOW, history_lines, manifest, nodes, running_job, write

WIDTHS = {"phone": 390, "laptop": 1280}

pytestmark = pytest.mark.slow


@pytest.fixture
def page(tmp_path: Path) -> Path:
    chromium()
    cluster = nodes(4, 2, busy=1)
    history = read_history(write(tmp_path / "h.jsonl", history_lines()))
    inputs = replace(inputs_of_job(running_job(manifest(), cluster), cluster, [], NOW), history=history)
    return write(tmp_path / "report.html", render(page_of(inputs)))


async def colors(opened: Tab) -> list[str]:
    return list(await opened.evaluate("[...document.querySelectorAll('.cells .r')].map((cell) => cell.className)"))


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
async def test_the_page_needs_nothing_and_fits(page: Path, width: int):
    async with tab() as opened:
        await opened.open(page.as_uri(), width)
        assert opened.problems == []
        assert {url for url in opened.requests if not url.startswith("data:")} == {page.as_uri()}
        assert await opened.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_no_serious_fault(page: Path, dark: bool):
    axe_source()
    async with tab() as opened:
        for width in WIDTHS.values():
            await opened.open(page.as_uri(), width, dark=dark)
            assert await opened.axe() == []


async def test_another_dimension_colors_the_ranks(page: Path):
    async with tab() as opened:
        await opened.open(page.as_uri())
        before = await colors(opened)
        await opened.evaluate("document.querySelector('input[value=tensor]').click()")
        after = await colors(opened)
        assert [name.split()[1] for name in before[:8]] == ["c0"] * 4 + ["c1"] * 4
        assert [name.split()[1] for name in after[:8]] == ["c0", "c1", "c2", "c3"] * 2
        assert await opened.evaluate("document.querySelector('.key').textContent") == "0123TP coordinate"
        assert opened.problems == []


async def test_the_page_prints(page: Path):
    async with tab() as opened:
        await opened.open(page.as_uri())
        document = await opened.pdf()
        assert document.startswith(b"%PDF")
        assert 1 < document.count(b"/Type /Page\n") + document.count(b"/Type /Page ") < 12
