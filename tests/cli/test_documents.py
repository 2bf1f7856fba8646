"""What README and docs show exists: links, files, commands, manifests."""

import re
from pathlib import Path

import pytest

from meshwright_cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(path):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_readme_shows_the_ten_line_example_as_it_is():
    assert (ROOT / "examples" / "ten-line.yaml").read_text().strip() in (ROOT / "README.md").read_text()


def test_every_make_target_and_command_in_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE))
    assert "demo" in named
    assert named <= targets
    assert set(re.findall(r"\.venv/bin/meshwright (\w+)", text)) <= set(COMMANDS)


def test_the_repository_map_names_what_there_is():
    table = (ROOT / "README.md").read_text().partition("## Map of the repository")[2]
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            candidates = [ROOT / name, ROOT / "meshwright" / name]
            assert any(candidate.exists() for candidate in candidates), name
