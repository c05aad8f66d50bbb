"""A Hugging Face folder as `--model`: read in parts, with the bits of `from_pretrained`, and the
memory of a shard.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_folders import (
    FOLDERS,
    LARGE,
    MIB,
    SMALL,
    differences,
    files,
    give_memory_back_at_once,
    job,
    peak_resident,
    reset_peak,
    saved,
)
from onefold.models import build as models
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, prepare
from onefold.train.worker import export
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import alone, this_rank

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
    pytest.mark.one_in(9),
]
SERVER = "libraries"


def trained(run: Run) -> list[float]:
    rows: list[Row] = []
    train(run, lambda: 0, rows.append)
    return [row["loss"] for row in rows]


def whole_instead() -> Any:
    """Inside, folders are read whole on the first rank, by transformers."""
    return patch.object(models, "read_whole", lambda *_: "as the test says.")


def both_ways(root: Path, names: list[str], stages: list[str]) -> list[str]:
    """On one of several ranks: what differs between a folder read in parts and read whole."""
    from transformers import AutoModelForCausalLM

    import onefold

    ranks, problems = this_rank(), []
    for name in names:
        expected: Any = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        for stage in stages:
            losses = []
            for way in (contextlib.nullcontext, whole_instead):
                said: list[str] = []
                with way():
                    run = prepare(job(root / name, stage=stage), ranks, said.append)
                streamed = way is contextlib.nullcontext
                state = onefold.full_state_dict(run.model)
                wrong = differences(expected.state_dict(), state) if ranks.is_first else []
                wrong += differences(
                    dict(expected.named_buffers()), dict(run.model.named_buffers())
                )
                noted = [line for line in said if "the whole model is read" in line]
                if (run.loaded.weights is not None) != streamed or bool(noted) == streamed:
                    wrong.append(f"read otherwise than was asked for ({said})")
                model: Any = run.loaded.module
                if model.generation_config.no_repeat_ngram_size != 9:
                    wrong.append("another generation configuration")
                if model.name_or_path != str(root / name):
                    wrong.append(f"name_or_path {model.name_or_path}")
                losses.append(trained(run))
                if streamed:
                    export(run, root / "out" / f"{name}-{stage}")
                problems += [f"{name}, stage {stage}, {way.__name__}: {w}" for w in wrong]
            if losses[0] != losses[1]:
                problems.append(f"{name}, stage {stage}: {losses}")
    return problems


def test_a_folder_read_in_parts_trains_as_one_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    names = ["files", "mixtral", "gpt2"]
    for name in names:
        saved(tmp_path, name)
    assert run_ranks(2, both_ways, tmp_path, names, ["3"], timeout=200) == [[], []]
    for name in names:
        made = tmp_path / "out" / f"{name}-3"
        dtypes = {key: tensor.dtype for key, tensor in files(tmp_path / name).items()}
        assert {key: tensor.dtype for key, tensor in files(made).items()} == dtypes, name
        again: Any = AutoModelForCausalLM.from_pretrained(made)
        assert again.generation_config.no_repeat_ngram_size == 9


_PLAIN = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
#: {class: arguments of its configuration}: positions, norms, experts and caches of other kinds.
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma2": {**SMALL, "sliding_window": 16},
    "Gemma3Text": {**SMALL, "sliding_window": 16},
    "Qwen3": SMALL,
    "Phi3": SMALL,
    "Mistral": SMALL,
    "GPTNeoX": _PLAIN,
    "OPT": {"vocab_size": 257, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "Bloom": {"vocab_size": 257, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "Mamba": {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "Qwen3Moe": {**SMALL, "moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 1},
    "GptOss": {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1},
    "DeepseekV3": {**_PLAIN, "num_key_value_heads": 2, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                   "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                   "v_head_dim": 8, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_other_architectures_come_out_as_transformers_opens_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    kind = f"{family.removesuffix('Text')}ForCausalLM"
    row = (kind, f"{family}Config", OTHERS[family], torch.float32, "1GB")
    monkeypatch.setitem(FOLDERS, family, row)
    folder = saved(tmp_path, family)
    expected: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    run = prepare(job(folder), alone(), lambda line: None)
    assert run.loaded.weights is not None
    model: Any = run.model
    assert differences(expected.state_dict(), model.state_dict()) == []
    assert differences(dict(expected.named_buffers()), dict(model.named_buffers())) == []
    tokens = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(expected.eval()(tokens).logits, model.eval()(tokens).logits)


def test_weights_in_pickles_are_read_whole_and_the_run_says_so(tmp_path: Path) -> None:
    folder = saved(tmp_path, "gpt2")
    expected = files(folder)
    torch.save({k: v.clone() for k, v in expected.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    said: list[str] = []
    run = prepare(job(folder), alone(), said.append)
    assert any("pytorch_model.bin" in line and "whole model" in line for line in said), said
    state = run.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_folder_that_cannot_be_read_is_told_with_its_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, "files")
    (folder / "model-00001-of-00012.safetensors").unlink(missing_ok=True)
    gone = next(folder.glob("model-*.safetensors"))
    gone.unlink()
    with pytest.raises(TrainError, match=r"--model .*files: .* are missing"):
        prepare(job(folder), alone(), lambda line: None)


def peaks(root: Path) -> dict[str, float]:
    """How far resident memory rose, in MiB, while a run was prepared and its model exported."""
    ranks = this_rank()
    give_memory_back_at_once()
    warm = prepare(job(root / "llama", stage="3"), ranks, lambda line: None)
    export(warm, root / "warm")
    found: dict[str, float] = {}
    for way in (contextlib.nullcontext, whole_instead):
        name = "parts" if way is contextlib.nullcontext else "whole"
        dist.barrier()
        reset_peak()
        before = peak_resident()
        with way():
            run = prepare(job(root / "large", stage="3"), ranks, lambda line: None)
        dist.barrier()
        found[name] = (peak_resident() - before) / MIB
        if name == "parts":
            reset_peak()
            before = peak_resident()
            export(run, root / "large-out")
            found["export"] = (peak_resident() - before) / MIB
        del run
    return found


@pytest.mark.slow
def test_loading_takes_a_shard_and_a_buffer_and_the_export_a_buffer(tmp_path: Path) -> None:
    import transformers

    saved(tmp_path, "llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE))
    whole = 4 * sum(p.numel() for p in model.parameters()) / MIB
    model.save_pretrained(tmp_path / "large")
    for rank, found in enumerate(run_ranks(2, peaks, tmp_path, timeout=200)):
        assert found["parts"] <= whole / 2 + 16, f"rank {rank}: {found}, the whole is {whole}"
        assert found["export"] <= 12, f"rank {rank}: {found}, the whole is {whole}"
        if not rank:  # so that this would be noticed
            assert found["whole"] > whole, f"{found}, the whole is {whole}"
    assert differences(files(tmp_path / "large"), files(tmp_path / "large-out")) == []
