"""Models made under `zero.Init`: rank 0's values to the bit, and no rank holds one whole."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from invariants.memory_probe import (
    MIB,
    give_memory_back_at_once,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from onefold.comm import StallError
from onefold.integrations.deepspeed.names import divided, init
from onefold.integrations.deepspeed.names.gathered import GatheredParameters
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **more,
    }


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width)
        nn.init.orthogonal_(self.inner.weight)
        self.outer.bias.data.fill_(0.25)
        self.register_buffer("first", self.inner.weight[0].detach().clone())


class Model(nn.Module):
    """What constructors do with weights that are there: read, write, tie, replace, cast, alias."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width, padding_idx=0)
        early = self.embed.weight.data  # written after others were made
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.gru = nn.GRU(width, width, num_layers=2)
        self.attention = nn.MultiheadAttention(width, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embed.weight
        early.mul_(0.5)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.1))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.apply(self._init_weights)
        for name, param in self.named_parameters():
            if name.endswith("outer.weight"):
                nn.init.normal_(param, std=0.02 / param.shape[1])
        for param in self.parameters():
            if param.dim() > 1 and param.is_floating_point() and param.numel():
                with torch.no_grad():
                    param.add_(float(param.abs().mean()))
        self.blocks[0].outer.weight = nn.Parameter(self.blocks[1].outer.weight.detach().clone())
        self.blocks[2].bfloat16()
        self.total = float(sum(p.double().sum() for p in self.blocks.parameters()))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.trunc_normal_(module.weight, std=0.3)
        if isinstance(module, nn.Embedding):
            module.weight.data[module.padding_idx].zero_()


def made_under_init(limit: int, seed_of_rank_1: int) -> dict[str, Any]:
    init.LIMIT = limit
    torch.manual_seed(3)
    plain = Model()
    highest = 0
    register = nn.Module.register_parameter

    torch.manual_seed(seed_of_rank_1 if dist.get_rank() else 3)
    with init.Init():
        noted = nn.Module.register_parameter
        made: list[nn.Parameter] = []

        def watched(module: nn.Module, name: str, param: Any) -> None:
            nonlocal highest
            noted(module, name, param)
            if param is not None:
                made.append(param)
            whole = {id(p): p for p in made if not isinstance(p, divided.DividedParameter)}
            highest = max(highest, sum(p.numel() * p.itemsize for p in whole.values()))

        nn.Module.register_parameter = watched  # type: ignore[method-assign, assignment]
        model = Model()
        nn.Module.register_parameter = noted  # type: ignore[method-assign]
    assert nn.Module.register_parameter is register
    out: dict[str, Any] = {
        "highest": highest,
        "all": sum(p.numel() * p.itemsize for p in plain.parameters()),
        "left whole": [
            name
            for name, p in model.named_parameters()
            if not isinstance(p, divided.DividedParameter)
        ],
        "names": [n for n, _ in model.named_parameters()]
        == [n for n, _ in plain.named_parameters()],
        "tied": model.head.weight is model.embed.weight,
        "total": model.total == plain.total,
        "buffer": torch.equal(model.blocks[1].first, plain.blocks[1].first),
        "next": torch.rand(1).item(),
    }
    with GatheredParameters(model):
        out["equal"] = [
            (p.dtype, p.shape) == (q.dtype, q.shape) and torch.equal(p, q)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        ]
    return out


@pytest.mark.parametrize("limit", [0, 4096, 1 << 30])
def test_values_are_those_of_the_model_made_without_it(limit: int) -> None:
    first, second = run_ranks(2, made_under_init, limit, 8)
    for seen in (first, second):
        assert all(seen["equal"]) and seen["names"] and seen["tied"]
        # One has no elements, and two make a weight by weight_norm
        assert seen["left whole"] == [
            "none", "normed.parametrizations.weight.original0",
            "normed.parametrizations.weight.original1",
        ]  # fmt: skip
    assert first["total"] and first["buffer"], "rank 0 has read whole values in its constructor"
    if limit < 1 << 30:
        # What is aliased (the embedding), what is new, and the limit
        largest = 4 * 48 * 16
        assert first["highest"] <= limit + 4 * 24 * 16 + 2 * largest < first["all"]


