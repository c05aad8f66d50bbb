"""`zero.Init`, `zero.GatheredParameters`, what parameters tell of themselves, and the `safe_get_*`
and `safe_set_*` functions.

`Made` is a class of this file: it does in its constructor what models do with their weights there.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
from ds.engines import (
    Plain,
    adam,
    apart,
    batch,
    json_of,
    loss_of,
    made,
    masters,
    served,
    some,
    train,
    warnings_of,
)
from on_ranks import on_ranks, slow
from reference import built, on_each_rank
from zoo import TinyMLP

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


class Made(nn.Module):
    """What constructors do with weights that are there: read, write, tie, replace, cast, alias."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width, padding_idx=0)
        early = self.embed.weight.data  # written after others were made
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))
        nn.init.orthogonal_(self.layers[0].weight)
        self.layers[1].bias.data.fill_(0.25)
        self.register_buffer("first", self.layers[1].weight[0].detach().clone())
        self.gru = nn.GRU(width, width, num_layers=2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embed.weight
        early.mul_(0.5)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.1))
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.apply(self.initialize)
        self.layers[0].weight = nn.Parameter(self.layers[1].weight.detach().clone())
        self.layers[2].bfloat16()
        self.total = float(sum(p.double().sum() for p in self.layers.parameters()))

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)
        if isinstance(module, nn.Embedding):
            module.weight.data[module.padding_idx].zero_()


def under_init(make: Callable[[], nn.Module], seed: int = 0, **options: Any) -> Any:
    """The model; rank 1 draws other numbers."""
    torch.manual_seed(seed if dist.get_rank() == 0 else seed + 5)
    with served().zero.Init(**options):
        return make()


def whole(model: nn.Module) -> list[Tensor]:
    with served().zero.GatheredParameters(model):
        return [p.detach().clone() for p in model.parameters()]


def is_divided(param: Any) -> bool:
    return getattr(param, "ds_status", None) == served().zero.ZeroParamStatus.NOT_AVAILABLE


