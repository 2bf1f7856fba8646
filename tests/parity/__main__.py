"""`make parity`: the whole matrix, docs/parity.md and its JSON. Ends with code 1 when a row is over its limit."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from meshwright.api.precision import Precision
from tests.distributed.pool import RankFailedError, RankPool
from tests.parity.case import Case
from tests.parity.matrix import all_cases
from tests.parity.measure import Oracle, check_refused, measure
from tests.parity.report import Row, as_json, markdown

ROOT = Path(__file__).parents[2]


def run(case: Case, pool: RankPool, oracle: Oracle) -> Row:
    """One row."""
    began = time.monotonic()
    if case.refused is not None:
        check_refused(case)
        return Row(case, None)
    formats = (Precision.FP32, Precision.FP64) if case.exact else (Precision.FP32,)
    errors = {precision: measure(case, pool, oracle, precision) for precision in formats}
    return Row(case, errors, time.monotonic() - began)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("-k", default="", help="run only cases whose name holds this; writes no page")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if arguments.k in case.name]
    began = time.monotonic()
    pool = RankPool()
    oracle, rows, failed = Oracle(pool), [], []
    try:
        for number, case in enumerate(cases, start=1):
            try:
                row = run(case, pool, oracle)
                good = row.passed
                rows.append(row)
                told = "" if good else f": {row.errors}"
            except (AssertionError, RankFailedError) as error:
                good, told = False, f": {error}"
            failed += [] if good else [case.name]
            sys.stdout.write(f"[{number}/{len(cases)}] {'ok  ' if good else 'FAIL'} {case.name}{told}\n")
            sys.stdout.flush()
    finally:
        pool.close()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(rows), indent=1) + "\n")
    if not arguments.k and not failed:
        (ROOT / "docs" / "parity.md").write_text(markdown(rows))
    sys.stdout.write(f"{len(rows)} rows, {len(failed)} over a limit, {time.monotonic() - began:.0f} s\n")
    sys.stdout.writelines(f"  {name}\n" for name in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
