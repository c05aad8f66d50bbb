"""Hugging Face folders into a sharded model and back: every bit, every byte once, no more memory
than a shard, and a sentence for what cannot be. A checkpoint becomes such a folder too.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from hf_folders import give_memory_back_at_once, peak_resident, reset_peak
from needed import skip_without
from on_ranks import on_ranks, slow
from reference import built, differences, on_each_rank
from tiny_transformers import FAMILIES, TOKENS, TRAINED, build, complaint, files, on_meta, opened
from zoo import TinyGPT, TinyMLP

skip_without("transformers")
SERVER = "libraries"


def recipe(stage: int = 3, **options: Any) -> onefold.Recipe:
    return onefold.Recipe.zero(stage, stall_timeout=20.0, **options)


def saved(folder: Path, family: str, name: str = "saved", **options: Any) -> Path:
    """What `save_pretrained` makes of the family's model. Collective."""
    if dist.get_rank() == 0 and not (folder / name).exists():
        model = built(lambda: build(family))
        for parameter in model.parameters():  # also norms and biases, which start as ones and zeros
            parameter.data.normal_()
        model.to(options.pop("dtype", torch.float32)).save_pretrained(folder / name, **options)
    dist.barrier()
    return folder / name


def whole_files(folder: Path) -> dict[str, Tensor]:
    dist.barrier()
    return files(folder)


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


def read(folder: Path, family: str, stage: int) -> Any:
    """The model, built without memory and read from the folder, in which all ranks together read
    each byte once.
    """
    counter, model = Counter(), on_meta(family)
    with (
        patch("os.preadv", counter),
        patch.object(Tensor, "normal_", no_random_values),
        patch.object(Tensor, "uniform_", no_random_values),
    ):
        onefold.shard(model, recipe(stage), weights=folder)
    with onefold.full_params(model):
        pass
    read, nbytes = on_each_rank(counter.read), sum(t.nbytes for t in files(folder).values())
    assert sum(read) == nbytes, (read, nbytes)
    return model


def same_model(model: Any, expected: Any, family: str) -> None:
    """Weights, buffers and logits."""
    if state := onefold.full_state_dict(model):
        assert not differences(expected.state_dict(), state)
    buffers = dict(expected.named_buffers()), dict(model.named_buffers())
    assert not differences(*buffers)
    if family in TRAINED:
        with torch.no_grad():
            mine = model.eval()(TOKENS).logits
            assert torch.equal(mine, expected.eval()(TOKENS).logits)


def there_and_back(family: str, folder: Path, stage: int) -> None:
    from safetensors import safe_open

    there = saved(folder, family)
    expected = opened(there, family)
    model = read(there, family, stage)
    same_model(model, expected, family)
    out = onefold.export(model, folder / f"out {stage}")
    assert not differences(files(there), whole_files(out))
    assert {safe_open(f, "pt").metadata()["format"] for f in out.glob("*.safetensors")} == {"pt"}
    first, second = (json.loads((f / "config.json").read_text()) for f in (there, out))
    assert first == second
    same_model(onefold.shard(opened(out, family), recipe(stage)), expected, family)
    # Into a model that is sharded already
    model = onefold.shard(build(family), recipe(stage))
    assert onefold.load_pretrained(model, there) == ([], [])
    same_model(model, expected, family)
    model = onefold.shard(build(family), recipe(stage))
    loaded = onefold.load(there, model=model)
    assert loaded.missing == loaded.unexpected == ()
    same_model(model, expected, family)


def but_slow(names: Iterable[str], *quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


@on_ranks(2)
@pytest.mark.parametrize("family", but_slow(FAMILIES, "llama, tied", "gpt2", "mixtral"))
def test_a_family_is_read_and_written_bit_for_bit(family: str, folder: Path) -> None:
    for stage in (0, 3) if family in TRAINED else (3,):
        there_and_back(family, folder, stage)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["bf16", "several files", "base", "head"])
def test_folders_in_16_bits_in_several_files_and_with_another_prefix(
    kind: str, folder: Path
) -> None:
    if kind in ("bf16", "several files"):
        given = {"dtype": torch.bfloat16} if kind == "bf16" else {"max_shard_size": "6KB"}
        there = saved(folder, "llama, tied", **given)
        expected = opened(there, "llama, tied")
        same_model(read(there, "llama, tied", 3), expected, "llama, tied")
        return
    whole = opened(saved(folder, "gpt2"), "gpt2")
    kept, model = (whole.transformer, whole) if kind == "base" else (whole, whole.transformer)
    if dist.get_rank() == 0:
        kept.save_pretrained(folder / "other")
    dist.barrier()
    sharded: Any = onefold.shard(
        build("gpt2") if kind == "base" else build("gpt2").transformer, recipe()
    )
    with pytest.raises(onefold.CheckpointError, match="holds no optimizer"):
        optimizer = torch.optim.AdamW(sharded.parameters())
        onefold.load(folder / "other", model=sharded, optimizer=optimizer)
    onefold.load(folder / "other", model=sharded)
    if state := onefold.full_state_dict(sharded):
        assert not differences(model.state_dict(), state)


