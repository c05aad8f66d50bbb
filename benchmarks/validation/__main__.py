"""Writes docs/validation.md: `python -m benchmarks.validation [--check]`. Every figure comes from
the package and from benchmarks/data.
"""

from __future__ import annotations

import sys

from benchmarks import harness
from benchmarks.validation.page import page

if __name__ == "__main__":
    sys.exit(
        harness.write_page("validation", __doc__, harness.ROOT / "docs" / "validation.md", page)
    )
