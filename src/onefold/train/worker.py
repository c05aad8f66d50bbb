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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onefold
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import FULL
from onefold.comm import StallError
from onefold.observe.meter import flat
from onefold.offload.nvme import TierError
from onefold.processes.claim import Claim, cannot_be_written
from onefold.processes.peers import Peer, PeerMonitor
from onefold.processes.ranks import Ranks, join, leave
from onefold.processes.signals import AGAIN, CONTROL, INTERRUPTED, Stop, StopSignal
from onefold.train import checkpoints
from onefold.train.checkpoints import changed, restarts
from onefold.train.config import TrainConfig
from onefold.train.keeper import Keeper, check_time, started_at
from onefold.train.loop import Row, train
from onefold.train.memory_error import explain, is_out_of_memory
from onefold.train.output import METRICS, Metrics, with_output, write_config
from onefold.train.prepare import Run, prepare
from onefold.train.report import JsonReporter, Reporter, Window, describe, observe, reporter
from onefold.train.results import MERGED, export
from onefold.wording import TrainError, few, seconds_of

#: Seconds that a rank gets to end by itself after another has gone. They include the 3 s for which
#: a collective's error waits for the other ranks' notes.
PATIENCE = 5.0
#: Seconds that a rank waits, after it stopped with the others, for a request that its own machine
#: end as well.
LINGER = 5.0
#: Options that each machine sets for itself.
OF_A_MACHINE = ("nproc", "device", "grace", "max_restarts")


