"""The rows: recipes, ranks, loops and models of which every promise is asked (jobs.py).

| group         | what varies                                                                       |
|---------------|-----------------------------------------------------------------------------------|
| stages        | stages 0 to 3 on 1, 2, 3, 4 and 8 ranks; precisions, scalers                        |
| accumulation  | micro-batches, when they are reduced, dtypes of sums and of the wire               |
| schedule      | overlap, prefetch, reductions in flight, what is gathered again, units             |
| optimizers    | those of torch, groups of parameters, implementations, clipping                    |
| models        | ties, frozen parts, adapters, odd shapes, buffers, skipped parts, several dtypes    |
| recomputation | of activations; activations on the host                                            |
| tiers         | states, gradients and parameters on the host and on NVMe, shares, in backward       |
| groups        | two levels, nodes, hybrid sharding, hybrid optimizer sharding, second copy          |
| codecs        | of gathers, reductions, frozen weights                                              |
| moments       | Adam's moments in fewer bits                                                       |

`ci=True` are the rows of `make test`; each option is in at least one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from promises.jobs import Loop, Mesh, Row

STAGES = (0, 1, 2, 3)
Options = dict[str, Any]
BF16: Options = {"precision": "bf16"}
CODECS = {"gather_codec", "reduce_codec", "frozen"}
#: Options on which the bits depend.
OF_BITS = ("precision", "master_dtype", "wire", "accumulate_dtype", "moments", "cast_inputs", "stochastic_rounding",
           "gather_codec", "reduce_codec", "frozen")  # fmt: skip
#: Options that say what holds without them.
AS_THEY_ARE = (("precision", "fp32"), ("moments", "fp32"), ("cast_inputs", True))
ONCE, THREE, CLIPPED = Loop(), Loop(micro_batches=3), Loop(clip=0.5)
BOTH = Loop(micro_batches=3, clip=0.5)


def table() -> list[Row]:
    """All rows. Their names are different."""
    rows = [row for group in GROUPS for row in group()]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    return rows


def row(
    group: str,
    stage: int,
    options: Options | None = None,
    ranks: int = 2,
    loop: Loop = ONCE,
    model: str = "gpt",
    ci: bool = False,
    per_node: int = 0,
    near: float = 0.0,
) -> Row:
    """A row that is named after what it has."""
    given = options or {}
    mesh = Mesh(dp=ranks, per_node=per_node)
    said = [f"{key}={value}" for key, value in given.items() if key != "chunk"]
    said += [] if model == "gpt" else [model]
    said += [f"{per_node} a node"] if per_node else []
    said += [f"{loop.micro_batches} micro-batches"] if loop.micro_batches > 1 else []
    said += [f"clipped to {loop.clip}"] if loop.clip else []
    said += [loop.optimizer] if loop.optimizer != "adamw" else []
    said += [f"scale {loop.scaler:g}"] if loop.scaler else []
    said += [*(f"{path} frozen" for path in loop.frozen), *([loop.then] if loop.then else [])]
    name = ", ".join([f"{group}: {stage} on {ranks}", *said])
    found = Row(name, stage, given, mesh, loop, model, family_of(stage, given, mesh, loop), ci)
    return replace(found, near=near or near_of(found))


def family_of(stage: int, options: Options, mesh: Mesh, loop: Loop) -> str:
    """Sums in the same order, of numbers that are rounded alike, are the same bits: whatever the
    stage, the schedule, the tier, and who holds what.
    """
    given = {k: v for k, v in options.items() if (k, v) not in AS_THEY_ARE}
    said = [f"{key}={given[key]}" for key in OF_BITS if key in given]
    size = options.get("shard_group", options.get("group", mesh.per_node or None))
    size = {"node": mesh.per_node, "flat": None, mesh.ranks: None}.get(size, size)
    said += [f"in groups of {size}"] if size else []
    if stage > 1 and loop.micro_batches > 1 and options.get("reduce_at") != "boundary":
        held = "shard_group" in options
        said += ["each micro-batch in a group" if held else "each micro-batch"]
    return ", ".join(said) or "fp32"


def near_of(row: Row) -> float:
    """Rounding: of sums in fp32, in 16 bits, and by codecs."""
    options = row.options
    if CODECS & set(options) or options.get("moments", "fp32") != "fp32":
        return 0.2 if "int4" in str(options) or "nf4" in str(options) else 5e-2
    narrow = {"precision", "wire", "accumulate_dtype", "master_dtype"} & set(options)
    return 3e-2 if narrow or row.model in ("mixed", "bf16 gpt") else 2e-5


# -- the groups ------------------------------------------------------------------------------------


def stages() -> Iterator[Row]:
    for ranks in (1, 2, 3, 4, 8):
        for stage in STAGES:
            for precision in (None, "bf16"):
                options = {"precision": precision} if precision else {}
                ci = ranks in (2, 4) and (not precision or stage == 3)
                yield row("stages", stage, options, ranks, CLIPPED, ci=ci)
    for stage in STAGES:
        scaled, overflowing = Loop(clip=0.5, scaler=1024.0), Loop(scaler=2.0**17)
        yield row("stages", stage, {"precision": "fp16"}, 2, scaled, ci=stage == 3)
        yield row("stages", stage, {"precision": "fp16"}, 2, overflowing, ci=stage == 2)
        narrow = {"precision": "bf16", "master_dtype": "bf16"}
        yield row("stages", stage, narrow, ci=stage == 3)
    for then in ("halve the weights", "evaluate kept gathered"):
        for stage in (1, 3):
            yield row("stages", stage, loop=Loop(then=then), ci=stage == 3)
    yield row("stages", 3, {"precision": "fp32"})


def accumulation() -> Iterator[Row]:
    late: Options = {"reduce_at": "boundary"}
    for ranks in (1, 2, 3, 4):
        for options in ({}, BF16) if ranks == 2 else ({},):
            for stage in STAGES:
                ci = ranks == 2 and (stage == 2 or (not options and stage != 1))
                ci = ci or (ranks == 4 and stage == 2)
                yield row("accumulation", stage, options, ranks, BOTH, ci=ci)
                if stage > 1:
                    ci = ranks == 2 and not options and stage == 2
                    yield row("accumulation", stage, options | late, ranks, BOTH, ci=ci)
    for stage in STAGES:
        narrow = {"precision": "bf16", "accumulate_dtype": "bf16"}
        yield row("accumulation", stage, narrow, loop=THREE, ci=stage == 3)
        yield row("accumulation", stage, {"wire": "bf16"}, loop=THREE, ci=stage == 3)
        wide = {"precision": "bf16", "wire": "fp32"}
        yield row("accumulation", stage, wide, loop=THREE, ci=stage == 2)


ALONE: Options = {"prefetch": 0, "in_flight": 0}


def schedule() -> Iterator[Row]:
    for stage in STAGES:
        for options in ({}, {"in_flight": 0}, {"in_flight": 5}):
            ci = stage in (0, 2) and options == {"in_flight": 5 * (stage // 2)}
            yield row("schedule", stage, options, model="big gpt", ci=ci)
        yield row("schedule", stage, {"units": ()}, loop=Loop(optimizer="sgd"))
        named = {"units": ("blocks.0", "head")}
        yield row("schedule", stage, named, loop=Loop(optimizer="sgd"), ci=stage == 3)
        yield row("schedule", stage, {}, 4, CLIPPED, "big gpt", ci=stage == 3)
        yield row("schedule", stage, {"in_flight": 0}, model="large mlp", ci=stage == 3)
    for micro_batches in (1, 2):
        for options in (
            {"prefetch": 0}, {"prefetch": 3}, {"prefetch": 0, "in_flight": 0}, {"prefetch": 4, "in_flight": 4},
            {"reshard_after_forward": False}, {"reshard_after_forward": False, "reduce_at": "boundary"},
        ):  # fmt: skip
            ci = len(options) == micro_batches and options not in ({"prefetch": 0}, {"prefetch": 3})
            yield row("schedule", 3, options, loop=Loop(micro_batches), ci=ci)
    for options in ({"prefetch": 2}, {"cast_inputs": False}, ALONE):
        ci = "cast_inputs" in options
        yield row("schedule", 3, BF16 | options, model="big gpt", ci=ci)


def optimizers() -> Iterator[Row]:
    for stage in STAGES:
        for kind in ("sgd", "fused adamw"):
            yield row("optimizers", stage, loop=Loop(clip=0.5, optimizer=kind), ci=stage == 3)
        yield row("optimizers", stage, loop=Loop(optimizer="two groups"), ci=stage == 3)
    kinds = ("plain sgd", "nadam", "radam", "adamax", "adadelta", "rprop", "asgd", "adam, the rate a tensor",
             "foreach adamw", "amsgrad", "adagrad", "rmsprop")  # fmt: skip
    for at, kind in enumerate(kinds):
        yield row("optimizers", at % 4, loop=Loop(optimizer=kind), ci=at > 8)
        yield row("optimizers", (at + 1) % 4, loop=Loop(optimizer=kind))
    yield row("optimizers", 3, {}, 4, Loop(clip=0.05, optimizer="sgd"))
    yield row("optimizers", 1, {}, 1, Loop(clip=0.05, optimizer="amsgrad"))


def models() -> Iterator[Row]:
    for stage in STAGES:
        for model in (
            "tied gpt",
            "half-frozen gpt",
            "adapted gpt",
            "odd",
            "conv",
            "mixed",
            "headed",
            "routed",
        ):
            ci = stage == 3
            yield row("models", stage, model=model, ci=ci)
        yield row("models", stage, BF16, model="headed", loop=BOTH)
        yield row("models", stage, {}, 3, Loop(optimizer="sgd"), "odd", ci=stage == 3)
        yield row("models", stage, loop=THREE, model="skipping", ci=stage == 3)
        yield row("models", stage, model="gpt with dropout", ci=stage == 3)
        frozen = Loop(frozen=("blocks.0", "blocks.1"))
        yield row("models", stage, loop=frozen, model="mlp", ci=stage == 1)
        yield row("models", stage, model="bf16 gpt", ci=stage == 3)
        yield row("models", stage, {"wire": "fp16"}, model="bf16 gpt")
        yield row("models", stage, BF16, model="conv")
    for sync in ("norms", False):
        yield row("models", 3, {"sync_buffers": sync}, model="conv")
    for model in ("routed", "tied gpt"):
        yield row("models", 3, BF16, 3, model=model, loop=BOTH)
    yield row("models", 3, HOST, model="bf16 gpt")
    for at, model in enumerate(("gpt2 of transformers", "llama of transformers")):
        yield row("models", at, model=model)
        yield row("models", 3, BF16, model=model, loop=THREE)
    yield row("models", 3, {}, 4, model="mlp")


def recomputation() -> Iterator[Row]:
    away: Options = {"offload_activations": "cpu"}
    for stage in STAGES:
        yield row("recomputation", stage, model="recomputed gpt", ci=stage == 3)
        yield row("recomputation", stage, model="gpt recomputed in another way", ci=stage == 3)
        yield row("recomputation", stage, away, model="long gpt")
    yield row("recomputation", 3, {}, 4, THREE, "recomputed gpt")
    yield row("recomputation", 3, BF16, loop=BOTH, model="recomputed gpt", ci=True)
    yield row("recomputation", 3, model="big gpt, recomputed")
    yield row("recomputation", 3, {"offload_activations": "6MB"}, model="long gpt", ci=True)
    yield row("recomputation", 3, away, model="long gpt, recomputed")
    yield row("recomputation", 3, away, 1, model="long gpt")


HOST: Options = {"offload_optimizer": "cpu"}
DISK: Options = {"offload_optimizer": "nvme"}
ALL_ON_HOST: Options = {"offload_optimizer": "cpu", "offload_param": "cpu"}
ALL_ON_DISK: Options = {"offload_optimizer": "nvme", "offload_param": "nvme"}
BEHIND: Options = {"step_in_backward": True}


def tiers() -> Iterator[Row]:
    for stage in STAGES:
        yield row("tiers", stage, HOST, loop=CLIPPED, ci=stage == 3)
        yield row("tiers", stage, DISK, loop=CLIPPED, ci=stage == 1)
        for kind in ("sgd", "fused adamw", "two groups"):
            loop = Loop(optimizer=kind)
            yield row("tiers", stage, HOST, loop=loop, ci=stage == 2 and kind == "two groups")
        yield row(
            "tiers", stage, {"offload_optimizer": "cpu", "offload_amount": 0.6}, ci=stage == 1
        )
    for stage in (2, 3):
        for where in (HOST, DISK):
            yield row("tiers", stage, where | BF16, loop=THREE, ci=stage == 2 and where == HOST)
            yield row("tiers", stage, where | BEHIND, ci=stage == 2)
            yield row("tiers", stage, where | {"reduce_at": "boundary"}, loop=THREE)
            yield row("tiers", stage, where, loop=Loop(optimizer="rmsprop", clip=0.5))
        yield row("tiers", stage, {"offload_optimizer": "cpu", "offload_amount": 60_000})
        share = {"offload_optimizer": "nvme", "offload_amount": 0.6, "offload_gradients": "cpu"}
        yield row("tiers", stage, share, ci=stage == 3)
        yield row("tiers", stage, share, loop=THREE)
    whole = (
        ALL_ON_HOST, ALL_ON_HOST | BF16, ALL_ON_DISK, ALL_ON_DISK | BF16, ALL_ON_DISK | BEHIND,
        {"offload_optimizer": "nvme", "offload_param": "cpu"},
        {"offload_optimizer": "nvme", "offload_amount": 0.5, "offload_param": "nvme", "prefetch": 2},
    )  # fmt: skip
    for options in whole:
        ci = options not in (ALL_ON_HOST, ALL_ON_DISK | BF16, ALL_ON_DISK | BEHIND)
        yield row("tiers", 3, options, ci=ci)
        yield row("tiers", 3, options, loop=THREE)
    for options in (
        HOST,
        DISK,
        ALL_ON_HOST,
        ALL_ON_DISK,
        {"offload_optimizer": "nvme", "offload_amount": 0.5, **BEHIND},
    ):
        yield row("tiers", 3, options, loop=Loop(2 if len(options) == 1 else 1), model="big gpt")
    yield row("tiers", 3, {"offload_param": "cpu"}, model="adapted gpt", ci=True)
    yield row("tiers", 3, ALL_ON_DISK, model="adapted gpt")
    yield row("tiers", 3, ALL_ON_HOST, 1)
    yield row("tiers", 1, DISK, 1)
    yield row("tiers", 3, HOST, 3, model="odd")
    yield row("tiers", 3, ALL_ON_DISK, 3, model="odd")
    for stage in (1, 3):
        overflowing = Loop(scaler=2.0**17)
        yield row("tiers", stage, HOST | {"precision": "fp16"}, loop=overflowing, ci=stage == 3)
    for where in (HOST, DISK, ALL_ON_DISK):  # the last rank owns nothing but padding of some units
        yield row("tiers", 3, where, 4, THREE, "mlp", ci=where == DISK)
        yield row("tiers", 3, where | BEHIND, 4, model="mlp")
    for where in (ALL_ON_HOST, DISK):
        yield row("tiers", 3, where | {"group": 2}, 4, ci=where == DISK)
        yield row("tiers", 3, where | {"shard_group": 2}, 4, THREE)
        yield row("tiers", 3, where | {"second_copy": True, "group": 2}, 4, ci=where == ALL_ON_HOST)
        yield row("tiers", 3, where | {"shard_group": 2, "optimizer_over": "all"}, 4)


#: Who holds what over groups: stage and options, for groups of any size.
KINDS: dict[str, tuple[int, Options]] = {
    "HSDP": (3, {"shard_group": 2}),
    "stage 2 in groups": (2, {"shard_group": 2}),
    "stage 1 in groups": (1, {"shard_group": 2}),
    "optimizer over all": (3, {"shard_group": 2, "optimizer_over": "all"}),
    "second copy": (3, {"group": 2, "second_copy": True}),
}


def groups() -> Iterator[Row]:
    for stage in STAGES:
        yield row("groups", stage, {"group": 2}, 4, CLIPPED, ci=stage == 3)
        yield row("groups", stage, {}, 4, CLIPPED, per_node=2, ci=stage in (0, 3))
        yield row("groups", stage, {"group": "flat"}, 4, CLIPPED, per_node=2, ci=stage == 3)
        yield row("groups", stage, {"group": "node"}, 4, CLIPPED, per_node=2)
        yield row("groups", stage, {}, 4, BOTH, per_node=2, ci=stage == 2)
        yield row("groups", stage, BF16, 4, CLIPPED, per_node=2, ci=stage == 0)
        yield row("groups", stage, HOST, 4, per_node=2)
        yield row("groups", stage, {}, 6, Loop(optimizer="fused adamw"), per_node=2)
    for stage, options in KINDS.values():
        yield row("groups", stage, options, 4, CLIPPED, ci=True)
        yield row("groups", stage, options | BF16, 4, BOTH, ci=stage == 3)
        yield row("groups", stage, options, 4, THREE)
        yield row("groups", stage, options, 4, model="big gpt")
        yield row("groups", stage, options | {"in_flight": 0}, 4, CLIPPED)
        yield row("groups", stage, options | {"in_flight": 5}, 4, CLIPPED)
        yield row("groups", stage, options, 4, model="odd", ci=stage == 2)
        yield row("groups", stage, options, 4, model="recomputed gpt")
        on_nodes = {k: "node" if v == 2 else v for k, v in options.items()}
        yield row("groups", stage, on_nodes, 4, CLIPPED, per_node=2, ci=stage == 3)
        if stage > 1:
            late = options | {"reduce_at": "boundary"}
            yield row("groups", stage, late, 4, BOTH, ci="optimizer_over" in options)
        if stage == 3:
            yield row("groups", stage, options | {"reshard_after_forward": False}, 4, CLIPPED)
            yield row("groups", stage, options | {"prefetch": 3, "in_flight": 5}, 4, CLIPPED)
        for ranks, size in ((6, 3), (8, 4)):
            of_size = {k: size if v == 2 else v for k, v in options.items()}
            yield row("groups", stage, of_size, ranks, CLIPPED)
    for size in (1, 4):
        yield row("groups", 3, {"group": size}, 4, CLIPPED)
    yield row("groups", 3, {"shard_group": 2}, 6, CLIPPED)
    for size, per_node in ((2, 4), (4, 2)):
        for options in ({"group": size}, {"shard_group": size}):
            yield row("groups", 3, options, 8, CLIPPED, per_node=per_node)


ZERO_PP: Options = {"second_copy": True, "group": 2, "gather_codec": "int8", "reduce_codec": "int4"}


def codecs() -> Iterator[Row]:
    for codec in ("int8", "int4"):
        gather, reduce = {"gather_codec": codec}, {"reduce_codec": codec}
        for more in ({}, ALONE, {"prefetch": 3, "in_flight": 4}, HOST):
            yield row("codecs", 3, gather | more, ci=codec == "int8" and more in ({}, HOST))
        yield row("codecs", 3, gather | BF16 | {"second_copy": True, "group": 2}, 4, THREE)
        for stage in (1, 2, 3):
            yield row("codecs", stage, reduce, ci=stage == 3 and codec == "int4")
            yield row("codecs", stage, reduce | BF16, 4, THREE, per_node=2)
        for options in ({"group": 2}, {"shard_group": 2}):
            yield row(
                "codecs",
                3,
                reduce | options,
                4,
                CLIPPED,
                ci=(codec, options) == ("int8", {"group": 2}),
            )
        yield row("codecs", 1, reduce | {"group": 2}, 4, CLIPPED)
    for stage in (1, 2, 3):
        yield row("codecs", stage, {"reduce_codec": "int4"}, loop=THREE, ci=stage == 2)
    both: Options = {"gather_codec": "int8", "reduce_codec": "int8"}
    yield row("codecs", 3, both, 3, model="odd")
    for where in ({}, ALONE, HOST | BEHIND, ALL_ON_DISK):
        yield row("codecs", 3, ZERO_PP | where, 4, ci=where == {})
        over = {"shard_group": 2, "optimizer_over": "all", **both}
        yield row("codecs", 3, over | where, 4, THREE if where != HOST | BEHIND else ONCE)
        if where != HOST | BEHIND:
            yield row("codecs", 3, {"shard_group": 2, **both, **where}, 4, THREE)
    yield row("codecs", 3, ZERO_PP | BF16 | {"in_flight": 4}, 4, THREE, ci=True)
    yield row("codecs", 3, {"shard_group": 2, "gather_codec": "int4"}, 4)
    for frozen in ("int8", "nf4"):
        yield row("codecs", 3, {"frozen": frozen}, model="wide adapted gpt", ci=frozen == "nf4")
        yield row("codecs", 3, {"frozen": frozen, **BF16}, loop=THREE, model="wide adapted gpt")
        yield row("codecs", 3, {"frozen": frozen, **ZERO_PP}, 4, model="adapted gpt")
    for where in ({}, HOST, DISK):
        yield row("codecs", 3, {"frozen": "int8", **where}, model="adapted gpt")
    yield row("codecs", 3, {"frozen": "int8", "shard_group": 2}, 4, model="adapted gpt", ci=True)
    yield row("codecs", 3, {"frozen": "nf4"}, 1, model="adapted gpt", ci=True)


def moments() -> Iterator[Row]:
    for kind in ("bf16", "int8", "int4"):
        for stage in STAGES:
            ci = (kind, stage) in (("bf16", 1), ("int8", 3), ("int4", 0))
            yield row("moments", stage, {"moments": kind}, model="wide gpt", ci=ci)
        yield row("moments", 3, {"moments": kind, **HOST}, model="wide gpt")
        yield row("moments", 3, {"moments": kind, **HOST, **BEHIND}, model="wide gpt")
        yield row("moments", 3, {"moments": kind}, 3, model="wide gpt")
        scaled = Loop(scaler=2.0**17, optimizer="fused adamw")
        yield row("moments", 1, {"moments": kind, "precision": "fp16"}, 2, scaled, "wide gpt")
    for kind in ("bf16", "int8"):
        options = {"moments": kind, **DISK, "chunk": 262144}
        yield row("moments", 3, options, model="wide gpt", ci=kind == "int8")
        yield row(
            "moments",
            2,
            {"moments": kind, "offload_optimizer": "cpu", "offload_amount": 0.5},
            model="wide gpt",
        )
    chance = {"moments": "bf16", "stochastic_rounding": True, "master_dtype": "bf16", **BF16}
    for stage in (1, 3):
        yield row("moments", stage, chance, model="wide gpt", ci=stage == 3)
        yield row("moments", stage, {"moments": "fp32"}, model="wide gpt")


GROUPS = (stages, accumulation, schedule, optimizers, models, recomputation, tiers, groups, codecs, moments)  # fmt: skip
