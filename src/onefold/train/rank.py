"""`python -m onefold.train.rank CONFIG`: one rank of `onefold train`. Nothing slow is imported before
`end_with_parent`.
"""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

from onefold.processes.signals import end_with_parent, parent_told, quiet_third_parties


def rank(config: Path) -> int:
    """Run as a rank until the run ends. Returns the exit status."""
    # SIGINT ends the rank until there is something to save: see onefold.processes.signals
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_third_parties()
    # Objects made by the imports stay alive. Collecting among them takes a fifth of the import time
    gc.disable()
    from onefold.train.config import TrainConfig
    from onefold.train.worker import run_rank

    gc.freeze()
    gc.enable()
    return run_rank(TrainConfig.model_validate_json(config.read_text(encoding="utf-8")))


if __name__ == "__main__":
    end_with_parent(parent_told())
    sys.exit(rank(Path(sys.argv[1])))
