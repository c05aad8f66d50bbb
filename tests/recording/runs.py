"""One run of the table on this rank, by the public surface: shard, some steps of a plain loop,
save, load elsewhere, a step there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from recording import seen
from recording.subjects import SUBJECTS, Subject
from recording.table import FOLDER, Options, Run

STEPS = 3  # the order of units is learned in the first; the third is as all that follow
STALL_TIMEOUT = 60.0
Record = dict[str, Any]


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), lr=0.01, weight_decay=0.1, eps=1e-4, **options)


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices, vectors = (
        [p for p in _trained(model) if p.dim() >= 2],
        [p for p in _trained(model) if p.dim() < 2],
    )
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.2},
            {"params": vectors, "lr": 2e-3, "weight_decay": 0.0},
        ],
        lr=0.01,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "fused adamw": lambda model: _adamw(model, fused=True),
    "foreach adamw": lambda model: _adamw(model, foreach=True),
    "amsgrad": lambda model: _adamw(model, amsgrad=True),
    "two groups": _two_groups,
    "sgd": lambda model: torch.optim.SGD(_trained(model), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(_trained(model), lr=0.02),
    "rmsprop": lambda model: torch.optim.RMSprop(_trained(model), lr=0.01),
    # Products with these are exact, so that it is one whether a processor rounds them before it
    # adds.
    "powers of two": lambda model: torch.optim.SGD(
        _trained(model), lr=0.125, momentum=0.5, weight_decay=2**-5
    ),
}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def record_runs(runs: list[Run]) -> list[Record]:
    """What each run of `runs` is, on this rank of as many as are there. Collective. A run that
    raises is recorded as what it raised.
    """
    seen.quiet()
    groups: dict[int, Any] = {}
    found = []
    for run in runs:
        for ranks in (
            {run.ranks, run.load[1] if run.load else run.ranks}
            - {dist.get_world_size()}
            - set(groups)
        ):
            groups[ranks] = dist.new_group(list(range(ranks)))
        with tempfile.TemporaryDirectory(prefix="onefold-recording-") as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            try:
                found.append(_record(run, groups, Path(folder[0])))
            except Exception as error:
                found.append(
                    {
                        "raised": f"{type(error).__name__}: {error}",
                        "trace": traceback.format_exc(limit=-6),
                    }
                )
            gc.collect()
            dist.barrier()  # nobody takes the folder away from under another
    return found


def _record(run: Run, groups: dict[int, Any], folder: Path) -> Record:
    _say_nodes(run.per_node)
    record: Record = {}
    if dist.get_rank() < run.ranks:
        _Trained(run, groups.get(run.ranks), folder, record).train()
    _say_nodes(0)
    dist.barrier()
    if run.load is not None and dist.get_rank() < run.load[1]:
        record["loaded"] = _loaded(run, groups.get(run.load[1]), folder)
    return record


def _say_nodes(per_node: int) -> None:
    """As a launcher would."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if per_node:
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)


def options_of(given: Options, folder: Path) -> Options:
    """A recipe's options, folders in their places."""
    if "deepspeed" in given:
        return dict(given)
    folders = {"nvme": str(folder)} if given.get("nvme") == FOLDER else {}
    return {"stall_timeout": STALL_TIMEOUT, **given, **folders}


