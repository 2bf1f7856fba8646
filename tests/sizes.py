"""Report the size of the code by directory: `python -m tests.sizes`. It sets no limit and never fails.

A file has one idea and all of it, and a function does one thing. The lists show where to look for exceptions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.conflicts import ROOT, repository_files

DIRECTORIES = {
    "meshwright": "meshwright/",
    "cli": "cli/meshwright_cli/",
    "local": "local/meshwright_local/",
    "operator": "operator/",
    "worker": "worker/",
    "dashboards": "dashboards/",
    "tests": "tests/",
    "benchmarks": "benchmarks/",
}
"""Names in the report and their paths. A file belongs to the one with the longest matching path."""

PRODUCT = ("meshwright", "cli", "local", "operator", "worker")
"""Directories whose files and functions are listed."""

SHORT_LINES = 40
LIST_LENGTH = 15


@dataclass(frozen=True)
class Module:
    """One Python file."""

    directory: str
    path: str
    lines: int
    functions: tuple[tuple[str, int], ...]
    """Functions and methods with their lines, which include decorators and docstrings."""

    @property
    def short(self) -> bool:
        """Whether the file is short. An `__init__.py` may be."""
        return self.lines < SHORT_LINES and not self.path.endswith("/__init__.py")


def read_modules(root: Path = ROOT) -> list[Module]:
    """The Python files of all directories."""
    names = [path.relative_to(root).as_posix() for path in repository_files(root) if path.suffix == ".py"]
    return [_read(root, name, directory) for name in names if (directory := directory_of(name))]


def directory_of(name: str) -> str:
    """The directory of a file, by its path from the root; an empty string for other files."""
    matches = [directory for directory, path in DIRECTORIES.items() if name.startswith(path)]
    return max(matches, key=lambda directory: len(DIRECTORIES[directory]), default="")


def _read(root: Path, name: str, directory: str) -> Module:
    text = (root / name).read_text(encoding="utf-8")
    return Module(directory, name, len(text.splitlines()), tuple(_functions(ast.parse(text))))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, (node.end_lineno or first) - first + 1
        scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        yield from _functions(node, f"{prefix}{node.name}." if isinstance(node, scopes) else prefix)


def report(modules: Sequence[Module]) -> str:
    """The report as text: a table of all directories, then lists for those of the product."""
    header = f"{'directory':<12}{'files':>7}{'lines':>9}{'median file':>13}{'short files':>13}{'median function':>17}"
    rows = [
        _row(directory, [module for module in modules if module.directory == directory]) for directory in DIRECTORIES
    ]
    product = [module for module in modules if module.directory in PRODUCT]
    files = sorted(((m.lines, m.path) for m in product), reverse=True)
    functions = sorted(((lines, f"{m.path}: {name}") for m in product for name, lines in m.functions), reverse=True)
    short = sorted((m.lines, m.path) for m in product if m.short)
    parts = [
        [header, *rows, _row("all", modules)],
        ["longest files", *_lines(files[:LIST_LENGTH])],
        ["longest functions", *_lines(functions[:LIST_LENGTH])],
        [f"short files (under {SHORT_LINES} lines, without __init__.py)", *_lines(short)],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _row(name: str, modules: Sequence[Module]) -> str:
    lines = [module.lines for module in modules]
    functions = [length for module in modules for _, length in module.functions]
    short = sum(module.short for module in modules)
    medians = f"{median(lines or [0]):>13.0f}{short:>13}{median(functions or [0]):>17.0f}"
    return f"{name:<12}{len(modules):>7}{sum(lines):>9}{medians}"


def _lines(entries: Sequence[tuple[int, str]]) -> list[str]:
    return [f"{lines:>6}  {name}" for lines, name in entries]


if __name__ == "__main__":
    sys.stdout.write(report(read_modules()) + "\n")
