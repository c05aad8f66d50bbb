"""Checkpoints of a mesh load on any other, bit-equal: weights and optimizer states, at other stages,
and without the axis. Each rank reads what it will own, and little more.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axes_models import Case, batches_of, built, mesh_of_case, parallelized
from test_experts import Case as ExpertCase
from test_experts import Net, batches, divided
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from needed import skip_without
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import key_of, read_manifest
from onefold.checkpoint.per_rank import stream_of
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import TensorFile
from onefold.inspection.diff import differences
from onefold.inspection.reshard import reshard
from onefold.inspection.summary import summarize
from onefold.inspection.verify import examine
from ranks import run_ranks

pytestmark = pytest.mark.one_in(3)

#: TP 2 × DP 2, with norms in fp32 that are the same on every rank beside the boxes.
MESH = Case(dp=2, tp=2, steps=2)
Trained = tuple[nn.Module, torch.optim.Optimizer, torch.device]


def made(stage: int, case: Case, seed: int = 0, **options: Any) -> Trained:
    """A sharded model of the case and its optimizer. `seed` moves the weights away from the case's."""
    import onefold

    mesh = mesh_of_case(case)
    model = parallelized(case, mesh)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * seed)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **{**case.options, **options})
    model = onefold.shard(model, recipe, mesh=mesh, data="dp")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh


def train(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, dp: int) -> None:
    for batch in batches_of(case, dp)[: case.steps]:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states as Onefold's whole state dicts have them, by a checkpoint's items."""
    import onefold

    out = {str(Item("parameter", n)): t for n, t in onefold.full_state_dict(model).items()}
    names = [name for name, _ in model.named_parameters()]
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            out[str(Item("state", names[number], key))] = value
    return out


class Counted:
    """Bytes that this rank reads of tensors in files."""

    def __enter__(self) -> Counted:
        from onefold.checkpoint.tensorfile import TensorFile

        self.nbytes, self._read = 0, TensorFile._read
        read, counted = TensorFile._read, self

        def counting(file: Any, into: memoryview, at: int, crc: int) -> int:
            counted.nbytes += len(into)
            return read(file, into, at, crc)

        TensorFile._read = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        from onefold.checkpoint.tensorfile import TensorFile

        TensorFile._read = self._read  # type: ignore[method-assign]


def saved(folder: str, stage: int, case: Case) -> dict[str, torch.Tensor]:
    """Train and save; returns the whole weights and states (rank 0)."""
    import onefold

    model, optimizer, mesh = made(stage, case)
    train(model, optimizer, case, mesh.get_local_rank("dp"))
    position = {"seen": mesh.get_local_rank("dp")}
    onefold.save(folder, model=model, optimizer=optimizer, data=position, step=case.steps)
    return wholes(model, optimizer)


def moved(source: str, target: str, stage: int, case: Case, later: bool) -> dict[str, Any]:
    """Load into another model, on this mesh, and save that. `later`: by the asynchronous calls."""
    import onefold
    import onefold.checkpoint.source as sources

    sources.BOX_BLOCK = 256  # small beside the tensors of this model
    model, optimizer, mesh = made(stage, case, seed=3)
    with Counted() as counted:
        if later:
            loaded = onefold.load_async(source, model=model, optimizer=optimizer).wait()
        else:
            loaded = onefold.load(source, model=model, optimizer=optimizer)
    with closing(FolderSource(Path(source))) as there:
        streams = [s.shape[0] for i, s in there.items().items() if i.kind == "rng"]
    random = streams[mesh.get_rank() % len(streams)]
    own = sum(e.accounted()[1] - e.accounted()[0] for e in onefold.engine_of(model).entries)
    position = {"seen": mesh.get_local_rank("dp")}
    give = {"model": model, "optimizer": optimizer, "data": position, "step": loaded.step}
    onefold.save_async(target, **give).wait() if later else onefold.save(target, **give)
    return {
        "wholes": wholes(model, optimizer),
        "data": loaded.data,
        "dp": mesh.get_local_rank("dp"),
        "read": counted.nbytes,
        "random": random,
        "own": 3 * 4 * own,  # master, two moments
    }


def in_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter and state of a checkpoint, read whole in this process."""
    source = FolderSource(folder)
    found = {str(i): source.whole(i) for i in source.items() if i.kind in ("parameter", "state")}
    for item in [i for i in source.items() if i.kind == "parameter"]:
        for key, value in source.scalars(item.name).items():
            found[str(Item("state", item.name, key))] = torch.as_tensor(value)
    source.close()
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()}"
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{what}: {name} has shape {found[name].shape}"
        assert torch.equal(found[name], value), f"{what}: {name} has other bits"


