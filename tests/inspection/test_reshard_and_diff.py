"""`reshard` writes the same checkpoint for other ranks; `diff` says what two checkpoints do not
have in common.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import MANIFEST, read_manifest
from onefold.checkpoint.source import Item
from onefold.inspection.diff import Difference, Tolerance, differences
from onefold.inspection.reshard import reshard
from onefold.inspection.verify import examine
from onefold.runtime.parameters.parameter import disable_torch_function
from ranks import run_ranks
from saved import Run, copied
from zoo import TinyGPT, tokens_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Run().save(tmp_path_factory.mktemp("saved") / "a")


def compared(a: Path, b: Path, **options: Any) -> Difference:
    first, second = FolderSource(a), FolderSource(b)
    try:
        return differences(first, second, **options)
    finally:
        first.close()
        second.close()


# -- reshard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_resharded_checkpoint_is_whole_and_the_same_in_other_files(
    saved: Path, tmp_path: Path, ranks: int
) -> None:
    between = reshard(saved, tmp_path / "between", 5)
    target = reshard(between, tmp_path / "b", ranks)
    assert examine(target).problems == []
    found = compared(saved, target)
    assert found.equal and sum(found.compared.values()) == len(
        [r for r in read_manifest(saved).records if r.item.kind != "rng"]
    )
    files = sorted(target.glob("rank-*.safetensors"))
    assert len(files) == ranks
    sizes = [f.stat().st_size for f in files]
    assert max(sizes[1:], default=0) < sum(sizes) / ranks * 1.5 + 20_000, (
        "divided evenly, but for what only the first rank stores"
    )
    one, other = read_manifest(saved), read_manifest(target)
    assert (one.step, one.created) == (other.step, other.created) and other.saved_by[
        "world_size"
    ] == 1
    assert sorted(os.listdir(tmp_path)) == ["b", "between"]


def test_a_checkpoint_of_two_ranks_and_its_resharded_forms_load_to_the_same_bits(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, loads, str(tmp_path))
    assert first == second == [[], [], []]


def loads(root: str) -> list[list[str]]:
    """Save on two ranks, reshard offline, load each form on two ranks: the states and random
    numbers that are not the same.
    """

    def make(stage: int, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed + dist.get_rank())
        model = onefold.shard(
            TinyGPT(depth=2, tied=True), onefold.Recipe.zero(stage, stall_timeout=30.0)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        found = {"random": torch.rand(4)}
        with disable_torch_function():
            # Those that this rank has a part of
            for name, p in ((n, p) for n, p in model.named_parameters() if p.numel()):
                found |= {
                    f"{name} {key}": t.detach().clone()
                    for key, t in {"": p.data, **optimizer.state[p]}.items()
                }
        return found

    model, optimizer = make(3, 1)
    for step in range(2):
        model(tokens_of(step + 10 * dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    onefold.save(f"{root}/two", model=model, optimizer=optimizer, step=2)
    expected, out = state(model, optimizer), []
    for ranks in (1, 3, 2):
        if dist.get_rank() == 0:
            reshard(f"{root}/two", f"{root}/{ranks}", ranks)
        dist.barrier()
        again, states = make(3, 7)
        onefold.load(f"{root}/{ranks}", model=again, optimizer=states)
        found = state(again, states)
        out.append(
            [name for name in {**expected, **found} if not torch.equal(expected[name], found[name])]
        )
    return out


def test_damage_is_not_written_on_under_a_new_checksum(saved: Path, tmp_path: Path) -> None:
    for name in ("rank-00000.safetensors", "state.json", "config.json"):
        source = copied(saved, tmp_path / f"damaged {name}")
        data = bytearray((source / name).read_bytes())
        data[-3] ^= 4
        (source / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"damaged|changed"):
            reshard(source, tmp_path / "b", 2)
        (source / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            reshard(source, tmp_path / "b", 2)
    assert [n for n in os.listdir(tmp_path) if not n.startswith("damaged")] == []


def test_a_reshard_that_is_stopped_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    seen = []

    def stop(nbytes: int) -> None:
        seen.append(nbytes)
        if len(seen) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(saved, tmp_path / "b", 2, advance=stop)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_can_be_resharded_in_its_place_and_is_never_replaced_unasked(
    saved: Path, tmp_path: Path
) -> None:
    place = copied(saved, tmp_path / "a")
    with pytest.raises(CheckpointError, match="overwrite"):
        reshard(saved, place, 2)
    reshard(place, place, 4, overwrite=True)
    assert (
        len(list(place.glob("rank-*"))) == 4
        and examine(place).problems == []
        and compared(saved, place).equal
    )
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        reshard(saved, tmp_path / "file", 2, overwrite=True)
    with pytest.raises(CheckpointError, match="0 ranks"):
        reshard(saved, tmp_path / "b", 0)
    assert sorted(os.listdir(tmp_path)) == ["a", "file"]


# -- diff ------------------------------------------------------------------------------------------


def test_one_element_is_found_with_its_place_and_size(saved: Path, tmp_path: Path) -> None:
    run = Run()
    with torch.no_grad(), disable_torch_function():
        weight = dict(run.model.named_parameters())["blocks.1.mlp.0.weight"].data.view(-1)
        old = float(weight[777])
        weight[777] += 0.5
        gap, bound = abs(float(weight[777]) - old), max(abs(float(weight[777])), abs(old))
    other = run.save(tmp_path / "b")
    (d,) = compared(saved, other).tensors
    assert d.item == Item("parameter", "blocks.1.mlp.0.weight") and d.what == "values"
    assert (d.differing, d.of, d.at) == (1, 80 * 20, 777)
    assert d.largest == pytest.approx(gap, rel=1e-12) and d.relative == pytest.approx(
        gap / bound, rel=1e-12
    )
    assert compared(saved, other, tolerance=Tolerance(absolute=0.51)).equal
    assert not compared(saved, other, tolerance=Tolerance(absolute=0.49)).equal
    assert compared(saved, other, tolerance=Tolerance(relative=gap / bound * 1.01)).equal
    assert compared(saved, other, parts=["optimizer", "rest", "random"]).equal
    assert compared(saved, other, wanted=lambda name: "blocks.0" in name).equal


def test_everything_that_resumes_is_compared(saved: Path, tmp_path: Path) -> None:
    run = Run()
    run.optimizer.param_groups[1]["lr"] = 0.5
    run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["step"].fill_(9.0)
    run.scheduler.last_epoch = 77
    torch.rand(1)
    found = compared(
        saved,
        run.save(
            tmp_path / "b",
            step=3,
            data={"position": 17},
            extra={"best": 1.25, "table": torch.arange(5000) * 2},
        ),
    )
    said = {(v.part, v.where): (v.first, v.second) for v in found.values}
    assert said.pop(("rest", "step")) == (2, 3)
    assert said.pop(("rest", "scheduler, last_epoch")) == (2, 77)
    assert said.pop(("rest", "data, all, position")) == (16, 17)
    assert said.pop(("rest", "extra, best")) == (1.5, 1.25)
    assert said.pop(("optimizer", "group 1, lr")) == (pytest.approx(0.0081), 0.5)
    assert said.pop(("optimizer", "tokens.weight, step")) == (2.0, 9.0)
    assert list(said) == [("random", "rank 0, torch")]
    assert [d.item.kind for d in found.tensors] == ["extra"], "the table"
    assert found.differing("rest") == (1, 4) and found.differing("weights") == (0, 0)


def test_a_damaged_checkpoint_is_not_compared(saved: Path, tmp_path: Path) -> None:
    other = copied(saved, tmp_path / "b")
    data = bytearray((other / "rank-00000.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (other / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="changed"):
        compared(saved, other)
    (other / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        compared(saved, other)
