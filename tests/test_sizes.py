"""The report of sizes: what it counts, and that it covers this repository."""

from pathlib import Path

from tests import sizes
from tests.conflicts import ROOT, repository_files

SOURCE = '''"""A module."""


class Thing:
    @property
    def one(self):
        return 1


def two():
    def three():
        return 3

    return three
'''


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_files_belong_to_the_deepest_directory_and_functions_are_measured(tmp_path: Path) -> None:
    write(tmp_path, "meshwright/core.py", SOURCE)
    write(tmp_path, "meshwright/__init__.py", "")
    write(tmp_path, f"{sizes.DIRECTORIES['cli']}long.py", "x = 1\n" * sizes.SHORT_LINES)
    write(tmp_path, "examples/script.py", SOURCE)
    modules = {module.path: module for module in sizes.read_modules(tmp_path)}
    assert {path: module.directory for path, module in modules.items()} == {
        "meshwright/core.py": "meshwright",
        "meshwright/__init__.py": "meshwright",
        f"{sizes.DIRECTORIES['cli']}long.py": "cli",
    }
    core = modules["meshwright/core.py"]
    assert core.lines == 14
    assert dict(core.functions) == {"Thing.one": 3, "two": 5, "two.three": 2}
    assert [path for path, module in modules.items() if module.short] == ["meshwright/core.py"]


def test_the_report_has_every_directory_and_the_longest_first(tmp_path: Path) -> None:
    write(tmp_path, "operator/a.py", SOURCE)
    write(tmp_path, "worker/b.py", "x = 1\n" * 90)
    write(tmp_path, "tests/c.py", "x = 1\n" * 200)
    table, files, functions, short = sizes.report(sizes.read_modules(tmp_path)).split("\n\n")
    assert [line.split()[:3] for line in table.splitlines()[1:] if line.split()[1] != "0"] == [
        ["operator", "1", "14"],
        ["worker", "1", "90"],
        ["tests", "1", "200"],
        ["all", "3", "304"],
    ]
    assert files.splitlines()[1:] == ["    90  worker/b.py", "    14  operator/a.py"]
    assert functions.splitlines()[1] == "     5  operator/a.py: two"
    assert short.splitlines()[1:] == ["    14  operator/a.py"]


def test_every_directory_of_this_repository_has_files() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in repository_files() if path.suffix == ".py"]
    assert {sizes.directory_of(name) for name in names} - {""} == set(sizes.DIRECTORIES)
