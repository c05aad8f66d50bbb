"""What a rank sends along each axis of a mesh in a step, in closed form. A run's counted bytes are
compared with it.

With t, c, x the degrees of tensor, context and expert parallelism; n = micro-batch × tokens ÷ c the
tokens of a rank in one of m micro-batches; h, k, v the widths of a block, of its keys and values; e
bytes an element; a active experts; p the passes over a block: 2, forward and backward, or 3 where
it is recomputed:

| axis | what                                           | bytes of one rank                                              |
|------|------------------------------------------------|----------------------------------------------------------------|
| data | each kind of parameters, Ψ local elements on H | g gathers and r reductions: (g + r)·Ψ·e·(H−1)/H                |
|      | holders                                        | stages 0 to 2: g = r = 1. Stage 3: g = 2, r = 1, in each       |
|      |                                                | micro-batch; in a pipeline g = r = 1, once a step              |
| tp   | behind attention and behind the feed-forward,  | m·p·2·2·n·h·e·(t−1)/t a block: an all-reduce, or with          |
|      | their inputs' gradients                        | sequence parallelism an all-gather and a reduce-scatter        |
|      | embedding, head                                | m·2·n·h·e·(t−1)/t each, once                                   |
| cp   | keys and values of a block                     | m·p·n·(k+v)/t·e·(c−1): gathered by the ranks that divide a     |
|      |                                                | sample, their gradients scattered                              |
| ep   | tokens to their experts, and back              | m·p·2·n·a·h·e·(x−1)/x a block, ÷ t with sequence parallelism   |
| pp   | a stage's output, and its gradient             | m·n·h·e each, ÷ t with sequence parallelism, for each chunk    |

Sources: Rajbhandari et al. 2020 (ZeRO), section 7; Narayanan et al. 2021 (arXiv:2104.04473), section
3.2; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2; Llama team 2024 (arXiv:2407.21783),
section 3.3.2 (context parallelism by all-gather); DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2.

With sequence parallelism the input of a column-wise layer may be gathered once more in the backward
pass; that is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from onefold.plan.degrees import AXES, Degrees
from onefold.plan.divided import Stage, divided_along, local_numel, rule_of
from onefold.plan.hardware import Machine
from onefold.plan.shapes import Transformer
from onefold.plan.traffic import Traffic
from onefold.plan.wire import Phase

#: The axes, in the order in which tables list them. "data" stands for the ranks that hold the same
#: parameters, whatever axes they lie along.
SENT = ("data", "tp", "cp", "ep", "pp")
#: What a step's layers wait for, axis by axis: nothing else can run meanwhile.
IN_LAYERS = ("tp", "cp", "ep")


@dataclass(frozen=True)
class Step:
    """One optimizer step of a rank.

    Attributes:
        zero: the ZeRO stage.
        micro_batches: of the rank, each of `micro_batch` samples of `seq` tokens.
        element: bytes of an element in which layers compute, and parameters are gathered.
        wire: bytes of an element in which gradients are reduced.
        recomputed: the share of blocks whose forward pass runs again.
        each_micro_batch: stages 2 and 3 reduce in every micro-batch.
        gathers_again: stage 3 gathers again in the backward pass.
    """

    zero: int
    micro_batches: int = 1
    micro_batch: int = 1
    seq: int = 2048
    element: int = 2
    wire: int = 2
    recomputed: float = 0.0
    each_micro_batch: bool = True
    gathers_again: bool = True

    def passes(self, pp: int) -> tuple[int, int]:
        """Return how often (parameters are gathered, gradients are reduced) in a step."""
        m = 1 if pp > 1 else self.micro_batches
        if self.zero == 3:
            gathers = m * (2 if self.gathers_again and pp == 1 else 1)
            return gathers, m if self.each_micro_batch else 1
        return 1, m if self.zero == 2 and self.each_micro_batch else 1

    def held_whole(self, pp: int) -> bool:
        """Whether gradients of several micro-batches are kept whole until the last."""
        return self.zero < 2 or pp > 1 or not self.each_micro_batch


def data_bytes(numel: float, holders: int, gathers: float, reductions: float) -> float:
    """Return the bytes that a rank sends to the `holders` ranks (itself one) that hold the same
    `numel` elements.

    Args:
        gathers, reductions: how often in a step, times the bytes of an element.
    """
    return numel * (gathers + reductions) * (holders - 1) / holders


@lru_cache(maxsize=1024)
def by_kind(
    stage: Stage, degrees: Degrees, trained: bool = False
) -> Mapping[tuple[str, tuple[str, ...]], int]:
    """Return the elements of a rank of this stage by kind and by the axes that divide them, of all
    parameters or of those that are `trained`.
    """
    out: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for p in stage.parameters:
        if p.trainable or not trained:
            out[rule_of(p.name).kind, divided_along(p, degrees)] += local_numel(p, degrees)
    return dict(out)


def sent(
    stage: Stage, dims: Transformer, degrees: Degrees, step: Step
) -> dict[str, dict[str, float]]:
    """Return the bytes that a rank of this pipeline stage sends in a step, by axis and kind."""
    gathers, reductions = step.passes(degrees.pp)
    data: dict[str, float] = defaultdict(float)
    for (kind, divided), numel in by_kind(stage, degrees, trained=True).items():
        data[kind] += data_bytes(
            numel, degrees.holding(divided), gathers * step.element, reductions * step.wire
        )
    tokens = step.micro_batch * step.seq / degrees.cp
    once = step.micro_batches * tokens * step.element
    passes = stage.blocks * (2 + step.recomputed)
    t, c, x = degrees.tp, degrees.cp, degrees.ep
    width = dims.hidden / (t if degrees.sequence_divided else 1)
    reduced = once * 2 * dims.hidden * (t - 1) / t
    routed = sum(1 for u in stage.units if any(p.routed for p in u.parameters))
    tokens_sent = once * dims.active * width * (x - 1) / x * routed * (2 + step.recomputed)
    crossed = once * width
    forward, backward = _crossings(stage, degrees)
    found = {
        "data": dict(data),
        "tp": {
            "attention": passes * reduced,
            "mlp": passes * reduced,
            "embedding": reduced * stage.first,
            "head": reduced * stage.last,
        },
        "cp": {"keys and values": passes * once * (dims.k + dims.v) / t * (c - 1)},
        "ep": {"dispatch": tokens_sent, "combine": tokens_sent},
        "pp": {"forward": forward * crossed, "backward": backward * crossed},
    }
    return {axis: {k: v for k, v in kinds.items() if v} for axis, kinds in found.items()}


def _crossings(stage: Stage, degrees: Degrees) -> tuple[int, int]:
    """Return how many (outputs, gradients) a stage hands on in one micro-batch: one for each chunk,
    but for the last output of the model and the gradient of its first input.
    """
    if degrees.pp == 1:
        return 0, 0
    return degrees.chunks - stage.last, degrees.chunks - stage.first


# -- on links --------------------------------------------------------------------------------------


def group_along(axis: str, degrees: Degrees) -> tuple[int, ...]:
    """Return the ranks along one axis of the mesh, from rank 0; of "pp", one rank of each stage."""
    sizes = degrees.sizes
    if axis == "pp":
        each = degrees.dp * degrees.of_stage_without_dp
        return tuple(range(0, degrees.ranks, each))
    stride = 1
    for name in AXES[AXES.index(axis) + 1 :]:
        stride *= sizes[name]
    return tuple(range(0, stride * sizes[axis], stride))


def on_links(
    move: str,
    nbytes: float,
    calls: float,
    ranks: Sequence[int],
    machine: Machine,
    phase: Phase = "both",
) -> Traffic:
    """Return a move among `ranks` by link. Gathers and reductions enter each node once; of an
    all-to-all, each peer's part travels by itself; a send has one peer.
    """
    size = len(ranks)
    here = sum(r // machine.per_node == ranks[0] // machine.per_node for r in ranks)
    if move == "send":
        between, hops = nbytes * (ranks[1] // machine.per_node != ranks[0] // machine.per_node), 1
    elif move == "all-to-all":
        between, hops = nbytes * (size - here) / max(size - 1, 1), 1
    else:
        between, hops = (nbytes / here if here < size else 0.0), size - 1
    return Traffic(move, nbytes - between, between, round(calls), hops, size, phase)


def in_layers(
    found: Mapping[str, Mapping[str, float]],
    stage: Stage,
    degrees: Degrees,
    step: Step,
    machine: Machine,
) -> Iterator[tuple[str, Traffic]]:
    """Yield (axis, move) of what layers wait for, and of what a pipeline hands on."""
    each = step.micro_batches * (2 + step.recomputed) * stage.blocks
    for axis, move, calls in (
        ("tp", "all-reduce", 2 * each * (2 if degrees.sequence_divided else 1)),
        ("cp", "all-gather", each),
        ("ep", "all-to-all", 2 * each),
        ("pp", "send", 2 * step.micro_batches * degrees.chunks),
    ):
        nbytes = sum(found[axis].values())
        if nbytes:
            yield axis, on_links(move, nbytes, calls, group_along(axis, degrees), machine)


def over_holders(stage: Stage, degrees: Degrees, step: Step, machine: Machine) -> list[Traffic]:
    """Return the gathers and reductions of a stage's parameters among those that hold them."""
    gathers, reductions = step.passes(degrees.pp)
    resident = step.zero < 3 or degrees.pp > 1
    late = step.held_whole(degrees.pp)
    by_group: dict[tuple[str, ...], int] = defaultdict(int)
    for (_, divided), numel in by_kind(stage, degrees, trained=True).items():
        by_group[divided] += numel
    units = max(1, len([u for u in stage.units if u.parameters]))
    out = []
    for divided, numel in by_group.items():
        size = degrees.holding(divided)
        if size == 1:
            continue
        ranks = holders_from_first(degrees, divided)
        moves: tuple[tuple[str, float, float, Phase], ...] = (
            (
                "all-gather",
                gathers * step.element,
                gathers,
                "first forward" if resident else "both",
            ),
            (
                "reduce-scatter",
                reductions * step.wire,
                reductions,
                "last backward" if late else "backward",
            ),
        )
        for move, each, times, phase in moves:
            nbytes = data_bytes(numel, size, each, 0)
            out.append(on_links(move, nbytes, times * units, ranks, machine, phase))
    return out


