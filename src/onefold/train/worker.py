"""One rank of a run, from joining the others to the saved model.

    run_rank    join ─► watch the other ranks ─► decide about the output folder, and claim it ─► _run
    _run        find the checkpoint to resume ─► prepare ─► load ─► train ─► write model, closing row
    Rank        what this process was asked, which ranks have gone, and what to say when it fails

When a rank has gone, the others end too, so that torchrun can start the ranks anew:

- A rank that is inside a collective gets a `StallError` there, and `PATIENCE` seconds to report it.
- A rank that is computing is ended by a timer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import torch

import onefold
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import FULL
from onefold.comm import StallError
from onefold.models.build import quiet_transformers
from onefold.models.names import kind_of, precision_of
from onefold.observe.memory import resident_memory
from onefold.offload.nvme import TierError
from onefold.pretrained.adapters import save_adapters
from onefold.pretrained.export import export as export_model
from onefold.processes.claim import Claim, cannot_be_written
from onefold.processes.peers import Peer, PeerMonitor
from onefold.processes.ranks import Ranks, join, leave
from onefold.processes.signals import AGAIN, CONTROL, INTERRUPTED, Stop, StopSignal
from onefold.recipe import COMPUTE_DTYPES
from onefold.train import checkpoints
from onefold.train.checkpoints import Keeper, restarts
from onefold.train.config import TrainConfig
from onefold.train.loop import train
from onefold.train.output import METRICS, check_output, name_output, write_config
from onefold.train.prepare import Run, prepare
from onefold.train.report import (
    Console,
    Metrics,
    Reporter,
    Row,
    describe,
    json_lines,
    observe,
    tensorboard,
)
from onefold.wording import TrainError, few, readable, seconds_of

#: Seconds that a rank gets to end by itself after another has gone. They include the 3 s for which
#: a collective's error waits for the other ranks' notes.
PATIENCE = 5.0
#: Seconds that a rank waits, after it stopped with the others, for a request that its own machine
#: end as well.
LINGER = 5.0
#: Steps whose rows a rank keeps for the report's figures.
RECENT = 1000
#: Options that each machine sets for itself.
OF_A_MACHINE = {"nproc", "device", "grace", "max_restarts"}
#: Parts of the messages with which torch and Python report a failed allocation, in lower case.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
)


class Rank:
    """What this process knows about itself and the other ranks.

    Attributes:
        stop: what this process was asked. peers: notices that a rank has gone; None for a single
            rank, or if not all ranks can connect to rank 0.
        claim: on the output folder, if this rank has made it.
        doing: what this rank is doing, for messages.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.number = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.stop = StopSignal(self.number, local_rank, seconds_of(config.grace))
        self.peers: PeerMonitor | None = None
        self.claim: Claim | None = None
        self.doing = "joining the other ranks"
        self.run: Run | None = None
        self._failing = threading.Lock()  # never released: this process ends

    def watch(self, ranks: Ranks) -> None:
        """Start to watch for ranks that go. Collective."""

        def gone(peer: Peer) -> None:
            end = threading.Timer(PATIENCE, lambda: self.fail(self._alone()))
            end.daemon = True
            end.start()

        self.peers = PeerMonitor.connect(ranks, gone)

    def leave(self) -> None:
        """Leave in order: the other ranks no longer report this one as gone."""
        if self.peers is not None:
            self.peers.close()

    def fail(self, error: BaseException) -> None:
        """Report what went wrong, once per machine, and end this process."""
        # The timer may come while the main thread reports: that may be said to its end
        self._failing.acquire(timeout=PATIENCE)
        with contextlib.suppress(OSError):  # nobody may read it any more
            if self.stop.speak_first():
                # Not for a CheckpointError: a rank may have gone during the save, so restart
                if isinstance(error, TrainError):
                    self.stop.no_restart()
                self._say(error)
            sys.stdout.flush()
            sys.stderr.flush()
        if self.peers is not None and self.peers.gone:  # another rank is to blame: leave in order
            self.leave()
        if self.claim is not None:
            self.claim.undo()
        # Not sys.exit, which would wait for process groups with an operation under way
        os._exit(INTERRUPTED if self.stop.asked == Stop.INTERRUPT else 1)

    def _alone(self, why: str = "it cannot go on alone.") -> StallError:
        """Say where this rank ends because another has gone."""
        place = "while " + self.doing
        if self.run is not None and self.doing == "training":
            engine = onefold.engine_of(self.run.model)
            units = [f" of unit {each.unit.name!r}" for each in engine.stack[-1:]]
            place = f"in the {engine.phase} pass{''.join(units)}, step {engine.step_count + 1}"
        return StallError(f"rank {self.number} ends {place}: {why}")

    def _who_has_gone(self, error: BaseException) -> list[Peer]:
        """Return the ranks that have gone. Wait up to 1 s after an error that another rank may have
        caused: a collective may notice it earlier than the monitor.
        """
        if self.peers is None:
            return []
        end = time.monotonic() + (1.0 if isinstance(error, RuntimeError | CheckpointError) else 0.0)
        while not self.peers.gone and time.monotonic() < end:
            time.sleep(0.02)
        return self.peers.gone

    def _say(self, error: BaseException) -> None:
        gone = self._who_has_gone(error)
        # Any other RuntimeError is, say, a write to the connection of the rank that has gone
        if gone and isinstance(error, RuntimeError) and not isinstance(error, StallError):
            error = self._alone(str(error).splitlines()[0][:200])
        if isinstance(error, StallError) and self.run is not None and self.run.start:
            error = StallError(
                f"{error}\nThis start went on from step {self.run.start}: the steps named above"
                " count from there."
            )
        if isinstance(error, OSError) and error.errno in FULL:
            error = TrainError(cannot_be_written(Path(str(self.config.output)), error))
        if self.config.json_lines:
            kind, names = type(error).__name__, [str(peer) for peer in gone]
            json_lines(
                "error", {"rank": self.number, "kind": kind, "message": str(error), "gone": names}
            )
        who = "".join(f"{peer} has gone.\n" for peer in gone)
        if isinstance(error, TrainError | CheckpointError | StallError | TierError):
            print(f"{who}error: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{who}rank {self.number} failed:", file=sys.stderr)
            traceback.print_exception(error)


