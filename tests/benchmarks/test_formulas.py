"""The closed forms: what they must obey for any numbers, and that two ways to the same figure
agree.
"""

from __future__ import annotations

import math

import pytest
from benchmarks.validation.formulas import (
    activations,
    compute,
    estimators,
    states,
    streaming,
    traffic,
)
from hypothesis import given
from hypothesis import strategies as st

from onefold.plan.formulas import RECOMPUTE
from onefold.plan.shapes import Transformer

numels = st.integers(1, 10**14)
ranks = st.integers(1, 10**5)
stages = st.sampled_from(states.STAGES)
conventions = st.sampled_from(sorted(states.CONVENTIONS)).map(states.CONVENTIONS.__getitem__)
micro_batches = st.integers(1, 64)


@given(numels, conventions, ranks)
def test_a_higher_stage_never_holds_more(numel: int, convention: states.Convention, n: int) -> None:
    held = [states.model_states(numel, convention, stage, n) for stage in states.STAGES]
    assert all(a >= b for a, b in zip(held, held[1:], strict=False)), held


@given(numels, conventions, stages, ranks, ranks)
def test_more_ranks_never_hold_more_each(
    numel: int, convention: states.Convention, stage: int, n: int, more: int
) -> None:
    assert states.model_states(numel, convention, stage, n + more) <= states.model_states(
        numel, convention, stage, n
    )


@given(numels, conventions, ranks)
def test_stage_3_on_all_ranks_together_is_one_copy(
    numel: int, convention: states.Convention, n: int
) -> None:
    assert n * states.model_states(numel, convention, 3, n) == pytest.approx(
        convention.total * numel
    )


@given(conventions, stages, ranks)
def test_a_reduction_never_passes_the_number_of_ranks(
    convention: states.Convention, stage: int, n: int
) -> None:
    assert 1 <= states.reduction_factor(convention, stage, n) <= n * (1 + 1e-12)


@given(st.floats(1e9, 1e12), conventions, stages, ranks, st.integers(1, 64))
def test_the_largest_model_fills_the_memory_exactly(
    capacity: float, convention: states.Convention, stage: int, n: int, mp: int
) -> None:
    largest = states.largest_model(capacity, convention, stage, n, mp)
    assert states.model_states(largest / mp, convention, stage, n) == pytest.approx(capacity)


def test_the_smallest_degree_is_refused_where_none_is_enough() -> None:
    with pytest.raises(ValueError, match=r"stage 1.*offload"):
        states.smallest_degree(1e12, states.CONVENTIONS["16"], 1, 32e9, (8, 64))


@pytest.mark.parametrize(("name", "total"), [("16", 16), ("18", 18), ("20", 20), ("fp32", 16)])
def test_a_convention_is_named_by_its_sum(name: str, total: int) -> None:
    assert states.CONVENTIONS[name].total == total


@given(st.sampled_from(traffic.SCHEMES), numels, ranks, micro_batches)
def test_traffic_grows_with_micro_batches_and_ranks(
    scheme: str, numel: int, n: int, m: int
) -> None:
    assert traffic.volume(scheme, m) <= traffic.volume(scheme, m + 1)
    assert traffic.wire_bytes(numel, scheme, n, 2, m) <= traffic.wire_bytes(
        numel, scheme, n + 1, 2, m
    )
    assert traffic.wire_bytes(numel, scheme, 1, 2, m) == 0


@given(micro_batches)
def test_no_scheme_sends_less_than_gradients_at_the_boundary(m: int) -> None:
    assert (
        min(traffic.volume(s, m) for s in traffic.SCHEMES)
        == traffic.volume("ddp", m)
        == traffic.volume("zero-1", m)
    )
    assert (
        traffic.volume("zero-2", m)
        <= traffic.volume("zero-3", m)
        <= traffic.volume("zero-3 recompute", m)
    )


@given(numels, st.integers(1, 512), st.integers(1, 512))
def test_one_group_of_all_ranks_sends_nothing_to_others(
    numel: int, group: int, groups: int
) -> None:
    assert traffic.between_groups(numel, group, group) == 0
    assert traffic.between_groups(numel, group, group * groups) <= 2 * 2 * numel / group


