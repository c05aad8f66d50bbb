"""What always holds of a plan: properties over random models, recipes and machines, and each kind of model that it takes."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onefold
from models import TinyGPT
from onefold.memory import GATHERED, GRADIENTS, MASTERS, PARAMETERS
from onefold.plan import choose
from onefold.plan.activity import Activity, assumed_dims, blocks_of, frozen_active
from onefold.plan.choose import Question, deeper, ladder, largest_micro_batch, largest_model, recommend
from onefold.plan.evaluate import bound_of, evaluate, usable_bytes
from onefold.plan.hardware import Machine, machine
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.planner import Plan, plan
from onefold.plan.replay import Replay
from onefold.plan.schema import MOMENTS, Account
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.plan.states import at_rest, units_of
from onefold.plan.subject import with_lora
from onefold.recipe import Recipe

GIB = 1 << 30


def gpus(ranks: int, capacity: float = 80 * GIB) -> Machine:
    """Ranks with this much memory each, in one node or in nodes of eight."""
    found = machine(ranks, 8 if ranks % 8 == 0 else ranks, "a100-80", "8x200g")
    return replace(found, gpu=replace(found.gpu, capacity=int(capacity)))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """An embedding, blocks of a few parameters of any size, a root with or without parameters of its own."""
    sizes = st.tuples(st.integers(1, 300), st.integers(1, 300))
    block = draw(st.lists(sizes, min_size=1, max_size=4))
    frozen = draw(st.booleans())
    root = [Parameter("head", draw(sizes))] if draw(st.booleans()) else []
    units = [UnitShape("(root)", tuple(root)), UnitShape("embed", (Parameter("embed.weight", draw(sizes)),), looks_up_only=True)]
    for i in range(draw(st.integers(1, 6))):
        first = len(block) > 1 and frozen
        named = [Parameter(f"blocks.{i}.p{k}", shape, trainable=k > 0 or not first) for k, shape in enumerate(block)]
        units.append(UnitShape(f"blocks.{i}", tuple(named)))
    return ModelShape("random", tuple(units))


stages = st.sampled_from((0, 1, 2, 3))
precisions = st.sampled_from(("fp32", "bf16", "fp16"))
options = st.fixed_dictionaries(
    {},
    optional={
        "prefetch": st.integers(0, 3),
        "in_flight": st.integers(0, 3),
        "overlap": st.booleans(),
        "reshard_after_forward": st.booleans(),
        "accumulate_dtype": st.sampled_from((torch.float32, torch.bfloat16)),
    },
)


def recipe_of(stage: int, precision: str, given: dict[str, Any]) -> Recipe | None:
    try:
        return Recipe.zero(stage, precision=precision, **given)
    except ValueError:  # options that this stage has no use for
        return None


def activity(shape: ModelShape, job: Job, micro: int, checkpointing: str = "none") -> Activity:
    return Activity.from_dims(shape, assumed_dims(shape, job.seq), micro, job.seq, 4, checkpointing)


def padding(shape: ModelShape, ranks: int) -> int:
    """Elements by which the layout of `ranks` ranks is longer than what it holds."""
    units = units_of(shape, Recipe.zero(0), ranks)
    return sum(f.numel - f.layout.content for u in units for f in u.flats)


# -- bytes -------------------------------------------------------------------------------------------------------------------------


@given(shapes(), stages, precisions, st.integers(1, 9), st.integers(1, 3), options)
@settings(max_examples=200)
def test_the_replay_of_the_engine_never_exceeds_its_bound(
    shape: ModelShape, stage: int, precision: str, ranks: int, micro_batches: int, given: dict[str, Any]
) -> None:
    recipe = recipe_of(stage, precision, given)
    if recipe is None:
        return
    units = units_of(shape, recipe, ranks)
    replay = Replay(units, recipe).run(micro_batches)
    assert replay.best_total <= bound_of(units, recipe, micro_batches), (recipe.describe(), replay.peak)
    at_end = {k: v for k, v in replay.now.items() if v}
    assert at_end == {k: v for k, v in at_rest(units).items() if k != MOMENTS}


@given(shapes(), stages, precisions, st.integers(1, 9), st.sampled_from(("", "boundary", "micro-batch")))
@settings(max_examples=60)
def test_two_micro_batches_peak_as_high_as_five(shape: ModelShape, stage: int, precision: str, ranks: int, when: str) -> None:
    recipe = recipe_of(stage, precision, {"reduce_at": when} if when else {})
    if recipe is None:
        return
    two, five = (Replay(units_of(shape, recipe, ranks), recipe).run(m).best_total for m in (2, 5))
    assert two == five


@given(shapes(), stages, precisions, st.integers(1, 9), st.integers(1, 3), st.sampled_from(CHECKPOINTING), st.booleans())
@settings(max_examples=100)
def test_a_peak_never_exceeds_the_bound_that_is_printed(
    shape: ModelShape, stage: int, precision: str, ranks: int, micro: int, checkpointing: str, offload: bool
) -> None:
    job = Job(seq=16, micro_batch=micro, precision=precision)
    for where in ("optimizer", "parameters", "nvme") if offload and stage == 3 else ("none",):
        scheme = Scheme(stage, checkpointing, where, micro)
        found = evaluate(shape, activity(shape, job, micro, checkpointing), gpus(ranks), job, scheme).account
        assert bool(found.rest_bytes) == (where in ("none", "optimizer")) and found.rest_bytes <= found.peak_bytes
        assert found.peak_bytes <= found.bound, (scheme, found)
        assert min(found.peak.values()) > 0 and min((*found.rest.values(), 1)) > 0


@given(shapes(), precisions, st.integers(1, 9))
@settings(max_examples=100)
def test_a_higher_stage_never_holds_more_at_rest(shape: ModelShape, precision: str, ranks: int) -> None:
    rests = [sum(at_rest(units_of(shape, Recipe.zero(s, precision=precision), ranks)).values()) for s in (0, 1, 2, 3)]
    # Stage 3 in fp32 drops the kept copy and stores its slice as masters: on one rank there is nothing to drop.
    assert rests[0] >= rests[1] == rests[2] >= rests[3], rests


@given(shapes(), stages, precisions, st.integers(1, 24), st.integers(1, 24))
@settings(max_examples=200)
def test_more_ranks_never_hold_more_at_rest_beyond_their_padding(
    shape: ModelShape, stage: int, precision: str, few: int, more: int
) -> None:
    """What is divided shrinks with every rank. What is replicated is as long as the layout, whose end is padded to whole intervals."""
    few, more = sorted((few, more))
    recipe = Recipe.zero(stage, precision=precision)
    low, high = (sum(at_rest(units_of(shape, recipe, n)).values()) for n in (few, more))
    # Bytes of an element that rests replicated: parameters at stages 1 and 2; parameters, masters and moments at stage 0. A cut may
    # also end later for the first rank, by less than one interval's alignment, which padding counts too; 4 bytes a parameter are counts.
    replicated = {0: 18, 1: 18, 2: 18, 3: 16}[stage]
    slack = replicated * padding(shape, more) + 4 * sum(len(u.parameters) for u in shape.units)
    assert high <= low + slack, (low, high, slack)


@given(st.integers(2, 7), st.sampled_from((1, 2, 3)), st.sampled_from(("fp32", "bf16")), st.integers(1, 4))
@settings(max_examples=40)
def test_twice_the_ranks_never_need_a_higher_peak(doublings: int, stage: int, precision: str, micro: int) -> None:
    """At stages 1 to 3 of a model whose units are large beside a rank's alignment; from two ranks on, since one reduces nothing."""
    shape, job = ModelShape.of_size(20_000_000), Job(seq=64, micro_batch=micro, precision=precision)
    own = activity(shape, job, micro)
    peaks = [evaluate(shape, own, gpus(2**k), job, Scheme(stage, micro_batch=micro)).account.peak_bytes for k in range(1, doublings + 1)]
    assert all(b <= a * 1.005 for a, b in itertools.pairwise(peaks)), peaks


