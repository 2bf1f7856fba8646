"""Links in README and docs lead somewhere, and README's map names what there is."""

import re

import pytest

from tests.docs.blocks import ROOT, pages


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_repository_map_names_what_there_is():
    table = (ROOT / "README.md").read_text().partition("## Map of the repository")[2]
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            candidates = [ROOT / name, ROOT / "meshwright" / name]
            assert any(candidate.exists() for candidate in candidates), name


def test_the_index_of_the_documentation_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#/]+\.md)", index))
    pages_of_docs = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages_of_docs <= linked
