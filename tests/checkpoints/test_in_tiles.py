"""What leaves the process knows no tiles: checkpoints and exports of a model in tiles are those of the
model without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from on_ranks import on_ranks, slow
from promises.jobs import whole_states
from reference import adamw, built, differences, train, weights
from tiny_transformers import TOKENS, build, files, on_meta, opened
from zoo import TinyGPT, tokens_of

SERVER = "libraries"


def recipe(tile: int | None) -> onefold.Recipe:
    return onefold.Recipe.zero(3, tile=tile, stall_timeout=30.0)


@on_ranks(2, server="core")
@pytest.mark.parametrize(("saved", "read"), [(700, None), (None, 700), (700, 1500)])
def test_saved_in_tiles_or_not_it_loads_in_tiles_or_not(
    saved: int | None, read: int | None, folder: Path
) -> None:
    def made(tile: int | None, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        plain = built(lambda: TinyGPT(depth=2, tied=True, width=12), seed)
        plain.blocks[0].requires_grad_(False)
        model = onefold.shard(plain, recipe(tile))
        return model, adamw(model)

    model, optimizer = made(saved, 1)
    train(model, optimizer, [tokens_of(dist.get_rank()), tokens_of(10 + dist.get_rank())])
    path = onefold.save(folder / "saved", model=model, optimizer=optimizer)
    assert all(
        "tiles." not in (path / f"{name}.json").read_text() for name in ("manifest", "state")
    )
    again, states = made(read, 2)
    onefold.load(path, model=again, optimizer=states)
    found = weights(again) | whole_states(states)
    assert not differences(weights(model) | whole_states(optimizer), found)


@slow
@on_ranks(2)
@pytest.mark.parametrize("family", ["llama, tied", "gpt2", "mixtral"])
def test_hugging_face_folders_go_in_and_come_out_as_they_were(family: str, folder: Path) -> None:
    if dist.get_rank() == 0:
        built(lambda: build(family)).save_pretrained(folder / "theirs")
    dist.barrier()
    model = onefold.shard(on_meta(family), recipe(700), weights=folder / "theirs")
    assert any(".tiles." in name for name, _ in model.named_parameters())
    with torch.no_grad():
        logits, wanted = (
            of.eval()(TOKENS).logits for of in (model, opened(folder / "theirs", family))
        )
    assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    onefold.export(model, folder / "ours")
    assert not differences(files(folder / "theirs"), files(folder / "ours"))
