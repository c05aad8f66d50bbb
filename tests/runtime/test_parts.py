"""Parts and wholes: what is written through a sink in any pieces is read through a source in any
others, on every tier and in every format; and nothing goes round the sources and sinks.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
import onefold.runtime.parts as parts
from moments_runs import Net
from onefold.optim.state_parts import OptimizerParts, Outline
from onefold.quant.encoded_storage import EncodedStorage
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.storage import OnDisk
from ranks import run_ranks
from zoo import Block, TinyGPT, features_of

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "onefold"


def recipes(folder: str) -> dict[str, dict[str, Any]]:
    disk = {"offload_optimizer": "nvme", "nvme": folder}
    return {
        "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 3": {"stage": 3}, "on the host": {"stage": 3, "offload_optimizer": "cpu"},
        "on NVMe": {"stage": 3, "offload_param": "nvme", **disk}, "on NVMe, stage 0": {"stage": 0, **disk},
        "tiles": {"stage": 3, "tile": 8000}, "tiles on NVMe": {"stage": 1, "tile": 8000, **disk},
        "encoded": {"stage": 3, "frozen": "int8"},
        "bf16 masters": {"stage": 2, "precision": "bf16", "master_dtype": "bf16"},
    }  # fmt: skip


def pieces(draw: random.Random, span: tuple[int, int], grain: int = 1) -> list[tuple[int, int]]:
    """Random intervals that together are `span`, in a random order. Cuts are at multiples of
    `grain`.
    """
    a, b = span
    cuts = sorted({draw.randint(a, b) // grain * grain for _ in range(draw.randint(0, 5))})
    edges = [a, *(cut for cut in cuts if a < cut < b), b]
    out = [(x, y) for x, y in zip(edges, edges[1:], strict=False) if x < y]
    draw.shuffle(out)
    return out


def written(
    sink: parts.HeldParts, item: parts.StateItem, whole: torch.Tensor, draw: random.Random, grain: int = 1
) -> None:  # fmt: skip
    for entry in item.entries:
        for x, y in pieces(draw, sink.held(entry), grain):
            sink.write(item, entry, x, y, item.tile(whole, entry)[x:y])


def read(
    source: parts.HeldParts, item: parts.StateItem, whole: torch.Tensor, draw: random.Random, grain: int = 1
) -> list[str]:  # fmt: skip
    return [
        f"{item.name} {item.key}: elements {x} to {y}"
        for entry in item.entries
        for x, y in pieces(draw, source.held(entry), grain)
        if not source.read(item, entry, x, y).cpu().equal(item.tile(whole, entry)[x:y])
    ]


def all_of(source: parts.HeldParts, item: parts.StateItem) -> torch.Tensor:
    """The whole from what each rank accounts for, as checkpoints put it together."""
    whole = torch.zeros(item.shape)
    for entry in item.entries:
        mine = parts.accounted(source, entry, item.key)
        place = mine.place.read() if isinstance(mine.place, OnDisk) else mine.place
        assert mine.shape == item.shape
        whole.view(-1)[mine.start : mine.stop] += place.float().cpu()
    dist.all_reduce(whole)
    return whole.to(item.dtype)


def told_by_first(whole: torch.Tensor | None) -> torch.Tensor:
    kept = [whole]
    dist.broadcast_object_list(kept)
    assert kept[0] is not None
    return kept[0]


def masters_in_pieces(
    engine: Engine, model: Any, draw: random.Random, agreed: random.Random
) -> list[str]:
    """`draw`: this rank's own. `agreed`: where ranks must go the same way."""
    wrong: list[str] = []
    items, resources = parts.master_items(engine.entries), engine.resources
    # Values that a codec keeps as they are, since it has made them
    expected = {
        item.name: told_by_first(parts.to_first(resources, parts.MasterParts(), item))
        for item in items
    }
    for number, factor in enumerate((0, 1)):  # all zeros, then what was there before
        sink = parts.MasterParts()
        agreed.shuffle(items)
        for item in items:
            whole = expected[item.name] * factor
            if number and agreed.random() < 0.3:
                given = whole if dist.get_rank() == 0 else None
                parts.from_first(resources, sink, item, given)
            else:
                written(sink, item, whole, draw)
        sink.finish()
        engine.make_stale()
        source = parts.MasterParts()
        for item in items:
            whole = expected[item.name] * factor
            wrong += read(source, item, whole, draw)
            brought = parts.to_first(resources, source, item)
            if (brought is None) != (dist.get_rank() != 0):
                wrong.append(f"{item.name}: a whole on rank {dist.get_rank()}: {brought}")
            wrong += [f"{item.name}: to rank 0"] * (not told_by_first(brought).equal(whole))
            wrong += [f"{item.name}: accounted"] * (not all_of(source, item).equal(whole))
        state = onefold.full_state_dict(model)
        wrong += [
            f"{n}: full_state_dict" for n in state if not state[n].equal(expected[n] * factor)
        ]
        for flat in (flat for unit in engine.units for flat in unit.flats):
            full = parts.whole_masters(resources, flat).cpu()
            for e in flat.entries:
                tile = parts.StateItem((e,), "", flat.dtypes.master).tile(
                    expected[e.part.names[0]], e
                )
                if not flat.view(full, e).reshape(-1).equal(tile * factor):
                    wrong.append(f"{e.slot.name}: to all")
    return wrong