@given(st.integers(1, 5), st.sampled_from((0, 1, 2, 3)), st.sampled_from(CHECKPOINTING))
@settings(max_examples=40)
def test_a_larger_micro_batch_never_needs_less(micro: int, stage: int, checkpointing: str) -> None:
    shape, job = ModelShape.of_size(5_000_000), Job(seq=128)
    one, more = (
        evaluate(shape, activity(shape, job, m, checkpointing), gpus(4), job, Scheme(stage, checkpointing, "none", m)).account.peak_bytes
        for m in (micro, micro + 1)
    )
    assert one <= more


def test_stage_1_holds_whole_gradients_between_micro_batches_and_stage_2_does_not() -> None:
    shape, job = ModelShape.of_size(20_000_000), Job(seq=16, global_batch=16)
    one, two = (sum(evaluate(shape, activity(shape, job, 1), gpus(4), job, Scheme(s)).account.ledger.values()) for s in (1, 2))
    assert one - two > 3 * shape.numel


# -- offload and LoRA --------------------------------------------------------------------------------------------------------------


def test_offload_moves_every_state_once_and_none_is_lost() -> None:
    shape, job, ranks = ModelShape.of_size(40_000_000), Job(seq=16), 4
    own = activity(shape, job, 1)

    def account(stage: int, offload: str) -> Account:
        return evaluate(shape, own, gpus(ranks), job, Scheme(stage, "none", offload)).account

    each = shape.numel / ranks
    kept, optimizer, every, disk = (account(3, o) for o in ("none", "optimizer", "parameters", "nvme"))
    assert optimizer.rest == {PARAMETERS: pytest.approx(2 * each, rel=0.01)}
    assert optimizer.host == pytest.approx(16 * each, rel=0.01)  # masters, two moments, gradients
    assert every.rest == {} and every.host == pytest.approx(18 * each, rel=0.01)
    assert disk.nvme == pytest.approx(14 * each, rel=0.01) and disk.host < every.host / 3
    assert kept.host == kept.nvme == 0 and kept.rest_bytes == pytest.approx(12 * each, rel=0.01)
    assert kept.peak_bytes > optimizer.peak_bytes
    assert not {MASTERS, MOMENTS, GRADIENTS} & set(optimizer.peak)
    assert every.peak[GATHERED] > 0
    two = account(2, "optimizer")
    assert two.rest == {PARAMETERS: pytest.approx(2 * shape.numel, rel=0.01)} and two.host == optimizer.host
    assert optimizer.seconds["step"] >= kept.seconds["step"]


