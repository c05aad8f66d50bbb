"""The plan over axes: what divides parameters, what each axis sends, what a rank of a mesh holds,
beside figures of published runs.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import onefold.plan
from onefold.cli.app import app
from onefold.layout.holders import Axes
from onefold.plan import hardware
from onefold.plan.collectives import (
    Step,
    bubble,
    by_kind,
    data_bytes,
    group_along,
    holders_from_first,
    in_flight,
    in_layers,
    sent,
)
from onefold.plan.degrees import Degrees
from onefold.plan.divided import (
    KINDS,
    divided_along,
    local_shape,
    rule_of,
    stages_of,
    units_over,
)
from onefold.plan.evaluate import evaluate
from onefold.plan.formulas import Convention, MicroBatchBytes
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.mesh_account import (
    SECONDS,
    MeshAccount,
    MeshQuestion,
    account_of,
    least_bytes,
    local_dims,
    states_of_stage,
)
from onefold.plan.mesh_search import AUTO, meshes, plan_over_axes
from onefold.plan.shapes import Transformer, architecture, find, model_of
from onefold.plan.subject import subject_of
from onefold.plan.wire import wire
from onefold.recipe import Recipe

GB, GIB = 1e9, 2**30
MESHES = [
    Degrees(dp=8),
    Degrees(dp=2, tp=4),
    Degrees(dp=4, tp=2, cp=2),
    Degrees(dp=8, ep=4, tp=2),
    Degrees(dp=8, ep=8, tp=2, expert_tp=False),
    Degrees(dp=4, ep=2, cp=2, tp=2),
]


def told(found: float, expected: float) -> str:
    return f"planned {found:.5g}, expected {expected:.5g}: {found / expected - 1:+.1%}"


def account(
    name: str,
    gpus: int,
    gpu: str,
    job: Job,
    zero: int,
    checkpointing: str,
    convention: Convention | None = None,
    **degrees: Any,
) -> MeshAccount:
    family = find(name).family
    question = MeshQuestion(
        architecture(name),
        hardware.machine(gpus, 8, gpu),
        job,
        family if family == "bloom" else "",
        convention,
    )
    return account_of(question, Degrees.on(gpus, **degrees), zero, checkpointing)


def bloom(tp: int, micro_batch: int) -> MeshAccount:
    native = (("reduce", "native"),)
    job = Job(seq=2048, micro_batch=micro_batch, global_batch=2048, options=native)
    return account(
        "bloom-176b", 384, "a100-80", job, 1, "full", Convention(2, 6, 12),
        tp=tp, pp=12, sequence_parallel=False,
    )  # fmt: skip


# -- published runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "micro_batch", "measured"), [(4, 2, 59), (4, 4, 73), (8, 2, 40)])
def test_bloom_176b_takes_the_memory_that_bigscience_measured(
    tp: int, micro_batch: int, measured: float
) -> None:
    """BigScience tr11-176B-ml, chronicles-prequel.md, "Rebalancing layers": nvidia-smi on 384 A100
    80 GB, ZeRO-1, PP 12, full recompute, without sequence parallelism. Their bf16 optimizer holds
    bf16 and fp32 gradients whole: 2 + 6 + 12 bytes per parameter. NCCL adds gradients up. Of the
    plan's figure 5 to 6.6 GiB are its assumption of what the driver and communicators take.
    """
    found = bloom(tp, micro_batch)
    assert 5 * GIB < found.reserve.nbytes < 7 * GIB
    assert found.papers_bytes / GIB == pytest.approx(measured, rel=0.1), told(
        found.papers_bytes / GIB, measured
    )


@pytest.mark.parametrize(
    ("seq", "cp", "micro_batch", "chunks", "measured"),
    [
        (8192, 1, 4, 2, 72.7),
        (32_768, 1, 1, 1, 75.3),
        (65_536, 2, 1, 1, 75.9),
        (131_072, 4, 1, 1, 77.1),
    ],
)
def test_llama_3_405b_takes_the_memory_that_torchtitan_measured(
    seq: int, cp: int, micro_batch: int, chunks: int, measured: float
) -> None:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Tables 5 and 6: 512 H100 of 96 GB,
    FSDP × TP 8 × PP 8 × CP, full recompute, 8 micro-batches (the default, one a stage). What the
    allocator reserved, so without driver and NCCL. fp32 masters, bf16 gathered, fp32 gradients.
    """
    job = Job(seq=seq, micro_batch=micro_batch, global_batch=8 * micro_batch * 8 // cp)
    found = account(
        "llama-3-405b", 512, "h100-96", job, 3, "full", tp=8, pp=8, cp=cp, chunks=chunks
    )
    assert found.micro_batches == 8
    assert found.peak_bytes / GIB == pytest.approx(measured, rel=0.1), told(
        found.peak_bytes / GIB, measured
    )


def test_llama_3_405b_on_16384_gpus_holds_what_its_report_says_of_fsdp() -> None:
    """Llama team 2024, section 3.3.2 and Table 4: TP 8 × CP 1 × PP 16 × DP 128 on 16,384 H100.
    Optimizer states are divided over the data-parallel ranks, parameters (bf16) are not gathered
    again, gradients accumulate in fp32. No memory is published: this is the closed form.
    """
    h, f, k = 16_384, 53_248, 8 * 128
    block = 2 * h * h + 2 * h * k + 3 * h * f
    expected = 8 * block / 8 * (2 + 4 + 12 / 128)
    job = Job(seq=8192, micro_batch=1, global_batch=2048)
    found = account("llama-3-405b", 16_384, "h100-80", job, 1, "full", tp=8, pp=16)
    assert found.degrees.dp == 128
    assert found.states == pytest.approx(expected, rel=0.1), told(found.states, expected)
    assert found.fits


def test_mt_nlg_530b_takes_what_its_paper_accounts_for() -> None:
    """Smith et al. 2022 (arXiv:2201.11990), section 3: 20 bytes per parameter (fp16 parameters and
    gradients, each with an fp32 copy, and fp32 moments) on the 280 GPUs of a replica of TP 8 ×
    PP 35; 8.8 GB of inputs of layers for a micro-batch of one sample, which a first stage keeps of
    35 micro-batches × 3 of the 105 layers. No memory is published: this is their own accounting.
    """
    inputs = 105 * 2048 * 20_480 * 2
    assert inputs == pytest.approx(8.8 * GB, rel=0.01)
    expected = 20 * 530e9 / 280 + inputs
    job = Job(seq=2048, micro_batch=1, global_batch=1920, precision="fp16")
    for gpus in (2240, 3360):
        found = account(
            "mt-nlg-530b", gpus, "a100-80", job, 0, "full", Convention(4, 4, 12),
            tp=8, pp=35, sequence_parallel=False,
        )  # fmt: skip
        planned = found.states + found.kept
        assert planned == pytest.approx(expected, rel=0.1), told(planned, expected)
        assert found.fits and found.papers_bytes < 80 * GIB


def test_deepseek_v3_holds_the_states_that_zhang_and_su_derive() -> None:
    """Zhang and Su 2025 (arXiv:2502.07846), Tables 6 and 8: a stage of four blocks of experts at
    DP 32 × TP 2 × PP 16 × EP 8, experts not divided by TP; bf16 parameters, fp32 gradients, fp32
    masters and bf16 moments (2 + 4 + 8). Their figures are derived, not measured.
    """
    model, degrees = architecture("deepseek-v3"), Degrees(dp=32, tp=2, pp=16, ep=8, expert_tp=False)
    stage = next(s for s in stages_of(model, degrees) if s.blocks == 4 and not s.first)
    numel = sum(by_kind(stage, degrees).values())
    assert numel == pytest.approx(6_250_364_928, rel=0.1)
    for zero, published in ((0, 81.54), (1, 40.46), (2, 19.92), (3, 9.66)):
        found = states_of_stage(stage, degrees, Convention(2, 4, 8), zero) / GIB
        assert found == pytest.approx(published, rel=0.1), (zero, told(found, published))


def test_deepseek_v3_on_ep_64_and_pp_16_holds_the_closed_form() -> None:
    """DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2: PP 16 × EP 64 × ZeRO-1 on 2,048 H800, no
    tensor parallelism. No memory is published: bf16 parameters, fp32 gradients, fp32 masters and
    bf16 moments (2 + 4 + 8), by hand for a stage of four blocks of experts.
    """
    h, expert = 7168, 3 * 7168 * 2048
    latent = 1536 * h + 24_576 * 1536 + 576 * h + 32_768 * 512 + 16_384 * h
    dense, routed = 4 * (latent + expert + 256 * h), 4 * 256 // 64 * expert
    expected = (dense + routed) * 6 + dense * 8 / 128 + routed * 8 / 2
    model, degrees = architecture("deepseek-v3"), Degrees(dp=128, pp=16, ep=64)
    stage = next(s for s in stages_of(model, degrees) if s.blocks == 4 and not s.first)
    found = states_of_stage(stage, degrees, Convention(2, 4, 8), 1)
    assert found == pytest.approx(expected, rel=0.1), told(found, expected)
    job = Job(seq=4096, micro_batch=1, global_batch=15_360)
    whole = account("deepseek-v3", 2048, "h100-80", job, 1, "full", pp=16, ep=64)
    assert whole.fits and whole.holders["experts"] == 2 and whole.holders["attention"] == 128


@pytest.mark.parametrize(
    ("name", "pp", "first", "middle", "last"),
    [
        ("bloom-176b", 12, 5, 6, 5),  # BigScience: an embedding takes the place of a block
        ("mt-nlg-530b", 35, 3, 3, 3),
        ("llama-3-405b", 16, 7, 8, 7),  # Llama team 2024: one block less on both ends
    ],
)
def test_stages_of_a_pipeline_are_those_of_the_published_runs(
    name: str, pp: int, first: int, middle: int, last: int
) -> None:
    counts = [s.blocks for s in stages_of(architecture(name), Degrees(pp=pp))]
    assert counts == [first, *[middle] * (pp - 2), last]


# -- what divides parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("divided", [(), ("tp",), ("ep",), ("ep", "tp")])
def test_the_short_forms_of_holders_are_those_of_the_runtime(
    degrees: Degrees, divided: tuple[str, ...]
) -> None:
    axes = Axes(("dp", "ep", "cp", "tp"), tuple(degrees.sizes.values()), ("dp", "ep", "cp"))
    holders = axes.holders(divided)
    assert degrees.holders(divided) == holders
    assert degrees.holding(divided) == holders.size
    assert holders_from_first(degrees, divided) == holders.groups[0]


@pytest.mark.parametrize(
    "name", ["gpt2", "bloom-176b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3"]
)
def test_every_matrix_of_a_block_has_a_kind_and_parts_make_the_whole(name: str) -> None:
    model = architecture(name)
    degrees = Degrees(dp=8, tp=2, ep=8 if model.active_numel != model.numel else 1)
    for p in (p for u in model.units for p in u.parameters):
        rule = rule_of(p.name)
        assert rule.kind in KINDS
        if len(p.shape) > 1 and not p.name.endswith("wpe.weight"):
            assert rule.kind != "norm", p.name
        parts = math.prod(degrees.sizes[axis] for axis in divided_along(p, degrees))
        local = math.prod(local_shape(p, degrees))
        uneven = rule.kind in ("embedding", "head") and p.shape[0] % 2
        assert uneven or parts * local == p.numel, p.name


@pytest.mark.parametrize(
    ("name", "kind", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "attention", 0),
        ("model.layers.0.self_attn.o_proj.weight", "attention", 1),
        ("model.layers.0.mlp.down_proj.weight", "mlp", 1),
        ("transformer.h.0.attn.c_attn.weight", "attention", 1),
        ("transformer.h.0.attn.c_proj.weight", "attention", 0),
        ("transformer.h.0.mlp.c_proj.bias", "norm", None),
        ("transformer.h.0.self_attention.dense.weight", "attention", 1),
        ("model.layers.0.mlp.gate.weight", "router", None),
        ("model.layers.0.mlp.gate_proj.weight", "mlp", 0),
        ("model.layers.0.mlp.experts.down_proj", "experts", 2),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "mlp", 0),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "latent", None),
        ("model.layers.0.self_attn.q_a_layernorm.weight", "norm", None),
        ("lm_head.weight", "head", 0),
        ("transformer.word_embeddings_layernorm.weight", "norm", None),
        ("something.of.its.own", "norm", None),
    ],
)
def test_a_parameter_is_divided_by_its_kind(name: str, kind: str, dim: int | None) -> None:
    rule = rule_of(name)
    assert (rule.kind, rule.axes.get("tp")) == (kind, dim)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_flat_buffers_lie_over_the_ranks_that_hold_their_parameters(degrees: Degrees) -> None:
    model = architecture("mixtral-8x7b")
    stage = stages_of(model, degrees)[0]
    shapes = {p.name: p for p in stage.parameters}
    for unit in units_over(stage, degrees, Recipe.zero(3, precision="bf16"), per_node=8):
        for flat in unit.flats:
            names = [slot.name for slot in flat.layout.slots]
            assert {degrees.holders(divided_along(shapes[n], degrees)).size for n in names} == {
                flat.ranks
            }
            assert flat.layout.content == sum(
                math.prod(local_shape(shapes[n], degrees)) for n in names
            )


