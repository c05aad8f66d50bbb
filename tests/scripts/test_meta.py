"""Models built on the meta device get their memory unit by unit, never whole. What was never given a
value is an error by name, until a load or a write brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from on_ranks import on_ranks, slow
from reference import adamw, built, differences, train
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)


def on_meta(stage: int, make: Callable[[], nn.Module] = TinyGPT, init: Any = None, **o: Any) -> Any:
    with torch.device("meta"):
        model = make()
    return onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0, **o), init=init)


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)


def reset_again(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def first(state: Any) -> Any:
    """What rank 0 alone gives."""
    return state if dist.get_rank() == 0 else None


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_loaded_from_a_state_dict_trains_like_any_other(
    stage: int, tied: bool
) -> None:
    plain = built(lambda: TinyGPT(tied=tied))
    model = on_meta(stage, lambda: TinyGPT(tied=tied))
    onefold.load_full_state_dict(model, first(plain.state_dict()))
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    plain = onefold.shard(plain, onefold.Recipe.zero(stage))
    batches = [tokens_of(10 * step + dist.get_rank()) for step in range(3)]
    assert train(model, adamw(model), batches) == train(plain, adamw(plain), batches)
    assert not differences(onefold.full_state_dict(plain), onefold.full_state_dict(model))


@on_ranks(2)
def test_a_meta_model_is_initialized_by_init_or_by_its_modules_alike_at_every_stage() -> None:
    found = []
    for stage in STAGES:
        by_init = onefold.full_state_dict(on_meta(stage, init=fill))
        assert all(torch.equal(t, torch.full_like(t, 0.25)) for t in by_init.values())
        torch.manual_seed(7)
        model = on_meta(stage, init=reset_again)
        found.append(onefold.full_state_dict(model))
        assert not differences(found[0], found[-1])
        for name, tensor in onefold.full_state_dict(on_meta(stage)).items():
            assert torch.isfinite(tensor).all()  # by reset_parameters
            assert "qkv.weight" not in name or 0.05 < tensor.std() < 0.3
        model(tokens_of(dist.get_rank())).backward()


@slow
@on_ranks(4, fresh=True)
def test_a_meta_model_is_never_whole() -> None:
    from invariants.memory_probe import give_memory_back_at_once, peak_resident_bytes, reset_peak

    give_memory_back_at_once()
    depth = 16
    with torch.device("meta"):
        model = TinyMLP(16, 512, depth, 16)  # 67 MB in fp32
    total = 4 * sum(p.numel() for p in model.parameters())
    onefold.shard(TinyMLP(), onefold.Recipe.zero(3))  # warm
    reset_peak()
    before = peak_resident_bytes()
    onefold.shard(model, onefold.Recipe.zero(3, stall_timeout=30.0), init=fill)
    grown = peak_resident_bytes() - before
    model(features_of(0, 2, 16))
    bound = total // 4 + 4 * (total // depth) + (8 << 20)  # its shard, four blocks and 8 MiB
    assert grown <= bound, f"{grown} bytes, expected at most {bound} of {total}"


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_may_be_on_the_meta_device_in_part_or_on_other_ranks(stage: int) -> None:
    model: Any = built(TinyGPT)
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.device("meta"):
        model.head = nn.Linear(20, 61, bias=False)
    onefold.shard(model, onefold.Recipe.zero(stage), init=fill)
    expected["head.weight"] = torch.full((61, 20), 0.25)
    assert not first(differences(expected, onefold.full_state_dict(model)))

    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        outline: Any = built(TinyGPT)
    expected = {name: t.clone() for name, t in outline.state_dict().items()}
    onefold.shard(outline, onefold.Recipe.zero(stage))
    assert not first(differences(expected, onefold.full_state_dict(outline)))
    optimizer = adamw(outline)
    train(outline, optimizer, [tokens_of(dist.get_rank())])
    with torch.no_grad():
        losses = [outline(tokens_of(5)).item() for _ in range(2)]
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, losses)
    assert len({*everybodys[0], *everybodys[1]}) == 1


# -- loaded later ----------------------------------------------------------------------------------


class Own(nn.Module):
    """A parameter and buffers that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.to(self.weight.dtype) @ self.weight) * self.scale * self.hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Own() for _ in range(3))
        self.gain = nn.Parameter(torch.empty(8))
        self.head = nn.Linear(8, 2)  # knows how to reset its parameters

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head((x * self.gain).to(self.head.weight.dtype))