@given(numels, micro_batches)
def test_each_part_of_zeropp_saves_something_between_nodes(numel: int, m: int) -> None:
    every = {"quantized_weights": False, "secondary_copy": False, "quantized_gradients": False}
    plain = traffic.zeropp_bytes(numel, m, **every)["between"]
    assert plain == pytest.approx(3 * 2 * numel * m)
    for part in every:
        assert traffic.zeropp_bytes(numel, m, **{**every, part: True})["between"] < plain
    assert traffic.zeropp_bytes(numel, m)["between"] == pytest.approx(plain / 4)


@given(
    numels,
    st.integers(1, 64),
    st.integers(1, 64),
    micro_batches,
    st.floats(0.1, 1),
    st.floats(0.1, 1),
)
def test_groups_never_send_more_over_a_nodes_border_and_copies_inside_it_less(
    numel: int, node: int, nodes: int, m: int, gathered: float, reduced: float
) -> None:
    sent = {
        way: traffic.border_bytes(numel, way, node, nodes, 2, m, gathered=gathered, reduced=reduced)
        for way in traffic.BORDERS
    }
    assert (
        sent["optimizer over all"]
        <= sent["second copy"]
        <= sent["groups"]
        <= sent["pairwise"] * (1 + 1e-12)
    )
    assert sent["pairwise"] == pytest.approx(node * sent["groups"])
    assert (max(sent.values()) == 0) == (nodes == 1)
    plain = traffic.border_bytes(numel, "shard group", node, nodes)
    assert plain == pytest.approx(node * traffic.between_groups(numel, node, node * nodes))


def test_an_unknown_scheme_and_a_group_that_does_not_divide_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"'zero-4'.*'zero-3'"):
        traffic.volume("zero-4")
    with pytest.raises(ValueError, match="does not divide"):
        traffic.between_groups(1, 3, 8)
    with pytest.raises(ValueError, match=r"'hsdp'.*'shard group'"):
        traffic.border_bytes(1, "hsdp", 8, 2)


dims = st.builds(
    lambda layers, heads, head, seq: Transformer(
        layers, heads * head, heads, 4 * heads * head, 50_257, seq, fused_attention=False
    ),
    st.integers(1, 100),
    st.integers(1, 128),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 4096),
)


@given(dims, st.integers(1, 16))
def test_a_gpt_block_with_dropout_is_korthikantis(shape: Transformer, batch: int) -> None:
    ours = activations.block_bytes(shape, batch, dropout=True)
    assert ours == pytest.approx(
        activations.korthikanti_layer(shape.seq, batch, shape.hidden, shape.heads)
    )


@given(dims, st.integers(1, 16))
def test_more_recompute_never_keeps_more(shape: Transformer, batch: int) -> None:
    none, selective, full = (activations.block_bytes(shape, batch, recompute=r) for r in RECOMPUTE)
    assert none >= selective >= full > 0


@given(dims, st.integers(1, 16))
def test_activations_are_proportional_to_the_micro_batch(shape: Transformer, batch: int) -> None:
    assert activations.total_bytes(shape, 3 * batch) == pytest.approx(
        3 * activations.total_bytes(shape, batch)
    )


@given(
    st.integers(1, 8192),
    st.integers(1, 16),
    st.integers(64, 16_384),
    st.integers(1, 128),
    st.sampled_from([1, 2, 4, 8]),
)
def test_parallelism_never_keeps_more(
    seq: int, batch: int, hidden: int, heads: int, tensor: int
) -> None:
    alone = activations.korthikanti_layer(seq, batch, hidden, heads)
    split = activations.korthikanti_layer(seq, batch, hidden, heads, tensor)
    sequence = activations.korthikanti_layer(
        seq, batch, hidden, heads, tensor, sequence_parallel=True
    )
    assert alone >= split >= sequence
    assert sequence == pytest.approx(alone / tensor)


def test_unknown_recompute_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"'some'.*'selective'"):
        activations.korthikanti_layer(1, 1, 1, 1, recompute="some")  # type: ignore[arg-type]


