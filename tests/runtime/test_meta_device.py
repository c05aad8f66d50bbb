"""Models built on the meta device get their memory unit by unit, never whole, and train like any
other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from trials import STAGES, GPTCase, differences, train, train_sharded
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

WIDTH, DEPTH = 512, 16  # 16 blocks of 2.1 MB x 2: 67 MB in fp32


def meta_gpt(tied: bool = False) -> nn.Module:
    with torch.device("meta"):
        return TinyGPT(tied=tied)


def loaded_from_a_state_dict(stage: int, tied: bool) -> list[str]:
    """Built on the meta device, loaded from rank 0's state dict: trains bit for bit like one built
    in memory.
    """
    import onefold

    class Tied(GPTCase):
        def build(self) -> nn.Module:
            return TinyGPT(tied=tied)

    case = Tied()
    torch.manual_seed(0)
    state = case.build().state_dict() if dist.get_rank() == 0 else None
    model = onefold.shard(meta_gpt(tied), onefold.Recipe.zero(stage, stall_timeout=10.0))
    onefold.load_full_state_dict(model, state)
    if left := [
        name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta
    ]:
        return [f"still on the meta device: {left}"]
    curve = train(case, model, model, lambda: onefold.full_state_dict(model))
    return differences("from meta", train_sharded(Tied(), stage), curve, 0.0, 0.0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_loaded_from_a_state_dict_trains_like_any_other(
    stage: int, tied: bool
) -> None:
    assert run_ranks(2, loaded_from_a_state_dict, stage, tied) == [[], []]


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)


def initialized(stage: int, how: str) -> list[str]:
    import onefold

    model = onefold.shard(
        meta_gpt(),
        onefold.Recipe.zero(stage, stall_timeout=10.0),
        init=fill if how == "init" else None,
    )
    state = onefold.full_state_dict(model)
    problems = []
    for name, tensor in state.items():
        if how == "init" and not torch.equal(tensor, torch.full_like(tensor, 0.25)):
            problems.append(f"{name} is not what init made it")
        if how == "reset_parameters" and not torch.isfinite(tensor).all():
            problems.append(f"{name} is not initialized: {tensor.flatten()[:4].tolist()}")
        if (
            how == "reset_parameters"
            and name.endswith("qkv.weight")
            and not 0.05 < tensor.std() < 0.3
        ):
            problems.append(
                f"{name} has a standard deviation of {tensor.std():.3f}, torch's Linear has about"
                " 0.13"
            )
    model(tokens_of(dist.get_rank())).backward()
    return problems


@pytest.mark.parametrize("how", ["init", "reset_parameters"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_is_initialized_by_init_or_by_its_modules(stage: int, how: str) -> None:
    assert run_ranks(2, initialized, stage, how) == [[], []]


def reset_again(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def weights_of(stage: int) -> dict[str, Tensor]:
    import onefold

    torch.manual_seed(7)
    model = onefold.shard(
        meta_gpt(), onefold.Recipe.zero(stage, stall_timeout=10.0), init=reset_again
    )
    return onefold.full_state_dict(model)


def test_a_meta_model_gets_the_same_weights_at_every_stage() -> None:
    first = run_ranks(2, weights_of, 0)[0]
    for stage in (1, 2, 3):
        other = run_ranks(2, weights_of, stage)[0]
        assert all(torch.equal(first[name], other[name]) for name in first), (
            f"stage {stage} starts from other weights"
        )


def peak_while_sharding() -> dict[str, Any]:
    """The largest amount of memory that ever lived while a 67 MB model came to be at stage 3 on 4
    ranks.
    """
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "invariants"))
    from memory_probe import give_memory_back_at_once, peak_resident_bytes, reset_peak

    import onefold

    give_memory_back_at_once()
    with torch.device("meta"):
        model = TinyMLP(16, WIDTH, DEPTH, 16)
    total = 4 * sum(p.numel() for p in model.parameters())
    onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=10.0))  # warm
    reset_peak()
    before = peak_resident_bytes()
    onefold.shard(model, onefold.Recipe.zero(3, stall_timeout=30.0), init=fill)
    grown = peak_resident_bytes() - before
    model(features_of(0, 2, 16))
    return {"grown": grown, "total": total, "bound": total // 4 + 4 * (total // DEPTH) + (8 << 20)}


def test_a_meta_model_is_never_whole() -> None:
    for rank, seen in enumerate(run_ranks(4, peak_while_sharding)):
        assert seen["grown"] <= seen["bound"], (
            f"rank {rank}: {seen}: expected its shard, four blocks and 8 MiB at most"
        )


def half_meta(stage: int) -> list[str]:
    """A pretrained body in memory, a new head on the meta device."""
    import onefold

    torch.manual_seed(0)
    model = TinyGPT()
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.device("meta"):
        model.head = nn.Linear(20, 61, bias=False)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0), init=fill)
    expected["head.weight"] = torch.full((61, 20), 0.25)
    state = onefold.full_state_dict(model)
    return [name for name in state if not torch.equal(state[name], expected[name])]


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_may_be_on_the_meta_device_in_part(stage: int) -> None:
    assert run_ranks(2, half_meta, stage) == [[], []]


def only_rank_0_has_it(stage: int) -> list[str]:
    """Rank 0 built the model, the others only its outline: the usual way to load a big checkpoint
    once.
    """
    import onefold

    torch.manual_seed(0)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = TinyGPT()
    expected = (
        {name: t.clone() for name, t in model.state_dict().items()} if dist.get_rank() == 0 else {}
    )
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))
    state = onefold.full_state_dict(model)
    model(tokens_of(dist.get_rank())).backward()
    return [name for name in state if not torch.equal(state[name], expected[name])]


@pytest.mark.parametrize("stage", STAGES)
def test_other_ranks_may_bring_an_outline_of_rank_0s_model(stage: int) -> None:
    assert run_ranks(2, only_rank_0_has_it, stage) == [[], []]
