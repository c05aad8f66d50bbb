"""The processes below `onefold train`: the agent and the ranks. Both are `python -m
onefold.train.agent`.

    launcher ─► ... agent CONFIG SAID TORCHRUN'S ARGUMENTS    the checks that need torch, then torchrun's elastic agent, without its
                                                              log: the ranks report errors better
    agent    ─► ... agent rank CONFIG                         one rank

The agent leads its own session. A Ctrl-C in the terminal therefore reaches the launcher only, and
the launcher decides what to do (see `onefold.processes.signals`). Some schedulers send a signal to
every process of a job; the agent ignores it. Nothing slow is imported before `end_with_parent`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from onefold.processes.signals import (
    CONTROL,
    GRACE,
    PARENT,
    REFUSED,
    end_with_parent,
    parent_told,
    quiet_third_parties,
)


def rank(config: Path) -> int:
    """Run as a rank until the run ends. Returns the exit status."""
    # SIGINT ends the rank until there is something to save: see onefold.processes.signals
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # the launcher finds this rank's pid here to end it
        Path(os.environ[CONTROL], f"rank-{os.environ.get('LOCAL_RANK', '0')}.pid").write_text(
            str(os.getpid())
        )
    quiet_third_parties()
    from onefold.train.config import TrainConfig
    from onefold.train.worker import run_rank

    gc.freeze()
    gc.enable()
    return run_rank(TrainConfig.model_validate_json(config.read_text(encoding="utf-8")))


def agent(file: Path, said: str, arguments: list[str]) -> int:
    """Check the configuration in `file`, print `said`, run torchrun's agent until its ranks end.
    Returns the exit status.
    """
    # A handler that does nothing: the ranks would inherit SIG_IGN, but not a handler
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    os.environ[PARENT] = str(os.getpid())  # the ranks end with this process
    logging.disable(logging.CRITICAL)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from onefold.train import alone
    from onefold.wording import TrainError

    alone.register()
    asked = run.parse_args(arguments)
    try:
        _make_ready(file, int(asked.nproc_per_node))
    except TrainError as error:
        Path(os.environ[CONTROL], REFUSED).write_text(str(error), encoding="utf-8")
        return 1
    gc.freeze()
    gc.enable()
    if said:
        print(said, flush=True)
    # Let torchrun handle only SIGQUIT, so that the handlers above stay. Some versions of torch lack
    # these options.
    for name, value in (
        ("signals_to_handle", "SIGQUIT"),
        ("shutdown_timeout", int(float(os.environ.get(GRACE, "30")))),
    ):
        if hasattr(asked, name):
            setattr(asked, name, value)
    try:
        run.run(asked)
        return 0
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        said = _how_it_ended(first, failure.exitcode)
        if _has_spoken(Path(os.environ[CONTROL])):
            return 1
    print(f"error: {said}", file=sys.stderr)
    return 1


def _make_ready(file: Path, nproc: int) -> None:
    """Run the checks that need torch, and download a model of the hub for the ranks.
    The agent does this because the launcher does not import torch.
    Raises TrainError.
    """
    from onefold.data.sources import needs_hub
    from onefold.models.names import fetch, kind_of
    from onefold.train.config import TrainConfig, with_precision
    from onefold.train.early import refuse_groups
    from onefold.train.output import with_output

    config = TrainConfig.model_validate_json(file.read_text(encoding="utf-8"))
    config.check_recipe()
    refuse_groups(config, nproc)
    config = with_output(config)
    if kind_of(config.model) == "hub":
        out = sys.stderr if config.json_lines else sys.stdout
        fetch(config.model, lambda line: print(line, file=out, flush=True))
        config = with_precision(config)
        if not needs_hub(config.data):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the ranks find it in the cache
        file.write_text(config.model_dump_json(by_alias=True), encoding="utf-8")


def _has_spoken(control: Path) -> bool:
    """Whether a rank of the last start has reported what went wrong."""
    starts = [file.stat().st_mtime_ns for file in control.glob("rank-*.pid")]
    return any(
        file.stat().st_mtime_ns >= min(starts, default=0) for file in control.glob("failed-*")
    )


def _how_it_ended(rank: int, status: int) -> str:
    if status >= 0:
        return f"rank {rank} ended with status {status} and said nothing."
    hint = ""
    if -status == signal.SIGKILL:
        hint = (
            " This is how the kernel ends a process when memory runs out: try a higher --stage, a"
            " smaller --micro-batch or --seq."
        )
    return f"rank {rank} was ended by {signal.Signals(-status).name}.{hint}"


if __name__ == "__main__":
    end_with_parent(parent_told())
    # Objects made by the imports stay alive. Collecting among them takes a fifth of the import time
    gc.disable()
    if sys.argv[1] == "rank":
        sys.exit(rank(Path(sys.argv[2])))
    sys.exit(agent(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
