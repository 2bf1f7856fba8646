"""`make parity`: the whole matrix, docs/parity.md and its JSON. Ends with code 1 when a row is over its limit.

The numbers are written after every row. With `--resume` rows whose numbers stand in the file are not run again, so the
matrix can be run in parts, also of one that was changed: a row is known by its name, which has all of its options. A
row without numbers stands in the page as not measured.

`--losses FILE` also records what every row computed, exactly: losses as hexadecimal floats and SHA-256 sums of
gradients and parameters. `--against FILE` runs the rows and compares them with such a file, bit for bit: it lists the
rows that differ and ends with code 1 if there are any. With either, no page is written, and no JSON unless
`--json` names a file. Rows of an asynchronous parameter server follow the clock: they are marked in the file and not
compared.
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
    numbers = arguments.json or (None if exact else NUMBERS)
    # Read before the rows are run, since the same file may be written.
    before = json.loads(arguments.against.read_text()) if arguments.against else None
    known = from_json(json.loads(numbers.read_text())) if arguments.resume and numbers and numbers.exists() else {}
    cases = all_cases()
    began = time.monotonic()
    wanted = [case for case in cases if arguments.k in case.name and case.name not in known]
    sweep = _Sweep(sorted(wanted, key=meshes_of), dict(known), numbers, began + arguments.seconds)
    sweep.run()
    failed = sweep.failed
    rows = {case.name: sweep.rows[case.name] for case in cases if case.name in sweep.rows}
    if numbers:
        numbers.write_text(json.dumps(as_json(rows.values()), indent=1) + "\n")
    if not (arguments.k or exact):
        (ROOT / "docs" / "parity.md").write_text(markdown([rows.get(case.name, Row(case, {})) for case in cases]))
    sys.stdout.write(
        f"{len(rows)} of {len(cases)} rows, {len(failed)} over a limit, {time.monotonic() - began:.0f} s\n"
    )
    sys.stdout.writelines(f"  {name}\n" for name in failed)
    fresh = losses.as_json({case.name: sweep.recorded[case.name] for case in cases if case.name in sweep.recorded})
    if arguments.losses:
        arguments.losses.write_text(json.dumps(fresh, indent=1) + "\n")
    same = before is None or _same(before, fresh, arguments.k)
    return 0 if same and not failed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("-k", default="", help="run only cases whose name holds this; writes no page")
    parser.add_argument("--json", type=Path, help=f"where the numbers are kept: {NUMBERS.relative_to(ROOT)}")
    parser.add_argument("--resume", action="store_true", help="keep the numbers that are there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so long")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="record the exact losses of every row; no page")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with recorded losses; no page")
    arguments = parser.parse_args()
    if arguments.resume and (arguments.losses or arguments.against):
        parser.error("--resume leaves out rows, which --losses and --against need")
    return arguments


def _same(before: losses.Stored, fresh: losses.Stored, part: str) -> bool:
    """Say how a run differs from a file."""
    if before["machine"] != fresh["machine"]:
        sys.stdout.write(f"the file is of another machine: {before['machine']}, this one is {fresh['machine']}\n")
    difference = losses.compare(before, fresh, part)
    sys.stdout.writelines(f"{line}\n" for line in losses.report(difference))
    return difference.empty


class _Sweep:
    """Runs cases on two pools at a time: ranks that meet wait for each other, and leave a core idle by that.

    One pool takes cases from the beginning of the list and one from its end, so that each goes on with the meshes of
    its last case.
    """

    def __init__(self, cases: Sequence[Case], rows: dict[str, Row], path: Path | None, until: float) -> None:
        self.rows, self.failed = rows, list[str]()
        self.recorded: dict[str, Recorded] = {}
        self._left, self._count, self._path, self._until = deque(cases), len(cases), path, until
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
        wrong = ""
        try:
            row, self.recorded[case.name] = run(case, pool, oracle)
            wrong = "" if row.passed else f": {row.errors}"
        except (AssertionError, RankFailedError) as error:
            wrong = f": {error}"
        with self._lock:
            self._done += 1
            if wrong:
                self.failed.append(case.name)
            else:
                self.rows[case.name] = row
            sys.stdout.write(f"[{self._done}/{self._count}] {'FAIL' if wrong else 'ok  '} {case.name}{wrong}\n")
            sys.stdout.flush()
            if self._path:
                self._path.write_text(json.dumps(as_json(self.rows.values()), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
