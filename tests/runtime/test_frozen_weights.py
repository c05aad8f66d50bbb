"""Frozen weights that rest encoded, once over all ranks: they compute what they decode to, take
what their codec says, and are saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.memory import MASTERS, PARAMETERS
from onefold.runtime.parameters.values import StoragelessError
from ranks import run_ranks
from zoo import TinyGPT, tokens_of


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
        loss = model(
            tokens_of(
                10 * step
                + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
            )
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def base(seed: int = 0, over: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return onefold.shard(Adapted(), onefold.Recipe.zero(3, **options), group=over)


def against_decoded(name: str, more: dict[str, Any]) -> dict[str, Any]:
    """The run, and a run of a model that has the decoded values as ordinary weights."""
    model = base(frozen=name, **more)
    decoded = onefold.full_state_dict(model)
    plain = base(**more)
    original = onefold.full_state_dict(plain)
    onefold.load_full_state_dict(plain, decoded if torch.distributed.get_rank() == 0 else None)
    engine, ordinary = onefold.engine_of(model), onefold.engine_of(plain)
    stored = [f for u in engine.units for f in u.flats if f.storage.encoded]
    far = 0.0
    if torch.distributed.get_rank() == 0:
        base_weights = {
            n: t
            for n, t in original.items()
            if t.dim() >= 2 and "blocks" in n and "adapter" not in n
        }
        far = max(((decoded[n] - t).norm() / t.norm()).item() for n, t in base_weights.items())
    return {
        "equal": trained(model) == trained(plain),
        "far": far,
        "bytes": sum(f.storage.payload.numel() for f in stored),
        "wanted": sum(f.storage.intervals.each for f in stored)
        * (2 if "shard_group" in more else 1),
        "elements": sum(f.owned[1] - f.owned[0] for f in stored),
        "content": sum(f.layout.content for f in stored) / engine.world_size,
        "held": sum(engine.memory.now().get(k, 0) for k in (PARAMETERS, MASTERS)),
        "ordinary": sum(ordinary.memory.now().get(k, 0) for k in (PARAMETERS, MASTERS)),
        "names": {e.names[0] for f in stored for e in f.entries},
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_encoded_weights_compute_what_they_decode_to_and_exist_once(name: str, ranks: int) -> None:
    bits = {"int8": 8.2, "nf4": 4.6}[name]
    said = run_ranks(
        ranks, against_decoded, name, {"group": 2, "second_copy": True} if ranks == 4 else {}
    )
    for one in said:
        assert one["equal"]
        assert one["bytes"] == one["wanted"] < one["elements"] * bits / 8 + 64
        assert "blocks.0.adapter.weight" not in one["names"] and not any(
            "embed" in n or "bias" in n for n in one["names"]
        )
        assert len(one["names"]) >= 6
        if ranks < 4:
            # Flat buffers are cut in two, and have the padding of two; small matrices are padded to
            # whole blocks.
            assert one["ordinary"] - one["held"] == pytest.approx(
                4 * one["content"] - one["bytes"], rel=0.05
            )
    assert 0 < said[0]["far"] < {"int8": 0.01, "nf4": 0.12}[name]


Codes = dict[str, dict[int, tuple[bytes, bytes]]]


def codes(model: nn.Module) -> Codes:
    """What rests encoded on this rank: by parameter and first element, the numbers and the blocks'
    magnitudes.
    """
    out: Codes = {}
    for flat in (f for u in onefold.engine_of(model).units for f in u.flats if f.storage.encoded):
        by, each = flat.storage.codec, flat.layout.shard_numel
        for index in range((flat.owned[1] - flat.owned[0]) // each):
            payload, kept = by.split(flat.storage.intervals.rows(flat.storage.payload)[index], each)
            first = flat.owned[0] + index * each
            for slot in flat.layout.slots:
                a, b = (
                    max(slot.start, first),
                    min(-(-slot.end // by.block) * by.block, first + each),
                )
                if a < b:
                    elements, nbytes = by.packed
                    numbers = payload[
                        (a - first) * nbytes // elements : (b - first) * nbytes // elements
                    ]
                    blocks = kept[(a - first) // by.block : (b - first) // by.block].view(
                        torch.int16
                    )
                    out.setdefault(slot.name, {})[a - slot.start] = (
                        bytes(numbers.tolist()),
                        blocks.numpy().tobytes(),
                    )
    return out


def put_together(held: list[Codes]) -> dict[str, tuple[bytes, bytes]]:
    """The whole parameters' bytes, from those of all ranks."""
    parts: Codes = {}
    for name, at, part in (
        (name, at, part)
        for one in held
        for name, found in one.items()
        for at, part in found.items()
    ):
        assert parts.setdefault(name, {}).setdefault(at, part) == part, (
            f"{name}: two ranks have different bytes from element {at} on"
        )
    ordered = {name: [part for _, part in sorted(found.items())] for name, found in parts.items()}
    return {
        name: (b"".join(numbers for numbers, _ in p), b"".join(kept for _, kept in p))
        for name, p in ordered.items()
    }


