"""Links in README and docs lead somewhere, and README's map and the index of docs name what there is."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages

_FENCED = re.compile(r"^ *(`{3,}).*?^ *\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)]*))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target, anchor in _LINK.findall(page.read_text()):
        to = page.parent / target if target else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    assert broken_links(path) == []


def test_a_link_to_a_heading_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two`\n## Same\n## Same\n```bash\n# no heading\n```\n")
    links = "[a](other.md#one-two) [b](other.md#same-1) [c](other.md#no-heading) [d](#here) [e](gone.md)"
    (tmp_path / "page.md").write_text(f"{links}\n# Here\n")
    assert broken_links(tmp_path / "page.md") == ["other.md#no-heading", "gone.md#"]


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    others = {path.name for path in index.parent.glob("*.md")} - {index.name}
    assert sorted(name for name in others if f"]({name})" not in index.read_text()) == [], "list it in docs/README.md"


def test_the_repository_map_names_what_there_is() -> None:
    table = (ROOT / "README.md").read_text().partition("## Map of the repository")[2]
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            candidates = [ROOT / name, ROOT / "meshwright" / name]
            assert any(candidate.exists() for candidate in candidates), name


def test_the_architecture_names_every_directory_of_the_packages() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = [
        ROOT / "meshwright",
        *(ROOT / name / f"meshwright_{name}" for name in ("cli", "local", "operator", "worker")),
    ]
    missing = [
        str(path.parent.relative_to(ROOT))
        for package in packages
        for path in sorted(package.glob("*/__init__.py"))
        if not re.search(rf"`(?:[\w/]+/)?{path.parent.name}/", text)
    ]
    assert missing == [], "name it in docs/architecture.md"
