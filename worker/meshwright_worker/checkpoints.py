"""List, verify and copy checkpoints in directories and object stores, and say where they come from.

Prints one JSON object for each.

Run as `python -m meshwright_worker.checkpoints list --at DIR`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from meshwright_worker.checkpoint import inspection
from meshwright_worker.checkpoint_errors import CheckpointError


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.checkpoints", description=__doc__)
    parser.add_argument("action", choices=("list", "verify", "copy", "lineage"), help="What to do.")
    parser.add_argument(
        "--at", action="append", required=True, help="A checkpoint, or a directory or URI of checkpoints."
    )
    parser.add_argument("--step", type=int, help="Only the checkpoint of this step.")
    parser.add_argument("--best", action="store_true", help="Only the checkpoint with the lowest evaluation loss.")
    parser.add_argument("--to", help="With copy: the directory or URI of the copy.")
    arguments = parser.parse_args()
    if (arguments.action == "copy") is not (arguments.to is not None):
        parser.error("`copy` needs --to, and only `copy` has it")
    if arguments.best and arguments.step is not None:
        parser.error("--best is not supported with --step: pass one of them")
    try:
        for entry in _entries(arguments):
            sys.stdout.write(json.dumps(asdict(entry)) + "\n")
            sys.stdout.flush()
    except (OSError, ValueError, CheckpointError) as error:
        parser.error(" ".join(str(error).split()))


def _entries(arguments: argparse.Namespace) -> Iterable[Any]:
    places = list(dict.fromkeys(place if "://" in place else place.rstrip("/") or "/" for place in arguments.at))
    if arguments.action == "copy":
        return [inspection.copied(places, arguments.step, arguments.to, best=arguments.best)]
    existing = _existing(places)
    step = inspection.best_steps(existing)[0] if arguments.best else arguments.step
    if arguments.action == "list":
        entries = inspection.with_best(entry for place in existing for entry in inspection.listed(place))
        return [entry for entry in entries if step in (None, entry.step)]
    if arguments.best:
        existing = [place for place in existing if step in (number for number, *_ in inspection.found_at(place))]
    if arguments.action == "lineage":
        found = [inspection.lineage(place, step) for place in existing]
        return sorted(found, key=lambda entry: -(entry.step or 0))[:1]
    return (entry for place in existing for entry in inspection.verified(place, step))


def _existing(places: list[str]) -> list[str]:
    """Of several places, those that have checkpoints: a tier of a job may have none yet."""
    if len(places) == 1:
        return places
    found = []
    for place in places:
        try:
            entries = inspection.listed(place)
        except FileNotFoundError:
            continue
        if entries:
            found.append(place)
    return found


if __name__ == "__main__":
    main()