X = torch.ones(4, 8)


def real() -> Any:
    model = built(Model)
    for p in model.parameters():
        nn.init.normal_(p)
    model.blocks[1].scale.fill_(2.0)  # type: ignore[operator, union-attr, index]
    return model


def names(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(onefold.UninitializedError) as error:
        call()
    for word in ("built on the meta device", *words):
        assert word in str(error.value), error.value


def in_part(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    part = {name: t for name, t in state.items() if "blocks.1" not in name}
    onefold.load_full_state_dict(model, first(part), strict=False)
    names(lambda: model(X), "'blocks.1.weight', 'blocks.1.scale'")
    onefold.load_full_state_dict(model, first(state))


def written(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    """As `.data` and in place; parameters on rank 0 alone, whose values are everybody's."""
    with onefold.full_params(model, write=True), torch.no_grad():
        for name, p in model.named_parameters() if dist.get_rank() == 0 else ():
            if name != "gain":
                p.data.copy_(state[name])
        for name, b in model.named_buffers():
            b.copy_(state.get(name, torch.ones(1)))
    names(lambda: model(X), "'gain'")
    with onefold.full_params(model, write=True), torch.no_grad():
        model.gain.copy_(state["gain"])


def a_checkpoint(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    onefold.save(folder / "saved", model=onefold.shard(real(), onefold.Recipe.zero(1)))
    onefold.load(folder / "saved", model=model)


def safetensors(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    dist.barrier()
    onefold.load_pretrained(model, str(folder))


def directly(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    """Every rank writes into what it has, as initializing loops do."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(0.5)
            state[name] = torch.full_like(state[name], 0.5)
        for name, b in model.named_buffers():
            b.copy_(state.get(name, torch.ones(1)))


@on_ranks(2)
@pytest.mark.parametrize("way", [in_part, written, a_checkpoint, safetensors, directly])
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_never_loaded_is_named_until_a_load_or_a_write_brings_it(
    stage: int, way: Any, folder: Path
) -> None:
    model = on_meta(stage, Model)
    for call in (
        lambda: model(X),
        lambda: onefold.full_state_dict(model),
        lambda: onefold.save(folder / "none", model=model),
        lambda: onefold.export(model, str(folder / "out")),
        lambda: onefold.full_params(model).__enter__(),
    ):
        names(call, "'gain'", "onefold.load(")
    names(lambda: model.blocks[1].weight.onefold.gather(), "'blocks.1.weight'")
    assert not list(folder.glob("none*"))
    for block in model.blocks:
        block.hidden = torch.ones(1)  # in no state dict: assigned
    state = {name: t.clone() for name, t in real().state_dict().items()}
    way(model, state, folder)
    like = real()
    like.load_state_dict(state)
    out = model(X)
    assert torch.allclose(out, like(X), rtol=1e-5, atol=1e-6)
    assert not first(differences(state, onefold.full_state_dict(model)))
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"frozen": "int8"}, {"offload_optimizer": "cpu", "offload_param": "cpu"}, {"tile": 256}],
    ids=str,
)
def test_what_rests_encoded_off_the_device_or_in_tiles_is_loaded_later_too(options: Any) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        for name, p in model.named_parameters():
            p.requires_grad_("frozen" not in options or "bias" in name)
        return model

    model = on_meta(3, make, lambda module: None, **options)
    names(lambda: model(X), "'0.")
    state = built(make).state_dict()
    part = {name: t for name, t in state.items() if name.startswith("0.")}
    onefold.load_full_state_dict(model, first(part), strict=False)
    names(lambda: model(X), "'2.")
    onefold.load_full_state_dict(model, first(state))
    like = make()
    like.load_state_dict(state)
    assert torch.allclose(model(X), like(X), atol=0.05)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_initializer_that_leaves_something_out_is_noticed(stage: int) -> None:
    def forgets(module: nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            if name != "gain":
                p.data.fill_(0.5)  # no version counter tells

    model = on_meta(stage, Model, forgets)
    names(lambda: model(X), "'gain'")