def test_a_checkpoint_goes_through_all_meshes_and_comes_back_bit_equal(tmp_path: Path) -> None:
    first = tmp_path / "first"
    expected = run_ranks(4, saved, str(first), 3, MESH)[0]
    same(in_folder(first), expected, "as saved on dp 2 × tp 2")
    manifest = read_manifest(first)
    by_name = {r.item.name: r for r in manifest.records if r.item.kind == "parameter"}
    assert manifest.version == 2
    assert {b.shape for b in by_name["layers.0.feed_forward.w2.weight"].boxes} == {(16, 20)}
    assert {b.shape for b in by_name["tok_embeddings.weight"].boxes} == {(31, 16), (30, 16)}
    assert not by_name["norm.weight"].boxed, "replicated: every rank of the mesh holds it"
    assert not examine(first).problems

    (tmp_path / "nvme").mkdir()
    nvme = {"offload_optimizer": "nvme", "nvme": str(tmp_path / "nvme")}
    hops: list[tuple[str, int, Case, bool]] = [
        ("tp 4", 1, replace(MESH, dp=1, tp=4, options={"offload_optimizer": "cpu"}), False),
        ("dp 4", 2, replace(MESH, plan="none", dp=4, tp=1), False),
        ("dp 2 × tp 2 again", 0, MESH, True),
        ("tp 2 of other layers", 3, replace(MESH, plan="layers"), False),
        ("dp 3, uneven", 3, replace(MESH, plan="none", dp=3, tp=1), False),
        ("tp 3, uneven", 2, replace(MESH, plan="layers", dp=1, tp=3, options=nvme), True),
    ]
    source = first
    for number, (name, stage, case, later) in enumerate(hops):
        target = tmp_path / str(number)
        ranks = run_ranks(case.dp * case.tp, moved, str(source), str(target), stage, case, later)
        same(ranks[0]["wholes"], expected, f"{name}, in the model")
        same(in_folder(target), expected, f"{name}, saved again")
        version = read_manifest(target).version
        assert version == (1 if case.plan == "none" else 2), f"{name}: version {version}"
        total = sum(r["read"] - r["random"] for r in ranks)
        assert sum(r["own"] for r in ranks) <= total, "everything is read at least once"
        for seen in ranks:
            # The blocks of 256 bytes at both ends of pieces, and rows of which it has a part
            read = seen["read"] - seen["random"]
            assert read < 1.5 * seen["own"], f"{name}: {read} bytes of {seen['own']} of its own"
        source = target

    # One process without any mesh, and the tools that know no ranks
    import onefold

    model = onefold.shard(built(MESH), onefold.Recipe.zero(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for folder in (first, source):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        onefold.load(folder, model=model, optimizer=optimizer)
        same(wholes(model, optimizer), expected, f"one process, from {folder.name}")
    reshard(first, tmp_path / "two files", 2)
    same(in_folder(tmp_path / "two files"), expected, "rewritten in two files")
    assert read_manifest(tmp_path / "two files").version == 1
    with closing(FolderSource(first)) as a, closing(FolderSource(source)) as b:
        assert differences(a, b, parts=("weights", "optimizer")).equal


# -- experts ---------------------------------------------------------------------------------------


class Cut(nn.Module):
    """A weight that two axes divide, in parts of unequal sizes."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(5 * 4 * 7, dtype=torch.float32)
        self.weight = nn.Parameter(numbers.view(5, 4, 7))


def experts_moved(
    folder: str, source: str, target: str, stage: int, dp: int, ep: int
) -> dict[str, Any]:
    """Load `source`, or train if it is "", on this mesh of experts; save as `target`."""
    import onefold

    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    net, cut = Net(), Cut()
    if ep > 1:
        divided(net, mesh["ep"])
        placements = [Shard(1), Shard(2)] if dp == 1 else [Shard(0), Shard(2)]
        parts = distribute_tensor(cut.weight.detach(), mesh, placements)
        cut.weight = nn.Parameter(torch.zeros_like(parts) if source else parts)
    elif source:
        nn.init.zeros_(cut.weight)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    model = onefold.shard(net, recipe, mesh=mesh, data=("dp", "ep"))
    also = onefold.shard(cut, recipe, mesh=mesh, data=("dp", "ep"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if source:
        onefold.load(f"{folder}/{source}", model=model, optimizer=optimizer)
        onefold.load(f"{folder}/{source}-cut", model=also)
    else:
        for batch in batches(ExpertCase(dp, ep), torch.distributed.get_rank()):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    onefold.save(f"{folder}/{target}", model=model, optimizer=optimizer)
    onefold.save(f"{folder}/{target}-cut", model=also)
    found: dict[str, Any] = wholes(model, optimizer)
    return found | {"cut": onefold.full_state_dict(also).get("weight")}


@pytest.mark.slow
def test_experts_go_to_other_ranks_bit_equal(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_ranks(4, experts_moved, folder, "", "first", 3, 2, 2)[0]
    assert torch.equal(expected["cut"], Cut().weight.detach())
    hops = [("first", "four", 2, 1, 4), ("four", "plain", 3, 4, 1), ("plain", "back", 1, 2, 2)]
    for source, target, stage, dp, ep in hops:
        found = run_ranks(4, experts_moved, folder, source, target, stage, dp, ep)[0]
        told = f"{source} to dp {dp} × ep {ep}"
        same(found, expected, told)
    records = {r.item.name: r for r in read_manifest(tmp_path / "first").records}
    assert len(records["blocks.0.experts.up"].boxes) == 2
    (weight,) = (
        r for r in read_manifest(tmp_path / "first-cut").records if r.item.name == "weight"
    )
    assert {box.shape for box in weight.boxes} == {(3, 4, 4), (3, 4, 3), (2, 4, 4), (2, 4, 3)}


# -- everything beside save and load ---------------------------------------------------------------


def beside(folder: str, stage: int) -> dict[str, Any]:
    """Averages, exports, streams and whole state dicts of a model on the mesh."""
    import onefold

    model, optimizer, mesh = made(stage, MESH)
    average = onefold.ema.EMA(model, decay=0.5)
    train(model, optimizer, MESH, mesh.get_local_rank("dp"))
    average.update()  # a copy
    before = onefold.full_state_dict(model)
    train(model, optimizer, MESH, mesh.get_local_rank("dp"))
    average.update()
    out: dict[str, Any] = {"before": before, "weights": onefold.full_state_dict(model)}
    out["average"] = average.state_dict()

    # Averages and states, into fresh ones
    again = onefold.ema.EMA(model, decay=0.5)
    again.load_state_dict(out["average"] if mesh.get_rank() == 0 else None)
    out["average again"] = again.state_dict()
    states = optimizer.state_dict()
    other, fresh, _ = made(stage, MESH, seed=3)
    fresh.load_state_dict(states)  # whole on rank 0, empty elsewhere
    every = [states]
    torch.distributed.broadcast_object_list(every)
    whole_everywhere = torch.optim.AdamW(other.parameters(), lr=0.01)
    whole_everywhere.load_state_dict(every[0])
    onefold.load_full_state_dict(other, out["weights"])
    out["states"] = wholes(model, optimizer)
    out["states again"] = wholes(other, fresh)
    out["states from each"] = wholes(other, whole_everywhere)

    out["streamed"] = {n: t.clone() for n, t in onefold.stream_params(model, bucket=2000)}
    onefold.export(model, f"{folder}/hf", max_shard_bytes=4000)
    with average.applied():
        onefold.export(model, f"{folder}/averaged")
    torch.distributed.checkpoint.save(
        onefold.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/dcp"
    )
    return out


def from_others(folder: str, stage: int, case: Case) -> dict[str, Any]:
    """What Hugging Face and DCP folders give on this mesh."""
    import onefold
    import onefold.checkpoint.source as sources

    sources.BOX_BLOCK = 256
    mesh = mesh_of_case(case)
    model = parallelized(replace(case, meta=True), mesh)
    with Counted() as counted:
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
        model = onefold.shard(model, recipe, mesh=mesh, data="dp", weights=f"{folder}/hf")
    entries = onefold.engine_of(model).entries
    out: dict[str, Any] = {"weights": onefold.full_state_dict(model), "read": counted.nbytes}
    out["own"] = 4 * sum(e.accounted()[1] - e.accounted()[0] for e in entries)
    model, optimizer, _ = made(stage, case, seed=3)
    torch.distributed.checkpoint.load(
        onefold.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/dcp"
    )
    out["dcp"] = wholes(model, optimizer)
    return out


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_exports_averages_streams_and_state_dicts_are_whole(stage: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks = run_ranks(4, beside, str(tmp_path), stage)
    first = ranks[0]
    weights = first["weights"]
    half = {n: first["before"][n].lerp(w, 0.5) for n, w in weights.items()}
    averages = {n.removeprefix("module."): t for n, t in first["average"].items() if "." in n}
    same(averages, half, "the average")
    same(first["average again"], first["average"], "the average, loaded")
    same(first["states again"], first["states"], "states, whole on rank 0")
    same(first["states from each"], first["states"], "states, whole on every rank")
    for rank, seen in enumerate(ranks):
        same(seen["streamed"], weights, f"streamed, rank {rank}")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    exported = {n: t for file in files for n, t in load_file(file).items()}
    same(exported, weights, "exported")
    same(load_file(tmp_path / "averaged" / "model.safetensors"), half, "exported, averaged")

    for case in (replace(MESH, dp=1, tp=4), replace(MESH, plan="layers")):
        told = f"dp {case.dp} × tp {case.tp}"
        ranks = run_ranks(case.dp * case.tp, from_others, str(tmp_path), 3 - stage, case)
        same(ranks[0]["weights"], weights, f"{told}, weights=")
        same(ranks[0]["dcp"], first["states"], f"{told}, DCP")
        for seen in ranks:
            assert seen["own"] <= seen["read"] < 2 * seen["own"], f"{told}: {seen['read']} bytes"


# -- packed moments --------------------------------------------------------------------------------


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's own states, as they rest."""
    local = onefold_local(optimizer)
    names = [name for name, _ in model.named_parameters()]
    return {
        f"{names[number]} {key}": value.clone()
        for number, state in local.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def onefold_local(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    from onefold.optim import local_state_dict

    found: dict[int, dict[str, Any]] = local_state_dict(optimizer)["state"]
    return found


def packed_on_meshes(folder: str, kind: str) -> dict[str, Any]:
    """Save packed moments on two meshes, load each on the other and on its own."""
    import onefold
    import onefold.recipe.moments as moments

    moments.SMALLEST = 64
    flat = replace(MESH, plan="none", dp=4, tp=1)
    made_of = {"boxes": (2, MESH), "whole": (3, flat)}
    out: dict[str, Any] = {}
    for name, (stage, case) in made_of.items():
        model, optimizer, mesh = made(stage, case, moments=kind)
        train(model, optimizer, case, mesh.get_local_rank("dp"))
        give = {"model": model, "optimizer": optimizer}
        onefold.save(f"{folder}/{name}", **give)
        onefold.save_async(f"{folder}/{name}-later", **give).wait()
        out[name] = wholes(model, optimizer), parts_of(model, optimizer)
        for target, (other_stage, other_case) in made_of.items():
            model, optimizer, _ = made(other_stage, other_case, seed=3, moments=kind)
            source = f"{folder}/{name}" + ("-later" if target == "whole" else "")
            onefold.load(source, model=model, optimizer=optimizer)
            out[f"{name} to {target}"] = wholes(model, optimizer), parts_of(model, optimizer)
        model, optimizer, _ = made(1, MESH, seed=3)
        onefold.load(f"{folder}/{name}", model=model, optimizer=optimizer)
        out[f"{name} to fp32"] = wholes(model, optimizer), {}
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
def test_packed_moments_are_the_same_codes_on_a_mesh_of_the_same_boxes(
    kind: str, tmp_path: Path
) -> None:
    skip_without("torchao", "the formats are torchao's: pip install onefold[lowbit]")
    ranks = run_ranks(4, packed_on_meshes, str(tmp_path), kind, server="libraries")
    whole = ranks[0]
    for name in ("boxes", "whole"):
        same(whole[f"{name} to fp32"][0], whole[name][0], f"{kind}: {name} to fp32")
        for rank, seen in enumerate(ranks):
            told = f"{kind}: {name} to {name}, rank {rank}"
            same(seen[f"{name} to {name}"][1], seen[name][1], told)
    for name, other in (("boxes", "whole"), ("whole", "boxes")):
        found, expected = whole[f"{name} to {other}"][0], whole[name][0]
        weights = {n: t for n, t in expected.items() if n.startswith("parameter")}
        same({n: found[n] for n in weights}, weights, f"{kind}: {name} to {other}")
        for key, value in expected.items():
            # Packed anew, in other blocks
            step = value.abs().max() * {"int8": 0.02, "int4": 0.3, "bf16": 0}[kind]
            assert (found[key] - value).abs().max() <= step, f"{kind}: {name} to {other}: {key}"
    if kind != "bf16":
        with pytest.raises(CheckpointError, match="packed in blocks of the boxes of a mesh"):
            reshard(tmp_path / "boxes", tmp_path / "one file", 1)
    assert not examine(tmp_path / "boxes").problems
    with closing(FolderSource(tmp_path / "boxes")) as source:
        summary = summarize(source, tmp_path / "boxes")
    assert summary.saved_by["mesh"] == "dp 2 × tp 2"
    kept = {t.item.state: t for t in summary.tensors if t.item.name == "output.weight"}
    if kind == "int8":  # 61 · 16 elements in two boxes, each a whole number of codes
        codes, scales = kept["exp_avg.int8"], kept["exp_avg.int8.scale"]
        assert (codes.dtype, codes.nbytes, scales.nbytes) == ("U8", 61 * 16, 2 * 2 * 4)


# -- what must not go through silently -------------------------------------------------------------

LOSSY = {"reduce_codec": "int8", "error_feedback": True}


def told(call: Any) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def elsewhere(folder: str, names: dict[str, str], case: Case) -> dict[str, Any]:
    """What loads of these checkpoints say on this mesh."""
    import onefold
    import onefold.checkpoint.source as sources

    sources.BOX_BLOCK = 256
    out: dict[str, Any] = {}
    model, optimizer, mesh = made(2, case, **LOSSY)
    out["coordinate"] = mesh.get_coordinate()
    for name, path in names.items():
        if name != "whole":
            own = torch.optim.Adafactor(model.parameters()) if name == "rows" else optimizer
            out[name] = told(
                lambda path=path, own=own: onefold.load(path, model=model, optimizer=own)
            )
            continue
        loaded = onefold.load(path, model=model, optimizer=optimizer)
        out[name] = loaded.data, loaded.notes
        kept = onefold.engine_of(model).residuals.kept
        out[f"{name}, residuals"] = len(kept)
    position: dict[str, Any] = {}
    thing = Position(position)
    out["position"] = told(
        lambda: onefold.load(names["whole"], model=model, optimizer=optimizer, data=thing)
    )
    out["position"] = out["position"] or position
    return out


class Position:
    """A data loader: what it was given is put into a dict."""

    def __init__(self, into: dict[str, Any]) -> None:
        self.into = into

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.into.update(state)


def saved_lossy(folder: str) -> dict[str, Any]:
    import onefold

    model, optimizer, mesh = made(2, MESH, **LOSSY)
    dp, rank = mesh.get_local_rank("dp"), mesh.get_rank()
    train(model, optimizer, MESH, dp)
    give = {"model": model, "optimizer": optimizer}
    onefold.save(f"{folder}/whole", **give, data={"seen": 10 + dp})
    out: dict[str, Any] = {
        "other data": told(lambda: onefold.save(f"{folder}/never", **give, data={"seen": rank}))
    }
    at_stage_0, _, _ = made(0, MESH)
    rows = torch.optim.Adafactor(at_stage_0.parameters(), lr=0.01)
    try:
        train(at_stage_0, rows, MESH, dp)
    except ValueError as error:
        out["rows"] = str(error)
    state = optimizer.state[next(iter(model.parameters()))]
    state["of its own"] = torch.zeros(3, 5)
    out["odd"] = told(lambda: onefold.save(f"{folder}/never", **give))
    return out


@pytest.mark.slow
def test_what_another_mesh_cannot_have_is_told(tmp_path: Path) -> None:
    said = run_ranks(4, saved_lossy, str(tmp_path))
    for seen in said:
        assert (
            "compute with the same data, and were given different positions" in seen["other data"]
        )
        assert "Adafactor steps whole matrices, and" in seen["rows"], "a box is a part too"
        assert "'of its own' of shape (3, 5) for parameter 'tok_embeddings.weight'" in seen["odd"]
    assert not (tmp_path / "never").exists()

    manifest = read_manifest(tmp_path / "whole")
    names = {"whole": str(tmp_path / "whole")}
    record = next(r for r in manifest.records if r.item.name.endswith("feed_forward.w2.weight"))
    for number, piece in enumerate(record.pieces[:2]):
        folder = tmp_path / f"damaged {number}"
        shutil.copytree(tmp_path / "whole", folder)
        with closing(TensorFile(folder / piece.file)) as file:
            at = file.header[key_of(record.item, piece.start, piece.box)].begin + 9
        data = bytearray((folder / piece.file).read_bytes())
        data[at] ^= 1
        (folder / piece.file).write_bytes(data)
        names[folder.name] = str(folder)

    import onefold

    model = onefold.shard(built(MESH), onefold.Recipe.zero(0))
    rows = torch.optim.Adafactor(model.parameters(), lr=0.01)
    train(model, rows, MESH, 0)
    names["rows"] = str(onefold.save(tmp_path / "rows", model=model, optimizer=rows))

    small = onefold.shard(built(replace(MESH, hidden=20)), onefold.Recipe.zero(0))
    names["small"] = str(onefold.save(tmp_path / "small", model=small))

    anew = "error feedback begins anew"
    for case in (replace(MESH, dp=1, tp=4), MESH, replace(MESH, dp=4, tp=1, plan="none")):
        mesh = f"dp {case.dp} × tp {case.tp}"
        for seen in run_ranks(4, elsewhere, str(tmp_path), names, case):
            data, notes = seen["whole"]
            for name in names:
                if name.startswith("damaged"):
                    assert "bytes have changed since they were written" in seen[name], (
                        f"{mesh}: {name}"
                    )
                    assert "feed_forward.w2.weight'" in seen[name], f"{mesh}: {name}"
            # A rank's own part of w1 has that very shape under TP 2
            words = "feed_forward.w1.weight: (20, 16) in it, (40, 16) in the model"
            assert words in seen["small"], f"{mesh}: {seen['small']}"
            if case.tp > 1:
                words = "has a shape of its own and cannot be divided along another axis than data"
                assert words in seen["rows"], f"{mesh}: {seen['rows']}"
            if case == MESH:
                dp = seen["coordinate"][0]
                assert (data, notes) == ({"seen": 10 + dp}, ()), f"{mesh}: {seen}"
                assert seen["position"] == {"seen": 10 + dp} and seen["whole, residuals"] > 0
            else:
                assert data is None and anew in notes[0], f"{mesh}: {seen}"
                words = f"each of its 2 ranks was elsewhere in its data, which cannot be divided among {case.dp}"
                assert words in seen["position"] and seen["whole, residuals"] == 0


def test_ranks_with_the_same_data_take_over_the_same_random_generators() -> None:
    four, two_by_two = [0, 1, 2, 3], [0, 0, 1, 1]
    # (whose generators a rank starts from, its number among the streams, how many were saved)
    assert [stream_of(r, four, four) for r in range(4)] == [(r, r, 4) for r in range(4)]
    assert [stream_of(r, two_by_two, two_by_two) for r in range(4)] == [(r, r, 4) for r in range(4)]
    onto = [stream_of(r, two_by_two, four) for r in range(4)]
    assert onto == [(0, 0, 4), (0, 0, 4), (1, 1, 4), (1, 1, 4)]
    # From two streams to four: ranks 2 and 3 start from them too, and draw a new seed (number >= 2)
    apart = [stream_of(r, four, two_by_two) for r in range(4)]
    assert apart == [(0, 0, 2), (2, 1, 2), (0, 2, 2), (2, 3, 2)]
