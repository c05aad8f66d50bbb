"""`onefold train` if no launcher has started ranks yet.

    joins, from_slurm    in processes/host.py: has a launcher set RANK? then this process is a rank (worker.run_rank)
    check_early          checks what needs no torch, in a second
    launch               claims the output folder ─► counts the ranks ─► checks the rest ─► starts the ranks
    _Signals             while they run: passes signals on to the ranks

A rank is `worker.main` (processes/local.py). Where one fails, all are started again,
up to --max-restarts times. On several machines the user starts torchrun.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from onefold.cores import physical_cores
from onefold.data.sources import check_data, needs_hub
from onefold.data.text import check_tokenizer
from onefold.models.names import check_hub, fetch, kind_of
from onefold.processes.claim import Claim
from onefold.processes.host import child_environment, gpus_here
from onefold.processes.local import how_it_ended, local_ranks
from onefold.processes.signals import (
    FAILED,
    FINAL,
    PREEMPTION,
    TRAINING,
    end_at_once,
    held_back,
    put_in_order,
)
from onefold.train.config import TrainConfig, with_precision
from onefold.train.optimizers import check_optimizer
from onefold.train.output import check_output, name_output
from onefold.wording import TrainError


def check_early(config: TrainConfig) -> None:
    """Raise TrainError unless everything that the options name exists and can be read."""
    check_tokenizer(config.tokenizer)
    check_optimizer(config)
    for option, folder in [("nvme", folder) for folder in config.nvme or ()] + [
        ("resume", config.resume)
    ]:
        if folder not in ("none", "auto") and not os.path.exists(folder):
            raise TrainError(f"--{option} {folder}: there is no such folder.")
    check_data(config.data, config.text_field)
    # The model comes last: where the user has named none, the default's package may be missing,
    # and what the user has named wrong is told first
    if kind_of(config.model) == "hub":
        check_hub(config.model)
    if config.lora is not None and importlib.util.find_spec("peft") is None:
        raise TrainError(f"--lora {config.lora} needs peft: pip install peft.")
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise TrainError("--tensorboard needs: pip install tensorboard.")


def ranks_to_start(config: TrainConfig) -> tuple[int, str]:
    """Return (how many, why): --nproc, else one per GPU, else one per physical core.
    Raises TrainError for more ranks than GPUs.
    """
    gpus = gpus_here() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise TrainError("--device cuda: torch finds no GPU here; use --device auto or cpu.")
    if gpus and config.nproc is not None and config.nproc > gpus:
        raise TrainError(
            f"--nproc {config.nproc}: there are {gpus} GPUs; use at most {gpus}, or --device cpu."
        )
    if config.nproc:
        return config.nproc, "as asked"
    if gpus:
        return gpus, f"one a GPU, {gpus} here"
    cores = physical_cores()
    return cores, f"one a physical core, {cores} here"


def launch(config: TrainConfig) -> int:
    """Run the training on ranks of this machine.
    Returns the exit status: 0, 1 for a failure, 130 after Ctrl-C.
    Raises TrainError if the run cannot start; then no rank was started and no file is left.
    """
    named = name_output(config)
    with held_back():
        claim = Claim(Path(str(named.output)), new=config.output is None)
        put_in_order.append(claim.undo)  # should a signal end this process before the ranks run
    try:
        check_output(named)
        nproc, why = ranks_to_start(config)
        named.check(nproc)
        return _run(_downloaded(named), nproc, why)
    finally:
        put_in_order.remove(claim.undo)
        claim.undo()


def _downloaded(config: TrainConfig) -> TrainConfig:
    """Download a model of the hub for the ranks. Raises TrainError if that fails."""
    if kind_of(config.model) != "hub":
        return config
    out = sys.stderr if config.json_lines else sys.stdout
    fetch(config.model, lambda line: print(line, file=out, flush=True))
    return with_precision(config)


def _run(config: TrainConfig, nproc: int, why: str) -> int:
    """Start the ranks and wait for their end. Returns the exit status."""
    with held_back():
        control = Path(tempfile.mkdtemp(prefix="onefold-"))
        clean = partial(shutil.rmtree, control, ignore_errors=True)
        put_in_order.append(clean)
    file = control / "config.json"
    file.write_text(config.model_dump_json(by_alias=True), encoding="utf-8")
    online, most = needs_hub(config.data), config.max_restarts
    environment = child_environment(os.environ, nproc, control, config.compile, online)
    signals = _Signals(control, config.json_lines)
    if not config.json_lines:
        print(f"starting {nproc} ranks ({why})", flush=True)
    try:
        for start in range(most + 1):
            for name in (FAILED, TRAINING):  # of an earlier start
                (control / name).unlink(missing_ok=True)
            counts = {"TORCHELASTIC_RESTART_COUNT": start, "TORCHELASTIC_MAX_RESTARTS": most}
            of_this = {**environment, **{name: str(n) for name, n in counts.items()}}
            rank = "onefold.train.worker", str(file)
            with local_ranks(nproc, of_this, *rank, logs=control, printed=True) as ranks:
                signals.ranks = ranks
                failed = ranks.wait(period=0.1).failures
            if failed and not (control / FAILED).exists():
                number, first = next(iter(failed.items()))
                hint = "; try a higher --stage, a smaller --micro-batch or --seq"
                hint *= first.exitcode == -signal.SIGKILL
                _say(f"error: {how_it_ended(number, first.exitcode)}{hint}.")
            if not failed or signals.arrived or (control / FINAL).exists():
                break
    finally:
        signals.stop()
        clean()
        put_in_order.remove(clean)
    return 128 + signals.by_hand if signals.by_hand else int(bool(failed))


class _Signals:
    """The signals that ask to stop, while ranks run. Before there is something to save, and at a second
    Ctrl-C, they end everything at once.

    Attributes:
        ranks: see `local_ranks`. arrived: the signals passed on to them. by_hand: the first that was no
            scheduler's, 0 without one.
    """

    ranks: Any = None

    def __init__(self, control: Path, silent: bool) -> None:
        self.control, self.silent = control, silent
        self.arrived: set[int] = set()
        self.by_hand = 0
        numbers = (signal.SIGINT, signal.SIGHUP, *PREEMPTION)
        self._before = {
            number: signal.signal(number, self._came)
            for number in numbers
            if signal.getsignal(number) is not signal.SIG_IGN  # as `signals.listen`
        }

    def stop(self) -> None:
        """Let those handle signals who did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        scheduler = number in PREEMPTION
        if not (self.control / TRAINING).exists() or (self.by_hand and not scheduler):
            end_at_once(number, frame)
        text = f"{signal.Signals(number).name}: saving a checkpoint after this step, then ending"
        if not scheduler:
            self.by_hand = number
            text = "stopping after this step, then saving; Ctrl-C again ends at once"
        if not self.silent and number not in self.arrived:
            _say(f"\n{text}")
        self.arrived.add(number)
        for handler in self.ranks.subprocess_handlers.values():
            handler.proc.send_signal(signal.SIGTERM if scheduler else signal.SIGINT)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)