def states_in_pieces(
    optimizer: torch.optim.Optimizer, draw: random.Random, grain: int
) -> list[str]:
    wrong: list[str] = []
    values = [optimizer.state_dict()]
    dist.broadcast_object_list(values)
    outline = Outline.of(optimizer)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        source, sink = OptimizerParts(optimizer), OptimizerParts(optimizer)
        for number, param in enumerate(outline.params):
            for key in ("exp_avg", "exp_avg_sq"):
                expected = values[0]["state"][number][key]
                item = param.item(key, expected.dtype)
                wrong += read(source, item, expected, draw, grain)
                sink.create(item)
                written(sink, item, expected, draw, grain)
                wrong += [f"made: {line}" for line in read(sink, item, expected, draw, grain)]
        wrong += [str(each.error) for each in (source, sink) if each.error]
    return wrong


def in_random_pieces(folder: str, names: list[str], seed: int) -> list[str]:
    parts.CHUNK = 1024
    wrong: list[str] = []
    for name in names:
        draw = random.Random(f"{seed} {name} {dist.get_rank()}")
        agreed = random.Random(f"{seed} {name}")
        torch.manual_seed(0)
        net = Net()
        net.blocks[0].weight.requires_grad_("encoded" not in name)
        model = onefold.shard(net, onefold.Recipe.zero(stall_timeout=20.0, **recipes(folder)[name]))
        engine = onefold.engine_of(model)
        assert ("encoded" in name) == any(e.flat.storage.encoded for e in engine.entries)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            lines = masters_in_pieces(engine, model, draw, agreed)
        wrong += [f"{name}: {line}" for line in lines]
        if "encoded" in name:
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(features_of(dist.get_rank(), 8, 19)).square().mean().backward()
        optimizer.step()
        wrong += [f"{name}: {line}" for line in states_in_pieces(optimizer, draw, 1)]
    return wrong


def test_random_pieces_through_source_and_sink_are_the_whole(
    tmp_path: Path, sample: Any, every: bool
) -> None:
    names = sample(recipes(""), 2)
    for seed in range(4 if every else 1):
        wrong = run_ranks(2, in_random_pieces, str(tmp_path), names, seed, timeout=240)
        assert wrong == [[], []], seed