@on_ranks(2)
def test_an_export_has_the_dtype_and_the_sizes_that_are_asked_for(folder: Path) -> None:
    there = saved(folder, "llama")
    whole = files(there)
    model = onefold.shard(opened(there, "llama"), recipe(precision="bf16"))
    for name, dtype, expected in (
        ("bf16", None, torch.bfloat16), ("fp16", torch.float16, torch.float16), ("fp32", "master", torch.float32),
    ):  # fmt: skip
        out = onefold.export(model, folder / name, dtype, max_shard_bytes=6_000)
        assert not differences({k: v.to(expected) for k, v in whole.items()}, whole_files(out))
        sizes = [os.path.getsize(f) for f in out.glob("*.safetensors")]
        assert len(sizes) >= 2 and max(sizes) <= 9_000
        assert opened(out, "llama", expected).dtype == expected
        said = json.loads((out / "config.json").read_text())["dtype"]
        assert f"torch.{said}" == str(expected)


@on_ranks(2, fresh=True)
def test_an_export_that_cannot_be_is_told_on_every_rank_and_leaves_nothing(folder: Path) -> None:
    there, root = saved(folder, "llama"), folder / "root"
    if dist.get_rank() == 0:
        for name, file in (("notes", "notes.txt"), ("model", "model.safetensors")):
            (root / name).mkdir(parents=True)
            (root / name / file).write_text("mine")
        (root / "a file").write_text("mine")
    dist.barrier()
    model = onefold.shard(opened(there, "llama"), recipe())

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def said(place: str, **options: Any) -> str:
        return complaint(lambda: onefold.export(model, root / place, **options))

    for name in ("write", "fsync"):
        with patch(f"os.{name}", full) if dist.get_rank() == 0 else nullcontext():
            assert "No space left" in said("new", max_shard_bytes=4000)
    assert "is a file" in said("a file")
    assert "nothing can be exported" in said("a file/below")
    assert "files that are no model" in said("notes", overwrite=True)
    assert "overwrite=True" in said("model")
    assert "floating-point" in said("new", dtype=torch.int8)
    dist.barrier()
    assert sorted(os.listdir(root)) == ["a file", "model", "notes"]
    assert (root / "a file").read_text() == (root / "notes" / "notes.txt").read_text() == "mine"
    dist.barrier()
    onefold.export(model, root / "model", overwrite=True)
    assert not differences(files(there), whole_files(root / "model"))


