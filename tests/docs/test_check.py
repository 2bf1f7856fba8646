"""A block that shows something wrong fails, and is written again where the right thing is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.__main__ import write_again
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.check import outcome, problems, script
from tests.docs.render import RenderError
from tests.docs.sandbox import CommandFailedError
from tests.docs.scenes import Sandboxes


def block(fence: str, text: str) -> Block:
    (found,) = blocks(f"```{fence}\n{text}\n```\n", "page.md")
    return found


async def shown(fence: str, text: str) -> list[str]:
    asked = block(fence, text)
    assert problems(asked) == []
    async with Sandboxes() as sandboxes:
        return await outcome(asked, sandboxes)


@pytest.mark.parametrize(
    ("fence", "text", "problem"),
    [
        ("bash", "make demo", "is not tagged"),
        ("bash unshown", "make coffee", "no target"),
        ("console run", "make demo", "begins with"),
        ("console run", "$ make coffee", "no target"),
        ("python run", "x = = 1", "invalid syntax"),
        ("python unshown", "from meshwright.no_such_thing import a", "no module `meshwright.no_such_thing`"),
        ("bash run scene=moon", "make demo", "no scene `moon`"),
        ("text figure", "a -> b\nmake demo", "a command in a figure"),
    ],
)
def test_a_block_with_something_wrong_is_a_problem(fence: str, text: str, problem: str) -> None:
    assert problem in problems(block(fence, text))[0]


async def test_a_transcript_runs_in_one_shell_in_a_checkout_of_its_own() -> None:
    text = "$ cd docs\n$ export A=1\n$ pwd && echo $A | cat\n~/meshwright/docs\n1\n$ ls ~ >&2\nmeshwright"
    assert await shown("console run", text) == text.splitlines()


async def test_other_output_than_shown_is_seen() -> None:
    assert await shown("console run", "$ echo one\ntwo\n$ echo three\nthree") == [
        *("$ echo one", "one"),
        *("$ echo three", "three"),
    ]


@pytest.mark.parametrize(
    ("fence", "text"),
    [
        ("console run", "$ echo one\none\n$ ls none\n..."),
        ("bash run", "ls none\necho one"),
        ("bash run", "ls none | cat"),
        ("bash run", "meshwright version; cat none.yaml"),
        ("python run", "raise SystemExit(3)"),
    ],
)
async def test_a_command_that_fails_is_a_failure(fence: str, text: str) -> None:
    with pytest.raises(CommandFailedError):
        await shown(fence, text)


@pytest.mark.parametrize(
    ("fence", "text", "problem"),
    [
        ("yaml render spec", "replicas: 2\nparalelism: {tensor: 2}", "paralelism"),
        ("yaml render spec", "parallelism: {tensor: 7}", "tensor"),
        ("yaml render spec", "parallelism: {tensor: 7", "flow mapping"),
        ("yaml render spec", "tensor", "has fields"),
        ("yaml render inventory", "- {name: a, gpus: 4, free: 5}", "free must be at most gpus"),
        ("json render chaos", '[{"effect": {"type": "explode"}}]', "explode"),
        ("yaml render none.yaml", "a: 1", "a file of the repository"),
    ],
)
async def test_what_the_product_does_not_accept_is_a_failure(fence: str, text: str, problem: str) -> None:
    with pytest.raises(RenderError, match=problem):
        await shown(fence, text)


async def test_a_file_is_shown_as_it_is() -> None:
    first, *_, last = (ROOT / "Makefile").read_text().splitlines()
    for text in ((ROOT / "Makefile").read_text().rstrip("\n"), f"{first}\n...", f"...\n{last}", "...\ndemo: ...\n..."):
        assert await shown("make render Makefile", text) == text.splitlines()
    for text in (first, f"{last}\n...", "...\ncoffee: ...\n..."):
        assert await shown("make render Makefile", text) != text.splitlines()


def test_a_block_of_a_script_is_its_commands() -> None:
    assert script(block("console run", "$ echo \\\n> a\na\n$ pwd")) == "echo \\\na\npwd"


async def test_a_page_is_written_again_around_what_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = "- item\n\n  ```console run\n  $ echo one; echo two\n  one\n  ```\n"
    page = f"# Title\n\n{first}\n```console run\n$ echo 3\n4\n```\nend\n"
    (tmp_path / "page.md").write_text(page)
    assert await write_again(list(blocks(page, "page.md")), tmp_path) == 0
    right = page.replace("  one\n", "  one\n  two\n").replace("\n4\n", "\n3\n")
    assert (tmp_path / "page.md").read_text() == right
    assert await write_again(list(blocks(right, "page.md")), tmp_path) == 0
    assert (tmp_path / "page.md").read_text() == right
    wrong = "```bash run\nls none\n```\n```bash\nls\n```\n"
    assert await write_again(list(blocks(wrong, "wrong.md")), tmp_path) == 1
    assert "is not tagged" in capsys.readouterr().out