def test_what_is_offloaded_never_hides_a_moment_that_is_larger_without_it() -> None:
    """Where gradients make the highest moment on the device, activations make it once they are gone."""
    shape, job = ModelShape.of_size(2_000_000), Job(seq=512, micro_batch=4)
    own = activity(shape, job, 4)
    top = max(s.peak for s in own.slots)
    for offload in ("optimizer", "parameters", "nvme"):
        assert evaluate(shape, own, gpus(2), job, Scheme(3, "none", offload, 4)).account.peak_bytes >= top


def test_an_offloaded_scheme_is_planned_and_not_run() -> None:
    found = plan(ModelShape.of_size(200_000_000), gpus(2, 2.1 * GIB), Job(seq=32), largest=False)
    assert found.recommended is not None and found.recommended.scheme.offload == "optimizer"
    assert not found.recommended.scheme.runs
    with pytest.raises(NotImplementedError, match="optimizer on the host"):
        _ = found.recipe


def test_lora_holds_states_of_its_adapters_only() -> None:
    found = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(lora_rank=16), largest=False)
    full = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(), largest=False)
    adapters = found.model.trainable
    assert 0 < adapters < full.model.numel / 100 and found.model.numel == full.model.numel + adapters
    assert found.stages[0].account.rest[MOMENTS] == pytest.approx(8 * adapters, rel=0.01)
    assert found.stages[0].account.rest[PARAMETERS] == pytest.approx(2 * found.model.numel, rel=0.01)
    assert found.stages[1].account.wire_bytes < full.stages[1].account.wire_bytes / 100
    # Frozen matrices have no gradient of their own: two thirds of the products.
    ratio = found.stages[1].account.seconds["compute"] / full.stages[1].account.seconds["compute"]
    assert 0.66 < ratio < 0.72


