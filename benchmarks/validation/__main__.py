"""Writes docs/validation.md: `python -m benchmarks.validation [--check]`. Every figure comes from
the package and from benchmarks/data.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.validation.page import page

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if the page is not what the code says",
    )
    text = page()
    if parser.parse_args().check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(
            f"{PAGE.name} is not what the code says: run `python -m benchmarks.validation`.",
            file=sys.stderr,
        )
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.name}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