class Rank:
    """What this process knows about itself and the other ranks.

    Attributes:
        stop: what this process was asked. peers: notices that a rank has gone; None for a single
            rank, or if not all ranks can connect to rank 0.
        doing: what this rank is doing, for messages. otherwise: a sentence about ranks that were
            given other options, "" if there are none.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.number = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.stop = StopSignal(self.number, local_rank, seconds_of(config.grace))
        self.stop.last_words = self._tell_who_has_gone
        self.peers: PeerMonitor | None = None
        self.doing = "joining the other ranks"
        self.otherwise = ""
        self.run: Run | None = None

    def watch(self, ranks: Ranks) -> None:
        """Start to watch for ranks that go. Collective."""
        self.peers = PeerMonitor.connect(ranks, self._one_has_gone)

    def leave(self) -> None:
        """Leave in order: the other ranks no longer report this one as gone."""
        if self.peers is not None:
            self.peers.close()

    def place(self) -> str:
        """Say where this rank is, for messages."""
        if self.run is None or self.doing != "training":
            return "while " + self.doing
        engine = onefold.engine_of(self.run.model)
        unit = next((each.unit.name for each in reversed(engine.stack)), None)
        where = f" of unit {unit!r}" if unit is not None else ""
        return f"in the {engine.phase} pass{where}, step {engine.step_count + 1}"

    def fail(self, error: BaseException) -> None:
        """Report what went wrong, once per machine, and end this process."""
        if self.stop.speak_first():
            self._say(error)
            # Not for a CheckpointError: a rank may have gone during the save, so restart
            if isinstance(error, TrainError):
                self.stop.no_restart()
        sys.stdout.flush()
        sys.stderr.flush()
        if self.peers is not None and self.peers.gone:  # another rank is to blame: leave in order
            self.leave()
        if self.run is not None:  # remove this rank's files from the disks
            with contextlib.suppress(Exception):
                onefold.engine_of(self.run.model).transfers.close()
        # Not sys.exit, which would wait for process groups with an operation under way
        os._exit(INTERRUPTED if self.stop.asked == Stop.INTERRUPT else 1)

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

    def _one_has_gone(self, peer: Peer) -> None:
        end = threading.Timer(PATIENCE, self._end)
        end.daemon = True
        end.start()

    def _tell_who_has_gone(self) -> None:
        """Report which rank has gone, when torchrun ends this one perhaps because of it."""
        if self._who_has_gone(RuntimeError()) and self.stop.speak_first():
            self._say(StallError(f"rank {self.number} ends {self.place()}."))

    def _end(self) -> None:
        """End this rank: another has gone, and this one is computing and has not noticed."""
        if self.stop.speak_first():
            self._say(StallError(f"rank {self.number} ends {self.place()}: it cannot go on alone."))
        self.leave()  # another rank is to blame: leave in order
        os._exit(1)

    def _say(self, error: BaseException) -> None:
        gone = self._who_has_gone(error)
        # Any other RuntimeError is, say, a write to the connection of the rank that has gone
        if gone and isinstance(error, RuntimeError) and not isinstance(error, StallError):
            error = StallError(
                f"rank {self.number} ends {self.place()}: {str(error).splitlines()[0][:200]}"
            )
        if isinstance(error, StallError) and self.run is not None and self.run.start:
            error = StallError(
                f"{error}\nThis start went on from step {self.run.start}: the steps named above"
                " count from there."
            )
        if isinstance(error, OSError) and error.errno in FULL:
            error = TrainError(cannot_be_written(Path(str(self.config.output)), error))
        if self.config.json_lines:
            kind, names = type(error).__name__, [str(peer) for peer in gone]
            JsonReporter().say("error", rank=self.number, kind=kind, message=str(error), gone=names)
        who = "".join(f"{peer} has gone.\n" for peer in gone)
        if isinstance(error, TrainError | CheckpointError | StallError | TierError):
            print(f"{who}error: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{who}rank {self.number} failed:", file=sys.stderr)
            traceback.print_exception(error)


def run_rank(config: TrainConfig, claim: Claim | None = None) -> int:
    """Run as one rank and return the exit status. The first rank that fails reports the error.
    `claim`: this process's claim on the output folder, if it has one already.
    """
    me = Rank(config)
    try:
        ranks = join(config.device, config.stall_timeout)
        me.watch(ranks)
        count = ranks.most(restarts())
        restarted: bool = ranks.from_first(
            count > 0 or checkpoints.made_since(config, started_at())
        )
        if CONTROL not in os.environ:
            given = config
            config = ranks.on_first(lambda: with_output(given, restarted))
            me.otherwise = otherwise(given, config, ranks)
        if CONTROL not in os.environ:  # else the command holds it
            claim = _claimed(config, ranks, claim)
        code = _run(config, ranks, me, restarted)
        me.leave()
        leave()
        if claim is not None:
            claim.release()
        return code
    except Exception as error:
        me.fail(error)
        raise


def _claimed(config: TrainConfig, ranks: Ranks, claim: Claim | None) -> Claim | None:
    """Return the first rank's claim on the output folder, held until the rank ends; None on other
    ranks. Collective.
    """
    assert config.output is not None
    held, folder = [claim], Path(config.output)

    def take() -> None:
        if claim is None or claim.folder != folder:
            if claim is not None:
                claim.undo()
            held[0] = Claim(folder)

    ranks.on_first(take)
    return held[0]


def otherwise(given: TrainConfig, taken: TrainConfig, ranks: Ranks) -> str:
    """Say which rank was told other options than the first, whose options hold; "" if none was.
    Collective.
    """
    left_open = {*OF_A_MACHINE, "" if given.output is not None else "output"}
    names = [name for name in TrainConfig.model_fields if name not in left_open]
    differ = changed((name, getattr(given, name), getattr(taken, name)) for name in names)
    said = [f"{text} (rank {rank})" for rank, text in enumerate(ranks.gather(differ)) if text]
    start = "not all ranks were told the same options; they follow rank 0: "
    return start + few(said, 3, "; ") if said else ""


def _run(config: TrainConfig, ranks: Ranks, me: Rank, restarted: bool) -> int:
    assert config.output is not None
    folder = Path(config.output)
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        say = reporter(ranks.is_first, config.json_lines)
        stack.callback(say.close)
        me.doing = "loading"
        point = ranks.on_first(lambda: checkpoints.find(config, restarted))
        run = me.run = prepare(config, ranks, say.note, point)
        config = run.config
        notes = checkpoints.load(run, point) if point is not None else []
        keeper = Keeper(run, folder, say)
        if ranks.is_first:
            write_config(config, folder, describe(run))
        say.say("plan", **describe(run))
        for text in [*run.data.notes, *_about_starting(run, me), *notes, check_time(run)]:
            if text:
                say.note(text)
        after = run.start if point is not None or restarted else None
        log = stack.enter_context(contextlib.closing(Log(run, folder, say, after)))
        me.stop.arm()
        me.doing = "training"
        done = _train(run, me, keeper, log, folder)
        me.doing = "saving the model"
        _finish(run, me, keeper, log, folder, done, time.perf_counter() - begun)
        keeper.close()
        return _exit_code(run, me)


class Log:
    """Sends rows to the metrics file, TensorBoard and the screen, and keeps this start's `rows`.
    A run goes on without metrics: where they cannot be written, it says so, here and at its end.
    """

    def __init__(self, run: Run, folder: Path, say: Reporter, after: int | None) -> None:
        first = run.ranks.is_first
        self.say, self.rows, self.lost = say, list[Row](), 0
        self.metrics = Metrics(folder / METRICS if first else Path(os.devnull), after)
        self.board: Any = None
        if run.config.tensorboard and first:
            from torch.utils.tensorboard import SummaryWriter

            void = None if after is None else after + 1  # of an earlier start
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=void)
        if after is not None:
            facts = {"ranks": run.ranks.world_size, "stage": run.choice.stage}
            row = {"resumed": True, "from_step": run.start, **facts, "restart": restarts()}
            self.attempt(self.metrics.write, row)

    def row(self, row: Row) -> None:
        """Write one step's figures."""
        self.rows.append(row)
        self.attempt(self.metrics.write, row)
        if self.board is not None:
            self.attempt(self._draw, row)
        self.say.say("step", **row)

    def _draw(self, row: Row) -> None:
        for name, value in flat(row).items():
            if name != "step":
                self.board.add_scalar(name.replace(" ", "_"), value, row["step"])

    def done(self, summary: Row) -> None:
        """Tell that the run is over, and what is missing in its files."""
        if not self.metrics.is_there:
            self.say.alert(
                f"{self.metrics.path} is gone: somebody removed it while the run went on."
            )
            summary["metrics"] = None
        elif self.lost:
            self.say.alert(f"{self.metrics.path} is not whole: {self.lost} writes failed.")
        self.say.say("done", **summary)

    def close(self) -> None:
        for file in (self.metrics, self.board):
            if file is not None:
                self.attempt(file.close)

    def attempt(self, write: Callable[..., None], *given: Any) -> None:
        """Call `write`; where the disk takes nothing, say so once."""
        try:
            write(*given)
        except OSError as error:
            if not self.lost:
                self.say.alert(
                    f"metrics in {self.metrics.path.parent} cannot be written"
                    f" ({error.strerror or error}): the training goes on without them. Free space on"
                    " that disk, or checkpoints will fail too."
                )
            self.lost += 1


