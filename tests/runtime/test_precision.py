"""Precision None computes as the model is; and in 16 bits every stage, and every recipe over the
same groups, has the same bits.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import states
from ranks import run_ranks
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STALL_TIMEOUT = 20.0
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Mixed(nn.Module):
    """Blocks in bf16, norms in fp32 between them, a head in fp32: as many checkpoints of large
    models come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.wide = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype]
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return self.head(x.float()) * self.wide


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, dtype=BF16), nn.Linear(16, 8, dtype=BF16)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x.float()).to(BF16)).relu())


def mixed_input(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


def plain_mixed(steps: int = 2) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and weights of one process of plain PyTorch: fp32 masters by hand, gradients of bf16
    weights in bf16.
    """
    torch.manual_seed(0)
    model = Mixed()
    widened = {
        name: p.detach().clone().to(FP32 if p.dtype == BF16 else p.dtype)
        for name, p in model.named_parameters()
    }
    masters = {name: nn.Parameter(p) for name, p in widened.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.1)
    outputs = []
    for step in range(steps):
        out = model(mixed_input(0, step))
        outputs.append(out.detach().clone())
        out.square().mean().backward()
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.to(masters[name].dtype)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return outputs, {name: p.detach() for name, p in masters.items()}


def as_it_is(stage: int) -> list[str]:
    """A model of mixed dtypes, the same batch on every rank, against plain PyTorch."""
    import onefold

    expected, masters = plain_mixed()
    torch.manual_seed(0)
    model = onefold.shard(Mixed(), onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    problems = []
    for step, want in enumerate(expected):
        out = model(mixed_input(0, step))
        if not torch.equal(out, want) or model.seen[0] != BF16:
            problems.append(
                f"step {step}: the output differs by {(out - want).abs().max():.3g}; computed in"
                f" {model.seen}"
            )
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    compute = {e.slot.name: e.flat.dtypes.compute for e in onefold.engine_of(model).entries}
    problems += [
        f"{n} computes in {d}"
        for n, d in compute.items()
        if d != dict(Mixed().named_parameters())[n].dtype
    ]
    state = onefold.full_state_dict(model)
    same = {n: t.dtype == masters[n].dtype and torch.equal(t, masters[n]) for n, t in state.items()}
    problems += [
        f"{n}: {state[n].dtype}, or other values" for n, equal in same.items() if not equal
    ]
    return problems


def all_as_they_are() -> dict[int, list[str]]:
    return {stage: as_it_is(stage) for stage in (0, 1, 2, 3)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_mixed_dtypes_computes_as_in_plain_pytorch(ranks: int) -> None:
    for rank, seen in enumerate(run_ranks(ranks, all_as_they_are)):
        assert not any(seen.values()), f"rank {rank}: {seen}"


def trained(
    build: Any, batch: Any, micro_batches: int = 1, scale: float = 1.0, **recipe: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of two steps, and the weights."""
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(build(), onefold.Recipe.zero(stall_timeout=STALL_TIMEOUT, **recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = onefold.GradScaler(model, init_scale=scale) if scale != 1 else None
    losses = []
    for step in range(2):
        for k in range(micro_batches):
            with onefold.no_sync(model) if k + 1 < micro_batches else contextlib.nullcontext():
                out = model(batch(dist.get_rank(), step * micro_batches + k))
                loss = out if out.dim() == 0 else out.float().square().mean()
                (scaler.scale(loss) if scaler is not None else loss).backward()
                losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = onefold.clip_grad_norm_(model, 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        losses.append(float(norm) if recipe.get("reduce_codec") is None else 0.0)
        optimizer.zero_grad()
    return losses, onefold.full_state_dict(model)


def bf16_gpt() -> nn.Module:
    return TinyGPT().to(BF16)


def fp16_mlp() -> nn.Module:
    return TinyMLP().to(FP16)


def half_features(rank: int, step: int) -> Tensor:
    return features_of(10 * step + rank, 4, 7).to(FP16)


def words(rank: int, step: int) -> Tensor:
    return tokens_of(10 * step + rank)


FAMILIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a bf16 model": ({"build": bf16_gpt, "batch": words}, [{"stage": s} for s in (0, 1, 2, 3)]),
    "bf16 by the recipe": (
        {"build": TinyGPT, "batch": words, "precision": "bf16", "micro_batches": 2},
        [{"stage": s} | ({"reduce_at": "boundary"} if s > 1 else {}) for s in (0, 1, 2, 3)],
    ),
    "mixed": ({"build": Mixed, "batch": mixed_input}, [{"stage": s} for s in (0, 1, 2, 3)]),
    "fp16, scaled": (
        {"build": fp16_mlp, "batch": half_features, "scale": 2.0**10},
        [{"stage": s} for s in (0, 1, 2, 3)],
    ),
    "sums in bf16": (
        {"build": bf16_gpt, "batch": words, "accumulate_dtype": "bf16"},
        [{"stage": s} for s in (0, 1, 2, 3)],
    ),
    "a wire of fp16": (
        {"build": bf16_gpt, "batch": words, "wire": "fp16"},
        [{"stage": s} for s in (0, 1, 2, 3)],
    ),
    "a wire of fp32": (
        {"build": bf16_gpt, "batch": words, "wire": "fp32"},
        [{"stage": s} for s in (0, 1, 2, 3)],
    ),
    "the host": (
        {"build": bf16_gpt, "batch": words},
        [{"stage": 1}, {"stage": 3, "offload_optimizer": "cpu"}],
    ),
}
GROUPED: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "groups": (
        {"build": bf16_gpt, "batch": words},
        [
            {"stage": 1, "group": 2}, {"stage": 2, "group": 2}, {"stage": 3, "group": 2}, {"stage": 3, "shard_group": 2},
            {"stage": 3, "shard_group": 2, "optimizer_over": "all"}, {"stage": 3, "group": 2, "second_copy": True},
        ],
    ),
    "encoded": (
        {"build": bf16_gpt, "batch": words, "reduce_codec": "int8"},
        [{"stage": 1, "group": 2}, {"stage": 3, "group": 2}, {"stage": 3, "shard_group": 2}],
    ),
    "no groups": ({"build": bf16_gpt, "batch": words}, [{"stage": s} for s in (0, 1, 2, 3)]),
    "encoded without groups": (
        {"build": bf16_gpt, "batch": words, "reduce_codec": "int4", "group": None},
        [{"stage": s} for s in (1, 2, 3)],
    ),
}  # fmt: skip


def compared(chosen: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Where recipes of a family differ from the first of it."""
    problems = []
    for name, recipes in chosen.items():
        common, first = (FAMILIES | GROUPED)[name][0], None
        for recipe in recipes:
            losses, state = trained(**common, **recipe)
            first = first or (losses, state)
            if losses != first[0]:
                problems.append(f"{name}: {recipe}: {losses}, not {first[0]}")
            problems += [
                f"{name}: {recipe}: {n}"
                for n, t in state.items()
                if not torch.equal(t, first[1][n])
            ]
    return problems


def test_in_16_bits_all_stages_give_the_same_bits(sample: Any) -> None:
    chosen = {name: [first, *sample(others, 2)] for name, (_, (first, *others)) in FAMILIES.items()}
    assert run_ranks(2, compared, chosen) == [[], []]


def test_in_16_bits_all_recipes_over_the_same_groups_give_the_same_bits(sample: Any) -> None:
    chosen = {name: [first, *sample(others, 2)] for name, (_, (first, *others)) in GROUPED.items()}
    assert run_ranks(4, compared, chosen) == [[]] * 4


def first_gradients(stage: int) -> tuple[dict[str, Tensor], int, int]:
    """Whole gradients of one step of a bf16 model, the bytes that their reductions sent, and the
    elements of the flat buffers.
    """
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(
        TinyMLP().to(BF16), onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT)
    )
    before = onefold.full_state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(features_of(dist.get_rank(), 4, 7).to(BF16)).float().square().mean().backward()
    engine = onefold.engine_of(model)
    sent, numel = engine.traffic.by_move(), sum(unit.numel for unit in engine.units)
    optimizer.step()
    after = onefold.full_state_dict(model)
    return (
        {name: before[name] - after[name] for name in before},
        sent.get("all-reduce", 0) + sent.get("reduce-scatter", 0),
        numel,
    )


def mean_of_ranks() -> list[str]:
    """The step's gradients against the ranks' own, added in fp32, divided, rounded once to bf16."""
    torch.manual_seed(0)
    model, total = TinyMLP().to(BF16), {}
    for rank in range(2):
        model.zero_grad()
        model(features_of(rank, 4, 7).to(BF16)).float().square().mean().backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + p.grad.float()
    exact = {name: t / 2 for name, t in total.items()}
    problems = []
    for stage in (0, 1, 2, 3):
        found, sent, numel = first_gradients(stage)
        # The difference of two fp32 weights of size 1 is the gradient within 2^-23; rounding to
        # bf16 moves it by up to 2^-9 of itself.
        problems += [
            f"stage {stage}: {n}"
            for n, t in found.items()
            if not torch.allclose(t, exact[n].to(BF16).float(), rtol=0, atol=1e-6)
        ]
        # 2 bytes an element, of which each of two ranks sends half
        if sent != (2 if stage == 0 else 1) * 2 * numel // 2:
            problems.append(f"stage {stage} sent {sent} bytes for {numel} elements")
    return problems


def test_the_mean_is_rounded_once_and_weighs_what_the_formula_says() -> None:
    for seen in run_ranks(2, mean_of_ranks):
        assert seen == []


def said_at_the_start(build: Any, **options: Any) -> str:
    import onefold

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    onefold.shard(build(), onefold.Recipe.zero(3, **options))
    logging.getLogger("onefold").removeHandler(handler)
    return "\n".join(said)


def test_masters_of_16_bit_weights_are_said_once_at_the_start() -> None:
    said = said_at_the_start(bf16_gpt)
    assert (
        said.count("precision=None") == 1
        and "bfloat16" in said
        and "master weights in float32" in said
        and "master_dtype" in said
    )
    assert "in float64 and float32 and bfloat16" in said_at_the_start(Mixed)
    assert "master weights in bfloat16" in said_at_the_start(bf16_gpt, master_dtype="bf16")
    for build, options in (
        (TinyGPT, {}),
        (bf16_gpt, {"precision": "bf16"}),
        (bf16_gpt, {"precision": "fp32"}),
        (frozen_gpt, {}),
    ):
        assert said_at_the_start(build, **options) == ""


def frozen_gpt() -> nn.Module:
    return bf16_gpt().requires_grad_(False)


def ledgers(kind: str, stage: int, micro_batches: int) -> dict[str, Any]:
    import onefold

    model = onefold.shard(
        {"bf16": bf16_gpt, "mixed": Mixed}[kind](),
        onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT),
    )
    batch = words if kind == "bf16" else mixed_input
    optimizer, engine = torch.optim.AdamW(model.parameters(), lr=0.01), onefold.engine_of(model)
    for _ in range(2):
        engine.memory.reset_peak()
        engine.traffic.reset()
        for k in range(micro_batches):
            with onefold.no_sync(model) if k + 1 < micro_batches else contextlib.nullcontext():
                model(batch(0, k)).float().square().mean().backward()
        engine.memory.now()
        optimizer.step()
        optimizer.zero_grad()
    peak = engine.memory.peak()
    rest = engine.memory.now() | {"moments": states.nbytes(optimizer)}
    return {"rest": rest, "peak": sum(peak.values()), "wire": engine.traffic.by_move()}


def all_ledgers() -> dict[tuple[str, int, int], dict[str, Any]]:
    return {
        (kind, stage, m): ledgers(kind, stage, m)
        for kind in ("bf16", "mixed")
        for stage in (0, 1, 2, 3)
        for m in (1, 2)
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_plan_counts_16_bit_models_as_the_ledgers_do(ranks: int) -> None:
    from onefold import Recipe
    from onefold.plan.modules import model_shape
    from onefold.plan.replay import Replay
    from onefold.plan.states import at_rest, bound_of, units_of
    from onefold.plan.wire import wire

    shapes = {"bf16": model_shape(bf16_gpt()), "mixed": model_shape(Mixed())}
    for rank, seen in enumerate(run_ranks(ranks, all_ledgers)):
        for (kind, stage, micro_batches), found in seen.items():
            recipe = Recipe.zero(stage)
            units, case = (
                units_of(shapes[kind], recipe, ranks, rank),
                f"{kind}, stage {stage}, {micro_batches} micro-batches, rank {rank}",
            )
            rest = {k: v for k, v in found["rest"].items() if v}
            assert rest == at_rest(units, "adamw"), (
                f"{case}: {rest}, planned {at_rest(units, 'adamw')}"
            )
            sent = {k: v for k, v in found["wire"].items() if v}
            assert sent == wire(units, recipe, micro_batches), f"{case}: {sent}"
            replayed = sum(Replay(units, recipe).run(micro_batches).peak.values())
            assert found["peak"] <= bound_of(units, recipe, micro_batches), case
            assert ranks == 1 or kind == "mixed" or found["peak"] == replayed, (
                f"{case}: {found['peak']}, replayed {replayed}"
            )


def test_a_plan_of_a_bf16_model_computes_in_bf16() -> None:
    import onefold
    from onefold.plan import hardware

    def asked(model: Any, **job: Any) -> Any:
        kind = (
            {"batch": lambda n: torch.zeros((n, 12), dtype=torch.long)}
            if isinstance(model, nn.Module)
            else {}
        )
        return onefold.plan(
            model,
            machine=hardware.machine(2, 2, "h100-80", "100g"),
            largest=False,
            seq=12,
            **kind,
            **job,
        )

    plans = {p: asked(bf16_gpt(), precision=p) for p in (None, "bf16", "fp32")}
    peaks = {
        p: [(c.account.rest_bytes, c.account.peak_bytes) for c in found.stages]
        for p, found in plans.items()
    }
    assert peaks[None] == peaks["bf16"] and peaks[None] != peaks["fp32"]
    assert (
        plans[None].recipe.compute_dtype is None
        and plans[None].to_json()["recipe"]["precision"] is None
    )
    assert any(
        "precision=None" in note and "taken as fp32" in note
        for note in asked(1e8, precision=None).notes
    )
    auto = onefold.plan.recipe_for(
        bf16_gpt(), seq=12, batch=lambda n: torch.zeros((n, 12), dtype=torch.long)
    )
    assert auto.compute_dtype is None


def shown_as_declared(stage: int) -> list[str]:
    """A bf16 model whose masters are fp32: what scripts ask of its parameters between steps."""
    import onefold
    from onefold.runtime.parameters.interval import local_part

    torch.manual_seed(0)
    model: Any = onefold.shard(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).bfloat16(),
        onefold.Recipe.zero(stage, stall_timeout=20),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4, 6)
    wrong = []
    for _ in range(2):
        first = next(model.parameters())
        y = model(x.to(first.dtype))
        y.float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            seen = {
                "dtype": (
                    {p.dtype for p in model.parameters()} == {torch.bfloat16}
                    and x.to(first).dtype == torch.bfloat16
                ),
                "bytes": (
                    sum(p.numel() * p.element_size() for p in model.parameters())
                    == sum(p.nbytes for p in model.parameters())
                    == 166
                ),
                "masters": (
                    {t.dtype for p in model.parameters() for t in (p.data, p.grad)}
                    == {torch.float32}
                ),
                "product": nn.functional.linear(x.bfloat16(), first).dtype == torch.bfloat16,
            }
        wrong += [f"{name}, stage {stage}" for name, good in seen.items() if not good]
        optimizer.zero_grad()
    before = [local_part(p).clone() for p in model.parameters()]
    model.bfloat16()  # says what it is already
    for p in model.parameters():
        p.data = p.data.to(p.dtype)
    for p, old in zip(model.parameters(), before, strict=True):
        wrong += [f"stage {stage}: masters were rounded"] * (not torch.equal(local_part(p), old))
        p.data = torch.full(p.shape, 0.3, dtype=p.dtype)
        wrong += [f"stage {stage}: not assigned"] * (
            not bool((local_part(p) == torch.tensor(0.3).bfloat16()).all())
        )
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_shows_the_dtype_that_the_model_was_declared_in(stage: int) -> None:
    assert run_ranks(2, shown_as_declared, stage) == [[], []]


class Normed(nn.Module):
    """Batch norms whose statistics are in fp32 between layers that compute in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)
        )
        self.frozen = nn.BatchNorm1d(8).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.frozen(x))


