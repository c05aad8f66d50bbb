"""`python -m benchmarks.convergence` or `python benchmarks/convergence`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = str(Path(__file__).resolve().parents[2])
    # Started as a folder: Python put the folder itself on the path, not the repository
    if root not in sys.path:
        sys.path[0:0] = [root]
    from benchmarks.convergence.cli import main

    sys.exit(main())