# -- zero.Init -------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_model_made_under_init_has_rank_0s_values_to_the_bit(limit: int) -> None:
    torch.manual_seed(3)
    plain = Made()
    with looks.init_divides_above(limit):
        model = under_init(Made, 3)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.head.weight is model.embed.weight
    for ours, theirs in zip(whole(model), plain.parameters(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if dist.get_rank() == 0:
        assert model.total == plain.total and torch.equal(model.first, plain.first)


@on_ranks(2, fresh=True)
def test_no_rank_holds_the_model_whole_while_it_is_made_and_sharded() -> None:
    """24 layers of 4 MiB; a rank keeps half of each, and up to 8 MiB whole while it is made."""
    mib, highest = 1 << 20, [0]

    def layer() -> nn.Module:
        made_one = nn.Linear(1024, 1024, bias=False)
        highest[0] = max(highest[0], looks.living())
        return made_one

    def make() -> nn.Module:
        model = nn.Sequential(*(layer() for _ in range(24)))
        model.apply(lambda m: m.weight.data.mul_(2.0) if isinstance(m, nn.Linear) else None)
        return model

    with looks.init_divides_above(8 * mib):
        model = under_init(make)
        rest = looks.living()
        engine = served().initialize(model=model, config=json_of(3))[0]
    assert 48 * mib <= rest < 56 * mib, rest / mib
    assert highest[0] < (48 + 8 + 16) * mib, highest[0] / mib
    assert sum(looks.held(engine.module)["device"].values()) < 56 * mib


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_divided_model_is_gathered_written_and_trained(precision: str) -> None:
    ds = served()
    given = json_of(3, **PRECISIONS[precision])
    model = under_init(TinyMLP, config_dict_or_path={**given, "train_batch_size": "auto"})
    params: list[Any] = list(model.parameters())
    expected = built(TinyMLP)
    low = torch.bfloat16 if precision == "bf16" else torch.float32
    for ours, theirs in zip(whole(model), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().to(low))
    with ds.zero.GatheredParameters(set(params)):
        # Inside another: it is written
        with ds.zero.GatheredParameters(params[0], modifier_rank=1):
            if dist.get_rank() == 1:
                params[0].data.fill_(0.5)
        assert (params[0] == 0.5).all()
    assert is_divided(params[0])
    engine = ds.initialize(model=model, config=given)[0]
    assert all(a is b for a, b in zip(params, engine.module.parameters(), strict=True))
    with torch.no_grad():
        expected.to(low).float()
        expected.enter.weight.fill_(0.5)
    plain = Plain(expected)
    train(engine, range(2), low)
    plain.train(2)
    assert apart(masters(engine), plain.weights()) < (2e-2 if precision == "bf16" else 1e-5)


@on_ranks(2)
def test_what_needs_values_raises_outside_and_shapes_and_writes_of_data_do_not() -> None:
    def two() -> nn.Sequential:
        return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))

    model, plain = under_init(two, 1), built(two, 1)
    weight = model[0].weight
    for call in (
        lambda: model(batch(0)),
        lambda: weight.data.zero_(),
        lambda: nn.init.zeros_(weight),
        lambda: model.load_state_dict(plain.state_dict()),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(RuntimeError, match=r"zero\.GatheredParameters\(param\)"):
            call()
    assert tuple(model.state_dict()["0.weight"].shape) == (5, 7)
    model[1].bias.data = torch.full((3,), 2.0 + dist.get_rank())  # rank 0's value counts
    engine = served().initialize(model=model, config=json_of(3))[0]
    expected = [*list(plain.parameters())[:3], torch.full((3,), 2.0)]
    assert all(map(torch.equal, whole(engine.module), expected))
    train(engine, range(1))


def made_apart(kind: str) -> None:
    """One rank does with a model what the others do not."""
    first, zero = dist.get_rank() == 0, served().zero

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        if first and kind == "reads":
            model[0].weight.mean()
        if first and kind == "fails":
            raise ValueError("no vocabulary")
        model.append(nn.Linear(3, 2))
        if first and kind == "makes more":
            model.append(nn.Linear(3, 3))
        if kind == "reads another":
            model[0 if first else 1].weight.mean()
        return model

    with looks.init_divides_above(0):
        model = under_init(make)
    at = 0 if first or kind == "fails in Gathered" else 2
    with zero.GatheredParameters(model[at].weight, modifier_rank=0):
        if first and kind == "fails in Gathered":
            raise ValueError("no vocabulary")


APART = {
    "reads": "on rank 0 a constructor reads or changes a parameter of shape (5, 6)",
    "reads another": "on ranks 1, 2 a constructor reads or changes a parameter of shape (3, 5)",
    "makes more": "on ranks 1, 2 the model has been made",
    "gathers another": "GatheredParameters of a parameter of shape (5, 6) begins",
    "fails in Gathered": "rank 0 ended with ValueError: no vocabulary",
    "fails": "rank 0 ended with ValueError: no vocabulary",
}


@on_ranks(3)
@pytest.mark.parametrize("kind", APART)
def test_a_rank_that_does_something_else_with_a_model_stops_all_at_once(kind: str) -> None:
    """What they have caught does not keep them from making another model."""
    start = time.monotonic()
    with pytest.raises((onefold.StallError, ValueError)) as caught:
        made_apart(kind)
    said = str(caught.value)
    if "fails" in kind:
        assert ("no vocabulary" if dist.get_rank() == 0 else APART[kind]) in said
    else:
        assert APART[kind] in said and "zero.GatheredParameters(param, modifier_rank=0)" in said
    assert time.monotonic() - start < 20, "the group has 30 minutes"
    del caught
    for ours, theirs in zip(whole(under_init(TinyMLP)), built(TinyMLP).parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- what parameters tell of themselves ------------------------------------------------------------


def rate_free(engine: Any) -> float:
    with torch.no_grad():
        return loss_of(engine(batch(0))).item()


@on_ranks(2)
def test_parameters_tell_their_facts_and_keep_what_is_written_to_their_part() -> None:
    ds, count, rank = served(), dist.get_world_size(), dist.get_rank()
    away, here = ds.zero.ZeroParamStatus.NOT_AVAILABLE, ds.zero.ZeroParamStatus.AVAILABLE
    model = under_init(TinyMLP, config_dict_or_path=json_of(3))
    plain, params = built(TinyMLP), list(model.parameters())
    ids = [p.ds_id for p in params]
    assert len(set(ids)) == len(ids) and on_each_rank(ids) == [ids] * count
    for p, theirs in zip(params, plain.parameters(), strict=True):
        numel, each = theirs.numel(), math.ceil(theirs.numel() / count)
        assert (tuple(p.ds_shape), p.ds_numel, p.ds_status) == (tuple(theirs.shape), numel, away)
        mine = theirs.detach().flatten()[rank * each : (rank + 1) * each]
        assert p.ds_tensor.shape == (each,) and torch.equal(p.ds_tensor[: mine.numel()], mine)
    weight, bias = model.enter.weight, model.enter.bias
    # What is written to a part is gathered, and computed with by the engine
    weight.ds_tensor.fill_(1.0 + rank)
    weight.all_gather()
    assert weight.ds_status == here and weight.flatten().tolist() == [1.0] * 35 + [2.0] * 35
    with torch.no_grad():
        weight.fill_(0.125)
    weight.partition(has_been_updated=True)
    weight.all_gather([weight, bias])
    assert (weight == 0.125).all()
    weight.partition([weight, bias])
    bias.ds_tensor.fill_(0.5)
    engine = ds.initialize(model=model, config=json_of(3))[0]
    assert ids == [p.ds_id for p in params] and {p.ds_status for p in params} == {away}
    model.leave.weight.ds_tensor.mul_(2)
    with torch.no_grad():
        plain.enter.weight.fill_(0.125)
        plain.enter.bias.fill_(0.5)
        plain.leave.weight.mul_(2)
    assert rate_free(engine) == pytest.approx(rate_free(plain), rel=1e-5)
    assert weight.ds_status == away


# -- zero.GatheredParameters -----------------------------------------------------------------------


@on_ranks(2)
def test_gathered_parameters_keep_the_modifiers_values_and_drop_others() -> None:
    gathered, rank = served().zero.GatheredParameters, dist.get_rank()
    for stage in (1, 3):
        engine, plain = made(stage), Plain()
        weight, bias = engine.module.enter.weight, engine.module.enter.bias
        before = masters(engine)[0]
        with gathered([weight, nn.Parameter(torch.ones(2))]):  # read only, one of them plain
            assert torch.equal(weight, before)
            weight.data.fill_(7.0)
        assert torch.equal(masters(engine)[0], before)
        with gathered([weight, bias], modifier_rank=1), torch.no_grad():
            if rank == 1:
                weight.mul_(2.0)
                bias.fill_(-1.0)
        with torch.no_grad():
            plain.model.enter.weight.mul_(2.0)
            plain.model.enter.bias.fill_(-1.0)
        assert apart(masters(engine), plain.weights()) == 0
        assert rate_free(engine) == pytest.approx(rate_free(plain.model), rel=1e-5)


@on_ranks(2)
def test_parameters_of_two_engines_are_gathered_and_written_together() -> None:
    gathered, rank = served().zero.GatheredParameters, dist.get_rank()
    for stage in (1, 3):
        one, other = made(stage), made(stage)
        expected = [3 * p for p in masters(one)]
        pairs = [list(engine.module.parameters()) for engine in (one, other)]
        with gathered({*pairs[0], *pairs[1]}, modifier_rank=0), torch.no_grad():
            if rank == 0:
                for mine, follows in zip(*pairs, strict=True):
                    follows.data.mul_(2.0).add_(mine.data)
        assert all(map(torch.equal, masters(other), expected))


@on_ranks(2)
@pytest.mark.parametrize("precision", list(PRECISIONS)[:2])
def test_a_write_inside_a_context_that_reads_is_kept_and_nothing_else_changes(
    precision: str,
) -> None:
    gathered, rank = served().zero.GatheredParameters, dist.get_rank()
    for stage, checks in ((1, False), (3, True)):
        engine = made(stage, zero={"enable_sanity_checks": checks}, **PRECISIONS[precision])
        everything = list(engine.module.parameters())
        weight = everything[0]
        expected = masters(engine)
        for outer in (everything, [weight]):
            with gathered(outer):
                with gathered(weight, modifier_rank=1), torch.no_grad():
                    if rank == 1:
                        weight[0] = 0.5 * len(outer)
                assert torch.equal(weight[0], torch.full_like(weight[0], 0.5 * len(outer)))
            expected[0][0] = 0.5 * len(outer)
            assert all(map(torch.equal, masters(engine), expected)), len(outer)
        said = pytest.raises(RuntimeError, match="in-place") if checks else nullcontext()
        with said, gathered(weight):
            with gathered(weight, modifier_rank=1), torch.no_grad():
                weight[0] = 2.0 + rank
            with torch.no_grad():
                weight[1] = 7.0 + rank  # is kept by nobody
        expected[0][0] = 3.0
        assert all(map(torch.equal, masters(engine), expected))


@on_ranks(2)
def test_after_an_error_parameters_are_as_they_were(folder: Path) -> None:
    gathered, model = served().zero.GatheredParameters, built(TinyMLP)
    model.gain = nn.Parameter(torch.empty(4, device="meta"))
    made(3, model)
    weight, gain = model.enter.weight, model.gain
    for context in (gathered(model), gathered(gain)):
        with pytest.raises(onefold.UninitializedError), context:
            pass
    with pytest.raises(onefold.UninitializedError):
        gain.all_gather()
    assert is_divided(weight) and is_divided(gain)
    with onefold.full_params(model, write=True), torch.no_grad():
        model.gain.fill_(0.5)
    with gathered(model):
        assert (gain == 0.5).all() and torch.equal(weight, built(TinyMLP).enter.weight)
        with pytest.raises(RuntimeError, match="to the outer"), onefold.full_params(model, True):
            pass
    disk = {"device": "nvme", "nvme_path": str(folder)}
    engine = made(3, zero={"offload_optimizer": disk, "offload_param": disk})
    weight = engine.enter.weight
    weight.all_gather()
    with torch.no_grad():
        weight.fill_(0.25)
    weight.partition(has_been_updated=True)
    assert is_divided(weight) and (masters(engine)[0] == 0.25).all(), "written on NVMe"
    with pytest.raises(ValueError, match="expected the whole parameter's"):  # noqa: SIM117
        with gathered(engine.enter.bias, modifier_rank=0):
            engine.enter.bias.data = torch.zeros(3)


@on_ranks(2)
@pytest.mark.parametrize("modifier", [None, 0])
def test_entering_in_vain_starts_no_exchange(modifier: int | None) -> None:
    """One rank may fail alone, while the others still gather."""
    from onefold.deepspeed import divided

    with looks.init_divides_above(0):
        model = under_init(Made)
    before, held = whole(model), [p for p in model.parameters() if is_divided(p)]
    names = "broadcast", "all_gather", "all_gather_object"

    def fails(params: Any) -> None:
        stack.enter_context(mock.patch.multiple(dist, **dict.fromkeys(names, exchanged)))
        raise MemoryError

    exchanged = mock.Mock()
    with ExitStack() as stack, pytest.raises(MemoryError):
        stack.enter_context(mock.patch.object(divided, "gather", fails))
        with served().zero.GatheredParameters(model, modifier_rank=modifier):
            pass
    assert held and not exchanged.called and all(map(is_divided, held))
    assert all(map(torch.equal, before, whole(model)))


@on_ranks(3)
def test_a_modifier_is_counted_in_the_group_of_the_engine() -> None:
    last, groups = dist.get_rank() != 1, [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[dist.get_rank() > 0]
    for stage in (1, 3):
        engine, *_ = served().initialize(model=built(TinyMLP), config=json_of(stage), group=group)
        assert engine.data_parallel_group is group
        weight, modifier = engine.enter.weight, group.size() - 1
        with served().zero.GatheredParameters(weight, modifier_rank=modifier), torch.no_grad():
            weight.fill_(0.5 if last else 7.0)
        assert (masters(engine)[0] == 0.5).all()


@on_ranks(2)
def test_a_model_is_taken_over_from_another_engine() -> None:
    expected = None
    for stages in ([3], [3, 3], [0, 3], [3, 2, 3]):
        model = built(TinyMLP)
        for stage in stages:
            engine = made(stage, model)
            assert engine.zero_optimization_stage() == stage
            first = rate_free(engine)
        train(engine, range(2))
        expected = expected or (first, masters(engine))
        assert first == expected[0] and apart(masters(engine), expected[1]) == 0, stages


# -- gradients, master weights and states ----------------------------------------------------------

STATES = ("exp_avg", "exp_avg_sq")
TIERS = [(0, "none"), (1, "none"), (1, "cpu"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")]


def odd() -> nn.Module:
    """Parameters of which ranks hold all, a part or nothing, and a frozen layer."""
    model = nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 7), nn.Linear(7, 3))
    model[1].requires_grad_(False)
    return model


def whole_of(stage: int, kind: str, param: Any, *key: str) -> Tensor | None:
    """By `safe_get_full_*`; the local elements of both ranks, in order, are the same."""
    utils = served().utils
    full = getattr(utils, f"safe_get_full_{kind}")(param, *key)
    local = getattr(utils, f"safe_get_local_{kind}")(param, *key)
    parts = [part for part in on_each_rank(local) if part is not None]
    if full is None:
        assert not parts
        return None
    assert full.dtype == torch.float32 and all(part.dim() == 1 for part in parts)
    assert torch.equal(torch.cat(parts) if stage else parts[0], full.flatten())
    return full


def read_and_write(stage: int, tier: str, folder: str, precision: str) -> None:
    utils, whole = served().utils, partial(whole_of, stage)
    zero = {"offload_optimizer": {"device": tier, "nvme_path": folder}}
    engine = made(stage, built(odd), zero, optimizer=adam(), **PRECISIONS[precision])
    plain = Plain(built(odd))
    own = torch.optim.AdamW(
        [p for p in plain.model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0
    )
    near = {"rtol": 1e-4, "atol": 1e-7} if precision == "fp32" else {"rtol": 0.1, "atol": 0.05}
    pairs = list(zip(engine.module.parameters(), plain.model.parameters(), strict=True))
    trained = [pair for pair in pairs if pair[1].requires_grad]
    low = next(engine.module.parameters()).dtype

    def passes() -> None:
        engine.backward(loss_of(engine(batch(0).to(low))))
        own.zero_grad()
        loss_of(plain.model(batch(0))).backward()
        grads = [engine.cur_scale * grad for grad in plain.gradients()]
        for (mine, theirs), grad in zip(pairs, grads, strict=True):
            found = whole("grad", mine)
            if theirs.requires_grad:
                torch.testing.assert_close(found, grad, **near)
                theirs.grad = grad / engine.cur_scale
            else:
                assert found is None

    def steps() -> None:
        engine.step()
        own.step()
        for mine, theirs in trained:
            torch.testing.assert_close(whole("fp32_param", mine), theirs.detach(), **near)
            for key in STATES:
                found = whole("optimizer_state", mine, key)
                torch.testing.assert_close(found, own.state[theirs][key], **near)

    passes()
    steps()
    # What is written is read again, and is what the next step computes with
    passes()
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in trained:
        new = torch.rand(theirs.shape, generator=generator)
        held = new.to(low).float()
        utils.safe_set_full_grad(mine, new.to(low))
        assert torch.equal(whole("grad", mine), held)
        utils.safe_update_full_grad_vectorized([mine], lambda grad, param: grad * 2)
        assert torch.equal(whole("grad", mine), 2 * held)
        theirs.grad = 2 * held / engine.cur_scale
        utils.safe_set_full_fp32_param(mine, new + 1)
        utils.safe_set_local_fp32_param(mine, utils.safe_get_local_fp32_param(mine) * 2)
        theirs.data = 2 * (new + 1)
        for at, key in enumerate(STATES):
            utils.safe_set_full_optimizer_state(mine, new + at, key)
            state = utils.safe_get_local_optimizer_state(mine, key)
            utils.safe_set_local_optimizer_state(mine, state * 2, key)
            own.state[theirs][key] = 2 * (new + at)
    steps()
    frozen = engine.module[1].weight
    with pytest.raises(ValueError, match="no master weights"):  # on every rank
        utils.safe_set_full_fp32_param(frozen, torch.zeros(frozen.shape))
    if dist.get_rank() == 0:  # a rank may ask for its own elements alone
        utils.safe_get_local_fp32_param(trained[0][0])
    passes()


@on_ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_masters_and_states_are_those_of_one_process(
    precision: str, folder: Path, every: bool
) -> None:
    rows = TIERS if precision == "fp32" else TIERS[:: 3 if every else 6]
    for stage, tier in some(rows, every, precision == "bf16"):
        read_and_write(stage, tier, str(folder), precision)


# -- leaf modules ----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_configuration_may_name_leaf_modules_of_which_each_rank_uses_another_part() -> None:
    class OneOf(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self[dist.get_rank()](x))

    def experts() -> nn.Module:
        layers = [OneOf(nn.Linear(7, 7) for _ in range(2)) for _ in range(2)]
        return nn.Sequential(*layers, nn.Linear(7, 3))

    leaf = {"classes": ["OneOf"], "names": ["2", "tail"]}
    with warnings_of() as said:
        engine, plain = made(3, built(experts), {"leaf_module": leaf}), Plain(built(experts))
    assert any("leaf_module.names fits no module: ['tail']" in line for line in said)
    assert all(served().utils.z3_leaf_parameter(p) for p in engine.module.parameters())
    train(engine, range(2))
    plain.train(2)
    assert apart(masters(engine), plain.weights()) < 1e-5


# -- transformers under zero.Init ------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@slow
@on_ranks(2, fresh=True, server="served")
def test_transformers_reads_a_folder_without_any_rank_holding_the_model(folder: Path) -> None:
    pytest.importorskip("transformers")
    import ctypes
    import threading

    import transformers as hf
    from transformers.integrations import HfDeepSpeedConfig

    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # malloc gives freed blocks back at once
    shape = {**SMALL, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}
    llama = hf.LlamaConfig(**shape, vocab_size=8192, tie_word_embeddings=False)
    if dist.get_rank() == 0:
        hf.LlamaForCausalLM(llama).save_pretrained(folder, max_shard_size="40MB")
    dist.barrier()
    in_force = HfDeepSpeedConfig(json_of(3, bf16={"enabled": True}))
    before, highest, done = resident(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], resident())

    thread = threading.Thread(target=sample)
    thread.start()
    model = hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    done.set()
    thread.join()
    del in_force
    mib, size = 1 << 20, sum(4 * p.ds_numel for p in model.parameters())
    assert all(map(is_divided, model.parameters()))
    # 64 MiB of whole parameters, and a share, at which both ranks arrive in fp32
    assert highest[0] - before < size / 2 + 104 * mib < size
    assert resident() - before < size / 4 + 16 * mib
    theirs = hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        with served().zero.GatheredParameters(ours):
            assert torch.equal(ours, expected)
