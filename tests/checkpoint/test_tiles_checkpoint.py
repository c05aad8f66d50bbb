"""What leaves the process knows no tiles: checkpoints, exports and adapters of a model in tiles are
those of the model without.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from tiny_transformers import (
    FAMILIES,
    TOKENS,
    complaint,
    differences,
    files,
    on_meta,
    opened,
    saved_folders,
)
from zoo import TinyGPT, tokens_of

pytestmark = pytest.mark.one_in(6)

SERVER = "libraries"

TILE = 700  # bytes
KINDS = ((None, 0), (TILE, 0), (TILE, 1), (TILE, 3), (None, 3), (2 * TILE, 2))  # (tile, stage)


def recipe_of(tile: int | None, stage: int, **options: Any) -> Any:
    import onefold

    return onefold.Recipe.zero(stage, tile=tile, stall_timeout=30.0, **options)


class Odd(nn.Module):
    """Tied, partly frozen, with a buffer; the bias of the last layer is no multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT(tied=True, width=12, depth=2)
        self.gpt.blocks[0].requires_grad_(False)
        self.last = nn.Linear(12, 37)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1.0
        return self.gpt(tokens) + self.last(self.gpt.tokens(tokens)).square().mean()


def build(
    tile: int | None, stage: int, precision: str, group: Any, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(seed)
    model = onefold.shard(Odd(), recipe_of(tile, stage, precision=precision), group=group)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {
            "params": [p for n, p in trained.items() if "norm" not in n and "bias" not in n],
            "lr": 2e-3,
        },
        {
            "params": [p for n, p in trained.items() if "norm" in n or "bias" in n],
            "weight_decay": 0.3,
        },
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, first: int = 0
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = model(tokens_of(100 * rank + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def outside(name: str) -> str:
    """What a tile's parameter is called outside."""
    before, tiles, after = name.partition(".tiles.")
    return f"{before}.{after.partition('.')[2]}" if tiles else name


def whole_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: Any, size: int
) -> dict[str, Any]:
    """{"parameter key": whole tensor or number} put together from the ranks' own objects, by the
    order of tiles in the model.
    """
    import onefold

    mine: list[tuple[str, str, tuple[int, ...], int, Any]] = []
    with torch._C.DisableTorchFunctionSubclass():
        for entry in onefold.engine_of(model).entries:
            start = 0 if entry.flat.unsharded else entry.flat.local(entry)[0] - entry.slot.start
            for key, value in {
                "value": entry.param.data,
                **optimizer.state.get(entry.param, {}),
            }.items():
                elementwise = (
                    isinstance(value, Tensor) and value.shape == entry.param.shape and key != "step"
                )
                data = value.detach().reshape(-1).clone() if elementwise else value
                if entry.param.numel():
                    mine.append(
                        (
                            entry.names[0],
                            key,
                            tuple(entry.slot.shape),
                            start if elementwise else -1,
                            data,
                        )
                    )
    said: list[Any] = [mine]
    if size > 1:
        said = [None] * size
        dist.all_gather_object(said, mine, group=group)
    pieces: dict[tuple[str, str], Tensor] = {}  # of parameters and tiles, in the model's order
    out: dict[str, Any] = {"calls": model.calls.clone()}
    for name, key, shape, start, data in itertools.chain(*said):
        if start < 0:
            out[f"{outside(name)} {key}"] = data
        else:
            whole = pieces.setdefault((name, key), torch.full(shape, torch.nan, dtype=data.dtype))
            whole.view(-1)[start : start + data.numel()] = data
    order = sorted(
        pieces, key=lambda pair: [int(part) if part.isdigit() else 0 for part in pair[0].split(".")]
    )
    for name, key in order:
        known = f"{outside(name)} {key}"
        out[known] = (
            torch.cat([out[known], pieces[name, key]]) if known in out else pieces[name, key]
        )
    return out


def unlike(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    wrong = [f"names: {set(a) ^ set(b)}"] if set(a) != set(b) else []
    for name in set(a) & set(b):
        same = (
            torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype
            if isinstance(a[name], Tensor)
            else a[name] == b[name]
        )
        wrong += [] if same else [name]
    return wrong


def every_pair(
    root: str, precision: str, sizes: list[int], loads: list[tuple[int, int]]
) -> list[str]:
    """Save in tiles and without, on each number of ranks; load each in tiles and without, of
    `loads` (what has loaded, by its number, what was saved, by its).
    """
    import onefold

    rank, wrong = dist.get_rank(), []
    groups = {
        n: dist.new_group(list(range(n))) if n < dist.get_world_size() else dist.group.WORLD
        for n in sizes
    }
    saved: dict[tuple[int, int], dict[str, Any]] = {}
    for size, (number, (tile, stage)) in itertools.product(sizes, enumerate(KINDS)):
        if rank < size:
            model, optimizer = build(tile, stage, precision, groups[size], seed=1)
            train(model, optimizer, rank, 2)
            onefold.save(f"{root}/{size}-{number}", model=model, optimizer=optimizer, step=2)
            saved[size, number] = whole_states(model, optimizer, groups[size], size)
        dist.barrier()
    every = list(itertools.product(sizes, range(len(KINDS))))
    for target, (size, (number, (tile, stage))) in enumerate(
        itertools.product(sizes, enumerate(KINDS))
    ):
        if rank >= size:
            continue
        model, optimizer = build(tile, stage, precision, groups[size], seed=2)
        if stage % 2:
            train(model, optimizer, rank, 1)  # states that must make way
        for source in (s for s in every if (target, every.index(s)) in loads):
            load = (
                onefold.load
                if (number + source[1]) % 2
                else lambda path, **them: onefold.load_async(path, **them).wait()
            )
            load(f"{root}/{source[0]}-{source[1]}", model=model, optimizer=optimizer)
            found = whole_states(model, optimizer, groups[size], size)
            # What was saved by ranks without this one, the others compare
            states = saved.get(source, found)
            wrong += [
                f"{KINDS[source[1]]} on {source[0]} into {(tile, stage)} on {size}: {what}"
                for what in unlike(states, found)
            ]
    return wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_in_tiles_or_not_it_loads_in_tiles_or_not_bit_for_bit(
    precision: str, tmp_path: Path, sample: Any
) -> None:
    loads = sample(itertools.product(range(2 * len(KINDS)), repeat=2), 3)
    found = run_ranks(2, every_pair, str(tmp_path), precision, [1, 2], loads, timeout=300.0)
    assert found == [[], []]
    # Stage 3 without and with
    plain, tiled = (
        json.loads((tmp_path / f"2-{number}" / "manifest.json").read_text()) for number in (4, 3)
    )
    outlines = [
        [
            tuple(t.get(key) for key in ("kind", "name", "state", "dtype", "shape", "aliases"))
            for t in m["tensors"]
            if t["kind"] != "rng"
        ]
        for m in (plain, tiled)
    ]
    assert sorted(map(str, outlines[0])) == sorted(map(str, outlines[1]))
    assert "tiles" not in json.dumps(
        [tiled["tensors"], json.loads((tmp_path / "2-3" / "state.json").read_text())]
    )


def goes_on(root: str) -> list[str]:
    """Training on after a load gives the losses of training on without a break: in the same tiles
    to the bit, in others within rounding.
    """
    import onefold

    rank, losses = dist.get_rank(), []
    model, optimizer = build(TILE, 3, "fp32", None, seed=1)
    train(model, optimizer, rank, 2)
    onefold.save(f"{root}/a", model=model, optimizer=optimizer, step=2)
    losses.append(train(model, optimizer, rank, 3, first=2))
    for tile in (TILE, 300):
        model, optimizer = build(tile, 3, "fp32", None, seed=5)
        onefold.load(f"{root}/a", model=model, optimizer=optimizer)
        losses.append(train(model, optimizer, rank, 3, first=2))
    problems = [] if losses[0] == losses[1] else [f"the same tiles: {losses[:2]}"]
    if not torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[2]), rtol=1e-5):
        problems.append(f"other tiles: {losses[0]} and {losses[2]}")
    return problems


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_in_tiles_of_another_size(tmp_path: Path) -> None:
    assert run_ranks(2, goes_on, str(tmp_path)) == [[], []]


def refused() -> list[str]:
    import onefold

    model, optimizer = build(TILE, 3, "fp32", None, seed=1)
    return [
        complaint(lambda: onefold.dcp_state_dict(model)),
        complaint(lambda: onefold.dcp_state_dict(model, optimizer)),
    ]


def test_torch_s_own_checkpoints_are_refused_with_the_way_out() -> None:
    for said in run_ranks(2, refused):
        assert all(
            "'gpt.tokens.weight' is computed in tiles" in sentence and "onefold.save" in sentence
            for sentence in said
        )


def of_another_model(path: str) -> list[str]:
    """What is said of a checkpoint whose head has another shape: once, by the name that it has
    outside.
    """
    import onefold

    torch.manual_seed(0)
    small = onefold.shard(TinyGPT(vocabulary=50, width=12), recipe_of(None, 3))
    onefold.save(path, model=small)
    large = onefold.shard(TinyGPT(vocabulary=61, width=12), recipe_of(TILE, 3))
    return [complaint(lambda: onefold.load(path, model=large))]


def test_a_checkpoint_of_another_shape_is_refused_by_the_parameter_s_name(tmp_path: Path) -> None:
    for (said,) in run_ranks(2, of_another_model, str(tmp_path / "a")):
        assert (
            said.count("tokens.weight: (50, 12) in it, (61, 12) in the model") == 1
            and "tiles" not in said
        )


# -- Hugging Face ----------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_folders(tmp_path_factory.mktemp("hf"))


def in_and_out(folders: dict[str, Path], root: Path, families: list[str], stage: int) -> list[str]:
    """From a folder onto the meta device, one step at learning rate 0, and out again; and the same
    from memory.
    """
    import onefold

    problems = []
    for family in families:
        expected = files(folders[family])
        brought = onefold.shard(on_meta(family), recipe_of(TILE, stage), weights=folders[family])
        held = onefold.shard(opened(folders[family], family), recipe_of(TILE, stage))
        onefold.load_pretrained(held, folders[family])
        for how, model in (("meta", brought), ("held", held)):
            if not any(".tiles." in name for name, _ in model.named_parameters()):
                problems.append(f"{family}: nothing is in tiles")
            with torch.no_grad():
                logits, wanted = (
                    model.eval()(TOKENS).logits,
                    opened(folders[family], family).eval()(TOKENS).logits,
                )
            # Sums of terms of that size
            if not torch.allclose(logits, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())):
                problems.append(
                    f"{family}, {how}: other logits, by {(logits - wanted).abs().max()}"
                )
            out = onefold.export(model, root / f"{family} {how}")
            problems += [f"{family}, {how}: {what}" for what in differences(expected, files(out))]
    return problems


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_hugging_face_folders_go_in_and_come_out_as_they_were(
    ranks: int, stage: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    families = ["llama", "llama, tied", "gpt2", "mixtral"]
    assert (
        run_ranks(ranks, in_and_out, folders, tmp_path, families, stage, timeout=300.0)
        == [[]] * ranks
    )
    for family in families:
        with torch.no_grad():
            ours, theirs = (
                opened(f, family).eval()(TOKENS).logits
                for f in (tmp_path / f"{family} meta", folders[family])
            )
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@needs_transformers
def test_every_family_is_exported_from_tiles_as_save_pretrained_writes_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    import onefold

    for family in (f for f in FAMILIES if f != "vit"):  # nothing of it is large
        model = onefold.shard(opened(folders[family], family), recipe_of(TILE, 3, precision="bf16"))
        assert any(".tiles." in name for name, _ in model.named_parameters()), family
        out = onefold.export(model, tmp_path / family, "master")
        assert differences(files(folders[family]), files(out)) == [], family


def saves_pretrained(folder: Path, out: Path) -> list[str]:
    """transformers' own way of saving, inside full_params."""
    import onefold

    model: Any = onefold.shard(opened(folder, "llama, tied"), recipe_of(TILE, 3))
    with onefold.full_params(model):
        if dist.get_rank() == 0:
            model.save_pretrained(out)
        generated = model.generate(TOKENS[:, :3], max_new_tokens=4, do_sample=False)
    expected = opened(folder, "llama, tied").generate(
        TOKENS[:, :3], max_new_tokens=4, do_sample=False
    )
    dist.barrier()
    problems = differences(files(folder), files(out))
    return (
        problems
        if torch.equal(generated, expected)
        else [*problems, f"{generated} generated, expected {expected}"]
    )


@pytest.mark.slow
@needs_transformers
def test_inside_full_params_transformers_saves_and_generates(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(2, saves_pretrained, folders["llama, tied"], tmp_path / "out") == [[], []]


def with_adapters(base: Path, root: Path) -> list[str]:
    """LoRA beside layers in tiles, and on some: saved, loaded again, and trained."""
    import peft

    import onefold

    def wrapped(model: Any) -> Any:
        config = peft.LoraConfig(
            r=3,
            target_modules=["down_proj", "lm_head"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    states, problems = [], []
    for tile in (None, TILE):
        model = onefold.shard(wrapped(opened(base, "llama")), recipe_of(tile, 3))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(2):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        out = onefold.save_adapters(model, root / f"adapters {tile}")
        states.append(onefold.full_state_dict(model))
        if tile is not None:
            again = onefold.shard(wrapped(opened(base, "llama")), recipe_of(tile, 3))
            onefold.load_adapters(again, out)
            loaded = onefold.full_state_dict(again)
            problems += [name for name, t in states[-1].items() if not torch.equal(t, loaded[name])]
            if not any("base_layer.tiles." in name for name, _ in model.named_parameters()):
                problems.append("no base layer is in tiles")
    problems += [] if list(states[0]) == list(states[1]) else [f"{set(states[0]) ^ set(states[1])}"]
    return problems + [
        name
        for name, t in states[0].items()
        if not torch.allclose(t, states[1][name], rtol=1e-4, atol=1e-6)
    ]


@pytest.mark.slow
@needs_transformers
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_on_layers_in_tiles_are_peft_s(folders: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(2, with_adapters, folders["llama"], tmp_path, timeout=300.0) == [[], []]
    left, right = (files(tmp_path / f"adapters {tile}") for tile in (None, TILE))
    assert left.keys() == right.keys() and all(
        torch.allclose(left[n], right[n], rtol=1e-4, atol=1e-6) for n in left
    )