def peak_of_making(inside: bool) -> dict[str, int]:
    """24 layers of 8 MiB, initialized a second time by `apply` in the end."""

    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Linear(1448, 1448, bias=False) for _ in range(24)))
            self.apply(lambda m: m.weight.data.normal_() if isinstance(m, nn.Linear) else None)

    init.LIMIT = 16 * MIB
    give_memory_back_at_once()
    torch.nn.Linear(512, 512)(torch.ones(2, 512))
    dist.barrier()
    reset_peak()
    before = resident_bytes()
    offset = peak_resident_bytes() - before
    with init.Init(enabled=inside):
        model = Deep()
    made = peak_resident_bytes() - offset - before
    rest = resident_bytes() - before
    initialize(model=model.eval(), config=config())
    return {"made": made, "rest": rest, "sharded": peak_resident_bytes() - offset - before}


def test_no_rank_holds_the_model_whole_while_it_is_made_and_sharded() -> None:
    """192 MiB on two ranks: each keeps 96 of them, and 16 and a layer beside while it is made."""
    for seen in run_ranks(2, peak_of_making, True):
        figures = {name: f"{value / MIB:.0f} MiB" for name, value in seen.items()}
        assert 96 * MIB < seen["rest"] < 112 * MIB, figures
        # Rank 0 cuts a layer in two messages
        assert seen["made"] < (96 + 16 + 4 * 8) * MIB, figures
        assert seen["sharded"] < (96 + 16 + 6 * 8) * MIB, figures
    for seen in run_ranks(2, peak_of_making, False):
        assert seen["made"] > 192 * MIB