def handed_on(folder: str, formats: list[tuple[str, str]]) -> dict[tuple[str, str], Codes]:
    """What rests encoded on this rank, first and after each way back from a file, over the same
    ranks and over others.
    """
    rank = torch.distributed.get_rank()
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    found: dict[tuple[str, str], Codes] = {}
    for name, precision in formats:
        model = base(frozen=name, precision=precision)
        found[name, "first"] = codes(model)
        onefold.save(f"{folder}/{name}", model=model)
        onefold.export(model, f"{folder}/{name} exported", dtype=torch.bfloat16)
        with onefold.full_params(model, write=True):
            pass
        found[name, "rewritten"] = codes(model)
        plain = base(precision=precision)
        others = {
            "again": base(1, frozen=name, precision=precision),
            "on two ranks": base(1, pairs[rank // 2], frozen=name, precision=precision),
            "over groups": base(1, frozen=name, precision=precision, shard_group=2),
            "as ordinary weights": plain,
        }
        for where, other in others.items():
            onefold.load(f"{folder}/{name}", model=other)
            found[name, where] = codes(other)
        onefold.save(f"{folder}/{name} of ordinary weights", model=plain)
        onefold.load(
            f"{folder}/{name} of ordinary weights",
            model=(other := base(1, frozen=name, precision=precision)),
        )
        found[name, "from ordinary weights"] = codes(other)
        onefold.load_pretrained(
            other := base(1, frozen=name, precision=precision), f"{folder}/{name} exported"
        )
        found[name, "from exported weights"] = codes(other)
    weight = next(
        p
        for n, p in model.named_parameters()
        if not p.requires_grad and p.numel() and "blocks" in n
    )
    with pytest.raises(StoragelessError, match="encoded"):
        weight.sum()
    return found


def test_what_rests_encoded_is_the_same_bytes_after_any_way_through_a_file(
    tmp_path: Path, sample: Any
) -> None:
    formats = sample([("int8", "bf16"), ("nf4", "fp32"), ("int4", "bf16"), ("fp8", "fp32")], 2)
    said = run_ranks(4, handed_on, str(tmp_path), formats)
    for name, where in said[0]:
        first = put_together([one[name, "first"] for one in said])
        assert len(first) >= 6 and all(
            numbers and magnitudes for numbers, magnitudes in first.values()
        )
        if where == "as ordinary weights":
            assert said[0][name, where] == {}
        else:
            assert put_together([one[name, where] for one in said]) == first, (name, where)


def test_below_stage_3_it_is_refused() -> None:
    with pytest.raises(ValueError, match="use stage 3"):
        onefold.Recipe.zero(2, frozen="int8")
    with pytest.raises(ValueError, match="expected one of 'int8', 'nf4', 'int4', 'fp8', or None"):
        onefold.Recipe.zero(3, frozen="int3")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_at_rest_encoded_cannot_be_trained_later_and_that_is_said_at_once(
    precision: str,
) -> None:
    model = base(frozen="int8", precision=precision)
    trained(model, steps=1)
    model.blocks[1].mlp[0].weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"'blocks\.1\.mlp\.0\.weight' was frozen .* so it is stored encoded"
    ):
        model(tokens_of(0))


def test_what_groups_and_frozen_weights_cannot_be_is_refused_or_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="leave accumulate_dtype out"):
        onefold.Recipe.zero(3, reduce_codec="int4", accumulate_dtype="bf16")
    with pytest.raises(ValueError, match="leave one of them out"):
        onefold.Recipe.zero(3, frozen="int8", offload_param="cpu")
    assert not any("has no effect" in n for n in onefold.Recipe.zero(0, group=2).notes), (
        "stage 0 sums over two levels, too"
    )
    with caplog.at_level("INFO"):
        onefold.shard(TinyGPT(), onefold.Recipe.zero(3, frozen="int8"))
    assert "no matrix but embeddings was frozen" in caplog.text
    for said in run_ranks(2, said_of_groups):
        assert "makes one group of the 2 ranks (all are on one node" in said


def said_of_groups() -> str:
    from onefold.runtime.state.start import idle_notes

    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, second_copy=True))
    return " ".join(idle_notes(onefold.engine_of(model)))
