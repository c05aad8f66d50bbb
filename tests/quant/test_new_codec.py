"""A codec that is made up, by the lines that the table of `onefold.quant` asks for: three bits an
element, eight elements in three bytes, rounded to the nearest only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from extended import Changes, extended, run_there

THREE_BITS = """
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from onefold.quant.blockwise import Blockwise


@dataclass(frozen=True)
class Int3(Blockwise):
    name: ClassVar[str] = "int3"
    top: ClassVar[float] = 3.0
    packed: ClassVar[tuple[int, int]] = (8, 3)

    block: int = 64

    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        codes = numbers.nan_to_num_(0.0).round_().add_(3.0).to(torch.int32)
        word = (codes.view(len(codes), -1, 8) << torch.arange(0, 24, 3)).sum(-1)
        payload.copy_((word[..., None] >> torch.tensor([0, 8, 16]) & 255).view(payload.shape))

    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        three = payload.view(len(payload), -1, 3).to(torch.int32)
        word = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
        codes = word[..., None] >> torch.arange(0, 24, 3) & 7
        numbers.copy_(codes.view(numbers.shape).sub_(3))

    def _off(self, sizes: torch.Tensor, scales: torch.Tensor, part: float) -> torch.Tensor:
        return scales * part
"""
CHANGES: Changes = {
    "quant/int3.py": THREE_BITS,
    "quant/registry.py": {
        "from onefold.quant.integers": "from onefold.quant.int3 import Int3\nfrom onefold.quant.integers",
        "Fp8, Nf4)}": "Fp8, Nf4, Int3)}",
    },
    "recipe/options.py": {
        'WireCodec = Literal["int8",': 'WireCodec = Literal["int3", "int8",',
        'FrozenCodec = Literal["int8",': 'FrozenCodec = Literal["int3", "int8",',
    },
}


def seen() -> dict[str, Any]:
    import onefold
    from onefold import Recipe
    from onefold.quant import codec
    from onefold.recipe.options import OPTIONS
    from zoo import TinyGPT, tokens_of

    by, off = codec("int3"), []
    for numel in (0, 1, 7, 8, 63, 64, 65, 1000):
        source = torch.randn(numel)
        coded = torch.empty(by.encoded_bytes(numel), dtype=torch.uint8)
        by.encode(source, coded)
        back = torch.empty(numel)
        by.decode(coded, back)
        off.append(bool(((back - source).abs() <= by.bound(source.abs())).all()))
    with pytest.raises(ValueError) as unknown:
        Recipe.zero(3, reduce_codec="int9")
    with pytest.raises(ValueError) as rounding:
        recipe = Recipe.zero(3, reduce_codec="int3", wire_rounding="stochastic")
        onefold.shard(TinyGPT(), recipe)
    weights, losses = {}, {}
    for name in ("int3", "int4"):
        torch.manual_seed(0)
        model = TinyGPT()
        model.blocks.requires_grad_(False)
        onefold.shard(model, Recipe.zero(3, precision="bf16", frozen=name))
        weights[name] = onefold.engine_of(model).memory.now()["parameters"]
        losses[name] = model(tokens_of(0)).float().square().mean().item()
    plans = {
        name: onefold.plan(
            "gpt2", gpus=16, gpu="a100-80", seq=1024, stage=3, largest=False, group="flat",
            gather_codec=name, reduce_codec=name, micro_batch=1,
        ).recommended
        for name in ("int3", "int4")
    }  # fmt: skip
    return {
        "bytes": [by.encoded_bytes(n) for n in (64, 65, 6400)],
        "within bounds": off,
        "choices": OPTIONS["reduce_codec"].type.__args__[0].__args__,
        "unknown": str(unknown.value),
        "rounding": str(rounding.value),
        "weights": weights,
        "losses": losses,
        "sent": {name: found.account.wire_bytes for name, found in plans.items()},  # type: ignore[union-attr]
    }


def test_a_new_codec_is_a_file_a_line_of_the_registry_and_its_name_in_the_options(
    tmp_path: Path,
) -> None:
    found = run_there(extended(tmp_path, CHANGES), seen)
    # 24 bytes and a scale a block; a block of one element has three bytes, and one to an even number
    assert found["bytes"] == [26, 32, 2600] and all(found["within bounds"])
    assert found["choices"] == ["int3", "int8", "fp8", "int4"] and "'int3'" in found["unknown"]
    assert "reduce_codec='int3': this codec rounds to the nearest value only" in found["rounding"]
    assert 0 < found["weights"]["int3"] < found["weights"]["int4"]
    assert found["losses"]["int3"] == pytest.approx(found["losses"]["int4"], rel=0.1)
    assert 3.2 / 4.3 < found["sent"]["int3"] / found["sent"]["int4"] < 3.3 / 4.2, found["sent"]
