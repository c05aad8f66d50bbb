"""Checks that train a small model: compare stages with each other and with DDP; groups, offloaded
state, checkpoints.

The model's sizes do not divide by the number of ranks. Intervals of ranks therefore cut through
parameters, and every flat buffer has padding.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import onefold
from onefold.doctor.check_numbers import same_bits
from onefold.doctor.checks import Findings, Here, LeftOut
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.options import Precision
from onefold.runtime.hooks import engine_of

VOCABULARY, WIDTH, HIDDEN, BLOCKS = 97, 44, 90, 4
BATCH, TOKENS = 2, 16
#: Steps of a training, micro-batches per step, and the norm to which gradients are clipped.
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.5
RATE = 1e-2
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
#: Relative differences that another order of sums may cause: (of losses and norms, of the change in
#: weights).
ROUNDING = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 0.1)}


class Block(nn.Module):
    """[..., width] → [..., width]: a norm and two layers with a residual connection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Token ids [batch, tokens] → the mean cross-entropy of predicting each from itself."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids.flatten())


def small(here: Here, **sizes: int) -> Small:
    """Make the model on the host, with the same weights on every rank and in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return Small(**sizes).to(here.device)


def batch(here: Here, step: int, micro: int, rank: int | None = None) -> torch.Tensor:
    """Return the token ids of one micro-batch of one rank."""
    of = here.rank if rank is None else rank
    generator = torch.Generator().manual_seed((step * 10 + micro) * 4099 + of)
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator, device="cpu").to(
        here.device
    )


@dataclass
class Trained:
    """The losses of this rank's micro-batches, the norms of steps, and whole weights on rank 0."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that every training here uses."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def accumulated(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    no_sync: Callable[[nn.Module], contextlib.AbstractContextManager[object]] = onefold.no_sync,
) -> list[torch.Tensor]:
    """Run a step's micro-batches, of which the last synchronizes gradients. Returns the losses."""
    losses = []
    for number, ids in enumerate(batches, 1):
        with contextlib.nullcontext() if number == len(batches) else no_sync(model):
            loss = model(ids)
            (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def batches(here: Here, step: int, count: int = MICRO_BATCHES) -> list[torch.Tensor]:
    """Return this rank's micro-batches of a step."""
    return [batch(here, step, micro) for micro in range(count)]


def one_step(
    here: Here,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    micro_batches: int = MICRO_BATCHES,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run a step. Returns (losses of the micro-batches, norm of the gradients), on the device."""
    losses = accumulated(model, batches(here, step, micro_batches))
    norm = onefold.clip_grad_norm_(model, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def train(
    here: Here, recipe: Recipe, micro_batches: int = MICRO_BATCHES, compiled: bool = False
) -> Trained:
    """Train `Small` with Onefold. Collective."""
    plain = small(here)
    for block in plain.blocks if compiled else ():
        block.compile()
    model = onefold.shard(plain, recipe)
    optimizer, found = adamw(model), Trained()
    for step in range(STEPS):
        losses, norm = one_step(here, model, optimizer, step, micro_batches)
        found.losses += [float(loss) for loss in losses]
        found.norms.append(float(norm))
    found.weights = onefold.full_state_dict(model)
    return found


class Cast(nn.Module):
    """A model with fp32 parameters that computes in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(
            self.model, {n: p.to(self.dtype) for n, p in self.model.named_parameters()}, (ids,)
        )
        return found


def train_with_ddp(here: Here, precision: str, micro_batches: int = MICRO_BATCHES) -> Trained:
    """Train `Small` in the same way with DistributedDataParallel and fp32 states. Collective."""
    model = small(here)
    ddp = DistributedDataParallel(Cast(model, COMPUTE_DTYPES[precision]))
    optimizer, found = adamw(model), Trained()
    for step in range(STEPS):
        losses = accumulated(ddp, batches(here, step, micro_batches), lambda _: ddp.no_sync())
        found.losses += [float(loss) for loss in losses]
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    if here.rank == 0:
        found.weights = {name: p.detach().cpu().clone() for name, p in model.state_dict().items()}
    return found


# -- comparing -------------------------------------------------------------------------------------


def bits_differ(a: Trained, b: Trained) -> str:
    """Say what differs in any bit; "" for nothing."""
    parts = []
    if a.losses != b.losses:
        parts.append(f"losses, by up to {_relative(a.losses, b.losses):.1e}")
    if a.norms != b.norms:
        parts.append(f"norms, by up to {_relative(a.norms, b.norms):.1e}")
    wrong = _unlike(b.weights, a.weights)
    if wrong or a.weights.keys() != b.weights.keys():
        parts.append(
            f"{len(wrong)} of {len(a.weights)} weights, {wrong[0] if wrong else 'by name'} first"
        )
    return " and ".join(parts)


def _unlike(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of expected weights that are missing or have other bits."""
    return [n for n, w in expected.items() if n not in found or not same_bits(found[n], w)]


def distance(here: Here, a: Trained, b: Trained) -> dict[str, float]:
    """Return relative differences: the largest one of losses and of norms, and the norm of the
    difference in weights ÷ the norm of their change in training.
    """
    moved = 0.0
    if b.weights:
        begin = small(here).state_dict()
        off = sum(
            float((a.weights[n].double() - w.double()).square().sum()) for n, w in b.weights.items()
        )
        way = sum(
            float((w.double() - begin[n].cpu().double()).square().sum())
            for n, w in b.weights.items()
        )
        moved = (off / way) ** 0.5 if way else float("inf")
    return {
        "losses": _relative(a.losses, b.losses),
        "norms": _relative(a.norms, b.norms),
        "weights": moved,
    }


def expect_same(findings: Findings, what: str, a: Trained, b: Trained) -> bool:
    """Note what differs in any bit between two trainings."""
    differs = bits_differ(a, b)
    return findings.expect(not differs, f"{what} differ in {differs}")


def expect_near(findings: Findings, what: str, apart: dict[str, float], precision: str) -> None:
    """Note where `apart` exceeds the rounding of `precision`, or is NaN."""
    numbers, moved = ROUNDING[precision]
    room = {"losses": numbers, "norms": numbers, "weights": moved}
    over = [
        f"{name} by {value:.1e} (at most {room[name]:.0e})"
        for name, value in apart.items()
        if not value <= room[name]
    ]
    findings.expect(not over, f"{what}: {', '.join(over)}")
    findings.figures[what] = {name: float(f"{value:.3g}") for name, value in apart.items()}


def _relative(a: list[float], b: list[float]) -> float:
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        off = abs(x - y) / max(abs(y), 1e-12)
        worst = off if not off <= worst else worst  # NaN stays
    return worst


# -- the checks ------------------------------------------------------------------------------------


def in_order(stage: int, precision: Precision, **options: Any) -> Recipe:
    """Return a recipe with ordered sums: flat over hosts the default would be native ones."""
    return Recipe.zero(stage, precision=precision, reduce="ordered", **options)


def stages(here: Here, findings: Findings) -> str:
    """Compare stages 0 to 3 to the bit, and with DDP within rounding, in fp32 and bf16.

    Gradients of several micro-batches are added up either before they are reduced (at the boundary)
    or after (reduced every micro-batch). The two orders give different bits, so each is compared by
    itself.
    """
    for precision in PRECISIONS:
        at_the_boundary = [
            train(here, in_order(stage, precision, reduce_at="boundary")) for stage in range(4)
        ]
        every_time = [train(here, in_order(stage, precision)) for stage in (2, 3)]
        right = [
            expect_same(findings, f"{precision}: {which}", a, b)
            for which, a, b in (
                *(
                    (f"stage {s} and stage 0", at_the_boundary[s], at_the_boundary[0])
                    for s in (1, 2, 3)
                ),
                ("stage 3 and stage 2, reduced every micro-batch,", every_time[1], every_time[0]),
            )
        ]
        if not all(here.gather(all(right))):
            again = train(here, in_order(0, precision, reduce_at="boundary"))
            findings.expect(
                not any(here.gather(bool(bits_differ(again, at_the_boundary[0])))),
                "stage 0 differs from itself too: this device's own kernels do not give the same"
                " bits twice",
            )
        ddp = train_with_ddp(here, precision)
        for name, found in (("stage 0", at_the_boundary[0]), ("stage 2", every_time[0])):
            apart = distance(here, found, ddp)
            expect_near(findings, f"{precision}: {name} and DDP", apart, precision)
    farthest = max(findings.figures, key=lambda name: findings.figures[name]["weights"])
    return (
        "stages 0 to 3 agree to the bit in fp32 and bf16, and with DDP within rounding (weights"
        f" differ most in {farthest.partition(':')[0]}: {findings.figures[farthest]['weights']:.0e})"
    )


def two_levels(here: Here, findings: Findings) -> str:
    """Compare recipes over groups with each other and with DDP, and count bytes between groups."""
    inner = here.per_node if here.per_node < here.world else here.world // 2
    if here.world < 4 or here.world % inner or inner < 2:
        raise LeftOut(
            f"the launcher says of one node, and {here.world} ranks make no two groups of two: use"
            " 4 ranks, or two nodes"
        )
    nodes = here.per_node < here.world
    recipes = {
        "stage 3": Recipe.zero(3, group=inner),
        "stage 2": Recipe.zero(2, group=inner),
        "stage 1": Recipe.zero(1, group=inner),
        "a second copy (hpZ)": Recipe.zero(3, group=inner, second_copy=True),
        "HSDP": Recipe.zero(3, shard_group=inner),
    }
    trained = {name: train(here, recipe, 1) for name, recipe in recipes.items()}
    for name, found in trained.items():
        what = f"in groups of {inner}, {name} and stage 3"
        expect_same(findings, what, found, trained["stage 3"])
    expect_near(
        findings,
        f"groups of {inner} and DDP",
        distance(here, trained["stage 3"], train_with_ddp(here, "fp32", 1)),
        "fp32",
    )

    sent = _sent_in_a_step(here, recipes["stage 3"])["between"]
    flat = sum(_sent_in_a_step(here, Recipe.zero(3, group=here.world)).values())
    # A flat move sends a part to each of N − 1 ranks; groups send it to one rank per other group.
    due = flat * (here.world // inner - 1) // (here.world - 1)
    findings.figures |= {"group": inner, "bytes between groups": sent, "formula": due}
    findings.expect(
        sent == due, f"{sent:,} bytes went between groups in a step, the formula says {due:,}"
    )
    said = "nodes" if nodes else "groups on this node, standing for nodes"
    return (
        f"{here.world // inner} {said}: recipes over groups agree to the bit, {sent:,} bytes"
        " between them as the formula says"
    )


def _sent_in_a_step(here: Here, recipe: Recipe) -> dict[str, int]:
    """Return the bytes that this rank sends in a step, by link."""
    model = onefold.shard(small(here), recipe)
    optimizer, engine = adamw(model), engine_of(model)
    for step in range(2):
        engine.traffic.reset()
        one_step(here, model, optimizer, step)
    return engine.traffic.by_link()


OFFLOADED: dict[str, dict[str, Any]] = {
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, optimizer on the host": {"stage": 3, "offload_optimizer": "cpu"},
    "stage 3, parameters and optimizer on the host": {
        "stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
}


def offload(here: Here, findings: Findings) -> str:
    """Compare recipes with state on the host, with each other to the bit and with the device."""
    for precision in PRECISIONS:
        plain = train(here, Recipe.zero(3, precision=precision))
        kept = train(here, Recipe.zero(3, precision=precision, offload_activations="cpu"))
        expect_same(
            findings, f"{precision}: activations on the host and on the device", kept, plain
        )
        trained = {
            name: train(here, Recipe.zero(precision=precision, **options))
            for name, options in OFFLOADED.items()
        }
        first = next(iter(OFFLOADED))
        for name, found in trained.items():
            expect_same(findings, f"{precision}: {name} and {first}", found, trained[first])
        if here.device.type == "cpu":
            what = f"{precision}: {first} and nothing on the host"
            expect_same(findings, what, trained[first], plain)
        else:
            apart = distance(here, trained[first], plain)
            expect_near(findings, f"{precision}: {first} and on the device", apart, precision)
    findings.figures["recipes"] = [*OFFLOADED, "activations on the host"]
    how = "to the bit"
    if here.device.type != "cpu":
        how = "within rounding, and with each other to the bit"
    return f"optimizer, parameters and activations on the host train as on the device, {how}"


def compiled_blocks(here: Here, findings: Findings) -> str:
    """Compare blocks that inductor compiles with eager ones, within rounding."""
    if here.device.type == "cpu":
        raise LeftOut("this needs a GPU: compiling for a CPU asks for a C++ compiler")
    recipe = Recipe.zero(3, precision="bf16")
    apart = distance(here, train(here, recipe, compiled=True), train(here, recipe))
    expect_near(findings, "compiled and eager blocks", apart, "bf16")
    return "compiled blocks train as eager ones, within rounding"


def save_and_reload(here: Here, findings: Findings) -> str:
    """Save with `save_async`, go on training, and load at another stage. The loaded state must be
    that of the moment of the call.
    """
    path = Path(here.folder) / "checkpoint"
    if here.rank == 0:
        (Path(here.folder) / "seen").touch()
    here.gather(None)
    if not all(here.gather((Path(here.folder) / "seen").exists())):
        raise LeftOut(
            f"not every node sees {here.folder}: start it in a folder that all of them share"
        )
    model = onefold.shard(small(here), Recipe.zero(2))
    optimizer = adamw(model)
    for step in range(2):
        one_step(here, model, optimizer, step)
    at_the_call = onefold.full_state_dict(model)
    saving = onefold.save_async(path, model=model, optimizer=optimizer)
    went_on = [one_step(here, model, optimizer, 2 + step) for step in range(2)]
    saving.wait()
    after = onefold.full_state_dict(model)

    loaded = onefold.shard(small(here), Recipe.zero(3))
    again = adamw(loaded)
    onefold.load(path, model=loaded, optimizer=again)
    there = onefold.full_state_dict(loaded)
    torn = _unlike(there, at_the_call)
    findings.expect(
        not torn,
        f"{len(torn)} of {len(at_the_call)} weights are not those of the save's moment,"
        f" {''.join(torn[:1])} first",
    )
    resumed = [one_step(here, loaded, again, 2 + step) for step in range(2)]
    other = _unlike(onefold.full_state_dict(loaded), after)
    findings.expect(
        not other,
        f"two steps after the load {len(other)} weights are not those of the saved run,"
        f" {''.join(other[:1])} first",
    )
    numbers = [
        [float(x) for losses, norm in run for x in (*losses, norm)] for run in (went_on, resumed)
    ]
    findings.expect(
        numbers[0] == numbers[1],
        f"after the load losses or norms differ, by up to {_relative(*numbers):.1e}",
    )
    findings.figures |= {"save_s": saving.seconds, "stall_s": saving.stall_s}
    here.gather(None)
    if here.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    return (
        "saved behind two steps, loaded at another stage: the same bits (the steps stood still for"
        f" {1000 * saving.stall_s:.0f} ms)"
    )