def test_a_mesh_of_data_ranks_alone_has_the_account_of_the_plan() -> None:
    job = Job(seq=2048, micro_batch=1, global_batch=16)
    machine = hardware.machine(8, 8, "h100-80")
    subject = subject_of("llama-3-8b", job, None, None, machine)
    question = MeshQuestion(subject.shape, machine, subject.job, "llama")
    for zero, checkpointing in itertools.product((0, 1, 2, 3), ("none", "full")):
        plain = evaluate(
            subject.shape,
            subject.activities(1, checkpointing),
            machine,
            subject.job,
            Scheme(zero, checkpointing),
        )
        mesh = account_of(question, Degrees.on(8), zero, checkpointing)
        assert mesh.rest == plain.account.rest
        assert mesh.wire == plain.account.wire
        assert mesh.peak == {k: v for k, v in plain.account.peak.items() if v}
        assert mesh.states == pytest.approx(plain.states, abs=1)
        assert mesh.reserve == plain.reserve
        assert mesh.seconds["step"] == pytest.approx(plain.account.seconds["step"], rel=0.1)


# -- what each axis sends --------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gathers_and_reductions_are_two_psi_among_each_kinds_holders(
    degrees: Degrees, zero: int
) -> None:
    model = architecture("mixtral-8x7b")
    stage = stages_of(model, degrees)[0]
    step = Step(zero)
    found = sent(stage, model.transformer or _none(), degrees, step)["data"]
    expected: dict[str, float] = {}
    for (kind, divided), psi in by_kind(stage, degrees).items():
        h = degrees.holders(divided).size
        expected[kind] = expected.get(kind, 0.0) + 2 * psi * (h - 1) / h * 2
    assert found == pytest.approx({k: v for k, v in expected.items() if v})
    units = units_over(stage, degrees, Recipe.zero(zero, precision="bf16"), per_node=8)
    exact = sum(wire(units, Recipe.zero(zero, precision="bf16")).values())
    assert exact == pytest.approx(sum(found.values()), rel=0.01), told(exact, sum(found.values()))


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_stage_3_sends_three_psi_but_for_units_that_are_gathered_once(degrees: Degrees) -> None:
    model, recipe = architecture("mixtral-8x7b"), Recipe.zero(3, precision="bf16")
    stage = stages_of(model, degrees)[0]
    found = sent(stage, model.transformer or _none(), degrees, Step(3))["data"]
    for (kind, divided), psi in by_kind(stage, degrees).items():
        h = degrees.holders(divided).size
        if [k for k, _ in by_kind(stage, degrees)].count(kind) == 1 and h > 1:
            assert found[kind] == pytest.approx(3 * psi * (h - 1) / h * 2)
    units = units_over(stage, degrees, recipe, per_node=8)
    once = sum(
        data_bytes(f.numel, f.ranks, 2, 0)
        for u in units
        if u.turns or u.looks_up_only
        for f in u.flats
    )
    exact = sum(wire(units, recipe).values())
    assert exact == pytest.approx(sum(found.values()) - once, rel=0.01)


