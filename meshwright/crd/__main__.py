"""Writes the generated files into a checkout: `python -m meshwright.crd [DIRECTORY]`."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.crd.generated_files import generated_files


def main() -> None:
    """Writes every generated file below the given directory, by default the current one."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, text in generated_files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
