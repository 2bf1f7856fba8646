"""One block: what is wrong with it, and what it should show."""

from __future__ import annotations

import shutil

from tests.docs import commands, transcript
from tests.docs.blocks import FIGURE, RENDER, RUN, SHELLS, UNSHOWN, Block, problem_of_tag
from tests.docs.programs import known, missing_modules
from tests.docs.render import RenderError, rendered
from tests.docs.sandbox import CommandFailedError, Sandbox
from tests.docs.scenes import SCENES, Sandboxes

OPTIONAL = ("docker", "helm", "kubectl")
"""Programs that a machine may not have."""
FAILURES = (RenderError, CommandFailedError, transcript.TranscriptError)


def problems(block: Block) -> list[str]:
    """What is wrong with a block, as far as can be known without running or rendering it."""
    wrong = problem_of_tag(block)
    if wrong is not None:
        return [wrong]
    if block.scene and block.scene not in SCENES:
        return [f"no scene `{block.scene}`: there are {', '.join(sorted(SCENES))}"]
    if block.tag == FIGURE:
        return [f"a command in a figure: `{line}`" for line in block.lines if commands.looks_like_command(line)]
    try:
        if block.language in SHELLS:
            return commands.problems(script(block))
        if block.language == "python" and block.tag in (RUN, UNSHOWN):
            return missing_modules(block.text)
    except (transcript.TranscriptError, SyntaxError, ValueError) as error:
        return [str(error)]
    return []


def script(block: Block) -> str:
    """The commands of a block in a shell's language.

    Raises:
        TranscriptError: a transcript that does not begin with a command.
    """
    if block.language != "console":
        return block.text
    return "\n".join(each.command for each in transcript.exchanges(block.text))


def lacking(block: Block) -> list[str]:
    """Programs that a block runs and this machine does not have."""
    if block.tag != RUN or block.language not in SHELLS:
        return []
    named = {words[0] for words in commands.simple_commands(script(block))} & known()
    return [name for name in OPTIONAL if name in named and shutil.which(name) is None]


async def outcome(block: Block, sandboxes: Sandboxes) -> list[str]:
    """The lines that a block should show: runs or renders it.

    Raises:
        RenderError, CommandFailedError: it does not work.
    """
    if block.tag == RENDER:
        return rendered(block)
    if block.tag != RUN:
        return block.lines
    async with sandboxes.sandbox(block.scene) as sandbox:
        return _run(block, sandbox)


def _run(block: Block, sandbox: Sandbox) -> list[str]:
    if block.language == "python":
        sandbox.python(block.text)
    elif block.language == "bash":
        sandbox.bash(block.text)
    else:
        shown = transcript.exchanges(block.text)
        outputs = sandbox.transcript([each.command for each in shown])
        for each, output in zip(shown, outputs, strict=True):
            right = transcript.updated(each.output, output, measured=block.is_measured)
            if right != each.output:
                print("\n".join([f"$ {each.command}", *output]))  # Whole: a test that fails shows it.
            each.output = right
        return transcript.written(shown).splitlines()
    return block.lines