def _about_starting(run: Run, me: Rank) -> list[str]:
    """Return notes about this start: differing options, restarts, options without effect."""
    config, launched, again = run.config, CONTROL not in os.environ, restarts()
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    told = {
        me.otherwise: True,
        f"restart {again} of at most {most}": bool(again),
        "not all ranks can connect to rank 0: one that goes is noticed only by those that wait for it":
            me.peers is None and run.ranks.world_size > 1,
        "--max-restarts without --save-every: a restart begins again at the first step":
            config.max_restarts and not config.save_every and not launched,
        "--max-restarts: the launcher that started this rank decides that, so it does nothing here; give it to the launcher":
            config.max_restarts and launched,
    }  # fmt: skip
    return [text for text, holds in told.items() if holds]


def _train(run: Run, me: Rank, keeper: Keeper, log: Log, folder: Path) -> int:
    """Train, and write the trace if one was asked for. Returns how many steps are done."""
    window = Window(run)
    try:
        done = train(run, lambda: me.stop.asked, log.row, window, keeper, log.say.alert)
    except TrainError:  # raised on every rank: complete the checkpoint that is under way
        with contextlib.suppress(CheckpointError):
            keeper.wait()
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain(run, error) from error
    finally:
        window.close()
    me.stop.disarm()
    traced = window.write(folder)
    if traced is not None:
        log.say.note(f"trace: {traced} (one file a rank; open it in Perfetto)")
    return done


def _finish(
    run: Run, me: Rank, keeper: Keeper, log: Log, folder: Path, done: int, seconds: float
) -> None:
    """Write the model of a whole run, and the closing row. Collective."""
    log.attempt(observe, run, folder, log.rows)
    stopped = done < run.steps or Stop.PREEMPT in run.stopped
    kind, model = None, folder / "model"
    if not stopped:
        me.leave()  # the first rank may write for long, and finishes even if another rank goes
        kind = export(run, model)
        if kind == "adapters" and run.config.merge:
            log.say.note(f"the whole model with its adapters: {folder / MERGED}")
    peak = run.ranks.most(log.rows[-1]["memory_peak"] if log.rows else 0)
    losses = [row["loss"] for row in log.rows if row["loss"] is not None]
    first = log.metrics.first
    summary: Row = {
        "done": True,
        "stopped": stopped,
        "why": run.stopped.reason if stopped else "",
        "steps": done,
        "seconds": seconds,
        "first_loss": first["loss"] if first is not None else None,
        "last_loss": losses[-1] if losses else None,
        "memory_peak": int(peak),
        "model_kind": kind,
        "model": str(model) if kind is not None else None,
        "checkpoint": str(keeper.path) if keeper.path is not None else None,
        "metrics": str(folder / METRICS),
    }
    log.attempt(log.metrics.write, summary)
    log.done(summary)


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
