"""Help, docs/cli.md and completion come from the commands alone."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshwright_cli.client.errors import MEANINGS, ExitCode, MeshwrightError
from meshwright_cli.kubectl_plugin import completions
from meshwright_cli.main import COMMANDS, main
from meshwright_cli.reference import page

ROOT = Path(__file__).parents[2]


def commands() -> list[tuple[str, click.Command]]:
    """Every command with its path."""
    found: list[tuple[str, click.Command]] = []

    def walk(path: str, command: click.Command) -> None:
        found.append((path, command))
        if isinstance(command, click.Group):
            context = click.Context(command, help_option_names=["-h", "--help"])
            for name in command.list_commands(context):
                sub = command.get_command(context, name)
                assert sub is not None
                walk(f"{path} {name}".strip(), sub)

    for name in COMMANDS:
        command = main.get_command(click.Context(main, help_option_names=["-h", "--help"]), name)
        assert command is not None
        walk(name, command)
    return found


def test_the_page_is_what_the_commands_say():
    assert (ROOT / "docs" / "cli.md").read_text() == page(), "run: make generate"


def test_every_command_and_option_is_in_the_page():
    text = page()
    for path, command in commands():
        assert f"`meshwright {path}`" in text
        for option in command.params:
            if isinstance(option, click.Option) and option.name != "help":
                assert all(name in text for name in option.opts), (path, option.opts)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_the_command_says(name):
    command = main.get_command(click.Context(main, help_option_names=["-h", "--help"]), name)
    assert command is not None
    first = (command.help or "").strip().split("\n")[0]
    mine = COMMANDS[name].summary
    # A group may describe itself in more words than fit into the list.
    assert isinstance(command, click.Group) or mine.split()[0] == first.split()[0], (mine, first)
    assert len(mine) <= 84


def test_commands_of_jobs_name_the_next_command():
    for path, command in commands():
        if path.split()[0] in COMMANDS and COMMANDS[path.split()[0]].section == "Jobs":
            assert command.epilog, path
            for word in command.epilog.split("meshwright ")[1:]:
                assert word.split()[0].strip(".,") in COMMANDS, command.epilog
            assert command.epilog in CliRunner().invoke(main, [*path.split(), "--help"], terminal_width=200).output


def test_every_command_of_a_cluster_runs_end_to_end():
    """On the embedded cluster and, with `--cluster assets`, on a real API server."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests" / "e2e").glob("*.py"))
    for path, command in commands():
        if any(option.name == "kubeconfig" for option in command.params):
            words = path.removesuffix(" job").split()  # `explain NAME` is short for `explain job NAME`
            spoken = r",\s*".join(f'"{word}"' for word in words)
            assert re.search(rf"(?:stage, |\"meshwright\", |main\(\)\", ){spoken}", text), path


def test_every_exit_code_has_a_meaning_and_every_error_a_code():
    assert set(MEANINGS) == set(ExitCode)

    def errors(kind: type[MeshwrightError]) -> list[type[MeshwrightError]]:
        return [kind, *(one for sub in kind.__subclasses__() for one in errors(sub))]

    for kind in errors(MeshwrightError):
        assert kind.exit_code in ExitCode
        assert kind.exit_code is not ExitCode.DONE
        assert kind.__name__ in page() or kind.__name__ in ("MeshwrightError", "ConfigurationError", "ManifestError")


def test_completion_of_commands_and_options():
    assert {line.split("\t")[0] for line in completions(["s"])} >= {"status", "submit", "scale", "suspend"}
    assert "--failed-first" in [line.split("\t")[0] for line in completions(["logs", "--fa"])]
    assert [line.split("\t")[0] for line in completions(["list", "-o", "j"])] == ["json", ":4"]
    assert completions(["explain", "j"])[0].startswith("job")
    assert completions(["submit", ""])[-1] == ":0"  # files


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_MESHWRIGHT_COMPLETE" in result.output


def test_an_unknown_command_names_the_nearest():
    result = CliRunner().invoke(main, ["sumbit"])
    assert result.exit_code == 2
    assert "Did you mean `submit`?" in result.output


def test_version():
    assert CliRunner().invoke(main, ["--version"]).output.startswith("meshwright, version 0.")