def main(file: str) -> int:
    """Run as one rank that the command has started, by the configuration in `file`."""
    return run_rank(TrainConfig.model_validate_json(Path(file).read_text(encoding="utf-8")))


def run_rank(config: TrainConfig) -> int:
    """Run as one rank and return the exit status. The first rank that fails reports the error."""
    me, given = Rank(config), config
    try:
        ranks = join(config.device, config.stall_timeout)
        me.watch(ranks)
        restarted = ranks.most(restarts()) > 0
        unlike = ""

        def settled() -> TrainConfig:
            named = name_output(given)
            # Held until this rank ends
            me.claim = Claim(Path(str(named.output)), new=given.output is None)
            if not restarted:
                check_output(named)
            return named

        if CONTROL not in os.environ:  # else the command holds the folder
            config = ranks.on_first(settled)
            unlike = otherwise(given, ranks)
        code = _run(config, ranks, me, restarted, unlike)
        me.leave()
        leave()
        if me.claim is not None:
            me.claim.release()
        return code
    except Exception as error:
        me.fail(error)
        raise


def otherwise(given: TrainConfig, ranks: Ranks) -> str:
    """Say which ranks were told other options than the first, whose options hold; "" if none was.
    Collective.
    """
    first, *others = ranks.gather(given.model_dump(exclude=OF_A_MACHINE))
    unlike = [str(rank) for rank, told in enumerate(others, 1) if told != first]
    return f"ranks {few(unlike)} were told other options than rank 0: its own hold" * bool(unlike)


def _run(config: TrainConfig, ranks: Ranks, me: Rank, restarted: bool, unlike: str) -> int:
    folder, begun = Path(str(config.output)), time.perf_counter()
    rows, losses = deque[Row](maxlen=RECENT), list[float]()  # the latest; the first and the last
    with contextlib.ExitStack() as stack:
        say = Reporter()
        if ranks.is_first and config.json_lines:
            say.listeners.append(json_lines)
        elif ranks.is_first:
            say.listeners.append(stack.enter_context(contextlib.closing(Console())))
        me.doing = "loading"
        point = ranks.on_first(lambda: checkpoints.find(config, restarted))
        run = me.run = prepare(config, ranks, say.note, point)
        notes = checkpoints.load(run, point) if point is not None else []
        keeper = Keeper(run, folder, say)
        say.say("plan", **describe(run))
        again, most = restarts(), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        if me.peers is None and ranks.world_size > 1:
            notes.append(
                "not all ranks can connect to rank 0: one that goes is noticed only by those that wait for it"
            )
        for text in (
            *run.data.notes,
            unlike,
            f"restart {again} of at most {most}" if again else "",
            *notes,
        ):
            if text:
                say.note(text)
        after = run.start if point is not None or restarted else None
        if ranks.is_first:
            write_config(run.config, folder, describe(run))
            say.listeners.append(Metrics(folder / METRICS, say.alert, after))
            if config.tensorboard:
                say.listeners.append(tensorboard(folder / "tensorboard", after))
        if after is not None:
            facts = {"ranks": ranks.world_size, "stage": run.choice.stage, "restart": again}
            say.say("resumed", resumed=True, from_step=run.start, **facts)

        def report(row: Row) -> None:
            rows.append(row)
            if row["loss"] is not None:
                losses[1:] = [row["loss"]]
            say.say("step", **row)

        me.stop.arm()
        me.doing = "training"
        done = _train(run, me, keeper, report, say)
        me.doing = "saving the model"
        try:
            observe(run, folder, list(rows))
        except OSError as error:
            say.alert(f"the report's files cannot be written: {error.strerror or error}")
        stopped, kind = done < run.steps or Stop.PREEMPT in run.stopped, None
        if not stopped:
            me.leave()  # the first rank may write for long, and finishes even if another rank goes
            kind = export(run, folder / "model")
        say.say(
            "done", done=True, stopped=stopped, why=run.stopped.reason if stopped else "", steps=done,
            seconds=time.perf_counter() - begun, first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            memory_peak=int(ranks.most(rows[-1]["memory_peak"] if rows else 0)),
            model_kind=kind, model=str(folder / "model") if kind is not None else None,
            checkpoint=keeper.path, metrics=str(folder / METRICS),
        )  # fmt: skip
        keeper.close()
        return _exit_code(run, me)