def test_a_pipeline_gathers_and_reduces_each_unit_once_a_step() -> None:
    model, degrees = architecture("llama-3-8b"), Degrees(dp=8, pp=4)
    stage = stages_of(model, degrees)[1]
    dims = model.transformer or _none()
    for zero in (1, 2, 3):
        step = Step(zero, micro_batches=16)
        found = sum(sent(stage, dims, degrees, step)["data"].values())
        assert found == pytest.approx(2 * stage.numel * 7 / 8 * 2)
    # Without a pipeline stage 3 does so in every micro-batch
    whole = stages_of(model, Degrees(dp=8))[0]
    found = sum(sent(whole, dims, Degrees(dp=8), Step(3, micro_batches=16))["data"].values())
    assert found == pytest.approx(16 * 3 * model.numel * 7 / 8 * 2)


def test_parameters_that_stay_gathered_and_late_reductions_send_less() -> None:
    model, degrees = architecture("llama-3-8b"), Degrees(dp=8)
    question = MeshQuestion(
        model,
        hardware.machine(8, 8, "h100-80"),
        Job(
            seq=2048,
            global_batch=32,
            options=(("reshard_after_forward", False), ("reduce_at", "boundary")),
        ),
    )
    step = question.step(degrees, 3, 1, "none")
    assert step.passes(1) == (4, 1)
    assert Step(3, micro_batches=4).passes(1) == (8, 4)
    found = account_of(question, degrees, 3, "none")
    exact, closed = sum(found.wire.values()), sum(found.sent["data"].values())
    assert exact == pytest.approx(closed, rel=0.01), told(exact, closed)


