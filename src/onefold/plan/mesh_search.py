"""The plan over axes: one mesh at every ZeRO stage, or the best meshes for a number of GPUs.

The search takes every tensor-parallel degree that stays inside a node and divides the heads; every
number of stages of which the fullest has at most 10 % more blocks than the mean; every degree that
divides the experts; and for each the ZeRO stages and recompute that fit. It lists one row a mesh, the
fastest, by seconds per token.

    all meshes ──► states alone fit? ──► seconds, closed form ──► in that order: the whole account
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onefold.plan.degrees import Degrees, check, check_sequence, divisors, most_tp
from onefold.plan.formulas import CODES, Convention
from onefold.plan.hardware import Machine
from onefold.plan.job import CHECKPOINTING, Job
from onefold.plan.mesh_account import (
    RECOMPUTE_SAID,
    MeshAccount,
    MeshQuestion,
    account_of,
    least_bytes,
    seconds_of,
)
from onefold.plan.shapes import find, known
from onefold.plan.subject import Subject, subject_of
from onefold.plan.traffic import Software
from onefold.recipe import Recipe
from onefold.recipe.optimizers import PLANNED, WHOLE

AUTO = "auto"
#: A stage may have this many times as many blocks as the mean.
UNEVEN = 1.1
#: Ranks that divide a sample at most, and the fewest tokens that each of them has.
MOST_CP, FEWEST_TOKENS = 32, 4096
#: How many whole accounts a search makes at most.
MOST_ACCOUNTS = 300
#: Options of a job that a plan over axes does not count.
_NOT_COUNTED = (
    "offload_optimizer", "offload_gradients", "offload_param", "offload_activations", "nvme", "step_in_backward", "units",
    "gather_codec", "reduce_codec", "frozen", "second_copy", "shard_group", "optimizer_over",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class MeshPlan:
    """The answers over axes, per rank. `print` shows them as `onefold plan --tp ...` does.

    Attributes:
        rows: one account for each ZeRO stage of the asked mesh, or for each of the best meshes.
        best: the fastest of `rows` that fits; None: none fits. `why_not` then says what is nearest.
        searched: how many meshes were looked at; 0: a mesh was asked for.
    """

    question: MeshQuestion
    rows: tuple[MeshAccount, ...]
    best: MeshAccount | None
    searched: int
    why_not: str
    notes: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the best row. Raises ValueError: none fits."""
        if self.best is None:
            raise ValueError(self.why_not)
        return self.question.job.recipe(self.best.zero)

    def __repr__(self) -> str:
        found = self.best
        said = f"{found.degrees}, ZeRO stage {found.zero}" if found is not None else "nothing fits"
        machine = self.question.machine
        return (
            f"MeshPlan({self.question.model.name} on {machine.ranks} × {machine.gpu.name}: {said})"
        )

    def __str__(self) -> str:
        try:
            from rich.console import Console

            from onefold.plan.mesh_tables import show_mesh
        except ModuleNotFoundError:  # rich comes with the commands, the core does without it
            return json.dumps(self.to_json(), indent=2)
        text = io.StringIO()
        show_mesh(self, Console(file=text, width=140, highlight=False, soft_wrap=True))
        return text.getvalue().rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as `onefold plan --tp ... --json` prints it."""
        model, machine, job = self.question.model, self.question.machine, self.question.job
        return {
            "schema": 1,
            "model": {"name": model.name, "parameters": model.numel, "active": model.active_numel},
            "machine": {
                "gpu": machine.gpu.name,
                "ranks": machine.ranks,
                "per_node": machine.per_node,
                "bytes": machine.capacity,
            },
            "job": {
                "seq": job.seq,
                "global_batch": self.question.samples(),
                "precision": job.computes,
            },
            "searched": self.searched,
            "rows": [row.to_json() for row in self.rows],
            "recommended": self.best.to_json() if self.best is not None else None,
            "why_not": self.why_not,
            "notes": list(self.notes),
        }


def plan_over_axes(
    model: Any,
    machine: Machine,
    job: Job,
    *,
    tp: int | str = 1,
    pp: int | str = 1,
    cp: int | str = 1,
    ep: int | str = 1,
    stages: tuple[int, ...] = (),
    convention: Convention | None = None,
    software: Software | None = None,
    keep: int = 5,
    **options: Any,
) -> MeshPlan:
    """Account for a mesh at each ZeRO stage, or search for the best ones.

    Args:
        tp, pp, cp, ep: the degrees, or "auto": the plan searches. dp is what they leave.
        stages: the ZeRO stages that are looked at; (): all of them.
        convention: bytes per parameter of the papers' count of states; None: the job's.
        keep: how many meshes a search lists.
        options: further fields of `Degrees`: chunks, schedule, sequence_parallel, expert_tp.

    Raises:
        ValueError: a mesh that is not possible, with what to choose instead; or an option that a plan
            over axes does not count.
    """
    asked = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    _refuse(job, machine)
    subject = subject_of(model, job, None, None, machine)
    code = ""
    if isinstance(model, str) and known(model):
        code = find(model).family if find(model).family in CODES else ""
    question = MeshQuestion(subject.shape, machine, subject.job, code, convention)
    searching = AUTO in asked.values()
    if searching:
        found, searched = _searched(question, asked, options, stages, software, keep)
        rows = tuple(found)
    else:
        degrees = _checked(question, asked, options)
        rows, searched = tuple(_columns(question, degrees, stages, software)), 0
    fitting = [row for row in rows if row.fits]
    best = min(fitting, key=_order, default=None)
    return MeshPlan(
        question,
        rows,
        best,
        searched,
        "" if best is not None else _why_not(question, rows, searched),
        (*_notes(question, best or (rows[-1] if rows else None)), *_of_activations(subject)),
    )


def _refuse(job: Job, machine: Machine) -> None:
    if machine.is_here or machine.measured is not None:
        raise ValueError(
            "--here measured moves among all ranks, none along an axis: give --gpus and --gpu instead."
        )
    if not job.micro_batch:
        raise ValueError(
            "--micro-batch auto: a plan over axes takes a number of samples, since more of them at once"
            " change the pipeline's bubble; give --micro-batch 1, 2 or 4 and compare."
        )
    given = [n for n in _NOT_COUNTED if dict(job.options).get(n) not in (None, False)]
    given += ["offload"] if job.offload not in ("", "none") else []
    given += ["lora"] if job.lora_rank else []
    given += [f"optimizer {job.optimizer}"] if PLANNED[job.optimizer].update == WHOLE else []
    if given:
        flags = ", ".join(f"--{n.replace('_', '-')}" for n in given)
        raise ValueError(
            f"{flags}: a plan over axes (--tp, --pp, --cp, --ep) does not count it; leave one of the"
            " two out."
        )


def _checked(
    question: MeshQuestion, asked: Mapping[str, Any], options: Mapping[str, Any]
) -> Degrees:
    """Return the mesh of the asked degrees. Raises ValueError: it is not possible for the model, the
    machine, the sequence or the batch.
    """
    model, machine, job = question.model, question.machine, question.job
    given: dict[str, Any] = {**asked, **options}
    check(Degrees(dp=asked.get("ep", 1), **given), model, machine)
    degrees = Degrees.on(machine.ranks, **given)
    check_sequence(degrees, job.seq)
    question.micro_batches(degrees, job.micro_batch)
    return degrees


def _order(row: MeshAccount) -> tuple[float, int, float]:
    """Order by seconds per token to four digits, then by the lower ZeRO stage."""
    return float(f"{row.seconds_per_token:.3e}"), row.zero, row.seconds_per_token


# -- one mesh --------------------------------------------------------------------------------------


def _columns(
    question: MeshQuestion, degrees: Degrees, stages: tuple[int, ...], software: Software | None
) -> Iterator[MeshAccount]:
    """Yield the account of each ZeRO stage with as little recompute as fits."""
    job = question.job
    for zero in stages or (0, 1, 2, 3):
        row = None
        for checkpointing in (job.checkpointing,) if job.checkpointing else CHECKPOINTING:
            row = account_of(question, degrees, zero, checkpointing, software)
            if row.fits:
                break
        assert row is not None
        yield row


# -- the search ------------------------------------------------------------------------------------


def meshes(
    question: MeshQuestion, asked: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Degrees]:
    """Yield every mesh that is possible for the model, the machine and the batch. A degree of
    `asked` that is a number stays.
    """
    machine, dims, seq = question.machine, question.dims, question.job.seq
    choices: dict[str, list[int]] = {
        "tp": most_tp(dims, machine),
        "pp": [
            n
            for n in divisors(machine.ranks)
            if n <= dims.layers and -(-dims.layers // n) * n <= UNEVEN * dims.layers
        ],
        "cp": [n for n in divisors(machine.ranks) if n <= MOST_CP and seq // n >= FEWEST_TOKENS]
        or [1],
        "ep": divisors(dims.experts) if dims.experts > 1 else [1],
    }
    for name, value in asked.items():
        if value != AUTO:
            choices[name] = [value]
    for tp, pp, cp, ep in itertools.product(*choices.values()):
        more = dict(options)
        if pp == 1:
            more.pop("chunks", None)
        try:
            degrees = _checked(question, {"tp": tp, "pp": pp, "cp": cp, "ep": ep}, more)
        except ValueError:
            continue
        yield degrees


def _searched(
    question: MeshQuestion,
    asked: Mapping[str, int | str],
    options: Mapping[str, Any],
    stages: tuple[int, ...],
    software: Software | None,
    keep: int,
) -> tuple[list[MeshAccount], int]:
    """Return (the fastest row of each of the best meshes, how many meshes are possible)."""
    job, usable = question.job, question.machine.capacity
    every = list(meshes(question, asked, options))
    if not every:
        _say_why_none(question, asked, options)
    timed: list[tuple[float, int, float, Degrees, str]] = []
    for degrees in every:
        # In a pipeline stage 2 reduces at the boundary, as stage 1 does
        usual = (1, 3) if degrees.pp > 1 else (1, 2, 3)
        for zero in stages or (usual if degrees.dp * degrees.of_stage_without_dp > 1 else (0,)):
            for checkpointing in (job.checkpointing,) if job.checkpointing else CHECKPOINTING:
                step = question.step(degrees, zero, job.micro_batch, checkpointing)
                if least_bytes(question, degrees, step, checkpointing) > usable:
                    continue
                seconds, tokens, _ = seconds_of(question, degrees, step, software or Software())
                each = seconds["step"] / tokens
                timed.append((float(f"{each:.3e}"), zero, each, degrees, checkpointing))
    timed.sort(key=lambda one: one[:3])
    rows: dict[Degrees, MeshAccount] = {}
    nearest: MeshAccount | None = None
    accounts = 0
    for _, zero, _, degrees, checkpointing in timed:
        if degrees in rows:
            continue
        if len(rows) == keep or accounts == MOST_ACCOUNTS:
            break
        accounts += 1
        row = account_of(question, degrees, zero, checkpointing, software)
        if row.fits:
            rows[degrees] = row
        if nearest is None or row.usable - row.peak_bytes > nearest.usable - nearest.peak_bytes:
            nearest = row
    found = list(rows.values()) or ([nearest] if nearest is not None else [])
    return found, len(every)


def _say_why_none(
    question: MeshQuestion, asked: Mapping[str, int | str], options: Mapping[str, Any]
) -> None:
    """Raises ValueError: no mesh is possible, in the words of the first thing that refuses it."""
    _checked(question, {k: v for k, v in asked.items() if v != AUTO}, options)
    raise ValueError(
        f"no mesh of {question.machine.ranks} GPUs is possible for {question.model.name} with"
        f" {', '.join(f'--{k} {v}' for k, v in asked.items())}: leave a degree to the search (auto),"
        " or take another number of GPUs."
    )


# -- words -----------------------------------------------------------------------------------------


def _why_not(question: MeshQuestion, rows: tuple[MeshAccount, ...], searched: int) -> str:
    name = question.model.name
    if not rows:
        return (
            f"{name} does not fit: on each of {searched} meshes the states alone exceed a device. Take"
            " more GPUs."
        )
    near = max(rows, key=lambda row: row.usable - row.peak_bytes)
    over = (near.peak_bytes - near.usable) / 2**30
    return (
        f"{name} does not fit: the nearest is {near.degrees} at ZeRO stage {near.zero}"
        f" {RECOMPUTE_SAID[near.checkpointing]}, whose peak of {near.peak_bytes / 2**30:.1f} GiB exceeds"
        f" the {near.usable / 2**30:.1f} GiB of a device by {over:.1f} GiB. Take more GPUs, a higher"
        " --tp or --pp, or --tp auto --pp auto to search."
    )


def _of_activations(subject: Subject) -> Iterator[str]:
    if subject.source == "from dimensions":
        yield from subject.notes
        return
    yield "over axes activations are counted from dimensions, as fused kernels keep them"


def _notes(question: MeshQuestion, shown: MeshAccount | None) -> Iterator[str]:
    dims = question.dims
    found = question.bytes_per_parameter
    yield (
        f"papers' way counts {found.parameters:g} parameters + {found.gradients:g} gradients +"
        f" {found.optimizer:g} optimizer bytes per parameter"
    )
    if dims.tied and shown is not None and shown.degrees.pp > 1:
        yield (
            "embedding and head are tied: both ends of the pipeline hold the matrix, and add its"
            " gradients up (not counted)"
        )
    if shown is not None and shown.degrees.ep > 1:
        yield "tokens are counted as spread evenly over the experts, and all-to-alls as not hidden"
    if shown is not None and shown.reserve.nbytes:
        yield f"left on each GPU beside tensors: {shown.reserve}; assumptions"
    if shown is not None:
        share = Software().kernel_share
        yield (
            f"seconds assume {share:.0%} of the rate of large matrix products; what layers send along"
            " tp, cp and ep is not hidden"
        )