def test_lora_counts_the_experts_that_a_token_passes() -> None:
    mixtral = plan("mixtral-8x7b", machine(8, 8, "h100-80"), Job(), largest=False).model
    adapted = with_lora(mixtral, 8)
    dense, routed = 8 * (4096 + 4096) * 2 + 8 * (4096 + 1024) * 2 + 8 * (4096 + 8), 8 * (2 * 4096 + 3 * 14_336)
    assert adapted.numel - mixtral.numel == 32 * (dense + 8 * routed), "every expert has adapters of its own"
    assert adapted.active_numel - mixtral.active_numel == 32 * (dense + 2 * routed)
    assert frozen_active(adapted) == mixtral.active_numel


def test_lora_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="no blocks with matrices"):
        plan(7e9, machine(8), Job(lora_rank=8))


# -- the choice --------------------------------------------------------------------------------------------------------------------


def question(shape: ModelShape, ranks: int, capacity: float, job: Job) -> Question:
    return Question(shape, lambda m, c: activity(shape, job, m, c), gpus(ranks, capacity), job)


def test_the_ladder_goes_from_stages_to_recompute_to_the_host_to_nvme() -> None:
    order = [(s.stage, s.checkpointing, s.offload) for s in ladder(Job(), 8)]
    assert order == [
        *[(stage, how, "none") for how in ("none", "selective", "full") for stage in (1, 2, 3)],
        (2, "full", "optimizer"),
        (3, "full", "optimizer"),
        (3, "full", "parameters"),
        (3, "full", "nvme"),
    ]
    assert [s.stage for s in ladder(Job(offload="none", checkpointing="none"), 1)] == [0]
    assert {s.checkpointing for s in ladder(Job(offload="optimizer"), 8)} == set(CHECKPOINTING)
    assert [(s.stage, s.offload) for s in ladder(Job(checkpointing="full", offload="none"), 4, (2,))] == [(2, "none")]
    with pytest.raises(ValueError, match="use stage 3"):
        list(ladder(Job(offload="nvme"), 4, (1,)))


@given(st.floats(1.2, 40), st.sampled_from((1, 2, 4, 8)), st.sampled_from((0, 1, 4)))
@settings(max_examples=60)
def test_what_is_recommended_is_the_first_of_the_ladder_that_fits(capacity: float, ranks: int, micro: int) -> None:
    asked = question(ModelShape.of_size(300_000_000), ranks, capacity * GIB, Job(seq=256, micro_batch=micro))
    best = recommend(asked)
    for scheme in ladder(asked.job, ranks):
        found = asked.answer(scheme)
        if best is not None and (scheme.stage, scheme.checkpointing, scheme.offload) == (
            best.scheme.stage, best.scheme.checkpointing, best.scheme.offload,
        ):  # fmt: skip
            assert best.fits and best.account.peak_bytes <= usable_bytes(asked.machine)
            return
        assert not found.fits, (str(scheme), best)
    assert best is None


def test_less_memory_never_means_a_lower_rung() -> None:
    shape, rungs = ModelShape.of_size(300_000_000), []
    order = [(s.stage, s.checkpointing, s.offload) for s in ladder(Job(), 4)]
    for capacity in (30, 6, 5, 4, 3.5, 3, 2.5, 2):
        best = recommend(question(shape, 4, capacity * GIB, Job(seq=256, micro_batch=4)))
        rungs.append(order.index((best.scheme.stage, best.scheme.checkpointing, best.scheme.offload)) if best else len(order))
    assert rungs == sorted(rungs) and rungs[0] == 0 and len(set(rungs)) >= 4, rungs


