"""The processes below `onefold train`, both of them `python -m onefold.train.agent`.

    launcher ─► ... agent CONFIG SAID TORCHRUN'S ARGUMENTS    the checks that need torch, then torchrun's elastic agent, without its log of
                                                              what the ranks say better
    agent    ─► ... agent rank CONFIG                         one rank

The agent leads a session of its own: a Ctrl-C in the terminal reaches the launcher only, and the
launcher decides (see `onefold.processes.signals`). Schedulers that send a signal to every process of a
job reach the agent too; it lets them pass. Nothing is imported before `end_with_parent`.
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
    """Be a rank until the run ends. Returns the exit status."""
    # Until there is something to save: see onefold.processes.signals
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # who ends the run finds this rank from now on
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
    """Check the configuration in `file`, say `said`, and run torchrun's agent until its ranks have
    ended. Returns the exit status.
    """
    # A handler that does nothing rather than SIG_IGN, which the ranks would inherit
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    os.environ[PARENT] = str(os.getpid())  # of the ranks
    logging.disable(logging.CRITICAL)
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api

    from onefold.wording import TrainError

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
    # Those above stay as they are. Not every version of torch has these options.
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
    except api.RendezvousTimeoutError:
        said = (
            "the machines did not meet in time: fewer than --nnodes asks for came to"
            " --rdzv-endpoint."
        )
    except api.RendezvousClosedError:
        said = "the run has ended on the other machines."
    except api.RendezvousError as error:
        said = (
            f"the machines cannot meet at --rdzv-endpoint ({_first_line(error)}): is it HOST:PORT"
            " of one of them, and is that one up?"
        )
    except DistError as error:  # a machine went during the rendezvous, and the store with it
        said = (
            f"the machines lost each other while they met ({_first_line(error)}). Start this one"
            " again, and it joins them."
        )
    print(f"error: {said}", file=sys.stderr)
    return 1


def _make_ready(file: Path, nproc: int) -> None:
    """Check what needs torch, and have a model of the hub where the ranks find it. Here rather than
    in the launcher, which so need not import torch.
    Raises TrainError.
    """
    from onefold.data.sources import needs_hub
    from onefold.models.names import fetch, kind_of
    from onefold.train.config import TrainConfig, with_precision
    from onefold.train.early import refuse_groups
    from onefold.train.output import with_output

    config = TrainConfig.model_validate_json(file.read_text(encoding="utf-8"))
    config.check_recipe()
    if config.nodes[1] == 1:
        refuse_groups(config, nproc)
        # On several machines the first rank of all decides about the folder, which may be in use by
        # the time that others come.
        config = with_output(config)
    if kind_of(config.model) == "hub":
        out = sys.stderr if config.json_lines else sys.stdout
        fetch(config.model, lambda line: print(line, file=out, flush=True))
        config = with_precision(config)
        if not needs_hub(config.data):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the ranks find it in the cache
        file.write_text(config.model_dump_json(by_alias=True), encoding="utf-8")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _has_spoken(control: Path) -> bool:
    """Whether a rank of the last start told what went wrong."""
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
    # What the imports make stays: going over it again and again takes a fifth of their time
    gc.disable()
    if sys.argv[1] == "rank":
        sys.exit(rank(Path(sys.argv[2])))
    sys.exit(agent(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
