"""A mesh of any axes keeps every promise: at each stage the numbers of one process, the bits of the
stages before, bytes on the wire and at rest by the closed form over those ranks that hold a part,
nothing that stays gathered, and a checkpoint that other meshes read bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axes_models import Case, Job, Seen, in_one_process, look, sharded

import looks
import onefold
from on_ranks import on_ranks, slow
from promises.formulas import counted_sends
from promises.jobs import differing

ABOVE = (1, 2, 3)
HOST = {"offload_optimizer": "cpu"}
ADAPTERS = Case(adapters=True, frozen=("tok_embeddings", "layers.0.attention", "output"))
ROWS: dict[int, dict[str, Case]] = {
    4: {
        "dp 2, tp 2": Case(ci=True),
        "sequence": Case(plan="sequence", micro_batches=2),
        "loss": Case(plan="loss"),
        "tp 4": Case(dp=1, tp=4, ci=True),
        "accumulation": Case(micro_batches=3),
        "checkpointing, sequence": Case(checkpointing=True, plan="sequence"),
        "frozen": Case(frozen=("tok_embeddings", "layers.0.feed_forward", "layers.1.ffn_norm")),
        "frozen, sequence": Case(plan="sequence", frozen=("layers.0", "norm")),
        "adapters": replace(ADAPTERS, ci=True),
        "tied": Case(tied=True),
        "meta": Case(meta=True),
        "scaler": Case(scaler=True),
        "at the boundary": Case(micro_batches=2, options={"reduce_at": "boundary"}),
        "kept for backward": Case(options={"reshard_after_forward": False}),
        "bf16": Case(options={"precision": "bf16"}, near=0.05),
        "replicas of tp 2": Case(replicate=2, dp=1, stages=ABOVE, ci=True),
        # Where state is
        "on the host": Case(options=HOST, scaler=True, stages=ABOVE, ci=True),
        "on the host, stepped in backward": Case(
            options={**HOST, "step_in_backward": True}, stages=(2, 3), max_norm=1e9
        ),
        "all on the host": Case(options={**HOST, "offload_param": "cpu"}, stages=(3,)),
        "states on NVMe": Case(options={"offload_optimizer": "nvme"}, stages=ABOVE),
        "all on NVMe": Case(
            options={"offload_optimizer": "nvme", "offload_param": "nvme"}, stages=(3,), ci=True
        ),
        "activations on the host": Case(options={"offload_activations": "cpu"}, stages=(1, 3)),
        "adapters, states on the host": replace(ADAPTERS, options=HOST, stages=ABOVE),
        # Codecs are off by their own step; a factor that is wrong is off by half or more
        "reduced in int8": Case(options={"reduce_codec": "int8"}, stages=(1,), near=0.05),
        "gathered in int8": Case(options={"gather_codec": "int8"}, stages=(3,), near=0.05),
        "both in int8": Case(
            ep=2, dp=2, tp=1, stages=(3,), near=0.1, ci=True,
            options={"gather_codec": "int8", "reduce_codec": "int8"},
        ),
        # Experts
        "dp 2, ep 2": Case(ep=2, tp=1, hidden=12, ci=True),
        "ep 4, accumulation": Case(ep=4, dp=1, tp=1, hidden=12, micro_batches=2),
        "ep 2, tp 2": Case(ep=2, dp=1, hidden=12, ci=True),
        "ep 2, tp 2, on the host": Case(
            ep=2, dp=1, hidden=12, options=HOST, checkpointing=True, micro_batches=2, stages=ABOVE
        ),
        "experts in bf16": Case(ep=2, tp=1, options={"precision": "bf16"}, near=0.05),
        # Steps of whole matrices
        "Muon": Case(plan="layers", optimizer="muon", stages=(0, 3), near=1e-2, ci=True),
    },
    6: {
        "uneven and empty parts": Case(plan="parts", tp=3, stages=ABOVE, ci=True),
        "uneven": Case(plan="parts", tp=3, stages=ABOVE, options=HOST, ci=True),
        "tp 3, uneven": Case(tp=3, hidden=41, plan="layers"),
    },
    8: {
        "two replicas of dp 2, tp 2": Case(replicate=2, stages=(2, 3)),
        "replicas": Case(replicate=2, stages=(3,), micro_batches=2),
        "dp 2, ep 2, tp 2": Case(ep=2, hidden=12, stages=ABOVE),
    },
}  # fmt: skip


def rows_on(ranks: int) -> Any:
    rows = ROWS[ranks]
    found = [pytest.param(c, id=name, marks=() if c.ci else slow) for name, c in rows.items()]
    return pytest.mark.parametrize("case", found)


def keep(case: Case, folder: Path, every: bool) -> None:
    """Without `every` at the first and the last stage only, and its checkpoint on another mesh only."""
    one, first = in_one_process(case), Seen()
    for stage in case.stages if every else sorted({case.stages[0], case.stages[-1]}):
        job, seen = sharded(stage, case, folder), Seen()
        for batches in job.batches():
            job.step(batches, seen, clip="step_in_backward" not in case.options)
        look(job, seen)
        # Stages 2 and 3 reduce in every micro-batch, and so add up in another order
        often = case.micro_batches > 1 and "reduce_at" not in case.options
        if not first.losses or (often and stage == (2 if every else 3)):
            first = seen
        wrong = [*_near(case, one[job.data_rank], seen), *_bits(first, seen), *_bytes(stage, job)]
        assert not wrong, f"stage {stage}: " + "\n".join(wrong)
    onefold.save(folder / "saved", model=job.model, optimizer=job.optimizers[0])
    saved = look(job, Seen())
    for other in (case, elsewhere(case))[not every :]:
        found = sharded(other.stages[0], other, folder, scale=0.5)
        onefold.load(folder / "saved", model=found.model, optimizer=found.optimizers[0])
        looked = look(found, Seen())
        wrong = [
            *differing("read", saved.weights, looked.weights),
            *differing(
                "read",
                *({k: t for k, t in s.states.items() if k[0] == "0"} for s in (saved, looked)),
            ),
        ]
        assert not wrong, f"{other.axes}: " + "\n".join(wrong)


def elsewhere(case: Case) -> Case:
    """The same model on the same ranks without tensor parallelism, or with it."""
    ranks = case.data_ranks * case.tp
    if case.tp > 1:
        ep = 1 if case.ep else 0
        plan = case.plan if case.plan == "parts" else "none"
        return replace(case, dp=ranks, tp=1, ep=ep, replicate=1, plan=plan, options={})
    return replace(case, dp=1, tp=ranks // max(case.ep, 1), plan="plain", options={})


def _near(case: Case, one: Seen, seen: Seen) -> Iterator[str]:
    for what in ("losses", "norms")[case.plan == "parts" :]:  # of those a rank has its own part
        a, b = torch.tensor(getattr(one, what)), torch.tensor(getattr(seen, what))
        if len(b) and not torch.allclose(b, a, case.near, case.near / 10):
            yield f"{what} {b}, in one process {a}"
    for what in ("weights", "states"):
        expected, found = getattr(one, what), getattr(seen, what)
        if found and expected.keys() != found.keys():
            yield f"other {what}: {expected.keys() ^ found.keys()}"
        for name in expected.keys() & found.keys():
            a, b = expected[name].float(), found[name].float()
            if a.shape != b.shape or not torch.allclose(b, a, 5 * case.near, case.near):
                yield f"{name} is off by {(a - b).abs().max() if a.shape == b.shape else b.shape}"


def _bits(first: Seen, seen: Seen) -> Iterator[str]:
    if (seen.losses, seen.norms) != (first.losses, first.norms):
        yield f"other bits: {seen.losses}, {seen.norms} for {first.losses}, {first.norms}"
    yield from differing("other bits", first.weights, seen.weights)
    yield from differing("other bits", first.states, seen.states)


def _bytes(stage: int, job: Job) -> Iterator[str]:
    """Of one more step, over the holders of each flat buffer."""
    model, case = job.model, job.case
    looks.watch(model)
    with counted_sends() as counted:
        job.step(next(job.batches()), Seen(), clip=False)
    sent = sum(looks.sent(model).values())
    if sent != counted.payload + counted.control - looks.control(model):
        yield f"{sent} bytes in the ledger, {counted} counted"
    if looks.gathered(model):
        yield f"gathered between steps: {looks.gathered(model)}"
    if (
        case.options
        or case.micro_batches > 1
        or case.frozen
        or case.optimizer != "adamw"
        or case.scaler
    ):
        return
    flats, expected = looks.flats(model), {"sent": 0, "parameters": 0}
    last = flats[-1].unit
    for flat in flats:
        # What the forward pass ends with stays gathered until the backward pass
        around = flat.unit in ("", last) or last.startswith(flat.unit + ".")
        moves = 2 if stage < 3 or around else 3
        once = 4 * flat.elements * (flat.shares - 1) // flat.shares
        across = 2 * 4 * flat.elements // flat.shares // 2 * (flat.holders > flat.shares)
        expected["sent"] += moves * once + across
        expected["parameters"] += 4 * flat.elements // (flat.shares if stage == 3 else 1)
    held = looks.held(model)["device"]
    stored = held.get("parameters", 0) + held.get("master weights", 0)
    if (sent, stored) != (expected["sent"], expected["parameters"]):
        yield f"{sent} bytes sent and {held} held, expected {expected}"


@on_ranks(4)
@rows_on(4)
def test_four_ranks_keep_every_promise(case: Case, folder: Path, every: bool) -> None:
    keep(case, folder, every)


@on_ranks(6)
@rows_on(6)
def test_six_ranks_keep_every_promise(case: Case, folder: Path, every: bool) -> None:
    keep(case, folder, every)


@on_ranks(8)
@rows_on(8)
def test_eight_ranks_keep_every_promise(case: Case, folder: Path, every: bool) -> None:
    keep(case, folder, every)