def trained_normed(stage: int | None, precision: str) -> dict[str, Any]:
    """Losses and weights of three steps; `stage` None: of plain PyTorch in one process, whose linear
    layers alone are in 16 bits, and are stepped by hand in fp32.
    """
    import onefold

    torch.manual_seed(0)
    model: nn.Module = Normed()
    narrow = {"bf16": BF16, "fp16": FP16}[precision]
    masters = {}
    if stage is None:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                for p in layer.parameters(recurse=False):
                    masters[p] = p.detach().clone().requires_grad_()
                layer.to(narrow)
        of = [masters.get(p, p) for p in model.parameters() if p.requires_grad]
    else:
        options = {"precision": precision, "sync_buffers": False, "stall_timeout": STALL_TIMEOUT}
        model = onefold.shard(model, onefold.Recipe.zero(stage, **options))
        of = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(of, lr=0.01), []
    for step in range(3):
        rank = dist.get_rank() if dist.is_initialized() else 0
        loss = model(mixed_input(rank, step).to(narrow)).float().square().mean()
        loss.backward()
        for p, master in masters.items():
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
        losses.append(loss.item())
    statistics = {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}
    assert {b.dtype for b in statistics.values()} == {FP32}
    if stage is None:
        return {"losses": losses, "statistics": statistics}
    engine = onefold.engine_of(model)
    rest = engine.memory.now() | {"moments": states.nbytes(optimizer)}
    return {"losses": losses, "statistics": statistics, "rest": rest}


def normed_at_all_stages(precision: str) -> dict[int | None, dict[str, Any]]:
    return {stage: trained_normed(stage, precision) for stage in (None, 0, 1, 2, 3)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norms_keep_fp32_weights_and_statistics_in_16_bits(precision: str) -> None:
    from onefold import Recipe
    from onefold.plan.modules import model_shape
    from onefold.plan.states import at_rest, units_of

    (alone,) = run_ranks(1, normed_at_all_stages, precision)
    for stage in (0, 1, 2, 3):
        for what in ("losses", "statistics"):
            assert str(alone[stage][what]) == str(alone[None][what]), f"stage {stage}: {what}"
    for rank, seen in enumerate(run_ranks(2, normed_at_all_stages, precision)):
        for stage in (0, 1, 2, 3):
            assert seen[stage]["losses"] == seen[0]["losses"], f"stage {stage}, rank {rank}"
            recipe = Recipe.zero(stage, precision=precision)  # type: ignore[arg-type]
            planned = at_rest(units_of(model_shape(Normed()), recipe, 2, rank), "adamw")
            rest = {k: v for k, v in seen[stage]["rest"].items() if v}
            assert rest == planned, f"stage {stage}, rank {rank}: {rest}, planned {planned}"
