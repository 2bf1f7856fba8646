"""Blocks are found wherever Markdown has them, and one that no test can check is refused."""

from __future__ import annotations

import pytest

from tests.docs.blocks import Block, blocks, pages, problem_of_tag

PAGE = """# Title

Some text with `code`.

```bash run long scene=cluster
kubectl get nodes
```
- an item

  ~~~~console run
  $ echo "```"
  ```
  ~~~~

      indented in an item

  more of the item
    is no code

## Section

    indented

    still indented

> ```yaml render spec
> replicas: 2
> ```

The paragraph goes on
    here, which is no code.
"""


def test_every_block_is_found_with_its_tag_and_place() -> None:
    found = list(blocks(PAGE, "page.md"))
    assert [(block.line, block.language, block.tag, block.options) for block in found] == [
        (5, "bash", "run", ("long", "scene=cluster")),
        (10, "console", "run", ()),
        (15, "", "", ()),
        (22, "", "", ()),
        (26, "yaml", "render", ("spec",)),
    ]
    assert [block.text for block in found] == [
        "kubectl get nodes",
        '$ echo "```"\n```',
        "indented in an item",
        "indented\n\nstill indented",
        "replicas: 2",
    ]
    assert [block.fenced for block in found] == [True, True, False, False, True]
    assert (found[0].is_long, found[0].scene, found[0].is_measured) == (True, "cluster", False)


@pytest.mark.parametrize(
    "text", [PAGE, *(path.read_text() for path in pages())], ids=["here", *(path.name for path in pages())]
)
def test_the_blocks_are_those_that_a_parser_of_markdown_finds(text: str) -> None:
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    tokens = [token for token in parser.parse(text) if token.type in ("fence", "code_block")]
    ours = [(block.line, block.fenced, block.text.strip()) for block in blocks(text, "page.md")]
    assert ours == [(token.map[0] + 1, token.type == "fence", token.content.strip()) for token in tokens]


def test_readme_and_docs_are_checked_and_the_changelog_is_not() -> None:
    names = {path.name for path in pages()}
    assert {"README.md", "models.md"} <= names
    assert "CHANGELOG.md" not in names


@pytest.mark.parametrize(
    ("fence", "problem"),
    [
        ("", "is not tagged"),
        ("bash", "`bash` is not tagged"),
        ("bash ran", "`bash ran` is not tagged"),
        ("console unshown", "goes with bash or python, not with `console`"),
        ("yaml run", "goes with console or bash or python"),
        ("bash figure", "goes with text or mermaid"),
        ("bash render README.md", "the language no shell"),
        ("yaml render", "must be `LANGUAGE render WHAT`"),
        ("bash run quickly", "takes no option quickly"),
        ("bash unshown long", "takes no option long"),
    ],
)
def test_a_fence_without_a_tag_that_fits_is_a_problem(fence: str, problem: str) -> None:
    (block,) = blocks(f"```{fence}\ntext\n```\n", "page.md")
    assert problem in str(problem_of_tag(block))


@pytest.mark.parametrize("text", ["Type\n\n    make demo\n", "- Type\n\n      make demo\n", "<pre>make demo</pre>\n"])
def test_a_block_without_a_fence_is_a_problem(text: str) -> None:
    (block,) = blocks(text, "page.md")
    assert "between fences" in str(problem_of_tag(block))


@pytest.mark.parametrize("fence", ["bash run long", "python unshown", "text figure", "json render chaos"])
def test_a_tag_that_fits_is_none(fence: str) -> None:
    (block,) = blocks(f"```{fence}\ntext\n```\n", "page.md")
    assert problem_of_tag(block) is None
    assert isinstance(block, Block)
