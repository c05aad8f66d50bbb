"""Run a step of the real engine as one rank of a mesh of several axes.

    shape of a stage ──► stand-in, its parameters cut by the plan's rules into DTensors over fake tensors
                              │
    fake process group ──► device mesh (pp, dp_replicate, dp, ep, cp, tp) ──► onefold.shard(mesh=, data=)
                              │
              pp > 1: torch's own schedule runs onefold.parallel.PipelineStage
                              │
                 ledgers of the engine, bytes that torch sends between stages
                              ║ equal, byte for byte
    the plan's walk (plan/rank.py, plan/program.py)

The stand-in reads its parameters and computes nothing. So what tensor, context and expert parallelism
send inside layers is not run: the plan alone counts it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.comm.communicators import REPLICATE, mesh_of
from onefold.plan.account import pipelined
from onefold.plan.degrees import AXES, DATA, Degrees, dims_of
from onefold.plan.program import Program
from onefold.plan.rank import Stage, divided_along, local_shape, rule_of, stages_of, units_of
from onefold.plan.shapes import ModelShape
from onefold.recipe import Recipe
from onefold.recipe.rows import FLAT
from onefold.runtime.state.checks import with_replicas
from onefold.simulation.refusals import check, check_mesh
from onefold.simulation.result import Simulation, events_of
from onefold.simulation.simulate import (
    STAND_IN,
    engine_on,
    nothing_real,
    one_of,
    optimizers_of,
    passes_of,
    predicted_by,
    steps_of,
)
from onefold.simulation.stand_in import stand_in

_NAMES = ("pp", REPLICATE, *AXES)
_DATA = (REPLICATE, *DATA)


def simulate_mesh(
    model: ModelShape,
    recipe: Recipe,
    degrees: Degrees,
    *,
    rank: int = 0,
    replicas: int = 1,
    micro_batches: int = 1,
    micro_batch: int = 1,
    seq: int = 128,
    optimizer: str = "adamw",
    per_node: int | None = None,
) -> Simulation:
    """Run two optimizer steps as one rank of a mesh, and report the ledgers of the second.

    Args:
        rank: the global rank: `pp` is the slowest axis, so it says the stage of the pipeline too.
        replicas: of the data-parallel ranks: state is divided inside each (hybrid sharding).
        micro_batch, seq: samples and tokens of a micro-batch; only what stages hand on depends on
            them.
        per_node: ranks of a node, as a launcher would say; None: all ranks.

    Raises:
        ValueError: an impossible argument, or what has no simulation.
        RuntimeError: a process group is already initialized.
    """
    check(recipe, degrees.ranks, rank, micro_batches, optimizer)
    check_mesh(recipe, degrees, replicas, micro_batches)
    begun = time.perf_counter()
    each = degrees.ranks // degrees.pp
    index, number = divmod(rank, each)
    stage = stages_of(model, degrees)[index]
    if recipe.inner is None and per_node is None:
        recipe = recipe.replace(group=FLAT)
    from torch.distributed.device_mesh import init_device_mesh

    dtype = recipe.parameters.dtype or stage.parameters[0].dtype
    # What stages hand on: a rank's tokens of a sample, and their width
    hidden = dims_of(model).hidden // (degrees.tp if degrees.sequence_divided else 1)
    handed = torch.empty(micro_batch, seq // degrees.cp, hidden, dtype=dtype, device="meta")
    kinds = {divided_along(p, degrees) for p in stage.parameters}
    seen, told, counted = Counter[str](), Counter[str](), _Sends()
    with _nodes_of(per_node, degrees.ranks), one_of(degrees.ranks, rank):
        dp, *others = degrees.sizes.values()
        sizes = degrees.pp, replicas, dp // replicas, *others
        root = init_device_mesh("cpu", sizes, mesh_dim_names=_NAMES)
        ours = mesh_of(root[_NAMES[1:]], _DATA)
        cut = {d: root[tuple(a for a in AXES if a in d)] for d in kinds if d}
        with nothing_real():  # meshes are read before: they have no values
            module, names = _cut_stand_in(stage, degrees, cut, number)
            with engine_on(module, recipe, mesh=ours, units=names) as engine, counted:
                if degrees.pp > 1:
                    step = _scheduled(module, stage, degrees, root, micro_batches, handed)
                else:
                    step = passes_of(module, torch.empty(1, device="cpu"), micro_batches)
                account = steps_of(engine, step, optimizers_of(module, optimizer), counted.reset)
                events = events_of(engine)
                along = {
                    g.name: _along(g.ranks, degrees, replicas, index * each)
                    for unit in engine.units
                    for flat in unit.flats
                    for g in (flat.group, flat.group.intra_group, flat.group.inter_group)
                }
                for event in engine.traffic.events:
                    if event.move in account.wire:
                        seen[along[event.group]] += event.nbytes
                del module, step
    planned = pipelined(with_replicas(recipe, ours), degrees)
    units = units_of(stage, planned, degrees, number, per_node)
    program = Program(units, planned, held=degrees.pp > 1)
    predicted = predicted_by(program, units, micro_batches, optimizer)
    for op, times in program.counted():
        if op.kind == "move":
            told[_along(op.over, degrees, replicas, 0)] += times * round(op.nbytes)
    # A stage hands on outputs and gradients, but for the ends of the model
    told["pp"] = (
        micro_batches * handed.nbytes * (2 - stage.first - stage.last) if degrees.pp > 1 else 0
    )
    seen["pp"] = counted.nbytes
    return Simulation(
        model.name, rank, degrees.ranks, micro_batches, replace(account, sent=dict(+seen)), replace(predicted, sent=dict(+told)),
        events, STAND_IN, time.perf_counter() - begun, degrees=degrees, stage=index,
    )  # fmt: skip


# -- the module ------------------------------------------------------------------------------------


def _cut_stand_in(
    stage: Stage, degrees: Degrees, cut: Mapping[tuple[str, ...], Any], number: int
) -> tuple[nn.Module, tuple[str, ...]]:
    """Make a stand-in for a stage whose parameters are the parts of rank `number`, as DTensors where
    an axis divides them. Returns it and the names of its units.

    Args:
        cut: the device mesh of the axes that divide a parameter.
    """
    from torch.distributed.tensor import DTensor, Shard

    root, names = stand_in(ModelShape("stage", stage.units))
    for unit in stage.units:
        module = root if unit.name == "(root)" else root.get_submodule(unit.name)
        for own, p in zip(list(module._parameters), unit.parameters, strict=True):
            part = torch.empty(local_shape(p, degrees, number), dtype=p.dtype, device="cpu")
            if divided := divided_along(p, degrees):
                mesh, dims = cut[divided], rule_of(p.name).axes
                part = DTensor.from_local(
                    part,
                    mesh,
                    [Shard(dims[axis]) for axis in mesh.mesh_dim_names],
                    run_check=False,
                    shape=torch.Size(p.shape),
                    stride=torch.empty(p.shape, device="meta").stride(),
                )
            module._parameters[own] = nn.Parameter(part, requires_grad=p.trainable)
        if isinstance(module, nn.Embedding):
            _look_up_own_rows(module)
    return root.train(), tuple(names)


def _look_up_own_rows(module: nn.Embedding) -> None:
    """Let an embedding look rows up in its own part of the table, without a message."""

    def forward(row: torch.Tensor) -> torch.Tensor:
        own: Any = module.weight
        return F.embedding(row, own.to_local() if hasattr(own, "to_local") else own)

    module.forward = forward  # type: ignore[method-assign,assignment]


# -- one step --------------------------------------------------------------------------------------


def _scheduled(
    module: nn.Module,
    stage: Stage,
    degrees: Degrees,
    root: Any,
    micro_batches: int,
    handed: torch.Tensor,
) -> Callable[[], None]:
    """Return a function that runs torch's schedule as this rank's stage of the pipeline."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
    from torch.distributed.pipelining.stage import InferenceMode

    from onefold.parallel import PipelineStage

    grad = torch.empty_like(handed, device="cpu")
    example = torch.empty_like(grad, requires_grad=True)
    here = PipelineStage(
        module,
        stage.index,
        degrees.pp,
        torch.device("cpu"),
        grad if stage.first else example,
        example,
        None if stage.last else grad,
        None if stage.first else grad,
        group=root.get_group("pp"),
    )
    kind = ScheduleGPipe if degrees.schedule == "gpipe" else Schedule1F1B
    schedule = kind(here, n_microbatches=micro_batches, loss_fn=lambda out, _: out.sum())

    # Stages vote whether each was given its shapes. No other stage is here: all of them were
    def told(stages: Any, *_: Any) -> None:
        for each in stages:
            each._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = told  # type: ignore[method-assign,assignment]
    whole = torch.cat([grad] * micro_batches)
    given = [whole] if stage.first else []
    target = whole if stage.last else None

    def step() -> None:
        with torch.enable_grad():
            schedule.step(*given, target=target)

    return step


class _Sends(TorchDispatchMode):
    """Counts the bytes of sends to other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def reset(self) -> None:
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.nbytes += sum(t.numel() * t.element_size() for t in args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _nodes_of(per_node: int | None, ranks: int) -> Iterator[None]:
    """Say inside what a launcher would say of the nodes."""
    if per_node is None:
        yield
        return
    said = {"LOCAL_WORLD_SIZE": str(min(per_node, ranks)), "WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, said):
        yield


def _along(ranks: Sequence[int], degrees: Degrees, replicas: int, first: int) -> str:
    """Return the axes along which some ranks of a stage lie, whose first rank is `first`."""
    each = degrees.sizes["dp"] // replicas
    seen: dict[str, set[int]] = {name: set() for name in (REPLICATE, *AXES)}
    for rank in ranks:
        at = degrees.coordinates_of(rank - first)
        seen[REPLICATE].add(at["dp"] // each)
        for name in AXES:
            seen[name].add(at[name] % each if name == "dp" else at[name])
    return " × ".join(name for name, places in seen.items() if len(places) > 1) or "nobody"