def in_packed_pieces(folder: str, formats: list[str]) -> list[str]:
    wrong: list[str] = []
    for format in formats:
        draw = random.Random(f"{format} {dist.get_rank()}")
        options: dict[str, Any] = (
            {"offload_optimizer": "nvme", "nvme": folder} if format == "int4" else {}
        )
        torch.manual_seed(0)
        model = onefold.shard(Net(), onefold.Recipe.zero(3, moments=format, **options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(features_of(dist.get_rank(), 8, 19)).square().mean().backward()
        optimizer.step()
        wrong += [f"{format}: {line}" for line in states_in_pieces(optimizer, draw, 256)]
    return wrong


def test_packed_states_are_the_whole_in_pieces_of_whole_blocks(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the formats are torchao's: pip install onefold[lowbit]")
    formats = ["bf16", "int8", "fp8", "int4"]
    assert run_ranks(2, in_packed_pieces, str(tmp_path), formats, timeout=120) == [[], []]


class Counted(parts.HeldParts):
    """Values that are no engine's: element i of a parameter is i. Each rank holds what it accounts
    for.
    """

    def __init__(self) -> None:
        self.got: dict[tuple[str, int], float] = {}

    def held(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        return entry.accounted(position)

    def place(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
        return torch.arange(x, y) + entry.part.first

    def write(
        self, item: parts.StateItem, entry: Entry, x: int, y: int, values: torch.Tensor
    ) -> None:
        self.got |= {
            (item.name, entry.part.first + x + i): v for i, v in enumerate(values.tolist())
        }


def values_of_others() -> list[str]:
    """A source and a sink of ten lines move as the engine's own do."""
    wrong: list[str] = []
    for recipe in ({"stage": 0}, {"stage": 3, "tile": 8000}):
        model = onefold.shard(Net(), onefold.Recipe.zero(stall_timeout=20.0, **recipe))
        engine, counted = onefold.engine_of(model), Counted()
        for item in parts.master_items(engine.entries):
            whole = parts.to_first(engine.resources, counted, item)
            if whole is not None and not whole.view(-1).equal(torch.arange(whole.numel()).float()):
                wrong.append(f"{recipe}, {item.name}: {whole}")
            parts.from_first(engine.resources, counted, item, whole)
        held = [0, sum(e.accounted()[1] - e.accounted()[0] for e in engine.entries)]
        wrong += [f"{k} is {v}" for k, v in counted.got.items() if k[1] != v]
        wrong += [f"{len(counted.got)} of {held}"] * (len(counted.got) != held[1])
    return wrong


def test_any_source_and_sink_can_be_moved() -> None:
    assert run_ranks(2, values_of_others) == [[], []]


def decodings(folder: str) -> list[str]:
    """How often encoded flat buffers are decoded, for each of these."""
    net = TinyGPT()
    for param in net.parameters():
        param.requires_grad_(param.dim() == 1)
    recipe = onefold.Recipe.zero(3, frozen="int8", stall_timeout=20.0)
    model = onefold.shard(net, recipe, units=(Block,))
    encoded = [e.flat.index for e in onefold.engine_of(model).entries if e.flat.storage.encoded]
    assert len(encoded) > len(set(encoded))
    calls: list[int] = []
    load = EncodedStorage.load

    def counted(storage: EncodedStorage) -> torch.Tensor:
        calls.append(storage.flat.index)
        return load(storage)

    EncodedStorage.load = counted  # type: ignore[method-assign]
    wrong: list[str] = []
    for what, call in {
        "full_state_dict": lambda: onefold.full_state_dict(model),
        "save": lambda: onefold.save(f"{folder}/saved", model=model),
        "export": lambda: onefold.export(model, f"{folder}/exported"),
    }.items():
        calls.clear()
        call()
        if not calls or sorted(calls) != sorted(set(calls)):
            wrong.append(f"{what} decodes flat buffers {sorted(calls)}, expected each once")
    return wrong


def test_an_encoded_flat_buffer_is_decoded_once_for_all_of_its_parameters(tmp_path: Path) -> None:
    assert run_ranks(2, decodings, str(tmp_path)) == [[], []]


#: Who may ask a storage for values, or put values there: {method: files}.
ASK = {
    "load": {"runtime/parts.py"},
    "landing": {"runtime/parts.py", "runtime/flat.py"},
    "store": {"runtime/parts.py"},
    "renew": {"runtime/parts.py"},
    "elements": {"runtime/parts.py", "optim/state_parts.py"},
    "overwrite": {"runtime/parts.py", "optim/state_parts.py"},
    "new_state": {"optim/state_parts.py"},
}
#: Who may read the memory of masters: those who build them, compare their memory, or step averages.
MASTER = {
    "runtime/flat.py", "runtime/parts.py", "runtime/refresh.py", "runtime/storage.py", "runtime/buffers.py", "quant/encoded_storage.py",
    "observe/activations.py", "ema.py",
}  # fmt: skip


def asked(file: Path) -> set[str]:
    """The methods of storages that a file calls for values, and "master" if it reads `flat.master`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name == "storage" and node.attr in ASK:
            found.add(node.attr)
        if name == "flat" and node.attr == "master":
            found.add("master")
    return found


def test_only_sources_and_sinks_ask_storages_for_values() -> None:
    """State dicts, checkpoints and exports that read `storage.load()` or `flat.master` themselves
    would need a case for each tier, tile and format.
    """
    seen: dict[str, set[str]] = {name: set() for name in (*ASK, "master")}
    for file in PACKAGE.rglob("*.py"):
        for name in asked(file):
            seen[name].add(str(file.relative_to(PACKAGE)))
    for name, files in seen.items():
        extra = files - ASK.get(name, MASTER)
        assert not extra, f"{name}: {sorted(extra)}: use a HeldParts of runtime/parts.py"
    assert {name: files for name, files in seen.items() if name in ASK} == ASK