def test_layers_send_what_the_papers_count() -> None:
    """Narayanan et al. 2021, section 3.2: 8·b·s·h·(t−1)/t elements a layer and micro-batch."""
    model, degrees = architecture("llama-3-8b"), Degrees(dp=2, tp=4, pp=2, cp=2)
    dims, stage = model.transformer or _none(), stages_of(model, degrees)[0]
    step = Step(1, micro_batches=3, micro_batch=2, seq=4096)
    found = sent(stage, dims, degrees, step)
    tokens, h = 2 * 4096 // 2, 4096
    blocks, m, e = stage.blocks, 3, 2
    layers = 8 * tokens * h * 3 / 4 * blocks * m * e
    assert found["tp"]["attention"] + found["tp"]["mlp"] == pytest.approx(layers)
    assert found["tp"]["embedding"] == pytest.approx(2 * tokens * h * 3 / 4 * m * e)
    assert "head" not in found["tp"]
    # 8 heads of keys and as many of values of 128 columns, a quarter on each rank, to one peer
    assert found["cp"]["keys and values"] == pytest.approx(
        2 * m * blocks * tokens * 2 * 1024 / 4 * e
    )
    assert found["pp"] == {"forward": pytest.approx(m * tokens * h / 4 * e)}
    again = sent(stage, dims, degrees, Step(1, 3, 2, 4096, recomputed=1.0))
    assert sum(again["tp"].values()) == pytest.approx(layers * 1.5 + found["tp"]["embedding"])


