"""The plan of meshes: what divides parameters, what each axis sends, what a rank of a mesh holds,
beside figures of published runs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import onefold.plan
from onefold.cli.app import app
from onefold.plan import hardware
from onefold.plan.account import FRAGMENTED, Candidate, bubble
from onefold.plan.activity import divided, of_dims
from onefold.plan.api import Plan
from onefold.plan.api import planned as plan
from onefold.plan.degrees import Degrees
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.modules import architectures, built, model_shape, module_of
from onefold.plan.rank import at_rest, stages_of, units_of
from onefold.plan.schema import ACTIVATIONS, LOGITS, SECONDS, TEMPORARY
from onefold.plan.search import AUTO, least, meshes
from onefold.plan.subject import question_of
from onefold.recipe import Recipe

GIB = 2**30


def told(found: float, expected: float) -> str:
    return f"planned {found:.5g}, expected {expected:.5g}: {found / expected - 1:+.1%}"


def account(
    name: str,
    gpus: int,
    gpu: str,
    job: Job,
    zero: int,
    checkpointing: str,
    **degrees: Any,
) -> Candidate:
    machine = hardware.machine(gpus, 8, gpu)
    question = question_of(name, machine, job)
    mesh = Degrees.on(gpus, **degrees)
    return question.answer(Scheme(zero, checkpointing, "none", job.micro_batch, degrees=mesh))


def bloom(tp: int, micro_batch: int) -> Candidate:
    native = (("reduce", "native"),)
    job = Job(seq=2048, micro_batch=micro_batch, global_batch=2048, options=native)
    return account(
        "bloom-176b", 384, "a100-80", job, 1, "full",
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
    account = found.account
    # All states at once: fp32 gradients beside the rest, and 2 bytes of gradients more than ours
    held = account.rest_bytes + 3 * account.rest["parameters"]
    passing = sum(account.peak.get(name, 0) for name in (ACTIVATIONS, LOGITS, TEMPORARY))
    held += passing * (1 + FRAGMENTED) + found.reserve.nbytes
    assert held / GIB == pytest.approx(measured, rel=0.1), told(held / GIB, measured)


@pytest.mark.parametrize(
    ("seq", "cp", "micro_batch", "chunks", "measured"),
    [
        (8192, 1, 4, 2, 72.7),
        pytest.param(32_768, 1, 1, 1, 75.3, marks=pytest.mark.slow),
        pytest.param(65_536, 2, 1, 1, 75.9, marks=pytest.mark.slow),
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
    assert found.accumulation == 8
    assert found.account.peak_bytes / GIB == pytest.approx(measured, rel=0.1), told(
        found.account.peak_bytes / GIB, measured
    )


def test_deepseek_v3_on_ep_64_and_pp_16_holds_the_closed_form() -> None:
    """DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2: PP 16 × EP 64 × ZeRO-1 on 2,048 H800, no
    tensor parallelism. No memory is published: bf16 parameters, fp32 masters and moments (2 + 12), by
    hand for a stage of four blocks of experts.
    """
    h, expert = 7168, 3 * 7168 * 2048
    latent = 1536 * h + 24_576 * 1536 + 576 * h + 32_768 * 512 + 16_384 * h
    dense, routed = 4 * (latent + expert + 256 * h), 4 * 256 // 64 * expert
    expected = (dense + routed) * 2 + dense * 12 / 128 + routed * 12 / 2
    model, degrees = (
        model_shape(module_of("deepseek-v3"), name="deepseek-v3"),
        Degrees(dp=128, pp=16, ep=64),
    )
    stage = next(s for s in stages_of(model, degrees) if s.blocks == 4 and not s.first)
    recipe = Recipe.zero(1, precision="bf16")
    found = sum(at_rest(units_of(stage, recipe, degrees)).values())
    assert found == pytest.approx(expected, rel=0.1), told(found, expected)
    job = Job(seq=4096, micro_batch=1, global_batch=15_360)
    whole = account("deepseek-v3", 2048, "h100-80", job, 1, "full", pp=16, ep=64)
    assert whole.fits and whole.holders["experts"] == 2 and whole.holders["attention"] == 128


# -- what divides parameters -----------------------------------------------------------------------


def test_a_mesh_of_data_ranks_alone_has_the_account_of_the_plan() -> None:
    job, there = Job(seq=2048, micro_batch=1, global_batch=16), hardware.machine(8, 8, "h100-80")
    question = question_of("llama-3-8b", there, job)
    for stage, checkpointing in itertools.product((0, 1, 2, 3), ("none", "full")):
        plain = question.answer(Scheme(stage, checkpointing))
        mesh = question.answer(Scheme(stage, checkpointing, degrees=Degrees.on(8)))
        assert replace(mesh.account, sent={}) == plain.account
        assert mesh.reserve == plain.reserve


# -- the pipeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "m", "chunks"), [(1, 4, 1), (4, 8, 1), (12, 128, 1), (8, 32, 2)])
def test_the_bubble_is_that_of_narayanan(pp: int, m: int, chunks: int) -> None:
    share = bubble(Degrees(pp=pp, chunks=chunks), m)
    if chunks == 1:
        assert share == pytest.approx((pp - 1) / (m + pp - 1))
    # Over the ideal time chunks divide it
    assert share / (1 - share) == pytest.approx((pp - 1) / m / chunks)


# -- activations -----------------------------------------------------------------------------------


def test_a_block_keeps_what_korthikanti_counts_under_tensor_parallelism() -> None:
    """Korthikanti et al. 2022, Table 2, without dropout's masks (2·s·b·h bytes less), attention scores
    and the statistics of norms: with sequence parallelism s·b·h·32/t. Without it nothing less than
    the table's s·b·h·(8 + 24/t), and the fp32 copies of norms in transformers' code, 8·s·b·h.
    """
    model, t = model_shape(module_of("mt-nlg-530b"), name="mt-nlg-530b"), 8
    dims = model.transformer
    assert dims is not None
    whole, sbh = of_dims(model, dims, 1, 2048, 2, "none"), 2048 * dims.hidden
    for sequence_parallel, low, high in (
        (True, 32 / t, 32 / t),
        (False, 8 + 24 / t, 16 + 24 / t),
    ):
        degrees = Degrees(tp=t, sequence_parallel=sequence_parallel)
        (stage,) = stages_of(model, degrees)
        found = divided(whole, model, stage, degrees, 1, 2048, 2, 1).rows[1].kept
        assert 0.99 * low <= found / sbh <= 1.01 * high, told(found / sbh, low)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        (
            "llama-3-8b",
            {"tp": 3},
            r"--tp 3 has to divide .* 32 heads, 8 heads of keys .*: choose 1, 2, 4, 8\.",
        ),
        ("llama-3-8b", {"tp": 16}, r"--tp 16 has to divide .* 8 heads of keys and values"),
        (
            "gpt3-175b",
            {"tp": 16},
            r"--tp 16 has to divide the 8 GPUs of a node, .*: choose 1, 2, 4",
        ),
        ("llama-3-8b", {"pp": 64}, r"--pp 64 makes 64 parts of 32 blocks: choose at most 32"),
        ("llama-3-8b", {"pp": 16, "chunks": 4}, r"--pp 16 × --chunks 4 makes 64 parts .* 8 stages"),
        (
            "llama-3-8b",
            {"pp": 3},
            r"--pp 3 makes 3 ranks, which do not divide 16 GPUs: use 15 or 18",
        ),
        ("llama-3-8b", {"ep": 2}, r"--ep 2: llama-3-8b has no experts; leave --ep out"),
        ("mixtral-8x7b", {"ep": 3}, r"--ep 3 does not divide 8 experts: choose 1, 2, 4, 8\."),
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
            r"a global batch of 7 .* use 8",
        ),
        ("llama-3-8b", {"chunks": 2}, r"--chunks 2 interleaves .* give --pp 2 or more"),
        ("llama-3-8b", {"tp": AUTO, "chunks": 2}, r"--chunks 2 interleaves .* give --pp 2 or more"),
        ("llama-3-8b", {"tp": 0}, r"--tp 0: expected a whole number, 1 or more\."),
        (
            "llama-3-8b",
            {"tp": 2, "lora_rank": 8},
            r"--lora: a plan of a mesh .* leave one of the two",
        ),
        ("llama-3-8b", {"tp": 2, "gather_codec": "int8"}, r"--gather-codec: a plan of a mesh"),
        (7e9, {"tp": 2}, r"has no dimensions .* give a name such as llama-3-70b"),
        ("llama-3-8b", {"tp": AUTO, "pp": 5}, r"--pp 5 makes 5 ranks, which do not divide 16 GPUs"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_what_to_choose(
    model: Any, asked: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        onefold.plan(model, gpus=16, **asked)


# -- will it fit -----------------------------------------------------------------------------------


def test_a_mesh_fits_from_the_byte_on_that_its_peak_needs_and_is_not_recommended_below() -> None:
    """A device is made as large as the peak and what the driver and NCCL take, then a byte smaller:
    the states alone, which are far less, still fit there.
    """
    there, job = (
        hardware.machine(8, 8, "h100-80"),
        Job(seq=4096, micro_batch=4, global_batch=16, checkpointing="none"),
    )

    def planned(capacity: int, tp: int | str = 2) -> Plan:
        device = replace(there, gpu=there.gpu.model_copy(update={"capacity": capacity}))
        axes = {"tp": tp, "pp": 1, "cp": 1, "ep": 1}
        return plan("llama-3-8b", device, job, axes=axes, stages=(3,))

    (row,) = planned(1 << 40).stages
    needed = row.account.peak_bytes + row.reserve.nbytes
    assert row.account.rest_bytes < min(row.usable, row.account.peak_bytes) / 2
    enough, short = planned(needed), planned(needed - 1)
    assert enough.recommended is not None and enough.recipe.stage == 3 and " yes" in str(enough)
    assert short.recommended is None and "does not fit" in short.why_not and " no, by" in str(short)
    with pytest.raises(ValueError, match="exceeds"):
        _ = short.recipe
    for found in planned(needed - 1, AUTO).stages:
        assert found.account.peak_bytes + found.reserve.nbytes < needed, found
    with pytest.raises(ValueError, match="states and activations alone exceed"):
        _ = planned(1 << 20, AUTO).shown


# -- the search ------------------------------------------------------------------------------------


def _tiny() -> Any:
    rows, _ = architectures()
    eight = {"num_hidden_layers": 8, "max_position_embeddings": 4096}
    return built("eight blocks", {**rows["mixtral-8x7b"], **eight})


def test_the_search_finds_the_fastest_mesh_of_all_that_fit() -> None:
    machine, job = hardware.machine(8, 4, "a100-40"), Job(seq=4096, micro_batch=1, global_batch=32)
    asked = {"tp": AUTO, "pp": AUTO, "cp": 1, "ep": AUTO}
    found = plan(_tiny(), machine, job, axes=asked)
    question = question_of(_tiny(), machine, job)
    every = meshes(question, asked)
    assert found.searched == len(every) > 10
    fastest: dict[Degrees, float] = {}
    for degrees, stage, how in itertools.product(every, (1, 2, 3), CHECKPOINTING):
        scheme = Scheme(stage, how, degrees=degrees)
        one, (seconds, nbytes) = question.answer(scheme), least(question, scheme)
        assert seconds <= one.step and nbytes <= one.account.peak_bytes, scheme
        if one.fits:
            fastest[degrees] = min(fastest.get(degrees, math.inf), one.step)
    expected = sorted(fastest.values())[:5]
    assert [c.step for c in found.stages] == pytest.approx(expected, rel=1e-3)
    assert found.recommended is not None and found.recommended.fits


def test_a_search_passes_meshes_over_whose_ranks_the_jobs_groups_do_not_divide() -> None:
    machine, asked = hardware.machine(16, 8, "h100-80"), {"tp": AUTO, "pp": 1, "cp": 1, "ep": 1}
    found = plan("gpt2", machine, Job(options=(("group", 8),)), axes=asked)
    assert found.stages and all(c.scheme.degrees.dp % 8 == 0 for c in found.stages)
    with pytest.raises(ValueError, match="3"):
        plan("gpt2", machine, Job(options=(("group", 3),)), axes=asked)


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
    (row,) = found["stages"]
    assert (row["stage"], row["sequence_parallel"]) == (3, False)
    assert (row["dp"], row["tp"], row["pp"]) == (2, 4, 2)
    assert set(row["account"]["seconds"]) > set(SECONDS) and row["holders"]["attention"] == 2