def _train(run: Run, me: Rank, keeper: Keeper, report: Any, say: Reporter) -> int:
    """Train. Returns how many steps are done."""
    try:
        done = train(run, lambda: me.stop.asked, report, keeper, say.alert)
    except TrainError:  # raised on every rank: complete the checkpoint that is under way
        with contextlib.suppress(CheckpointError):
            keeper.wait()
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain(run, error) from error
    me.stop.disarm()
    return done


def export(run: Run, folder: Path) -> str:
    """Write the model to `folder`, and return the kind of what was written. Collective.

    - A transformers model: in the Hugging Face format.
    - A peft model: its adapters alone.
    - Any other model: safetensors with the names of its state dict.

    Replaces an earlier folder once the new one is complete.
    Raises CheckpointError on every rank if the folder cannot be written.
    """
    model: Any = run.loaded.module
    # That of a folder's weights: the model keeps its size, and a later run on it has the same --precision
    name, tokenizer = run.config.model, run.loaded.tokenizer
    known = precision_of(name) if kind_of(name) in ("folder", "hub") else None
    dtype = COMPUTE_DTYPES.get(known or "")
    ours = not run.loaded.is_transformers
    if not ours:
        model.config.use_cache = True
    if getattr(model, "peft_config", None):
        save_adapters(run.model, folder, overwrite=True)
        return "adapters"
    with contextlib.nullcontext() if ours else quiet_transformers():
        export_model(run.model, folder, dtype or "master", tokenizer=tokenizer, overwrite=True)
    return "safetensors" if ours else "Hugging Face model"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocation that failed, on a device or the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in _OUT_OF_MEMORY
    )


def explain(run: Run, error: BaseException) -> TrainError:
    """Return the error for an allocation that failed in this run's loop: what was held where, and
    which options need less.
    """
    engine, planned = onefold.engine_of(run.model), run.choice.planned
    unit, phase = engine.passes.raised_in or ("(between units)", engine.phase)
    held = ", ".join(f"{name} {readable(n)}" for name, n in engine.memory.now().items())
    expected = (
        f", planned at most {readable(planned.account.peak_bytes)}" if planned is not None else ""
    )
    return TrainError(
        f"rank {run.ranks.rank} ran out of memory in the {phase} pass of unit {unit!r} (step"
        f" {engine.step_count + 1}): {str(error).splitlines()[0][:160]}\nThe engine held"
        f" {held or 'nothing'}; the process {readable(resident_memory()[0])}{expected}.\nTo need less,"
        " the cheapest first: a smaller --micro-batch (--global-batch keeps the batch),"
        " --activation-checkpointing full, a higher --stage, --precision bf16, --offload-optimizer cpu"
        " (from a GPU) or nvme, a shorter --seq, more ranks."
    )


def _exit_code(run: Run, me: Rank) -> int:
    """Return 0, or 130 after Ctrl-C.
    `AGAIN` asks torchrun to restart: another machine was preempted, and this one goes on.
    """
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    elastic = several and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if Stop.PREEMPT in run.stopped and elastic:
        end = time.monotonic() + LINGER
        while not me.stop.asked & Stop.PREEMPT:
            if time.monotonic() > end:
                return AGAIN
            time.sleep(0.1)
    return me.stop.exit_code(run.stopped)