def test_experts_send_each_token_to_its_experts_and_back() -> None:
    model, degrees = architecture("mixtral-8x7b"), Degrees(dp=8, ep=4)
    dims, stage = model.transformer or _none(), stages_of(model, degrees)[0]
    found = sent(stage, dims, degrees, Step(1, micro_batch=1, seq=1024))["ep"]
    each = 1024 * 2 * 4096 * 2 * 3 / 4 * 32 * 2  # forward and backward
    assert found == {"dispatch": pytest.approx(each), "combine": pytest.approx(each)}


def test_tensor_parallel_bytes_stay_in_the_node_and_experts_cross_nodes() -> None:
    model, degrees = architecture("mixtral-8x7b"), Degrees(dp=8, tp=4, ep=8)
    machine = hardware.machine(32, 8, "h100-80")
    dims, stage, step = model.transformer or _none(), stages_of(model, degrees)[0], Step(1)
    found = sent(stage, dims, degrees, step)
    moves = dict(in_layers(found, stage, degrees, step, machine))
    assert moves["tp"].between == 0 and moves["tp"].inside == sum(found["tp"].values())
    # Of eight ranks along ep, two are on the node, so six of seven peers are on others
    assert group_along("ep", degrees) == tuple(range(0, 32, 4))
    assert moves["ep"].between == pytest.approx(sum(found["ep"].values()) * 6 / 7)