@given(st.integers(1, 200), st.integers(64, 65_536), st.integers(1, 16))
def test_megatrons_flops_with_recompute_are_four_thirds_but_for_the_head(
    layers: int, hidden: int, batch: int
) -> None:
    hardware = compute.megatron_flops(batch, 2048, layers, hidden, vocab=0)
    model = compute.megatron_flops(batch, 2048, layers, hidden, vocab=0, recompute=False)
    assert hardware == pytest.approx(compute.FULL_RECOMPUTE * model)


@given(st.integers(1, 200), st.integers(64, 65_536), st.integers(1, 8192))
def test_both_conventions_of_model_flops_agree(layers: int, hidden: int, seq: int) -> None:
    """PaLM's 6N + 12Lhs on the blocks' 12Lh² is Korthikanti's 72·l·h²(1 + s/6h)."""
    palm = (
        compute.model_flops_per_token(streaming.parameters(layers, hidden), layers, hidden, seq)
        * seq
    )
    assert palm == pytest.approx(
        compute.megatron_flops(1, seq, layers, hidden, vocab=0, recompute=False)
    )


def test_published_training_times_follow() -> None:
    """Narayanan et al. 2021, section 5.1: 34 and 84 days."""
    assert round(compute.training_days(300e9, 175e9, 1024, 140e12)) == 34
    assert round(compute.training_days(450e9, 1.0e12, 3072, 163e12)) == 83


@given(
    st.sampled_from(streaming.STREAMED),
    st.integers(1, 64),
    st.floats(1e6, 1e14),
    st.floats(1e6, 1e14),
)
def test_more_bandwidth_is_never_less_efficient(
    streamed: str, batch: int, slow: float, more: float
) -> None:
    ait = streaming.intensity(streamed, batch=batch, hidden=2048)
    assert 0 < streaming.efficiency(ait, slow) <= streaming.efficiency(ait, slow + more) < 1 + 1e-12


@given(st.floats(1.0, 1e6), st.floats(0.01, 0.99))
def test_the_bandwidth_for_an_efficiency_gives_it(ait: float, wanted: float) -> None:
    assert streaming.efficiency(ait, streaming.bandwidth_for(ait, wanted)) == pytest.approx(wanted)


@given(numels, st.integers(1, 16), st.integers(1, 64))
def test_offloading_never_needs_more_of_the_gpu(numel: int, gpus: int, nodes: int) -> None:
    largest = numel / 10
    none = estimators.zero3_estimate(numel, largest, gpus, nodes)
    optimizer = estimators.zero3_estimate(numel, largest, gpus, nodes, offload_optimizer=True)
    both = estimators.zero3_estimate(
        numel, largest, gpus, nodes, offload_optimizer=True, offload_parameters=True
    )
    assert none.gpu >= optimizer.gpu >= both.gpu
    assert optimizer.host <= both.host


def test_optimizers_weigh_what_the_table_says() -> None:
    assert states.optimizer_bytes("adamw", 1e9) == 12e9
    assert (
        states.optimizer_bytes("adamw-8bit", 1e9)
        < states.optimizer_bytes("lion", 1e9)
        < states.optimizer_bytes("adamw", 1e9)
    )
    with pytest.raises(ValueError, match=r"'adamx'.*adamw"):
        states.optimizer_bytes("adamx", 1)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 10_000)), min_size=1),
    st.integers(1, 64),
)
def test_adapters_of_any_rank_weigh_less_than_full_training_of_a_large_base(
    shapes: list[tuple[int, int]], rank: int
) -> None:
    adapters = states.low_rank_parameters(shapes, rank)
    base = sum(m * n for m, n in shapes) + 100 * adapters
    full = states.model_states(base, states.CONVENTIONS["16"], 0, 1)
    assert states.adapter_states(base, adapters, states.CONVENTIONS["16"], 0.5) < full


def test_the_fsdp_peak_is_every_shard_and_the_largest_unit() -> None:
    assert states.fsdp_peak_parameters([10, 30, 20], 2) == 4 * 60 / 2 + 2 * 30
    assert math.isclose(states.fsdp_peak_parameters([], 4), 0.0)
