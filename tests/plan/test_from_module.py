"""A model's shape is what `shard` would bind, and a model of any size is read without memory."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.plan.modules import model_shape, module_of
from onefold.tracing.trace import trace
from zoo import TinyGPT, TinyMLP

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "make",
    [lambda: TinyGPT(tied=True), lambda: TinyGPT(tied=False), TinyMLP, lambda: nn.Linear(3, 2)],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_shape_has_the_units_and_parameters_that_shard_binds(make: Any, stage: int) -> None:
    shape = model_shape(make())
    module = onefold.shard(make(), onefold.Recipe.zero(stage, precision="bf16"))
    engine = onefold.engine_of(module)
    assert [u.name for u in shape.units] == [u.name for u in engine.units]
    for said, bound in zip(shape.units, engine.units, strict=True):
        assert [(p.name, p.shape) for p in said.parameters] == [
            (e.slot.name, tuple(e.slot.shape)) for e in bound.entries
        ]
        assert said.looks_up_only == bound.looks_up_only


@needs_transformers
def test_a_model_of_70_billion_parameters_is_read_and_traced_without_memory(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = module_of(folder_with(tmp_path / "llama", LLAMA_70B))
    shape = model_shape(module)
    assert shape.numel == shape.active_numel == 70_553_706_496
    assert (
        len(shape.units) == 1 + 80 + 2
        and shape.units[1].name == "model.embed_tokens"
        and shape.units[1].looks_up_only
    )
    assert shape.transformer is not None
    assert (
        shape.transformer.layers,
        shape.transformer.kv_heads,
        shape.transformer.tied,
    ) == (80, 8, False)
    ids = torch.zeros(1, 8192, dtype=torch.long)
    said = trace(
        module,
        {"input_ids": ids, "labels": ids},
        precision="bf16",
        device="cuda",
        checkpointing="full",
    )
    saved = Counter[str]()
    for row in said.rows:
        saved[row.unit] += row.kept
    # The input of each block and nothing else
    assert [saved[f"model.layers.{i}"] for i in range(1, 80)] == [8192 * 8192 * 2] * 79
    assert all(p.is_meta for p in module.parameters())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if sys.platform == "darwin" else 1024
    )
    assert grown < 2**30, (
        f"{grown / 2**20:.0f} MiB for a model of {shape.numel * 2 / 2**30:.0f} GiB"
    )


@needs_transformers
def test_a_config_is_built_as_the_class_it_names_with_its_own_names_and_shapes(
    tmp_path: Path,
) -> None:
    import transformers

    folder = folder_with(tmp_path / "moe", MIXTRAL)
    for source in (folder, folder / "config.json", str(folder)):
        shape = model_shape(module_of(source))
        real = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL))
        assert {p.name: p.shape for u in shape.units for p in u.parameters} == {
            n: tuple(p.shape) for n, p in real.named_parameters()
        }
    assert shape.transformer is not None
    assert (shape.transformer.experts, shape.transformer.active) == (4, 2)
    routed = sum(p.numel() for n, p in real.named_parameters() if ".experts." in n)
    assert shape.active_numel == shape.numel - routed // 2


def test_a_factory_is_called_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factories_here.py").write_text(
        "from torch import nn\n"
        "def big(): return nn.Sequential(*[nn.Linear(50_000, 50_000) for _ in range(8)])\n"
        "def pair(): return nn.Linear(2, 2), None\n"
        "def needy(width): return nn.Linear(width, width)\n"
        "def wrong(): return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model_shape(module_of("factories_here:big")).numel == 8 * (50_000 * 50_000 + 50_000)
    assert model_shape(module_of("factories_here:pair")).numel == 6
    for source, sentence in {
        "factories_here:bigg": r"AttributeError: .*'bigg'",
        "factories_here:needy": "TypeError: .* 'width'",
        "factories_here:wrong": "got int",
        "no_such_package:make": "No module named 'no_such_package'",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            module_of(source)


@needs_transformers
def test_what_is_no_model_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "other.json").write_text('{"a": 1}')
    cases = {
        tmp_path / "empty": "cannot be read as JSON",
        tmp_path / "nowhere": "no architecture and no folder",
        tmp_path / "broken.json": "cannot be read as JSON",
        tmp_path / "notes.txt": "cannot be read as JSON",
        tmp_path / "other.json": 'has no "model_type"',
        folder_with(tmp_path / "typo", {"model_type": "lama"}): "Did you mean .*llama",
        folder_with(
            tmp_path / "odd", {**LLAMA_70B, "num_attention_heads": 0}
        ): "could not build this model",
    }
    for source, sentence in cases.items():
        with pytest.raises(ValueError, match=sentence):
            module_of(source)
