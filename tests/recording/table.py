"""The table of runs that are recorded: what each of them trains, by which recipe, on how many
ranks, and where it is loaded again.

| group          | what varies                                                                                          |
|----------------|------------------------------------------------------------------------------------------------------|
| stages         | stages 0 to 3, 1, 2, 3, 4 and 8 ranks, precisions                                                    |
| accumulation   | micro-batches, when they are reduced, dtypes of sums and of the wire                                 |
| schedule       | overlap, prefetch, reductions in flight, what is gathered again, units                               |
| optimizers     | AdamW, SGD, Adagrad, groups of parameters, implementations, clipping                                 |
| models         | ties, frozen parts, adapters, odd shapes, buffers, parts that are skipped, several dtypes            |
| activations    | recomputed, on the host                                                                              |
| tiers          | states, gradients and parameters on the host and on NVMe, shares, stepped in backward the backward pass   |
| groups         | two levels, nodes, hybrid sharding, hybrid optimizer sharding, second copy                           |
| codecs         | of gathers, reductions, frozen weights; error feedback, rounding                                     |
| tiles, moments | weights computed in tiles; Adam's moments in fewer bits                                              |
| any processor  | a model whose bits are those of any processor, over much of the above                                |
| other ways     | DeepSpeed's JSON, evaluation, averages, whole parameters                                             |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]
#: Stands for a folder of the run's own in a recipe's options.
FOLDER = "FOLDER"


@dataclass(frozen=True)
class Run:
    """One run: some steps, a checkpoint, and a step of whoever loads that.

    Attributes:
        name: what it is recorded under.
        stage, options: of the recipe. ranks: how many train. per_node: how many of them the
            launcher says are on a node; 0: nothing.
        subject: which model (subjects.py). optimizer: which optimizer (runs.py). clip: the largest
            norm, or None.
        micro_batches: of a step, under no_sync but for the last. scaled: the initial scale of a
            GradScaler; 0: none.
        load: stage, ranks and options of who loads the checkpoint; None: nothing is saved.
        then: something that happens behind the steps (runs.py).
    """

    name: str
    stage: int
    options: Options = field(default_factory=dict)
    ranks: int = 2
    per_node: int = 0
    subject: str = "gpt"
    optimizer: str = "adamw"
    clip: float | None = None
    micro_batches: int = 1
    scaled: float = 0.0
    load: tuple[int, int, Options] | None = None
    then: str = ""

    @property
    def world(self) -> int:
        """Ranks that must be there."""
        return max(self.ranks, self.load[1] if self.load else 1)


def table() -> list[Run]:
    """All runs. Their names are different."""
    runs = [run for group in GROUPS for run in group()]
    names = [run.name for run in runs]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return runs


#: Who loads, in turn: stage and ranks.
LOADERS = [(3, 1), (0, 2), (2, 4), (1, 1), (3, 2), (2, 1), (1, 2), (3, 4), (0, 1), (2, 2)]


def _loader(number: int, **options: Any) -> tuple[int, int, Options]:
    return (*LOADERS[number % len(LOADERS)], options)


def stages() -> Iterable[Run]:
    number = 0
    for ranks in (1, 2, 4):
        for stage in (0, 1, 2, 3):
            for precision in (None, "bf16"):
                number += 1
                options = {} if precision is None else {"precision": precision}
                name = f"stages: {stage} on {ranks}, {precision or 'as the model is'}"
                yield Run(name, stage, options, ranks, clip=0.5, load=_loader(number, **options))
    for ranks in (3, 8):
        for stage in (0, 1, 2, 3):
            if ranks == 3 or stage in (1, 3):
                yield Run(
                    f"stages: {stage} on {ranks}",
                    stage,
                    {},
                    ranks,
                    clip=0.5,
                    load=((stage + 1) % 4, 2, {}),
                )
    for stage in (0, 1, 2, 3):
        yield Run(f"stages: {stage} on 2, fp32", stage, {"precision": "fp32"}, load=_loader(stage))
        yield Run(f"stages: {stage} on 2, fp16 and a scaler", stage, {"precision": "fp16"}, scaled=1024.0, clip=0.5,
                  load=_loader(stage + 5, precision="fp16"))  # fmt: skip
    for stage in (1, 3):
        yield Run(
            f"stages: {stage} on 2, fp16 that overflows at first",
            stage,
            {"precision": "fp16"},
            scaled=2.0**24,
        )
        yield Run(
            f"stages: {stage} on 2, masters in bf16",
            stage,
            {"precision": "bf16", "master_dtype": "bf16"},
            load=_loader(stage),
        )


def accumulation() -> Iterable[Run]:
    for ranks in (2, 4):
        for stage in (0, 1, 2, 3):
            yield Run(
                f"accumulation: {stage} on {ranks}",
                stage,
                {},
                ranks,
                micro_batches=3,
                clip=0.5,
                load=_loader(stage + ranks),
            )
            if stage >= 2:
                yield Run(
                    f"accumulation: {stage} on {ranks}, at the boundary",
                    stage,
                    {"reduce_at": "boundary"},
                    ranks,
                    micro_batches=3,
                )
    for stage in (2, 3):
        for where in ("micro-batch", "boundary"):
            load = _loader(stage, precision="bf16")
            yield Run(
                f"accumulation: {stage}, bf16, {where}",
                stage,
                {"precision": "bf16", "reduce_at": where},
                micro_batches=3,
                load=load,
            )
    for stage in (1, 2, 3):
        yield Run(
            f"accumulation: {stage}, sums in bf16",
            stage,
            {"precision": "bf16", "accumulate_dtype": "bf16"},
            micro_batches=3,
        )
        yield Run(
            f"accumulation: {stage}, the wire in bf16", stage, {"wire": "bf16"}, micro_batches=2
        )
    yield Run("accumulation: 3 on 1", 3, {}, 1, micro_batches=3)


def schedule() -> Iterable[Run]:
    for stage in (0, 1, 2, 3):
        for options in ({"overlap": False}, {"in_flight": 0}, {"in_flight": 5}):
            yield Run(f"schedule: {stage}, {options}", stage, options, subject="big gpt")
    for options in (
        {"prefetch": 0}, {"prefetch": 3}, {"prefetch": 0, "in_flight": 0}, {"reshard_after_forward": False}, {"units": ()},
        {"units": ("blocks.0", "head")}, {"reshard_after_forward": False, "reduce_at": "boundary"},
    ):  # fmt: skip
        yield Run(
            f"schedule: 3, {options}",
            3,
            options,
            subject="big gpt",
            micro_batches=2,
            load=_loader(len(options)),
        )
    for stage in (0, 1, 2, 3):
        yield Run(f"schedule: {stage} on 4, large units", stage, {}, 4, subject="big gpt", clip=0.5)
    yield Run("schedule: 3, large units recomputed", 3, {}, subject="big gpt, recomputed")
    yield Run(
        "schedule: 3, large units, bf16", 3, {"precision": "bf16", "prefetch": 2}, subject="big gpt"
    )
    yield Run(
        "schedule: 3, bf16, inputs as they come", 3, {"precision": "bf16", "cast_inputs": False}
    )


def optimizers() -> Iterable[Run]:
    for stage in (0, 1, 2, 3):
        yield Run(
            f"optimizers: {stage}, SGD with momentum",
            stage,
            optimizer="sgd",
            clip=0.5,
            load=_loader(stage),
        )
        yield Run(
            f"optimizers: {stage}, fused AdamW",
            stage,
            optimizer="fused adamw",
            load=_loader(stage + 3),
        )
    for stage, optimizer in (
        (3, "adagrad"),
        (2, "amsgrad"),
        (3, "two groups"),
        (1, "two groups"),
        (3, "foreach adamw"),
        (3, "rmsprop"),
    ):
        yield Run(
            f"optimizers: {stage}, {optimizer}", stage, optimizer=optimizer, load=_loader(stage + 1)
        )
    yield Run(
        "optimizers: 3 on 4, the largest gradient clipped", 3, {}, 4, optimizer="sgd", clip=0.05
    )


def models() -> Iterable[Run]:
    for stage in (0, 1, 2, 3):
        yield Run(f"models: tied, {stage}", stage, subject="tied gpt", load=_loader(stage))
        yield Run(
            f"models: half frozen, {stage}",
            stage,
            subject="half-frozen gpt",
            load=_loader(stage + 2),
        )
        yield Run(f"models: odd, {stage} on 2", stage, subject="odd", load=_loader(stage + 4))
        yield Run(f"models: odd, {stage} on 3", stage, {}, 3, subject="odd", optimizer="sgd")
        yield Run(
            f"models: convolutions and norms, {stage}",
            stage,
            subject="conv",
            load=_loader(stage + 6),
        )
    for stage in (0, 2, 3):
        yield Run(f"models: adapters, {stage}", stage, subject="adapted gpt", load=_loader(stage))
        yield Run(f"models: a skipped part, {stage}", stage, subject="skipping", micro_batches=3)
    for sync in ("norms", False):
        yield Run(
            f"models: convolutions and norms, sync_buffers={sync}",
            3,
            {"sync_buffers": sync},
            subject="conv",
        )
    for stage in (0, 1, 3):
        yield Run(f"models: two dtypes, {stage}", stage, subject="mixed", load=_loader(stage))
    yield Run("models: dropout, 3", 3, subject="gpt with dropout")
    yield Run("models: an MLP, 3 on 4", 3, {}, 4, subject="mlp")


def activations() -> Iterable[Run]:
    for stage in (0, 2, 3):
        yield Run(f"activations: {stage}, recomputed", stage, subject="recomputed gpt")
        yield Run(
            f"activations: {stage}, recomputed in another way",
            stage,
            subject="gpt recomputed in another way",
        )
        yield Run(
            f"activations: {stage}, on the host",
            stage,
            {"offload_activations": "cpu"},
            subject="long gpt",
        )
    yield Run(
        "activations: 3, recomputed, three micro-batches",
        3,
        subject="recomputed gpt",
        micro_batches=3,
    )
    yield Run(
        "activations: 3, up to 6 MB on the host",
        3,
        {"offload_activations": "6MB"},
        subject="long gpt",
    )
    yield Run(
        "activations: 3, recomputed and on the host",
        3,
        {"offload_activations": "cpu"},
        subject="long gpt, recomputed",
    )
    yield Run(
        "activations: 3 on 1, on the host", 3, {"offload_activations": "cpu"}, 1, subject="long gpt"
    )


NVME: Options = {"nvme": FOLDER, "chunk": 65536}


def tiers() -> Iterable[Run]:
    host: Options = {"offload_optimizer": "cpu"}
    disk: Options = {"offload_optimizer": "nvme", **NVME}
    for stage in (0, 1, 2, 3):
        yield Run(f"tiers: {stage}, states on the host", stage, host, clip=0.5, load=_loader(stage))
        yield Run(f"tiers: {stage}, states on NVMe", stage, disk, clip=0.5, load=_loader(stage + 1))
    for stage in (2, 3):
        bf16: Options = {"precision": "bf16"}
        for name, options, load in (
            ("the host", host, _loader(stage, **bf16)),
            ("NVMe", disk, _loader(stage + 3, **bf16)),
        ):
            yield Run(
                f"tiers: {stage}, bf16, states on {name}, accumulating",
                stage,
                options | bf16,
                micro_batches=3,
                load=load,
            )
            behind = {**options, "step_in_backward": True}
            yield Run(
                f"tiers: {stage}, states on {name}, stepped in backward",
                stage,
                behind,
                load=_loader(stage),
            )
            yield Run(f"tiers: {stage}, states on {name}, SGD", stage, options, optimizer="sgd")
        yield Run(
            f"tiers: {stage}, a share on the host",
            stage,
            {"offload_optimizer": 0.6},
            load=_loader(stage, offload_optimizer="cpu"),
        )
        yield Run(f"tiers: {stage}, a budget on the host", stage, {"offload_optimizer": 60_000})
        yield Run(f"tiers: {stage}, a share on NVMe, gradients on the host", stage,
                  {"offload_optimizer": "nvme:0.6", "offload_gradients": "cpu", **NVME})  # fmt: skip
    both: Options = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    for name, options in (
        ("all on the host", both),
        ("all on the host, bf16", both | {"precision": "bf16"}),
        ("parameters on the host, states on NVMe", {"offload_optimizer": "nvme", "offload_param": "cpu", **NVME}),
        ("all on NVMe", {"offload_optimizer": "nvme", "offload_param": "nvme", **NVME}),
        ("all on NVMe, bf16", {"offload_optimizer": "nvme", "offload_param": "nvme", "precision": "bf16", **NVME}),
        ("half of all on NVMe, further ahead", {"offload_optimizer": "nvme:0.5", "offload_param": "nvme", "prefetch": 2, **NVME}),
        ("all on NVMe, stepped in backward", {"offload_optimizer": "nvme", "offload_param": "nvme", "step_in_backward": True, **NVME}),
    ):  # fmt: skip
        yield Run(
            f"tiers: 3, {name}",
            3,
            options,
            micro_batches=2 if "bf16" in options else 1,
            load=_loader(len(name)),
        )
    yield Run(
        "tiers: 3, frozen weights on the host", 3, {"offload_param": "cpu"}, subject="adapted gpt"
    )
    yield Run(
        "tiers: 3, adapters, all on NVMe",
        3,
        {"offload_optimizer": "nvme", "offload_param": "nvme", **NVME},
        subject="adapted gpt",
    )
    for name, options in (
        ("states on the host", host), ("states on NVMe", disk), ("all on the host", both),
        ("all on NVMe", {"offload_optimizer": "nvme", "offload_param": "nvme", **NVME}),
        ("a share on NVMe, stepped in backward", {"offload_optimizer": "nvme:0.5", "step_in_backward": True, **NVME}),
    ):  # fmt: skip
        yield Run(
            f"tiers: 3, large units, {name}",
            3,
            options,
            subject="big gpt",
            micro_batches=2 if "states" in name else 1,
        )
    yield Run("tiers: 3 on 1, all on the host", 3, both, 1, load=(3, 2, dict(both)))
    yield Run("tiers: 1 on 1, states on NVMe", 1, disk, 1, load=(1, 2, dict(disk)))
    yield Run(
        "tiers: 3 on 3, odd, states on the host", 3, host, 3, subject="odd", load=(3, 2, dict(host))
    )
    yield Run("tiers: 3, states on the host, fp16", 3, host | {"precision": "fp16"}, scaled=1024.0)
    for name, options in (("the host", both), ("NVMe", disk)):
        yield Run(f"tiers: 3 on 4, groups of 2, on {name}", 3, {**options, "group": 2}, 4)
        yield Run(
            f"tiers: HSDP on 4, groups of 2, on {name}",
            3,
            {**options, "shard_group": 2},
            4,
            micro_batches=2,
        )


def groups() -> Iterable[Run]:
    for stage in (0, 1, 2, 3):
        yield Run(
            f"groups: {stage} on 4, groups of 2",
            stage,
            {"group": 2},
            4,
            clip=0.5,
            load=_loader(stage),
        )
        yield Run(
            f"groups: {stage} on 4, two nodes",
            stage,
            {},
            4,
            per_node=2,
            micro_batches=2,
            load=_loader(stage + 1),
        )
        yield Run(f"groups: {stage} on 4, two nodes, flat", stage, {"group": "flat"}, 4, per_node=2)
    kinds: list[tuple[str, int, Options]] = [
        ("HSDP", 3, {"shard_group": 2}),
        ("stage 2 sharded in groups", 2, {"shard_group": 2}),
        ("stage 1 sharded in groups", 1, {"shard_group": 2}),
        ("optimizer over all", 3, {"shard_group": 2, "optimizer_over": "all"}),
        ("second copy", 3, {"group": 2, "second_copy": True}),
    ]
    for number, (name, stage, options) in enumerate(kinds):
        yield Run(f"groups: {name} on 4", stage, options, 4, clip=0.5, load=_loader(number))
        yield Run(f"groups: {name} on 4, bf16, accumulating", stage, options | {"precision": "bf16"}, 4, micro_batches=3,
                  load=(stage, 4, {**options, "precision": "bf16"}))  # fmt: skip
    for name, stage, options in (kinds[0], kinds[3], kinds[4]):
        yield Run(
            f"groups: {name} on 4, at the boundary",
            stage,
            options | {"reduce_at": "boundary"},
            4,
            micro_batches=3,
        )
        yield Run(
            f"groups: {name} on 4, not gathered again",
            stage,
            options | {"reshard_after_forward": False},
            4,
        )
        yield Run(f"groups: {name} on 4, recomputed", stage, options, 4, subject="recomputed gpt")
        yield Run(
            f"groups: {name} on 4, large units",
            stage,
            options,
            4,
            subject="big gpt",
            micro_batches=2,
        )
    yield Run("groups: 3 on 4, groups of 2, large units", 3, {"group": 2}, 4, subject="big gpt")
    for name, options in (
        ("HSDP", {"shard_group": "node"}),
        ("second copy", {"second_copy": True}),
    ):
        yield Run(f"groups: {name} of nodes on 4", 3, options, 4, per_node=2, load=_loader(3))
    yield Run("groups: 3 on 8, groups of 4", 3, {"group": 4}, 8)
    yield Run(
        "groups: HSDP on 8, groups of 2", 3, {"shard_group": 2}, 8, load=(3, 8, {"shard_group": 4})
    )
    yield Run(
        "groups: odd, optimizer over all",
        3,
        {"shard_group": 2, "optimizer_over": "all"},
        4,
        subject="odd",
    )


def codecs() -> Iterable[Run]:
    for codec in ("int8", "fp8", "int4"):
        yield Run(f"codecs: 3, gathers in {codec}", 3, {"gather_codec": codec}, load=_loader(1))
        for stage in (1, 2, 3):
            yield Run(f"codecs: {stage}, reductions in {codec}", stage, {"reduce_codec": codec}, 4 if codec == "int4" else 2, per_node=2,
                      micro_batches=2 if stage == 2 else 1)  # fmt: skip
    for stage, micro_batches in ((1, 1), (2, 3), (3, 3)):
        fed_back: Options = {"reduce_codec": "int4", "error_feedback": True}
        yield Run(f"codecs: {stage}, int4 with error feedback", stage, fed_back, micro_batches=micro_batches,
                  load=(stage, 2, dict(fed_back)))  # fmt: skip
    yield Run(
        "codecs: 3, int4 rounded stochastically",
        3,
        {"reduce_codec": "int4", "wire_rounding": "stochastic"},
    )
    yield Run(
        "codecs: 3, int8 on odd shapes",
        3,
        {"gather_codec": "int8", "reduce_codec": "int8"},
        3,
        subject="odd",
    )
    zero_pp: Options = {
        "second_copy": True,
        "group": 2,
        "gather_codec": "int8",
        "reduce_codec": "int4",
    }
    for micro_batches in (1, 3):
        yield Run(
            f"codecs: ZeRO++ on 4, {micro_batches} micro-batches",
            3,
            zero_pp,
            4,
            micro_batches=micro_batches,
        )
    yield Run(
        "codecs: ZeRO++ on 4, bf16, error feedback",
        3,
        {**zero_pp, "precision": "bf16", "error_feedback": True},
        4,
        micro_batches=2,
    )
    yield Run(
        "codecs: HSDP on 4, int8 both ways",
        3,
        {"shard_group": 2, "gather_codec": "int8", "reduce_codec": "int8"},
        4,
    )
    yield Run("codecs: optimizer over all on 4, int8", 3,
              {"shard_group": 2, "optimizer_over": "all", "gather_codec": "int8", "reduce_codec": "int8"}, 4, micro_batches=2)  # fmt: skip
    yield Run(
        "codecs: 3, gathers in int8, states on the host",
        3,
        {"gather_codec": "int8", "offload_optimizer": "cpu"},
    )
    for frozen in ("int8", "nf4", "int4", "fp8"):
        yield Run(
            f"codecs: 3, frozen in {frozen}",
            3,
            {"frozen": frozen},
            subject="wide adapted gpt",
            load=(3, 1, {"frozen": frozen}),
        )
    yield Run(
        "codecs: 3, frozen in nf4, bf16",
        3,
        {"frozen": "nf4", "precision": "bf16"},
        subject="wide adapted gpt",
        micro_batches=2,
    )
    yield Run(
        "codecs: 3 on 4, frozen in nf4, second copy",
        3,
        {"frozen": "nf4", "group": 2, "second_copy": True},
        4,
        subject="adapted gpt",
    )
    yield Run("codecs: 3 on 1, frozen in nf4", 3, {"frozen": "nf4"}, 1, subject="adapted gpt")
    yield Run(
        "codecs: 3, frozen in int8, states on the host",
        3,
        {"frozen": "int8", "offload_optimizer": "cpu"},
        subject="adapted gpt",
    )


def tiles() -> Iterable[Run]:
    for name, stage, options, load in (
        ("3", 3, {}, (3, 1, {})),
        ("3, bf16", 3, {"precision": "bf16"}, None),
        (
            "3, all on the host",
            3,
            {"offload_optimizer": "cpu", "offload_param": "cpu"},
            (3, 2, {"tile": 20_000}),
        ),
        (
            "3, all on NVMe",
            3,
            {"offload_optimizer": "nvme", "offload_param": "nvme", **NVME},
            (2, 2, {}),
        ),
        ("2", 2, {}, (3, 2, {})),
        ("HSDP", 3, {"shard_group": 2}, None),
    ):
        yield Run(f"tiles: {name}", stage, {**options, "tile": 12_000}, 4 if name == "HSDP" else 2, subject="wide gpt", load=load,
                  micro_batches=2 if name == "3" else 1)  # fmt: skip


def moments() -> Iterable[Run]:
    for kind in ("bf16", "int8", "fp8", "int4"):
        wide: Options = {"moments": kind}
        for stage in (1, 3):
            yield Run(
                f"moments: {stage}, {kind}",
                stage,
                wide,
                subject="wide gpt",
                load=(3 if stage == 1 else 1, 1, dict(wide)),
            )
        yield Run(
            f"moments: 3, {kind}, on the host",
            3,
            {**wide, "offload_optimizer": "cpu"},
            subject="wide gpt",
            load=(3, 2, dict(wide)),
        )
    for kind in ("bf16", "int8"):
        options: Options = {
            "moments": kind,
            "offload_optimizer": "nvme",
            "nvme": FOLDER,
            "chunk": 262144,
        }
        yield Run(
            f"moments: 3, {kind}, on NVMe",
            3,
            options,
            subject="wide gpt",
            load=(3, 2, {"moments": kind}),
        )
    chance: Options = {
        "moments": "bf16",
        "stochastic_rounding": True,
        "master_dtype": "bf16",
        "precision": "bf16",
    }
    yield Run(
        "moments: 3, bf16, all rounded by chance",
        3,
        chance,
        subject="wide gpt",
        load=(2, 2, dict(chance)),
    )
    yield Run(
        "moments: HSDP, int8", 3, {"moments": "int8", "shard_group": 2}, 4, subject="wide gpt"
    )
    yield Run("moments: 3, fp32, by name", 3, {"moments": "fp32"}, subject="wide gpt")


def any_processor() -> Iterable[Run]:
    for stage in (0, 1, 2, 3):
        for ranks in (1, 2, 4):
            yield _portable(f"{stage} on {ranks}", stage, {}, ranks, load=_loader(stage + ranks))
        yield _portable(
            f"{stage}, bf16, accumulating", stage, {"precision": "bf16"}, micro_batches=3
        )
        yield _portable(f"{stage}, groups of 2", stage, {"group": 2}, 4, micro_batches=2)
    for stage in (2, 3):
        yield _portable(
            f"{stage}, states on the host", stage, {"offload_optimizer": "cpu"}, load=_loader(stage)
        )
        yield _portable(
            f"{stage}, states on NVMe",
            stage,
            {"offload_optimizer": "nvme", **NVME},
            load=_loader(stage + 4),
        )
        yield _portable(
            f"{stage}, int4 with error feedback",
            stage,
            {"reduce_codec": "int4", "error_feedback": True},
            micro_batches=2,
        )
        yield _portable(f"{stage}, reductions in int8", stage, {"reduce_codec": "int8"})
        yield _portable(f"{stage}, reductions in fp8", stage, {"reduce_codec": "fp8"})
    for codec in ("int8", "fp8", "int4"):
        yield _portable(f"3, gathers in {codec}", 3, {"gather_codec": codec})
    for name, options in (
        ("HSDP", {"shard_group": 2}),
        ("optimizer over all", {"shard_group": 2, "optimizer_over": "all"}),
        (
            "ZeRO++",
            {"group": 2, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"},
        ),
    ):
        yield _portable(f"{name} on 4", 3, options, 4, micro_batches=2)
    yield _portable(
        "3, all on the host, bf16",
        3,
        {"offload_optimizer": "cpu", "offload_param": "cpu", "precision": "bf16"},
    )
    yield _portable("3, at the boundary", 3, {"reduce_at": "boundary"}, micro_batches=3)
    yield _portable("3 on 3", 3, {}, 3)
    yield _portable("3, wire of 16 bits", 3, {"wire": "bf16"})


def _portable(name: str, stage: int, options: Options, ranks: int = 2, **more: Any) -> Run:
    wide = "codec" in str(options)
    subject = "wide elementwise" if wide else "elementwise"
    return Run(
        f"any processor: {name}",
        stage,
        options,
        ranks,
        subject=subject,
        optimizer="powers of two",
        **more,
    )


def other_ways() -> Iterable[Run]:
    zero: Options = {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    for stage, more in (
        (2, {"zero_optimization": zero, "bf16": {"enabled": True}}),
        (3, {"zero_optimization": {"stage": 3}}),
    ):
        yield Run(f"other ways: DeepSpeed's JSON, stage {stage}", stage, {"deepspeed": more})
    for stage in (0, 1, 3):
        yield Run(f"other ways: {stage}, averages", stage, then="averages")
        yield Run(f"other ways: {stage}, whole parameters", stage, then="whole parameters")
    yield Run("other ways: 3, kept gathered", 3, then="kept gathered")
    yield Run(
        "other ways: 3 on 4, groups of 2, kept gathered", 3, {"group": 2}, 4, then="kept gathered"
    )
    yield Run(
        "other ways: 3, states on NVMe, averages",
        3,
        {"offload_optimizer": "nvme", **NVME},
        then="averages",
    )
    for stage in (1, 3):
        yield Run(f"other ways: {stage}, another structure", stage, then="another structure")


GROUPS = (
    stages, accumulation, schedule, optimizers, models, activations, tiers, groups, codecs, tiles, moments, any_processor, other_ways,
)  # fmt: skip
