"""Hugging Face folders into a sharded model: every bit, every byte once, and a sentence for what
cannot be.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from tiny_transformers import (
    FAMILIES,
    TOKENS,
    TRAINED,
    build,
    complaint,
    differences,
    files,
    on_meta,
    opened,
    saved_folders,
)
from zoo import TinyMLP, features_of

SERVER = "libraries"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_folders(tmp_path_factory.mktemp("hf"))


# -- names and layouts, in one process -------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_fits_the_model_that_saved_it(family: str, folders: dict[str, Path]) -> None:
    from onefold.pretrained.huggingface import opened as fitted_to

    expected = opened(folders[family], family)
    fitted = fitted_to(folders[family], on_meta(family))
    assert fitted.missing == [] and fitted.unexpected == []
    tensors, aliases = {}, fitted.aliases()
    for item, stored in fitted.items().items():
        tensors[item.name] = torch.full(stored.shape, torch.nan)
        fitted.read(item, 0, tensors[item.name].numel(), tensors[item.name].view(-1))
    tensors |= {alias: tensors[name] for alias, name in aliases.items()}
    fitted.close()
    assert differences(expected.state_dict(), tensors) == []


@pytest.mark.parametrize("inner", [True, False])
def test_the_prefix_of_the_base_model_may_be_there_or_not(
    inner: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    from onefold.pretrained.huggingface import opened as fitted_to

    whole = opened(folders["gpt2"], "gpt2")
    saved, loaded = (whole.transformer, whole) if inner else (whole, whole.transformer)
    saved.save_pretrained(tmp_path / "base")
    fitted = fitted_to(tmp_path / "base", loaded)
    expected = {name for name, _ in loaded.named_parameters()}
    assert expected <= fitted.names() and fitted.missing == [] and fitted.unexpected == []
    fitted.close()


# -- on ranks --------------------------------------------------------------------------------------


class Counter:
    """Counts the bytes that a rank reads out of tensors."""

    def __init__(self) -> None:
        self.read, self._preadv = 0, os.preadv

    def __call__(self, file: int, buffers: Any, offset: int) -> int:
        got = self._preadv(file, buffers, offset)
        self.read += got
        return got


def no_random_values(*_: Any, **__: Any) -> None:
    raise AssertionError("a value was drawn at random that a file brings")


def from_meta(folder: Path, family: str, stage: int, itemsize: int = 4) -> tuple[Any, list[str]]:
    """A model built on the meta device and read from `folder`, and what is wrong with how it was
    read.
    """
    import onefold

    counter, model = Counter(), on_meta(family)
    with (
        patch("os.preadv", counter),
        patch.object(Tensor, "normal_", no_random_values),
        patch.object(Tensor, "uniform_", no_random_values),
    ):
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0), weights=folder)
    engine = onefold.engine_of(model)
    owned = sum(b - a for a, b in (entry.accounted() for entry in engine.entries)) * itemsize
    if engine.rank == 0:
        parameters = {name for e in engine.entries for name in e.names}
        with onefold.full_params(model):
            owned += sum(
                t.numel() * itemsize
                for name, t in model.state_dict().items()
                if name not in parameters
            )
    else:
        with onefold.full_params(model):
            pass
    problems = (
        []
        if counter.read == owned
        else [f"{folder.name} at stage {stage}: read {counter.read} bytes, owns {owned}"]
    )
    return model, problems


def same_model(model: Any, expected: Any, where: str) -> list[str]:
    """Weights, buffers and logits against those of an unsharded model."""
    import onefold

    state = onefold.full_state_dict(model)
    problems = (
        differences(expected.state_dict(), state)
        if not dist.is_initialized() or dist.get_rank() == 0
        else []
    )
    problems += differences(dict(expected.named_buffers()), dict(model.named_buffers()))
    with torch.no_grad():
        if not torch.equal(model.eval()(TOKENS).logits, expected(TOKENS).logits):
            problems.append("other logits")
    return [f"{where}: {p}" for p in problems]


def load_everything(folders: dict[str, Path], stages: list[int]) -> list[str]:
    import onefold
    from onefold.pretrained.huggingface import load_pretrained

    problems = []
    for family in TRAINED:
        expected = opened(folders[family], family)
        for stage in stages:
            model, wrong = from_meta(folders[family], family, stage)
            problems += wrong + same_model(model, expected, f"{family} at stage {stage}")
    for name, family, itemsize in (("bf16", "llama, tied", 2), ("many", "llama", 4)):
        expected = opened(folders[name], family)
        for stage in stages:
            model, wrong = from_meta(folders[name], family, stage, itemsize)
            problems += wrong + same_model(model, expected, f"{name} at stage {stage}")
        model = onefold.shard(build(family), onefold.Recipe.zero(stages[-1], stall_timeout=20.0))
        assert load_pretrained(model, folders[name]) == ([], [])
        problems += same_model(model, expected, f"{name} into a sharded model")
    return problems


@pytest.mark.parametrize(("ranks", "stages"), [(1, [3]), (2, [0, 3]), (3, [3])])
def test_each_rank_reads_the_bytes_it_owns_and_the_model_is_the_same(
    ranks: int, stages: list[int], folders: dict[str, Path]
) -> None:
    assert run_ranks(ranks, load_everything, folders, stages) == [[]] * ranks


def peaks(root: Path) -> dict[str, int]:
    """How far resident memory rose while a 34 MB model came to be at stage 3 on 4 ranks, and while
    it was exported in bf16.
    """
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "invariants"))
    from memory_probe import (
        give_memory_back_at_once,
        peak_resident_bytes,
        reset_peak,
        resident_bytes,
    )

    import onefold
    from onefold.pretrained.export import export

    give_memory_back_at_once()
    recipe = onefold.Recipe.zero(3, stall_timeout=30.0)
    warm = export(onefold.shard(TinyMLP(), recipe), root / "warm")
    with torch.device("meta"):
        small, model = TinyMLP(), TinyMLP(16, 512, 8, 16)
    onefold.shard(small, recipe, weights=warm)
    dist.barrier()
    reset_peak()
    before = peak_resident_bytes()
    onefold.shard(model, recipe, weights=root / "big")
    dist.barrier()
    loaded = peak_resident_bytes() - before
    reset_peak()
    before = peak_resident_bytes()
    export(model, root / "out", torch.bfloat16)
    return {"load": loaded, "export": peak_resident_bytes() - before, "held": resident_bytes()}


def test_neither_a_load_nor_an_export_holds_more_than_a_shard_and_a_few_buffers(
    tmp_path: Path,
) -> None:
    import onefold
    from onefold.pretrained.export import export

    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(16, 512, 8, 16), onefold.Recipe.zero(0))
    total = 4 * sum(p.numel() for p in model.parameters())
    export(model, tmp_path / "big")
    for rank, seen in enumerate(run_ranks(4, peaks, tmp_path)):
        assert seen["load"] <= total // 4 + (8 << 20), (
            f"rank {rank}: {seen}, a shard has {total // 4}"
        )
        assert seen["export"] <= 12 << 20, f"rank {rank}: {seen}, a shard has {total // 4}"
    expected = {name: t.bfloat16() for name, t in files(tmp_path / "big").items()}
    assert differences(expected, files(tmp_path / "out")) == []


def test_tied_weights_of_a_meta_model_stay_one_parameter_on_one_rank(
    folders: dict[str, Path],
) -> None:
    import onefold

    for options in ({}, {"weights": folders["llama, tied"]}):
        model: Any = onefold.shard(on_meta("llama, tied"), onefold.Recipe.zero(0), **options)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_buffer_that_nobody_gives_a_value_is_refused_when_it_is_used() -> None:
    import onefold

    def half_done(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)

    with torch.device("meta"):
        model = TinyMLP()
        model.register_buffer("scale", torch.ones(2), persistent=False)
    onefold.shard(model, onefold.Recipe.zero(0), init=half_done)
    with pytest.raises(onefold.UninitializedError, match=r"uses 'scale', built on the meta device"):
        model(features_of(0, 2, 7))
    model.scale = torch.ones(2)
    assert model(features_of(0, 2, 7)).isfinite().all()


def train_in_bf16(folder: Path) -> list[str]:
    """Masters keep the file's fp32 bits under bf16 compute, and the model trains."""
    import onefold

    model: Any = onefold.shard(
        on_meta("llama"),
        onefold.Recipe.zero(2, precision="bf16", stall_timeout=20.0),
        weights=folder,
    )
    state = onefold.full_state_dict(model)
    problems = differences(files(folder), state) if dist.get_rank() == 0 else []
    optimizer = torch.optim.AdamW(model.parameters())
    before = model(input_ids=TOKENS, labels=TOKENS).loss
    before.backward()
    optimizer.step()
    optimizer.zero_grad()
    return problems + (
        [] if model(input_ids=TOKENS, labels=TOKENS).loss < before else ["the loss did not fall"]
    )