@given(st.floats(3, 30), st.sampled_from((0, 96, 120)), st.sampled_from(CHECKPOINTING))
@settings(max_examples=40)
def test_the_largest_micro_batch_fits_and_the_next_does_not(capacity: float, global_batch: int, checkpointing: str) -> None:
    job = Job(seq=128, micro_batch=0, global_batch=global_batch)
    asked = question(ModelShape.of_size(100_000_000), 4, capacity * GIB, job)
    found = largest_micro_batch(asked, Scheme(1, checkpointing))
    sizes = [b for b in range(1, 31) if not global_batch or global_batch // 4 % b == 0]
    if found is None:
        assert not asked.answer(Scheme(1, checkpointing, "none", 1)).fits
        return
    assert found.fits
    size = found.scheme.micro_batch
    if global_batch:
        assert global_batch % (4 * size) == 0 and found.accumulation == global_batch // 4 // size
        later = [b for b in sizes if b > size]
    else:
        later = [size + 1]
    for b in later[:1]:
        assert not asked.answer(Scheme(1, checkpointing, "none", b)).fits


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("capacity", [4, 12])
def test_the_largest_model_fits_and_one_block_more_does_not(stage: int, capacity: int) -> None:
    job = Job(seq=128)
    asked = question(ModelShape.of_size(100_000_000), 4, capacity * GIB, job)

    def build(shape: ModelShape) -> Any:
        dims = assumed_dims(shape, job.seq)
        return lambda m, c: Activity.from_dims(shape, dims, m, job.seq, 2, c)

    numel = largest_model(asked, Scheme(stage), build)
    each = blocks_of(asked.model)[0].numel
    blocks = (numel - (asked.model.numel - each * len(blocks_of(asked.model)))) // each
    assert deeper(asked.model, blocks).numel == numel
    assert choose._at(asked, Scheme(stage), build, blocks).fits
    assert not choose._at(asked, Scheme(stage), build, blocks + 1).fits


def test_what_fits_nowhere_here_is_told_with_what_would_do() -> None:
    shape = ModelShape.of_size(300_000_000)
    fixed = plan(shape, gpus(4, 3.6 * GIB), Job(seq=32), stages=(1,), largest=False)
    assert fixed.recommended is not None
    wide = plan(shape, gpus(2, 4 * GIB), Job(seq=256, micro_batch=64, checkpointing="none", offload="none"), largest=False)
    assert wide.recommended is None and "exceeds" in wide.why_not and "micro-batch 1 would fit" in wide.why_not
    more = plan(shape, gpus(2, 2.2 * GIB), Job(seq=256, offload="none"), largest=False)
    assert more.recommended is None and " devices stage 3" in more.why_not, more.why_not
    ranks = int(more.why_not.split(" devices")[0].rsplit(" ", 1)[1])
    assert recommend(question(shape, ranks, 2.2 * GIB, Job(seq=256))) is not None
    never = plan(shape, gpus(2, 1.01 * GIB), Job(seq=4096), largest=False)
    assert never.recommended is None and "No number of devices would do" in never.why_not
    with pytest.raises(ValueError, match="does not fit"):
        _ = never.recipe


def test_next_steps_save_more_and_more_behind_the_recommendation() -> None:
    found = plan("llama-3-8b", machine(8, 8, "h100-80"), Job(seq=2048), largest=False)
    assert found.recommended is not None and found.next_steps
    peaks = [found.recommended.account.peak_bytes, *(c.account.peak_bytes for c in found.next_steps)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    order = [s.with_(micro_batch=1) for s in ladder(found.job, 8)]
    assert [order.index(c.scheme) for c in found.next_steps] == sorted(order.index(c.scheme) for c in found.next_steps)


# -- what may be asked about -------------------------------------------------------------------------------------------------------


def make_gpt() -> nn.Module:
    return TokenModel()


class TokenModel(nn.Module):
    """A language model of its own: takes input_ids and labels, returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyGPT(width=32, depth=4, length=64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)


def test_a_number_a_name_a_folder_a_factory_and_a_module_are_all_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {
        "number": 1e7,
        "name": "gpt2",
        "folder": tmp_path,
        "file": str(tmp_path / "config.json"),
        "factory": "onefold_tests_factory:make_gpt",
        "module": TokenModel(),
    }
    sys.modules["onefold_tests_factory"] = sys.modules[__name__]
    try:
        found = {kind: plan(model, gpus(2), Job(seq=12), largest=False) for kind, model in asked.items()}
    finally:
        del sys.modules["onefold_tests_factory"]
    for kind, one in found.items():
        assert one.recommended is not None and one.recommended.scheme.stage == 1, kind
        assert one.source == ("from dimensions" if kind in ("number", "name") else "traced from the module")
        assert [c.scheme.stage for c in one.stages] == [0, 1, 2, 3]
    assert found["folder"].model.numel == found["file"].model.numel
    assert found["factory"].stages[1].account == found["module"].stages[1].account
    assert found["number"].model.numel == 10_000_000
    assert next(p.device.type for p in asked["module"].parameters()) == "cpu"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gtp2", "Did you mean 'gpt2'"),
        (0, "positive"),
        (math.inf, "positive"),
        (math.nan, "positive"),
        (True, "positive"),
        ([], "expected"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(model, machine(8))


def test_a_module_that_is_no_language_model_needs_a_batch() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    with pytest.raises(ValueError, match=r"give onefold\.plan a batch in Python"):
        plan(module, gpus(2))
    found = plan(module, gpus(2), Job(precision="fp32"), batch=lambda n: (torch.zeros(n, 16),), largest=False)
    assert found.recommended is not None and found.stages[0].account.rest[PARAMETERS] >= 4 * found.model.numel


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"seq": 0}, "seq=0"),
        ({"micro_batch": -1}, "0 or more"),
        ({"precision": "int8"}, "expected one of"),
        ({"optimizer": "adamm"}, "adamw"),
        ({"checkpointing": "half"}, "none, selective, full"),
        ({"offload": "tape"}, "nvme"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_a_sentence(job: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Job(**job)


def test_a_global_batch_that_does_not_divide_names_one_that_does() -> None:
    with pytest.raises(ValueError, match="use 16"):
        plan("gpt2", gpus(8), Job(global_batch=15, micro_batch=2))
    with pytest.raises(ValueError, match="use 16"):
        plan("gpt2", gpus(8), Job(global_batch=15, micro_batch=0))


# -- what comes out ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(TokenModel(), gpus(2), Job(seq=12, global_batch=16))


def test_a_plan_goes_through_json_and_comes_back(small: Plan) -> None:
    said = json.loads(json.dumps(small.to_json(), allow_nan=False))
    assert [Account.from_json(c["account"]) for c in said["stages"]] == [c.account for c in small.stages]
    assert Account.from_json(said["recommended"]["account"]) == small.stages[1].account
    assert said["largest_micro_batch"].keys() == {"0", "1", "2", "3"}
    assert said["model"]["parameters"] == sum(p.numel() for p in TokenModel().parameters())


def test_the_recipe_that_comes_out_shards_the_model(small: Plan) -> None:
    recipe = small.recipe
    assert recipe.stage == 1 and recipe.compute_dtype is torch.bfloat16
    model = onefold.shard(TokenModel(), recipe)
    ids = torch.zeros((1, 12), dtype=torch.long)
    model(input_ids=ids, labels=ids).float().backward()
    assert onefold.engine_of(model).memory.now()


@pytest.mark.parametrize(
    ("job", "total"),
    [
        (Job(), 18), (Job(precision="fp32"), 16), (Job(precision="fp16", accumulate="fp16"), 16), (Job(optimizer="sgd"), 10),
    ],
)  # fmt: skip
def test_the_convention_is_that_of_the_recipe(job: Job, total: int) -> None:
    found = plan(1e8, gpus(1), job, largest=False)
    assert f"= {total}; gradients are gone between steps" in found.notes[0]
    gradients = {"fp32": 4, "fp16": 2}[job.accumulate]
    assert found.stages[0].account.rest_bytes == pytest.approx((total - gradients) * found.model.numel, rel=0.01)