class Odd(TinyGPT):
    """Ties, buffers of other dtypes, a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("flag", torch.tensor(True))
        self.empty = nn.Parameter(torch.zeros(0, 4))


@on_ranks(1)
def test_any_other_model_and_a_tokenizer_are_exported_and_ties_stay(folder: Path) -> None:
    state = built(Odd).state_dict()
    expected = {n: t.double() if t.is_floating_point() else t.clone() for n, t in state.items()}
    out = onefold.export(onefold.shard(built(Odd), recipe(1)), folder / "odd", torch.float64)
    assert not differences(expected, files(out)) and not (out / "config.json").exists()
    there = saved(folder, "llama, tied")
    (there / "tokenizer.json").write_text('{"mine": 1}')
    for options in ({}, {"weights": there}):
        model: Any = onefold.shard(on_meta("llama, tied"), recipe(0), **options)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model = onefold.shard(opened(there, "llama, tied"), recipe(0))
    out = onefold.export(model, folder / "out")
    assert (out / "tokenizer.json").read_text() == '{"mine": 1}'


@on_ranks(1)
@pytest.mark.parametrize("family", ["llama, tied", "mixtral"])
def test_a_checkpoint_is_exported_without_ranks(family: str, folder: Path) -> None:
    from onefold.checkpoint.folder_source import FolderSource
    from onefold.pretrained.export import export_folder

    there = saved(folder, family)
    onefold.save(folder / "step-1", model=onefold.shard(opened(there, family), recipe()))
    source = FolderSource(folder / "step-1")
    for name, dtype in (("out", None), ("half", torch.bfloat16)):
        out = export_folder(source, folder / name, dtype, beside=there)
        whole = {n: t.to(dtype or t.dtype) for n, t in files(there).items()}
        assert not differences(whole, files(out))
        assert opened(out, family, dtype or torch.float32).dtype == (dtype or torch.float32)
    source.close()


@slow
@on_ranks(4, fresh=True)
def test_a_load_holds_a_shard_and_a_few_buffers_and_an_export_no_more(folder: Path) -> None:
    """A model of 34 MB, after a small one that has everything imported."""
    give_memory_back_at_once()
    sizes, risen = {"small": (7, 10, 3, 5), "large": (16, 512, 8, 16)}, {}
    for name, size in sizes.items():
        if dist.get_rank() == 0:
            from safetensors.torch import save_file

            (folder / name).mkdir()
            save_file(
                built(lambda size=size: TinyMLP(*size)).state_dict(),
                folder / name / "model.safetensors",
            )
        dist.barrier()
        with torch.device("meta"):
            model = TinyMLP(*size)
        reset_peak()
        before = peak_resident()
        onefold.shard(model, recipe(), weights=folder / name)
        dist.barrier()
        risen["load"] = peak_resident() - before
        reset_peak()
        before = peak_resident()
        onefold.export(model, folder / f"{name} out", torch.bfloat16)
        risen["export"] = peak_resident() - before
    shard = sum(p.numel() for p in built(lambda: TinyMLP(*size)).parameters())  # a quarter, 4 bytes
    assert risen["load"] <= shard + (8 << 20), (risen, shard)
    assert risen["export"] <= 12 << 20, (risen, shard)
    expected = {n: t.bfloat16() for n, t in files(folder / "large").items()}
    assert not differences(expected, whole_files(folder / "large out"))


@on_ranks(2)
def test_a_model_read_from_a_folder_trains_in_bf16(folder: Path) -> None:
    """Masters keep the file's fp32 bits."""
    there = saved(folder, "llama")
    model: Any = onefold.shard(on_meta("llama"), recipe(2, precision="bf16"), weights=there)
    if state := onefold.full_state_dict(model):
        assert not differences(files(there), state)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model(input_ids=TOKENS, labels=TOKENS).loss
    before.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model(input_ids=TOKENS, labels=TOKENS).loss < before


@on_ranks(2)
def test_what_cannot_be_loaded_is_told_on_every_rank_and_changes_nothing(folder: Path) -> None:
    from safetensors.torch import save_file

    family = "llama, tied"
    there = saved(folder, family)
    whole, norm = files(there), "model.norm.weight"
    less = {name: value for name, value in whole.items() if name != norm}
    quantized = '{"quantization_config": {"quant_method": "bitsandbytes"}}'
    index = "model.safetensors.index.json"
    missing = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    #: {words: (tensors, another file and its text)}
    broken: dict[str, tuple[Any, Any]] = {
        "are pickles": (None, ("pytorch_model.bin", "\x80\x04.")),
        "shapes differ": ({**whole, norm: torch.zeros(3)}, None),
        "quantized": (whole, ("config.json", quantized)),
        "1 names are missing in it": (less, None),
        "1 are unknown to this model": ({**whole, "model.extra.weight": torch.zeros(3)}, None),
        "cut short": (whole, None),
        "are missing": (None, (index, missing)),
        "no index": (None, (index, "[]")),
    }
    for words, (tensors, other) in broken.items() if dist.get_rank() == 0 else ():
        (folder / words).mkdir()
        if tensors is not None:
            save_file(tensors, file := folder / words / "model.safetensors")
            if words == "cut short":
                file.write_bytes(file.read_bytes()[:-1])
        if other:
            (folder / words / other[0]).write_text(other[1])
    dist.barrier()
    model = onefold.shard(build(family), recipe())
    before = onefold.full_state_dict(model)
    here = there if dist.get_rank() == 0 else folder / "nowhere"
    for words, place in {
        **{words: folder / words for words in broken}, "does not exist": folder / "nowhere", "not exist": here,
    }.items():  # fmt: skip
        assert words in complaint(lambda place=place: onefold.load_pretrained(model, place))
    few = folder / "1 names are missing in it"
    said = complaint(lambda: onefold.shard(on_meta(family), recipe(), weights=few))
    assert "on the meta device" in said
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no module name"):
        onefold.shard(build(family), recipe(), weights=there, units=["none"])
    assert len(os.listdir("/proc/self/fd")) <= opened
    other = saved(folder, "gpt2", "gpt2")
    said = complaint(lambda: onefold.load(other, model=model))
    assert "is of another model" in said
    assert not differences(before, onefold.full_state_dict(model))
    # A tensor that fits nowhere is not passed over, unless that is asked for
    more = folder / "1 are unknown to this model"
    said = complaint(lambda: onefold.load(more, model=model))
    assert "1 are unknown to this model (model.extra.weight)" in said
    assert onefold.load(more, model=model, strict=False).unexpected == ("model.extra.weight",)