def test_a_model_read_from_a_folder_trains_in_bf16(folders: dict[str, Path]) -> None:
    assert run_ranks(2, train_in_bf16, folders["llama"]) == [[], []]


def refuse_everything(folders: dict[str, Path], root: Path) -> list[str]:
    """The message of each refusal, on this rank."""
    import onefold
    from onefold.pretrained.huggingface import load_pretrained

    model = onefold.shard(build("llama, tied"), onefold.Recipe.zero(3, stall_timeout=20.0))
    before = onefold.full_state_dict(model)
    said = [
        complaint(lambda name=name: load_pretrained(model, root / name))
        for name in sorted(p.name for p in root.iterdir())
    ]  # type: ignore[misc]
    said.append(complaint(lambda: load_pretrained(model, root / "nowhere")))
    only_here = folders["llama, tied"] if dist.get_rank() == 0 else root / "nowhere"
    said.append(complaint(lambda: load_pretrained(model, only_here)))
    recipe = onefold.Recipe.zero(3, stall_timeout=20.0)
    said.append(
        complaint(
            lambda: onefold.shard(on_meta("llama"), recipe, weights=root / "4 a name is missing")
        )
    )
    return said + differences(before, onefold.full_state_dict(model))


def test_what_cannot_be_loaded_is_told_on_every_rank_and_changes_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    def folder(name: str, tensors: dict[str, Tensor] | None) -> Path:
        (tmp_path / name).mkdir()
        if tensors is not None:
            save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    whole = files(folders["llama, tied"])
    (folder("1 pickles", None) / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    folder("2 other shapes", {**whole, "model.norm.weight": torch.zeros(3)})
    (folder("3 quantized", whole) / "config.json").write_text(
        '{"quantization_config": {"quant_method": "bitsandbytes"}}'
    )
    folder("4 a name is missing", {k: v for k, v in whole.items() if k != "model.norm.weight"})
    folder("5 a name too many", {**whole, "model.extra.weight": torch.zeros(3)})
    cut = folder("6 cut short", whole) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    (folder("7 a file is missing", None) / "model.safetensors.index.json").write_text(index)
    (folder("8 no index", None) / "model.safetensors.index.json").write_text("[]")
    outcomes = run_ranks(2, refuse_everything, folders, tmp_path)
    expected = ["are pickles", "shapes differ", "quantized", "nothing for 1 of", "fit nowhere", "cut short", "are missing", "no index",
                "does not exist", "does not exist", "on the meta device"]  # fmt: skip
    for said in outcomes:
        assert len(said) == len(expected), said
        for message, part in zip(said, expected, strict=True):
            assert part in message, message


def test_load_reads_a_hugging_face_folder_too(tmp_path: Path) -> None:
    """`onefold.load` of a folder of another library goes by that library's names, and refuses what
    such a folder has not.
    """
    import onefold

    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=33, n_positions=8)
    saved = transformers.GPT2LMHeadModel(config)
    saved.transformer.save_pretrained(tmp_path / "base")  # without the head, and without the prefix
    model = onefold.shard(transformers.GPT2LMHeadModel(config), onefold.Recipe.zero(3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(onefold.CheckpointError, match="holds no optimizer"):
        onefold.load(tmp_path / "base", model=model, optimizer=optimizer)
    onefold.load(tmp_path / "base", model=model)
    whole = onefold.full_state_dict(model)
    assert all(torch.equal(whole[name], value) for name, value in saved.state_dict().items())


def read_ahead(folders: dict[str, Path], base: Path) -> list[str]:
    """Folders that need their names changed, their experts stacked, or their ties found, behind
    what the program does meanwhile.
    """
    import onefold

    problems = []
    for family, folder in (
        ("gpt2", base),
        ("mixtral", folders["mixtral"]),
        ("llama, tied", folders["llama, tied"]),
    ):
        expected = opened(folders[family], family)
        for stage in (0, 3):
            model = onefold.shard(build(family), onefold.Recipe.zero(stage, stall_timeout=20.0))
            before = onefold.full_state_dict(model)
            loading = onefold.load_async(folder, model=model)
            problems += differences(before, onefold.full_state_dict(model))
            loaded = loading.wait(300.0)
            assert loaded.missing == loaded.unexpected == ()
            problems += same_model(model, expected, f"{family} at stage {stage}")
    said = complaint(lambda: onefold.load_async(folders["gpt2"], model=model).wait(300.0))
    problems += [] if "is of another model" in said else [said]
    again = onefold.full_state_dict(model)
    return problems + (differences(expected.state_dict(), again) if dist.get_rank() == 0 else [])


def test_a_tensor_that_fits_nowhere_is_not_passed_over(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    import onefold

    save_file(
        {**files(folders["llama"]), "model.extra.weight": torch.zeros(3)},
        tmp_path / "model.safetensors",
    )
    model = onefold.shard(build("llama"), onefold.Recipe.zero(0))
    for load in (onefold.load, lambda *a, **k: onefold.load_async(*a, **k).wait()):
        assert "1 are unknown to this model (model.extra.weight)" in complaint(
            lambda load=load: load(tmp_path, model=model)
        )  # type: ignore[misc]
        assert load(tmp_path, model=model, strict=False).unexpected == ("model.extra.weight",)
