"""Frozen weights that rest encoded, once over all ranks: they compute what they decode to, take what their codec says, and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from models import TinyGPT, tokens_of
from onefold.memory import MASTERS, PARAMETERS
from onefold.runtime.hollow import HollowError
from ranks import run_ranks


class Adapted(TinyGPT):
    """Matrices are frozen; vectors train, and so does an adapter in each block."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.requires_grad_(p.dim() < 2)
        for block in self.blocks:
            block.adapter = nn.Linear(4, 4)


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(steps):
        loss = model(tokens_of(10 * step + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def base(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return onefold.shard(Adapted(), onefold.Recipe.zero(3, **options))


def against_decoded(name: str, more: dict[str, Any]) -> dict[str, Any]:
    """The run, and a run of a model that has the decoded values as ordinary weights."""
    model = base(frozen=name, **more)
    decoded = onefold.full_state_dict(model)
    plain = base(**more)
    original = onefold.full_state_dict(plain)
    onefold.load_full_state_dict(plain, decoded if torch.distributed.get_rank() == 0 else None)
    engine, ordinary = onefold.engine_of(model), onefold.engine_of(plain)
    stored = [f for u in engine.units for f in u.flats if f.route.stored]
    far = 0.0
    if torch.distributed.get_rank() == 0:
        base_weights = {n: t for n, t in original.items() if t.dim() >= 2 and "blocks" in n and "adapter" not in n}
        far = max(((decoded[n] - t).norm() / t.norm()).item() for n, t in base_weights.items())
    return {
        "equal": trained(model) == trained(plain),
        "far": far,
        "bytes": sum(f.route.second.numel() for f in stored),
        "wanted": sum(f.route.each for f in stored) * (2 if "shard_group" in more else 1),
        "elements": sum(f.owned[1] - f.owned[0] for f in stored),
        "held": sum(engine.memory.now().get(k, 0) for k in (PARAMETERS, MASTERS)),
        "ordinary": sum(ordinary.memory.now().get(k, 0) for k in (PARAMETERS, MASTERS)),
        "names": {e.names[0] for f in stored for e in f.entries},
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_encoded_weights_compute_what_they_decode_to_and_exist_once(name: str, ranks: int) -> None:
    bits = {"int8": 8.2, "nf4": 4.6}[name]
    said = run_ranks(ranks, against_decoded, name, {"group": 2, "second_copy": True} if ranks == 4 else {})
    for one in said:
        assert one["equal"]
        assert one["bytes"] == one["wanted"] < one["elements"] * bits / 8 + 64
        assert "blocks.0.adapter.weight" not in one["names"] and not any("embed" in n or "bias" in n for n in one["names"])
        assert len(one["names"]) >= 6
        if ranks < 4:
            # Flat buffers are cut in two, and have the padding of two.
            assert one["ordinary"] - one["held"] == pytest.approx(4 * one["elements"] - one["bytes"], rel=0.03)
    assert 0 < said[0]["far"] < {"int8": 0.01, "nf4": 0.12}[name]


def saved_and_read(folder: str) -> list[bool]:
    model = base(frozen="int8")
    whole = onefold.full_state_dict(model)
    onefold.save(folder, model=model)
    again = base(frozen="int8")
    plain = base()
    found = []
    for other in (again, plain):
        onefold.load(folder, model=other)
        read = onefold.full_state_dict(other)
        # Encoded anew, an element may move by half a step again: scales are rounded.
        far = max(((read[n] - whole[n]).norm() / whole[n].norm()).item() for n in whole if whole[n].norm() > 0) if whole else 0.0
        found.append(far < (0.01 if other is again else 1e-7))
    weight = next(p for n, p in model.named_parameters() if not p.requires_grad and p.numel() and "blocks" in n)
    with pytest.raises(HollowError, match="encoded"):
        weight.sum()
    return found


def test_what_rests_encoded_is_saved_as_what_it_stands_for(tmp_path: Path) -> None:
    assert run_ranks(2, saved_and_read, str(tmp_path / "saved")) == [[True, True]] * 2


def test_below_stage_3_it_is_refused() -> None:
    with pytest.raises(ValueError, match="use stage 3"):
        onefold.Recipe.zero(2, frozen="int8")
    with pytest.raises(ValueError, match="expected one of 'int8', 'fp8', 'int4', 'nf4'"):
        onefold.Recipe.zero(3, frozen="int3")


def test_what_groups_and_frozen_weights_cannot_be_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="leave accumulate_dtype out"):
        onefold.Recipe.zero(3, reduce_codec="int4", accumulate_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="leave one of them out"):
        onefold.Recipe.zero(3, frozen="int8", offload_param="cpu")
    assert any(n.startswith("group=2 has no effect") for n in onefold.Recipe.zero(0, group=2).notes)
    with caplog.at_level("INFO"):
        onefold.shard(TinyGPT(), onefold.Recipe.zero(3, frozen="int8"))
    assert "no matrix but embeddings was frozen" in caplog.text
    for said in run_ranks(2, said_of_groups):
        assert "makes one group of the 2 ranks (the launcher says" in said


def said_of_groups() -> str:
    from onefold.runtime.route import of_routes

    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, second_copy=True))
    return " ".join(of_routes(onefold.engine_of(model)))