def holders_from_first(degrees: Degrees, divided: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same part as rank 0 of a parameter divided along `divided`."""
    ranks = [0]
    stride = 1
    for name in reversed(AXES):
        size = degrees.sizes[name]
        if name not in divided:
            ranks = [i * stride + r for i in range(size) for r in ranks]
        stride *= size
    return tuple(sorted(ranks))


# -- the pipeline ----------------------------------------------------------------------------------


def bubble(degrees: Degrees, micro_batches: int) -> float:
    """Return the share of a step in which a rank of the pipeline has nothing to do:
    (P−1)/(V·M + P−1) for P stages, M micro-batches and V chunks a stage.

    It is (P−1)/(M+P−1) for GPipe and 1F1B. Over the ideal time the loss is (P−1)/M ÷ V (Narayanan
    et al. 2021, sections 2.2.1 and 2.2.2).
    """
    lost = degrees.pp - 1
    return lost / (degrees.chunks * micro_batches + lost)


def in_flight(degrees: Degrees, index: int, micro_batches: int) -> int:
    """Return how many forward passes of a chunk stage `index` holds at most, before their backward
    passes: of interleaved stages Korthikanti et al. 2022, section 4.2.3.
    """
    p, v = degrees.pp, degrees.chunks
    if degrees.schedule == "gpipe":
        return micro_batches
    held = p - index if v == 1 else 2 * (p - index - 1) + (v - 1) * p + 1
    return min(held, micro_batches * v)
