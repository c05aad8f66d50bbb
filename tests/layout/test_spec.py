"""`ShardSpec`: properties over random layouts and schemes; runtime and plan read the same one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.layout import Dtypes, FlatLayout, ShardSpec, Topology, overlap
from onefold.layout.spec import CODED_ALIGNMENT
from onefold.plan.wire import gathered, part_bytes
from onefold.quant import codec
from onefold.recipe import Recipe
from ranks import run_ranks
from zoo import TinyMLP, features_of

shapes = st.lists(st.lists(st.integers(1, 60), max_size=3).map(tuple), min_size=1, max_size=8)
topologies = st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (6, 2), (4, 1), (8, 4)]).map(
    lambda pair: Topology(*pair)
)
SCHEMES: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "reduce_codec": "int8", "error_feedback": True},
    {"stage": 3},
    {"stage": 3, "precision": "bf16"},
    {"stage": 3, "shard_group": 2},
    {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
    {"stage": 3, "group": 2, "second_copy": True},
    {"stage": 3, "gather_codec": "int8", "reduce_codec": "int4"},
    {"stage": 3, "group": 2, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"},
    {"stage": 3, "offload_optimizer": "cpu"},
)
schemes = st.sampled_from(SCHEMES)


def spec_of(
    shapes: list[tuple[int, ...]], topology: Topology, scheme: dict[str, Any], position: int = 0
) -> ShardSpec:
    recipe = Recipe.zero(**({"precision": "fp32"} | scheme))
    return ShardSpec.of(
        [(f"p{i}", s) for i, s in enumerate(shapes)],
        Dtypes.of(torch.float32, True, recipe),
        recipe,
        topology,
        position,
        codec,
    )


def everybodys(
    shapes: list[tuple[int, ...]], topology: Topology, scheme: dict[str, Any]
) -> list[ShardSpec]:
    return [spec_of(shapes, topology, scheme, p) for p in range(topology.size)]


@given(shapes, topologies, schemes)
def test_the_ranks_own_every_element_equally_often(shapes, topology, scheme):
    specs = everybodys(shapes, topology, scheme)
    times = sum(s.own for s in specs) / specs[0].numel if specs[0].numel else 1
    assert times in (1, topology.outer, topology.size), [s.owned for s in specs]
    edges = sorted({s.owned for s in specs})
    assert edges[0][0] == 0 and edges[-1][1] == specs[0].numel, edges
    assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False)), edges


@given(shapes, topologies, schemes)
def test_each_hop_tiles_its_span_and_the_last_leaves_the_interval(shapes, topology, scheme):
    for spec in everybodys(shapes, topology, scheme):
        left = (0, spec.numel)
        for hop in spec.hops:
            assert (hop.ranges[0][0], hop.ranges[-1][1]) == left, (hop, left)
            assert all(a[1] == b[0] for a, b in zip(hop.ranges, hop.ranges[1:], strict=False)), hop
            left = hop.ranges[hop.index]
        assert left == spec.interval, (spec.hops, spec.interval)


@given(shapes, topologies, schemes)
def test_what_is_sent_in_a_gather_arrives_as_the_whole_less_what_was_there(
    shapes, topology, scheme
):
    """Every rank sends and receives the same: what all send is what all lacked."""
    for spec in everybodys(shapes, topology, scheme):
        sent = sum(nbytes for _, nbytes in gathered(spec))
        held = (spec.shard[1] - spec.shard[0]) if spec.has_secondary else spec.own
        missing = (spec.numel - held) // max(spec.layout.shard_numel, 1)
        assert sent == missing * spec.each, (sent, missing, spec.each, gathered(spec))


@given(shapes, topologies, schemes)
def test_a_hop_receives_what_its_peers_send(shapes, topology, scheme):
    spec = spec_of(shapes, topology, scheme)
    for at, hop in enumerate(spec.hops):
        room = spec.exchange(at, spec.dtypes.wire)
        bytes_of_a_part = room.part * room.dtype.itemsize
        padding = bytes_of_a_part - part_bytes(spec, hop)
        assert 0 <= padding < CODED_ALIGNMENT and (padding == 0 or spec.encodes(hop)), (room, hop)
        own_rows = 1 if spec.encodes(hop) else 0
        assert room.rows + bool(room.apart) == hop.size - 1 + own_rows, (room, hop)


@given(shapes, topologies, schemes, st.data())
def test_a_span_of_the_whole_needs_no_more_than_the_whole(shapes, topology, scheme, data):
    spec = spec_of(shapes, topology, scheme)
    edges = sorted({0, spec.numel, *(s.start for s in spec.layout.slots)})
    a, b = sorted((data.draw(st.sampled_from(edges)), data.draw(st.sampled_from(edges))))
    for adds in ("pairwise", "at once", None):
        whole = spec.exchange(0, spec.dtypes.wire, None, adds)
        assert spec.exchange(0, spec.dtypes.wire, (0, spec.numel), adds) == whole
        part = spec.exchange(0, spec.dtypes.wire, (a, b), adds)
        assert part.sent <= whole.sent and part.dtype == whole.dtype
        assert part.received <= whole.received and part.apart <= whole.apart


@given(shapes, topologies, schemes)
def test_cached_intervals_are_whole_places_within_the_encoded_whole(shapes, topology, scheme):
    for spec in everybodys(shapes, topology, scheme):
        first, last = spec.cached
        assert 0 <= first <= last <= spec.ranks and spec.cached_bytes == (last - first) * spec.each
        if spec.gather_codec is not None:
            assert spec.each % CODED_ALIGNMENT == 0
            assert spec.each >= spec.gather_codec.encoded_bytes(spec.layout.shard_numel)


def test_a_local_part_lies_in_what_the_rank_owns():
    spec = spec_of([(40, 9), (3,)], Topology(4, 2), {"stage": 3, "shard_group": 2}, 3)
    for slot in spec.layout.slots:
        a, b = overlap((slot.start, slot.end), spec.owned)
        assert spec.local(slot) == b - a


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 4}, "was given with position 4 of 4"),
        ({"layout": FlatLayout.of([("p", (64,))], 2)}, "a layout for 2 ranks"),
        ({"stored": True}, "cannot be all of this"),
        ({"has_secondary": True, "resident": True}, "cannot be all of this"),
        ({"unsharded": True}, "cannot be all of this"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    spec = spec_of([(64, 8)], Topology(4, 2), {"stage": 3})
    with pytest.raises(ValueError, match=message):
        replace(spec, **change)


def of_engine_and_plan(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The specs that a real engine was made of, those of the plan, and what was allocated."""
    import onefold
    from onefold.plan.modules import model_shape
    from onefold.plan.states import units_of

    out = []
    for option in options:
        recipe = Recipe.zero(stall_timeout=30.0, **option)
        shape = model_shape(TinyMLP(16, 128, 3, 16))
        model = onefold.shard(TinyMLP(16, 128, 3, 16), recipe)
        engine = onefold.engine_of(model)
        model(features_of(0, 4, 16)).square().mean().backward()
        engine.memory.now()
        flats = [f for unit in engine.units for f in unit.flats]
        planned = [
            f for u in units_of(shape, recipe, engine.world_size, engine.rank) for f in u.flats
        ]
        out.append(
            {
                "option": option,
                "engine": [f.spec for f in flats],
                "plan": planned,
                "held": engine.memory.now(),
                "owned": [None if f.unsharded else f.master.numel() for f in flats],
                "kept": [0 if f.gather.cached is None else f.gather.cached.nbytes for f in flats],
            }
        )
    return out


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_runtime_and_plan_read_the_same_spec(ranks: int) -> None:
    options = [{"precision": "fp32"} | scheme for scheme in SCHEMES]
    if ranks < 4:
        options = [o for o in options if "group" not in o and "shard_group" not in o]
    for seen in run_ranks(ranks, of_engine_and_plan, options)[-1]:
        told = f"{seen['option']} on {ranks} ranks"
        specs = seen["engine"]
        assert specs == seen["plan"], told
        assert seen["kept"] == [s.cached_bytes for s in specs], told
        owned = [None if s.unsharded else s.own for s in specs]
        assert seen["owned"] == owned, told
        for category, nbytes in (
            ("parameters", sum(s.parameter_bytes for s in specs)),
            ("master weights", sum(s.master_bytes for s in specs)),
            ("error feedback", sum(s.residual_bytes for s in specs)),
        ):
            assert seen["held"].get(category, 0) == nbytes, f"{told}: {category}, {seen['held']}"