class _Trained:
    """A sharded model under way."""

    def __init__(self, run: Run, group: Any, folder: Path, record: Record, seed: int = 0) -> None:
        self.run, self.folder, self.record = run, folder, record
        self.subject: Subject = SUBJECTS[run.subject]
        torch.manual_seed(seed)
        module = self.subject.make()
        self.model = onefold.shard(
            module, seen.recipe_of(run.stage, options_of(run.options, folder)), group=group
        )
        self.optimizer = OPTIMIZERS[run.optimizer](self.model)
        self.scaler = onefold.GradScaler(self.model, init_scale=run.scaled) if run.scaled else None
        torch.manual_seed(100 + dist.get_rank())  # dropout

    def train(self) -> None:
        run, record = self.run, self.record
        averages = onefold.ema.EMA(self.model, 0.5) if run.then == "averages" else None
        record["layout"] = seen.layout(self.model)
        losses, wires = [], []
        for number in range(STEPS):
            seen.watch(self.model)
            losses += self.step(number)
            wires.append(seen.wire(self.model))
            if averages is not None:
                averages.update()
        record |= {"wire": _once(wires), "moves": seen.moves(self.model)}
        record |= {"carried": seen.carried(self.model), "peak": seen.peak(self.model)}
        record["with gradients"] = seen.at_rest(self.model, self.optimizer)
        self.optimizer.zero_grad()
        record["at rest"] = seen.at_rest(self.model, self.optimizer)
        seen.watch(self.model)
        with averages.applied() if averages is not None else contextlib.nullcontext():
            losses += self.evaluate()
        record["wire of an evaluation"] = seen.wire(self.model)
        if run.then in AFTERWARDS:
            losses += AFTERWARDS[run.then](self)
        record["bits"] = {"losses": losses, **self.bits()}
        if run.load is not None:
            seen.watch(self.model)
            onefold.save(
                self.folder / "saved",
                model=self.model,
                optimizer=self.optimizer,
                scaler=self.scaler,
                step=STEPS,
            )
            record["wire of a save"] = seen.wire(self.model)
            if dist.get_rank() == 0:
                record["saved"] = seen.saved_files(self.folder / "saved")
                record["bits"]["saved"] = seen.saved_bits(self.folder / "saved")

    def step(self, number: int) -> list[str]:
        """One step of a plain loop. Returns the losses' bits."""
        run, bits = self.run, []
        self.optimizer.zero_grad()
        for micro in range(run.micro_batches):
            last = micro == run.micro_batches - 1
            with contextlib.nullcontext() if last else onefold.no_sync(self.model):
                batch = self.subject.batch(100 * number + 10 * micro + dist.get_rank())
                loss = self.subject.loss(self.model, batch) / run.micro_batches
                (self.scaler.scale(loss) if self.scaler is not None else loss).sum().backward()
            bits.append(_figure(loss))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if run.clip is not None:
            bits.append(_figure(onefold.clip_grad_norm_(self.model, run.clip)))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            bits.append(f"scale {self.scaler.get_scale()}")
        else:
            self.optimizer.step()
        return bits

    def evaluate(self) -> list[str]:
        with torch.no_grad():
            return [
                _figure(self.subject.loss(self.model, self.subject.batch(7000 + dist.get_rank())))
            ]

    def bits(self) -> Record:
        """Whole weights and whole optimizer states, on the first rank. Collective."""
        weights, states = onefold.full_state_dict(self.model), self.optimizer.state_dict()
        if dist.get_rank() != 0:
            return {}
        return {"weights": seen.bits_of(weights), "states": seen.bits_of(states["state"])}


def _loaded(run: Run, group: Any, folder: Path) -> Record:
    """Who loads has another stage, other ranks and other weights before."""
    assert run.load is not None
    stage, ranks, options = run.load
    where = folder / "loader"
    where.mkdir(exist_ok=True)
    other = Run(
        run.name,
        stage,
        options,
        ranks,
        subject=run.subject,
        optimizer=run.optimizer,
        clip=run.clip,
        scaled=run.scaled,
    )
    record: Record = {}
    its = _Trained(other, group, where, record, seed=5)
    seen.watch(its.model)
    back = onefold.load(
        folder / "saved", model=its.model, optimizer=its.optimizer, scaler=its.scaler
    )
    record["wire of a load"] = seen.wire(its.model)
    bits = its.bits()
    seen.watch(its.model)
    losses = its.step(back.step or 0)
    record |= {"wire": seen.wire(its.model), "at rest": seen.at_rest(its.model, its.optimizer)}
    after = its.bits()
    record["bits"] = {"losses": losses, "as loaded": bits, "a step later": after}
    return record


def _figure(loss: Tensor) -> str:
    """The bits of a loss: the number, or a hash of many."""
    return seen.digest_of(loss) if loss.dim() else loss.item().hex()


def _once(steps: list[Any]) -> Any:
    """The steps, or one of them where all are the same."""
    return steps[0] if all(step == steps[0] for step in steps) else steps


# -- what else may happen behind the steps ---------------------------------------------------------


def _whole_parameters(its: _Trained) -> list[str]:
    with torch.no_grad(), onefold.full_params(its.model, write=True):
        for p in its.model.parameters():
            p.mul_(0.5)
    return its.evaluate()


def _kept_gathered(its: _Trained) -> list[str]:
    seen.watch(its.model)
    with onefold.keep_gathered(its.model):
        found = [bits for _ in range(3) for bits in its.evaluate()]
    its.record["wire of three evaluations kept gathered"] = seen.wire(its.model)
    return found + its.step(STEPS)


def _another_structure(its: _Trained) -> list[str]:
    with onefold.unsharded(its.model) as plain:
        plain.head.weight = plain.tokens.weight
    its.record["layout of another structure"] = seen.layout(its.model)
    return its.step(STEPS)


AFTERWARDS: dict[str, Callable[[_Trained], list[str]]] = {
    "whole parameters": _whole_parameters,
    "kept gathered": _kept_gathered,
    "another structure": _another_structure,
}
