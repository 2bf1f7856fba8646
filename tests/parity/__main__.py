"""`make parity`: the whole matrix, docs/parity.md and its JSON. Ends with code 1 when a row is over its limit.

The numbers are written after every row. With `--resume` rows whose numbers stand in the file are not run again, so the
matrix can be run in parts, also of one that was changed: a row is known by its name, which has all of its options. A
row without numbers stands in the page as not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.distributed.pool import RankFailedError, RankPool
from tests.parity.case import Case, meshes_of
from tests.parity.matrix import all_cases
from tests.parity.measure import Oracle, check_refused, measure
from tests.parity.report import Row, as_json, from_json, markdown

ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "benchmarks" / "results" / "parity.json"


def run(case: Case, pool: RankPool, oracle: Oracle) -> Row:
    """One row."""
    began = time.monotonic()
    if case.refused is not None:
        check_refused(case)
        return Row(case, None)
    return Row(case, measure(case, pool, oracle, case.formats), time.monotonic() - began)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("-k", default="", help="run only cases whose name holds this; writes no page")
    parser.add_argument("--json", type=Path, default=NUMBERS, help="where the numbers are kept")
    parser.add_argument("--resume", action="store_true", help="keep the numbers that are there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so long")
    arguments = parser.parse_args()
    known = from_json(json.loads(arguments.json.read_text())) if arguments.resume and arguments.json.exists() else {}
    cases = all_cases()
    began = time.monotonic()
    pool = RankPool(timeout=600)
    oracle, failed, rows = Oracle(), [], dict(known)
    wanted = [case for case in cases if arguments.k in case.name and case.name not in known]
    try:
        for number, case in enumerate(sorted(wanted, key=meshes_of), start=1):
            if time.monotonic() - began > arguments.seconds:
                break
            told = _tell(case, pool, oracle, rows)
            failed += [case.name] if told else []
            sys.stdout.write(f"[{number}/{len(wanted)}] {'FAIL' if told else 'ok  '} {case.name}{told}\n")
            sys.stdout.flush()
            arguments.json.write_text(json.dumps(as_json(rows.values()), indent=1) + "\n")
    finally:
        pool.close()
        oracle.close()
    arguments.json.write_text(json.dumps(as_json(rows.values()), indent=1) + "\n")
    if not arguments.k:
        (ROOT / "docs" / "parity.md").write_text(markdown([rows.get(case.name, Row(case, {})) for case in cases]))
    sys.stdout.write(
        f"{len(rows)} of {len(cases)} rows, {len(failed)} over a limit, {time.monotonic() - began:.0f} s\n"
    )
    sys.stdout.writelines(f"  {name}\n" for name in failed)
    return 1 if failed else 0


def _tell(case: Case, pool: RankPool, oracle: Oracle, rows: dict[str, Row]) -> str:
    """What is wrong with a case; empty, and its row among `rows`, when nothing is."""
    try:
        row = run(case, pool, oracle)
    except (AssertionError, RankFailedError) as error:
        return f": {error}"
    if row.passed:
        rows[case.name] = row
        return ""
    return f": {row.errors}"


if __name__ == "__main__":
    sys.exit(main())