# -- the pipeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "m", "chunks"), [(1, 4, 1), (4, 8, 1), (12, 128, 1), (8, 32, 2)])
def test_the_bubble_is_that_of_narayanan(pp: int, m: int, chunks: int) -> None:
    share = bubble(Degrees(pp=pp, chunks=chunks), m)
    if chunks == 1:
        assert share == pytest.approx((pp - 1) / (m + pp - 1))
    # Over the ideal time chunks divide it
    assert share / (1 - share) == pytest.approx((pp - 1) / m / chunks)


def test_a_stage_keeps_the_micro_batches_of_its_schedule() -> None:
    assert [in_flight(Degrees(pp=4), i, 16) for i in range(4)] == [4, 3, 2, 1]
    assert in_flight(Degrees(pp=4), 0, 2) == 2
    assert in_flight(Degrees(pp=4, schedule="gpipe"), 0, 16) == 16
    # Korthikanti et al. 2022, section 4.2.3: L·(1 + (p−1)/(p·v)) layers on the first stage
    p, v, layers = 8, 3, 96
    held = in_flight(Degrees(pp=p, chunks=v), 0, 100) * layers / (p * v)
    assert held == pytest.approx(layers * (1 + (p - 1) / (p * v)))


# -- activations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_block_keeps_what_korthikanti_counts_under_tensor_parallelism(
    sequence_parallel: bool,
) -> None:
    """Korthikanti et al. 2022, Table 2, without dropout's masks (2·s·b·h bytes less, of which the
    attention's h is divided) and attention scores: s·b·h·(8 + 24/t), with sequence parallelism
    s·b·h·32/t.
    """
    dims, t = find("mt-nlg-530b").dims, 8
    degrees = Degrees(tp=t, sequence_parallel=sequence_parallel)
    local = local_dims(dims, degrees)
    sbh = 2048 * dims.hidden
    expected = sbh * 32 / t if sequence_parallel else sbh * (8 + 24 / t)
    found = MicroBatchBytes(local, 1, 2048, 2, "").whole
    assert found == pytest.approx(expected, rel=0.01), told(found, expected)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("llama-3-8b", {"tp": 3}, r"--tp 3 does not divide 32 heads: choose 1, 2, 4 or 8\."),
        ("llama-3-8b", {"tp": 16}, r"--tp 16 does not divide 8 heads of keys and values: choose 1"),
        ("gpt3-175b", {"tp": 16}, r"--tp 16 does not stay inside a node of 8 GPUs: choose 1, 2, 4"),
        ("llama-3-8b", {"pp": 64}, r"--pp 64 makes 64 parts of 32 blocks: choose at most 32"),
        ("llama-3-8b", {"pp": 16, "chunks": 4}, r"--pp 16 × --chunks 4 makes 64 parts .* 8 stages"),
        (
            "llama-3-8b",
            {"pp": 3},
            r"--pp 3 makes 3 ranks, which do not divide 16 GPUs: use 15 or 18",
        ),
        ("llama-3-8b", {"ep": 2}, r"--ep 2: llama-3-8b has no experts; leave --ep out"),
        ("mixtral-8x7b", {"ep": 3}, r"--ep 3 does not divide 8 experts: choose 1, 2, 4 or 8\."),
        (
            "mixtral-8x7b",
            {"ep": 8, "tp": 4},
            r"--ep 8 does not divide the 4 data-parallel ranks: ch",
        ),
        (
            "llama-3-8b",
            {"cp": 2, "seq": 1026},
            r"--cp 2 .* 4 pieces, and --seq is 1,026: choose --s",
        ),
        (
            "llama-3-8b",
            {"tp": 8, "seq": 1002},
            r"sequence parallelism .* choose --seq 1000, or --no",
        ),
        (
            "llama-3-8b",
            {"tp": 2, "global_batch": 7},
            r"a global batch of 7 .* use --global-batch 8",
        ),
        ("llama-3-8b", {"chunks": 2}, r"--chunks 2 interleaves .* give --pp 2 or more"),
        ("llama-3-8b", {"pp": 2, "schedule": "dual"}, r"--schedule dual: expected 1f1b or gpipe\."),
        ("llama-3-8b", {"tp": 0}, r"--tp 0: expected a whole number, 1 or more\."),
        (
            "llama-3-8b",
            {"tp": 2, "lora_rank": 8},
            r"--lora: a plan over axes .* leave one of the two",
        ),
        ("llama-3-8b", {"tp": 2, "gather_codec": "int8"}, r"--gather-codec: a plan over axes"),
        (7e9, {"tp": 2}, r"has no dimensions .* give a name such as llama-3-70b"),
        ("llama-3-8b", {"tp": AUTO, "pp": 5}, r"--pp 5 makes 5 ranks, which do not divide 16 GPUs"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_what_to_choose(
    model: Any, asked: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        onefold.plan.over_axes(model, gpus=16, **asked)


# -- the search ------------------------------------------------------------------------------------


def _tiny() -> Any:
    dims = Transformer(
        8, 4096, 32, 14_336, 32_000, 4096, 8, gated=True, experts=8, active=2, tied=False
    )
    return model_of("eight blocks of experts", "mixtral", dims)


def test_the_search_finds_the_fastest_mesh_of_all_that_fit() -> None:
    machine, job = hardware.machine(8, 4, "a100-40"), Job(seq=4096, micro_batch=1, global_batch=32)
    found = plan_over_axes(_tiny(), machine, job, tp=AUTO, pp=AUTO, cp=1, ep=AUTO, keep=3)
    asked = {"tp": AUTO, "pp": AUTO, "cp": 1, "ep": AUTO}
    every = list(meshes(found.question, asked, {}))
    assert found.searched == len(every) > 10
    accounts = [
        account_of(found.question, degrees, zero, checkpointing)
        for degrees in every
        for zero in (1, 2, 3)
        for checkpointing in CHECKPOINTING
    ]
    fastest: dict[Degrees, float] = {}
    for one in accounts:
        step = found.question.step(one.degrees, one.zero, 1, one.checkpointing)
        assert least_bytes(found.question, one.degrees, step, one.checkpointing) <= one.peak_bytes
        if one.fits:
            known = fastest.get(one.degrees, math.inf)
            fastest[one.degrees] = min(known, one.seconds_per_token)
    expected = sorted(fastest.values())[:3]
    assert [r.seconds_per_token for r in found.rows] == pytest.approx(expected, rel=1e-3)
    assert found.best is not None and found.best.fits


def test_meshes_keep_the_limits_of_the_node_and_of_the_model() -> None:
    machine = hardware.machine(32, 4, "a100-80")
    question = MeshQuestion(architecture("mixtral-8x7b"), machine, Job(seq=8192))
    every = list(meshes(question, dict.fromkeys(("tp", "pp", "cp", "ep"), AUTO), {}))
    assert {d.tp for d in every} == {1, 2, 4}
    assert {d.pp for d in every} == {1, 2, 4, 8, 16, 32}
    assert {d.ep for d in every} == {1, 2, 4, 8}
    assert {d.cp for d in every} == {1, 2}  # at least 4,096 tokens a rank
    assert all(d.ranks == 32 and d.dp % d.ep == 0 for d in every)


def test_what_does_not_fit_says_what_is_nearest() -> None:
    found = onefold.plan.over_axes("llama-3-70b", gpus=8, gpu="a100-40", tp=8, seq=2048)
    assert found.best is None
    assert "does not fit: the nearest is dp 1 × tp 8" in found.why_not
    with pytest.raises(ValueError, match="does not fit"):
        _ = found.recipe
    searched = onefold.plan.over_axes("llama-3-405b", gpus=8, gpu="a100-40", tp=AUTO, pp=AUTO)
    assert searched.rows == () and "the states alone exceed a device" in searched.why_not


def test_more_of_an_axis_leaves_less_on_a_rank() -> None:
    machine, job = hardware.machine(32, 8, "h100-80"), Job(seq=4096, global_batch=32)
    question = MeshQuestion(architecture("mixtral-8x7b"), machine, job)
    for axis in ("tp", "pp", "ep"):
        rest = [
            account_of(question, Degrees.on(32, **{axis: n}), 1, "full").rest_bytes
            for n in (1, 2, 4)
        ]
        assert rest == sorted(rest, reverse=True) and len(set(rest)) == 3, (axis, rest)


# -- the command -----------------------------------------------------------------------------------


def _run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command_prints_a_mesh_and_its_numbers() -> None:
    words = ("llama-3-8b", "--gpus", "16", "--tp", "4", "--pp", "2", "--seq", "8192")
    shown = _run(*words)
    assert shown.exit_code == 0, shown.output
    for said in (
        "dp 2 × tp 4 × pp 2",
        "tensor parallel",
        "among holders (ZeRO)",
        "bubble",
        "use dp 2",
    ):
        assert said in shown.output
    found = json.loads(_run(*words, "--json", "--stage", "3", "--no-sequence-parallel").output)
    (row,) = found["rows"]
    assert (row["zero_stage"], row["sequence_parallel"]) == (3, False)
    assert (row["dp"], row["tp"], row["pp"]) == (2, 4, 2)
    assert set(row["seconds"]) == set(SECONDS) and row["peak"] and row["holders"]["attention"] == 2


def test_the_command_searches_for_meshes() -> None:
    words = ("gpt3-13b", "--gpus", "8", "--tp", "auto", "--pp", "auto", "--json")
    found = json.loads(_run(*words).output)
    rows = found["rows"]
    assert found["searched"] and len(rows) > 1 and all(r["fits"] for r in rows)
    each = [r["seconds"]["step"] / r["tokens"] for r in rows]
    assert each == pytest.approx(sorted(each), rel=2e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tp", "x"), "--tp x: expected a whole number, 1 or more, or auto."),
        (("--tp", "2", "--simulate", "--trace", "x"), "a mesh is simulated without a timeline"),
        (("--ep", "2"), "--ep 2: llama-3-8b has no experts"),
    ],
)
def test_the_command_refuses_in_its_own_words(words: tuple[str, ...], said: str) -> None:
    result = _run("llama-3-8b", *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
PRINTED = [
    (command.replace("\\\n", " "), printed)
    for command, printed in re.findall(
        r"^```\n\$ onefold plan ((?:.*\\\n)*.*)\n((?:.*\n)+?)```", PAGE, re.MULTILINE
    )
]


@pytest.mark.parametrize(("words", "printed"), PRINTED, ids=[w for w, _ in PRINTED])
def test_the_page_shows_what_the_command_prints(words: str, printed: str) -> None:
    """The page folds sentences that are wider than its column; `...` stands for what it leaves out."""
    shown = " ".join(_run(*shlex.split(words)).output.split())
    at = 0
    for part in printed.split("\n...\n"):
        wanted = " ".join(part.removeprefix("...").split())
        at = shown.find(wanted, at)
        assert at >= 0, f"{wanted!r} is not in {shown}"


def test_the_page_has_the_figures_of_the_published_runs() -> None:
    assert PRINTED
    for tp, micro_batch, published in ((4, 2, 59), (4, 4, 73), (8, 2, 40)):
        planned = bloom(tp, micro_batch).papers_bytes / GIB
        off = planned / published - 1
        assert f"| {published} | {planned:.1f} | {100 * off:+.0f} % |".replace("-", "−") in PAGE
    job = Job(seq=8192, micro_batch=4, global_batch=256)
    for chunks, said in ((2, "72.7 | {:.1f} |"), (1, "82.5; 84.9 | {:.1f};")):
        found = account("llama-3-405b", 512, "h100-96", job, 3, "full", tp=8, pp=8, chunks=chunks)
        assert said.format(found.peak_bytes / GIB) in PAGE
    # Smith et al. 2022, section 4: 280, 350 and 420 nodes
    job = Job(seq=2048, micro_batch=1, global_batch=1920, precision="fp16")
    took = [
        account(
            "mt-nlg-530b", gpus, "a100-80", job, 0, "full", tp=8, pp=35, sequence_parallel=False
        ).seconds["step"]
        for gpus in (2240, 2800, 3360)
    ]
    assert "{:.1f}, {:.1f} and {:.1f} s (".format(*took) in PAGE
    for seconds, published in zip(took, (60.1, 50.2, 44.4), strict=True):
        assert 0.75 < seconds / published < 1.0


def _none() -> Transformer:
    raise AssertionError("the model has no dimensions")
