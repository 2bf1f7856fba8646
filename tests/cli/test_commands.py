"""The list of commands, and what happens when an extra is missing."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import meshwright_cli.client
from meshwright_cli.lazy_group import LazyCommand, LazyGroup
from meshwright_cli.main import COMMANDS, main


def test_help_lists_every_command_without_importing_it():
    code = (
        "import sys; from click.testing import CliRunner; from meshwright_cli.main import main;"
        "r = CliRunner().invoke(main, ['--help']); print(r.output);"
        "heavy = {'aiohttp', 'rich', 'yaml', 'pydantic', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, entry in COMMANDS.items():
        assert name in result.stdout
        assert entry.summary.split()[0] in result.stdout


def test_commands_that_reach_no_cluster_import_no_client_of_one():
    code = (
        "import sys, meshwright_cli.plan.command, meshwright_cli.commands.validate, meshwright_cli.simulate.command;"
        "print('aiohttp' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_the_client_has_every_name_that_it_exports():
    for name in meshwright_cli.client.__all__:
        assert getattr(meshwright_cli.client, name).__module__.startswith("meshwright_cli.client.")
    with pytest.raises(AttributeError, match="'nothing'"):
        meshwright_cli.client.__getattr__("nothing")


def test_version_names_the_package():
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith("meshwright 0.")


def test_unknown_command_is_an_error():
    result = CliRunner().invoke(main, ["trane"])
    assert result.exit_code == 2
    assert "No such command" in result.output


@pytest.mark.parametrize("arguments", [["crd"], ["--help"]])
def test_a_full_disk_is_one_line(arguments):
    command = [sys.executable, "-c", "from meshwright_cli.main import main; main()", *arguments]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "Error: cannot write: No space left on device\n")


@pytest.mark.parametrize(("value", "colored"), [("1", False), ("", True)])
def test_no_color_turns_colors_off_in_a_terminal(value, colored, monkeypatch):
    @click.command()
    def red():
        click.echo(click.style("red", fg="red"))

    monkeypatch.setitem(main._lazy, "red", LazyCommand("tests.red:red", "Red.", ""))
    monkeypatch.setattr("meshwright_cli.lazy_group.load", lambda name, entry: red)
    result = CliRunner().invoke(main, ["red"], env={"NO_COLOR": value}, color=True)
    assert ("\x1b[" in result.output) is colored


def test_ctrl_c_ends_a_command_without_a_message(monkeypatch):
    @click.command()
    def watch():
        raise KeyboardInterrupt

    monkeypatch.setitem(main._lazy, "watch", LazyCommand("tests.watch:watch", "Watch.", ""))
    monkeypatch.setattr("meshwright_cli.lazy_group.load", lambda name, entry: watch)
    result = CliRunner().invoke(main, ["watch"])
    assert (result.exit_code, result.output.strip()) == (130, "")


def test_missing_dependency_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "needs_absent.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    group = LazyGroup(lazy={"thing": LazyCommand("needs_absent:thing", "A thing.", "meshwright-local")})
    result = CliRunner().invoke(group, ["thing"])
    assert result.exit_code == 1
    assert "`a_package_that_is_absent`" in result.output
    assert "pip install meshwright-local" in result.output


def test_a_module_missing_from_meshwright_itself_is_no_installation_advice():
    group = LazyGroup(lazy={"thing": LazyCommand("meshwright.no_such_module:thing", "A thing.", "meshwright-local")})
    result = CliRunner().invoke(group, ["thing"])
    assert isinstance(result.exception, ModuleNotFoundError)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_loads_and_has_help(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert isinstance(main.get_command(click.Context(main, help_option_names=["-h", "--help"]), name), click.Command)
