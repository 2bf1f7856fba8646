"""The programs that commands of the documentation name, and what can be known of them without running them.

Our own programs come from `[project.scripts]` of each room's pyproject.toml, so that nothing here names a module.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import click
import yaml

from meshwright_cli.main import main
from tests import definition
from tests.docs.blocks import ROOT

_OPTION = re.compile(r"[\"'](--?[a-z][a-z0-9-]*)[\"']")
_VERBS = {"annotate", "apply", "cordon", "create", "delete", "describe", "drain", "edit", "exec", "explain", "get"}
_VERBS |= {"kustomize", "label", "logs", "patch", "port-forward", "rollout", "scale", "taint", "top", "uncordon"}
_VERBS |= {"wait"}
_OF_KINDS = {"annotate", "delete", "describe", "edit", "get", "label", "patch", "wait"}
_KINDS = {
    "certificate",
    "configmap",
    "deployment",
    "deviceclass",
    "event",
    "lease",
    "namespace",
    "node",
    "pod",
    "pvc",
    "resourceclaim",
    "resourceclaimtemplate",
    "resourcequota",
    "resourceslice",
    "secret",
    "service",
}


@cache
def scripts() -> dict[str, str]:
    """Our own programs: name → `module:function`."""
    found: dict[str, str] = {}
    for project in sorted(ROOT.glob("*/pyproject.toml")):
        found |= tomllib.loads(project.read_text())["project"].get("scripts", {})
    return found


@cache
def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def kinds() -> set[str]:
    """What `kubectl get` takes: some built-in kinds, and every name of our own."""
    found = _KINDS | {f"{name}es" if name.endswith("s") else f"{name}s" for name in _KINDS}
    names = definition.committed()["spec"]["names"]
    return found | {names["plural"], names["singular"], *names.get("shortNames", ()), *names.get("categories", ())}


def known() -> set[str]:
    """Every program that a command may name."""
    return {*scripts(), *_CHECKS}


def problems(words: list[str]) -> list[str]:
    """What is wrong with one command, as far as can be known without running it."""
    name, rest = words[0].rpartition("/")[2], words[1:]
    if name not in known():
        return [f"`{name}`: no such program is known to tests/docs/programs.py"]
    check = _CHECKS.get(name) or partial(_own, name)
    return [f"`{name}`: {problem}" for problem in [*check(rest), *_missing_files(rest)]]


def command(name: str) -> click.Command | None:
    """One of our own programs as a click command; None when it is another kind of program."""
    module, _, attribute = scripts()[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found if isinstance(found, click.Command) else None


def _own(name: str, words: list[str]) -> list[str]:
    found = command(name)
    return _module(scripts()[name].partition(":")[0], words) if found is None else _click(found, words)


def _click(command: click.Command, words: list[str]) -> list[str]:
    context = click.Context(command, help_option_names=["-h", "--help"])
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        default = getattr(command, "default", "")
        if found is None and default:  # such as the name of a job
            found, words = command.get_command(context, default), [name, *words]
        if found is None:
            return [f"no command `{name}`"]
        command, context = found, click.Context(found, parent=context)
    try:
        _, left, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return [error.format_message()]
    return [f"unexpected {' '.join(left)}"] if left else []


def _python(words: list[str]) -> list[str]:
    if words[:1] == ["-m"]:
        return _module(words[1], words[2:])
    return _source(ROOT / words[0], words[1:]) if words and words[0].endswith(".py") else []


def _torchrun(words: list[str]) -> list[str]:
    program = next((n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")), None)
    return ["starts neither a module nor a file"] if program is None else _python(words[program:])


def missing_modules(program: str) -> list[str]:
    """Modules that a Python program imports and that do not exist.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = list(ast.walk(ast.parse(program)))
    names = [alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module]
    return [f"no module `{name}`" for name in names if _origin(name) is None]


def _module(name: str, words: list[str]) -> list[str]:
    origin = _origin(name)
    return [f"no module `{name}`"] if origin is None else _source(Path(origin), words)


def _origin(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None else spec.origin


def _source(path: Path, words: list[str]) -> list[str]:
    """Options that no file beside a program declares: asking it would import torch."""
    if not path.is_file():
        return [f"no file {path.name}"]
    declared = {option for file in path.parent.glob("*.py") for option in _OPTION.findall(file.read_text())}
    return [f"no option {word}" for word in _options(words) if word not in declared]


def _make(words: list[str]) -> list[str]:
    return [f"no target `{word}`" for word in words if "=" not in word and word not in targets()]


def _kubectl(words: list[str]) -> list[str]:
    verb, *rest = words or [""]
    if f"kubectl-{verb}" in scripts():  # a plugin
        return _click(main, rest)
    if verb not in _VERBS:
        return [f"no command `{verb}`"]
    first = next((word for word in rest if not word.startswith("-")), "")
    if verb not in _OF_KINDS or not first:
        return []
    return [f"no kind `{kind}`" for kind in first.partition("/")[0].split(",") if kind not in kinds()]


def _helm(words: list[str]) -> list[str]:
    if words[:1] in (["test"], ["uninstall"]):
        return []
    chart = next((ROOT / word for word in words if (ROOT / word / "Chart.yaml").is_file()), None)
    if chart is None:
        return ["no chart of the repository"]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    given = [word.partition("=")[0] for flag, word in zip(words, words[1:], strict=False) if flag == "--set"]
    return [f"no value `{name}`" for name in given if not _has(values, name.split("."))]


def _has(values: object, path: list[str]) -> bool:
    """Whether there is a value at the path. An empty map takes any key."""
    for part in path:
        if values == {}:
            return True
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _anything(words: list[str]) -> list[str]:
    return []


_CHECKS: dict[str, Callable[[list[str]], list[str]]] = {
    **{"python": _python, "python3": _python, "torchrun": _torchrun, "make": _make, "kubectl": _kubectl, "helm": _helm},
    **dict.fromkeys(
        [
            ".",
            "cat",
            "cd",
            "cp",
            "df",
            "docker",
            "echo",
            "eval",
            "export",
            "git",
            "grep",
            "jq",
            "ls",
            "mkdir",
            "pip",
            "pwd",
            "pytest",
        ],
        _anything,
    ),
}


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("-") and not word.lstrip("-")[:1].isdigit()]


def _missing_files(words: list[str]) -> list[str]:
    """Paths into the repository that lead nowhere."""
    inside = [word for word in words if "/" in word and word[0] not in "-./" and (ROOT / word.split("/")[0]).is_dir()]
    return [f"no file {word}" for word in inside if not (ROOT / word).exists()]
