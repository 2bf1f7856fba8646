"""`make parity`: runs every row of the parity matrix, and writes docs/parity.md and a JSON file with the numbers.

Exits with 1 if a row exceeds its limit. The numbers are written after every row. With `--resume`, rows that have
numbers in the file are not run again, so the matrix can be run in parts, also after a change: a row is identified by
its name, which contains all of its options. The page shows a row without numbers as not measured.

`--losses FILE` also records the exact results of every row: losses as hexadecimal floats, and SHA-256 sums of gradients
and parameters. `--against FILE` runs the rows and compares them with such a file, bit for bit. It lists the rows that
differ, and exits with 1 if there are any. With either option no page is written, and no JSON unless `--json` names a
file. With `--resume`, rows that are in the file of `--losses` are not run again. Results of an asynchronous parameter
server depend on timing: these rows are marked in the file and not compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.distributed.rank_pool import RankFailedError, RankPool
from tests.parity import losses
from tests.parity.case import Case, meshes_of
from tests.parity.losses import Recorded
from tests.parity.matrix import all_cases
from tests.parity.measure import Oracle, check_refused, measure
from tests.parity.report import Row, as_json, from_json, markdown

ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "benchmarks" / "results" / "parity.json"


def run(case: Case, pool: RankPool, oracle: Oracle) -> tuple[Row, Recorded]:
    """One row, and what it computed exactly."""
    began = time.monotonic()
    if case.refused is not None:
        return Row(case, None), Recorded(case.technique, {}, refused=check_refused(case))
    measured = measure(case, pool, oracle, case.formats)
    row = Row(case, measured.errors, time.monotonic() - began)
    return row, Recorded(case.technique, measured.numbers, timed=case.asynchronous)


def main() -> int:
    """The command line."""
    arguments = _arguments()
    exact = bool(arguments.losses or arguments.against)
    # Read before the rows are run, since the same file may be written.
    before = json.loads(arguments.against.read_text()) if arguments.against else None
    cases = all_cases()
    results = _Results(cases, arguments.json or (None if exact else NUMBERS), arguments.losses)
    if arguments.resume:
        results.read()
    began = time.monotonic()
    wanted = [case for case in cases if arguments.k in case.name and not results.has(case)]
    sweep = _Sweep(sorted(wanted, key=meshes_of), results, began + arguments.seconds)
    sweep.run()
    if not (arguments.k or exact):
        rows = [results.rows.get(case.name, Row(case, {})) for case in cases]
        (ROOT / "docs" / "parity.md").write_text(markdown(rows))
    sys.stdout.write(
        f"{len(results)} of {len(cases)} rows, {len(sweep.failed)} over a limit, {time.monotonic() - began:.0f} s\n"
    )
    sys.stdout.writelines(f"  {name}\n" for name in sweep.failed)
    same = before is None or _same(before, results.exact(), arguments.k)
    return 0 if same and not sweep.failed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("-k", default="", help="run only cases whose name contains this; write no page")
    parser.add_argument("--json", type=Path, help=f"file of the numbers (default: {NUMBERS.relative_to(ROOT)})")
    parser.add_argument("--resume", action="store_true", help="do not run rows again that have numbers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this time")
    parser.add_argument(
        "--losses", type=Path, metavar="FILE", help="record the exact losses of every row; write no page"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with recorded losses; write no page")
    arguments = parser.parse_args()
    if arguments.resume and arguments.against and not arguments.losses:
        parser.error("--resume with --against needs --losses FILE, which has the rows that ran before")
    return arguments


def _same(before: losses.Stored, fresh: losses.Stored, part: str) -> bool:
    """Say how a run differs from a file."""
    if before["machine"] != fresh["machine"]:
        sys.stdout.write(f"the file is of another machine: {before['machine']}, this one is {fresh['machine']}\n")
    difference = losses.compare(before, fresh, part)
    sys.stdout.writelines(f"{line}\n" for line in losses.report(difference))
    return difference.empty


class _Results:
    """The rows so far, written to their files after each one: a long run may be killed.

    `numbers` has how far rows are from one process, `losses_file` what they computed exactly.
    """

    def __init__(self, cases: Sequence[Case], numbers: Path | None, losses_file: Path | None) -> None:
        self.rows: dict[str, Row] = {}
        self._order = [case.name for case in cases]
        self._numbers, self._losses = numbers, losses_file
        self._exact: losses.Stored = losses.as_json({})

    def read(self) -> None:
        """Take the rows that the files have."""
        if self._numbers and self._numbers.exists():
            self.rows = from_json(json.loads(self._numbers.read_text()))
        if self._losses and self._losses.exists():
            stored = json.loads(self._losses.read_text())
            if stored["machine"] != losses.machine():
                raise SystemExit(f"{self._losses} is of another machine: {stored['machine']}")
            self._exact = losses.joined(self._exact, stored, self._order)

    def has(self, case: Case) -> bool:
        """Whether the row is in every file that is written."""
        files = [self.rows] * bool(self._numbers) + [self._recorded()] * bool(self._losses)
        return bool(files) and all(case.name in names for names in files)

    def add(self, case: Case, row: Row, recorded: Recorded) -> None:
        """One more row."""
        if row.passed:
            self.rows[case.name] = row
        self._exact = losses.joined(self._exact, losses.as_json({case.name: recorded}), self._order)
        if self._numbers:
            rows = [self.rows[name] for name in self._order if name in self.rows]
            _write(self._numbers, json.dumps(as_json(rows), indent=1))
        if self._losses:
            _write(self._losses, json.dumps(self._exact))

    def exact(self) -> losses.Stored:
        """What all rows computed."""
        return self._exact

    def __len__(self) -> int:
        return len({*self.rows, *self._recorded()})

    def _recorded(self) -> set[str]:
        return {*self._exact["rows"], *self._exact["refused"]}


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text + "\n")
    part.replace(path)


class _Sweep:
    """Runs cases on two pools at a time: ranks that meet wait for each other, and leave a core idle by that.

    One pool takes cases from the beginning of the list and one from its end, so that each goes on with the meshes of
    its last case.
    """

    def __init__(self, cases: Sequence[Case], results: _Results, until: float) -> None:
        self.failed = list[str]()
        self._left, self._count, self._results, self._until = deque(cases), len(cases), results, until
        self._done = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until no case is left, or no time."""
        with ThreadPoolExecutor(2) as threads:
            for under_way in [threads.submit(self._some, take) for take in (self._left.popleft, self._left.pop)]:
                under_way.result()

    def _some(self, take: Callable[[], Case]) -> None:
        pool, oracle = RankPool(timeout=600), Oracle()
        try:
            while self._left and time.monotonic() < self._until:
                with suppress(IndexError):
                    self._one(take(), pool, oracle)
        finally:
            pool.close()
            oracle.close()

    def _one(self, case: Case, pool: RankPool, oracle: Oracle) -> None:
        wrong, found = "", None
        try:
            found = run(case, pool, oracle)
            wrong = "" if found[0].passed else f": {found[0].errors}"
        except (AssertionError, RankFailedError) as error:
            wrong = f": {error}"
        with self._lock:
            self._done += 1
            if wrong:
                self.failed.append(case.name)
            if found:
                self._results.add(case, *found)
            sys.stdout.write(f"[{self._done}/{self._count}] {'FAIL' if wrong else 'ok  '} {case.name}{wrong}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
