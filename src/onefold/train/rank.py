"""The process of one rank, started by the agent as `python -m onefold.train.rank CONFIG`: what must
hold before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from onefold.train.quiet import quiet_third_parties
from onefold.train.stop import CONTROL, end_with_parent, parent_told


def main(config: Path) -> int:
    """Returns the exit status."""
    end_with_parent(parent_told())
    # Until there is something to save: see onefold.train.stop
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # who ends the run finds this rank from now on
        Path(os.environ[CONTROL], f"rank-{os.environ.get('LOCAL_RANK', '0')}.pid").write_text(
            str(os.getpid())
        )
    quiet_third_parties()
    from onefold.train.config import TrainConfig
    from onefold.train.worker import run_rank

    return run_rank(TrainConfig.model_validate_json(config.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