def used_outside() -> dict[str, Any]:
    """What code does with a model between `Init` and `initialize`."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    torch.manual_seed(1)
    with init.Init():
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    weight = model[0].weight
    out: dict[str, Any] = {"errors": {}}

    def fails(name: str, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:
            out["errors"][name] = str(error)

    fails("read", lambda: weight.mean())
    fails("forward", lambda: model(torch.ones(2, 6)))
    fails("write", lambda: weight.data.zero_())
    fails("copy", lambda: nn.init.zeros_(weight))
    fails("load", lambda: model.load_state_dict(plain.state_dict()))
    fails("save", lambda: torch.save(model, io.BytesIO()))
    fails("save states", lambda: torch.save(model.state_dict(), io.BytesIO()))
    out["state"] = {n: (tuple(v.shape), v.dtype) for n, v in model.state_dict().items()}
    twin = copy.deepcopy(model)
    twin.to(torch.float64)
    out["twin"] = twin[0].weight.dtype
    model[1].bias.data = torch.full((3,), 2.0 + dist.get_rank())  # rank 0's value counts
    if dist.get_rank() == 0:
        model[0].bias.data = torch.full((5,), 7.0)
    engine, *_ = initialize(model=model, config=config())
    copied, *_ = initialize(model=twin.eval(), config={k: config()[k] for k in list(config())[:2]})
    with GatheredParameters(engine.module):
        out["model"] = [p.tolist() for p in engine.module.parameters()]
    with GatheredParameters(copied.module):
        out["copy"] = [p.tolist() for p in copied.module.parameters()]
    out["plain"] = [p.tolist() for p in plain.parameters()]
    engine.backward(engine(torch.ones(2, 6)).sum())
    engine.step()
    return out


def test_what_needs_values_raises_outside_and_shapes_dtypes_and_copies_do_not() -> None:
    for seen in run_ranks(2, used_outside):
        assert seen["errors"].keys() == {
            "read", "forward", "write", "copy", "load", "save", "save states"
        }  # fmt: skip
        assert all("zero.GatheredParameters(param)" in said for said in seen["errors"].values())
        assert seen["state"]["0.weight"] == ((5, 6), torch.float32)
        assert seen["twin"] is torch.float64
        weight, _, second, _ = seen["plain"]
        assert seen["model"] == [weight, [7.0] * 5, second, [2.0] * 3]
        torch.testing.assert_close(seen["copy"], seen["plain"], rtol=0, atol=0)


def told_apart(kind: str) -> tuple[str, float]:
    """One rank does with a model what the others do not: (what this one says, after seconds)."""
    init.LIMIT = 0
    first, start = dist.get_rank() == 0, time.monotonic()

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 5), nn.Linear(5, 3)
            if first and kind == "reads":
                self.inner.weight.mean()
            if first and kind == "fails":
                raise ValueError("no vocabulary")
            self.last = nn.Linear(3, 2)
            if first and kind == "makes more":
                self.more = nn.Linear(3, 3)
            if kind == "reads another":
                (self.inner if first else self.outer).weight.mean()

    def make() -> nn.Module:
        with init.Init():
            return Reads()

    try:
        if "Gathered" in kind:
            model = make()
            with GatheredParameters(
                model.inner.weight if first or "fails" in kind else model.last.weight,
                modifier_rank=0,
            ):
                if first and kind == "fails in Gathered":
                    raise ValueError("no vocabulary")
        else:
            make()
    except (StallError, ValueError) as error:
        return str(error), time.monotonic() - start
    return "nothing", time.monotonic() - start


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("reads", "on rank 0 a constructor reads or changes a parameter of shape (5, 6)"),
        (
            "reads another",
            "on ranks 1, 2 a constructor reads or changes a parameter of shape (3, 5)",
        ),
        ("makes more", "on ranks 1, 2 the model has been made"),
        ("Gathered, of other shapes", "GatheredParameters of a parameter of shape (5, 6) begins"),
        ("fails in Gathered", "rank 0 ended with ValueError: no vocabulary"),
        ("fails", "rank 0 ended with ValueError: no vocabulary"),
    ],
)
def test_a_rank_that_does_something_else_with_a_model_stops_all_at_once(
    kind: str, says: str
) -> None:
    for rank, (said, seconds) in enumerate(run_ranks(3, told_apart, kind)):
        assert seconds < 20, (rank, said, seconds)  # the group has 30 minutes
        if "fails" in kind:
            assert ("no vocabulary" if rank == 0 else says) in said
        else:
            assert says in said and "zero.GatheredParameters(param, modifier_rank=0)" in said


def made_again(kind: str) -> list[bool]:
    """After an error that all ranks met, a model is made as ever."""
    told_apart(kind)
    return made_under_init(0, 8)["equal"]


@pytest.mark.parametrize("kind", ["reads", "fails"])
def test_ranks_that_have_caught_it_make_another_model(kind: str) -> None:
    for equal in run_ranks(2, made_again, kind):
        assert all(equal) and equal


def kinds_that_stay() -> dict[str, Any]:
    class Own(nn.Parameter):
        pass

    with init.Init(dtype=torch.bfloat16):
        with init.Init():  # of two the outer one counts
            model = nn.ParameterDict({"own": Own(torch.full((4,), 1.0 + dist.get_rank()))})
        model["lazy"] = nn.LazyLinear(3).weight
        with torch.device("meta"):
            model["meta"] = nn.Linear(4, 3).weight
        model["plain"] = nn.Parameter(torch.full((4,), 3.0 + dist.get_rank()))
    seen = {name: type(param).__name__ for name, param in model.items()}
    dtypes = {model["own"].dtype, model["plain"].dtype}
    with GatheredParameters([model["own"], model["plain"]], modifier_rank=1):
        values = [model["own"].tolist(), model["plain"].tolist()]
        if dist.get_rank() == 1:
            model["plain"].data.fill_(9.0)
    with GatheredParameters(model["plain"]):
        values.append(model["plain"].tolist())
    return {"kinds": seen, "dtypes": dtypes, "values": values}


def test_parameters_of_other_classes_stay_whole_with_rank_0s_values_when_gathered() -> None:
    for seen in run_ranks(2, kinds_that_stay):
        assert seen["kinds"] == {
            "own": "Own", "lazy": "UninitializedParameter", "meta": "Parameter",
            "plain": "DividedParameter",
        }  # fmt: skip
        assert seen["dtypes"] == {torch.bfloat16}
        assert seen["values"] == [[1.0] * 4, [3.0] * 4, [9.0] * 4]


def read_by_transformers(folder: str) -> dict[str, Any]:
    """`from_pretrained` as transformers does it where a DeepSpeed configuration of stage 3 is in
    force, and a model of theirs made under `zero.Init` itself.
    """
    import threading

    import onefold.deepspeed

    onefold.deepspeed.serve(say=False)
    import deepspeed  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    give_memory_back_at_once()
    shape = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained(folder, max_shard_size="40MB")
    dist.barrier()
    kept = HfDeepSpeedConfig(config(3, bf16={"enabled": True}))
    highest, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], resident_bytes())

    before, thread = resident_bytes(), threading.Thread(target=sample)
    thread.start()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    done.set()
    thread.join()
    out: dict[str, Any] = {
        "peak": highest[0] - before,
        "rest": resident_bytes() - before,
        "whole": sum(p.numel() * 4 for p in model.parameters()),
        "divided": all(isinstance(p, divided.DividedParameter) for p in model.parameters()),
        "dtypes": {str(p.dtype) for p in model.parameters()},
    }
    del kept
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    pairs = list(zip(model.parameters(), theirs.parameters(), strict=True))
    equal = []
    for ours, expected in pairs:
        with GatheredParameters(ours):
            equal.append(torch.equal(ours, expected))
    out["equal"] = all(equal)
    small = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(5)
    plain = LlamaForCausalLM(small)
    torch.manual_seed(5)
    init.LIMIT = 4096
    with deepspeed.zero.Init():
        made = LlamaForCausalLM(small)
    with GatheredParameters(made):
        out["made"] = all(
            torch.equal(p, q) for p, q in zip(made.parameters(), plain.parameters(), strict=True)
        )
    out["families"] = unequal_families(folder)
    out["tied"] = made.lm_head.weight is made.model.embed_tokens.weight
    return out


def unequal_families(folder: str) -> list[str]:
    """Parameters read otherwise than they were saved, of a model with weight_norm, of one whose
    experts are put together as it is read, and of one that gets a new head.
    """
    import transformers as hf
    from transformers.integrations import HfDeepSpeedConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 48}  # fmt: skip
    speech = hf.Wav2Vec2Config(
        **sizes, conv_dim=(16, 16), conv_stride=(2, 2), conv_kernel=(3, 3),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    experts = hf.MixtralConfig(**sizes, vocab_size=64, num_local_experts=4, num_key_value_heads=2)
    bert = hf.BertConfig(**sizes, vocab_size=64)
    out = []
    for config, kind, reader in (
        (speech, hf.Wav2Vec2Model, hf.Wav2Vec2Model),
        (experts, hf.MixtralForCausalLM, hf.MixtralForCausalLM),
        (bert, hf.BertModel, hf.BertForTokenClassification),
    ):
        torch.manual_seed(0)
        plain, place = kind(config), f"{folder}/{kind.__name__}"
        if dist.get_rank() == 0:
            plain.save_pretrained(place)
        dist.barrier()
        in_force = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1,
                                      "zero_optimization": {"stage": 3}})  # fmt: skip
        read = reader.from_pretrained(place)
        del in_force
        whole = dict(read.named_parameters())
        prefix = "" if reader is kind else f"{read.base_model_prefix}."
        with GatheredParameters(read):
            out += [
                name
                for name, value in plain.named_parameters()
                if (prefix + name) in whole and not torch.equal(whole[prefix + name], value)
            ]
            out += [name for name, value in whole.items() if not value.isfinite().all()]
    return out


def test_transformers_reads_a_folder_without_any_rank_holding_the_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for seen in run_ranks(2, read_by_transformers, str(tmp_path), server="served"):
        figures = {name: f"{seen[name] / MIB:.0f} MiB" for name in ("peak", "rest", "whole")}
        assert seen["divided"] and seen["equal"] and seen["made"] and seen["tied"]
        assert seen["families"] == []
        assert seen["dtypes"] == {"torch.bfloat16"}
        # Whole parameters of up to LIMIT bytes, and a share, at which both ranks arrive in fp32
        assert seen["peak"] < seen["whole"] / 2 + init.LIMIT + 40 * MIB < seen["whole"], figures
        assert seen["rest"] < seen["whole"] / 4 + 16 * MIB, figures


def unset_weights() -> tuple[list[str], list[str], list[str]]:
    """Parameters that nothing gives values, where memory that is new holds NaN: of a model that
    transformers makes by itself, with its own context that leaves initial values out and sets them
    afterwards, as it does at stage 3; of one that it makes under `zero.Init`; and of one of others.
    """
    import onefold.deepspeed

    onefold.deepspeed.serve(say=False)
    import transformers as hf
    from transformers import initialization
    from transformers.integrations import HfDeepSpeedConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 48}  # fmt: skip
    speech = hf.Wav2Vec2Config(
        **sizes, conv_dim=(16, 16), conv_stride=(2, 2), conv_kernel=(3, 3),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    bert = hf.BertConfig(**sizes, vocab_size=64)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN

    def unset(model: nn.Module) -> list[str]:
        with GatheredParameters(model):
            return [name for name, p in model.named_parameters() if not p.isfinite().all()]

    with initialization.no_init_weights():
        alone = hf.Wav2Vec2Model(speech)
    with torch.no_grad(), initialization.guard_torch_init_functions():
        alone.initialize_weights()
    in_force = HfDeepSpeedConfig(config(3))
    out = (
        unset(alone),
        unset(hf.AutoModel.from_config(speech)),
        unset(hf.AutoModel.from_config(bert)),
    )
    del in_force
    return out


def test_only_what_transformers_itself_leaves_unset_has_no_values_under_init() -> None:
    """transformers sets a weight of weight_norm through the product of its two parts, which is
    made anew each time: both keep what was in memory. Its models of speech that are made from a
    configuration at stage 3 have one such weight, whoever serves the name; read by
    `from_pretrained`, none.
    """
    pytest.importorskip("transformers")
    for alone, under_init, other in run_ranks(2, unset_weights, server="served"):
        weight = "encoder.pos_conv_embed.conv.parametrizations.weight"
        assert alone == [f"{weight}.original0", f"{weight}.original1"]
        assert under_init == alone and other == []


def digests() -> list[str]:
    """TRL's digest of the same model, whole and made under `zero.Init`, and of another one."""
    import trl.trainer.dpo_trainer as host

    torch.manual_seed(3)
    whole = host.hash_module(Model())
    out = [whole]
    for seed in (3, 4):
        torch.manual_seed(seed)
        with init.Init():
            model = Model()
        out.append(host.hash_module(model))
        assert any(isinstance(p, divided.DividedParameter) for p in model.parameters())
    return out


def test_trls_digest_of_a_divided_model_is_that_of_the_whole_one() -> None:
    pytest.importorskip("trl")
    for whole, made, other in run_ranks(2, digests, server="libraries"):
        assert whole == made != other


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cuda:nccl", "cuda"),  # by name, and of init_process_group() without a backend
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_values_on_the_host_go_by_the_device_where_the_group_has_no_backend_for_the_host(
    config: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(divided, "available", lambda: True)
    monkeypatch.setattr(divided, "default_device", lambda: torch.device("cuda", 0))
    assert divided._wire(torch.device("cpu")).type == expected
    assert divided._wire(torch.device("cuda", 0)).type == "cuda"
