"""`--lora`: adapters of peft around a frozen base, saved as peft's, merged shard by shard."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_folders import (
    LARGE,
    MIB,
    SMALL,
    files,
    give_memory_back_at_once,
    job,
    peak_resident,
    reset_peak,
    saved,
)
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import newest_first
from onefold.checkpoint.folder_source import FolderSource
from onefold.models.adapters import with_adapters
from onefold.models.build import load_model
from onefold.pretrained.adapters import export_merged
from onefold.processes.ranks import Ranks
from onefold.train import checkpoints
from onefold.train.checkpoints import Keeper
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, prepare
from onefold.train.report import Reporter
from onefold.train.worker import export
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import alone, begun, this_rank

#: Of ranks.SERVERS.
SERVER = "libraries"

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")),
    reason="transformers and peft are not both installed",
)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"lora_targets": "q_proj,down_proj", "lora_alpha": 6},
    "gpt2": {"lora_targets": "all-linear"},
    "files": {"frozen": "nf4", "precision": "bf16"},
}


def start(config: Any, ranks: Ranks) -> tuple[Run, Keeper]:
    """A start of the run as the command makes it."""
    run, _ = begun(config, ranks)
    return run, Keeper(run, Path(config.output), Reporter())


def losses_of(run: Run, keeper: Keeper, most: int = 1000) -> list[float]:
    rows: list[Row] = []
    train(run, lambda: len(rows) >= most, rows.append, keeper=keeper)
    keeper.close()
    return [row["loss"] for row in rows]


def merged_by_hand(run: Run) -> dict[str, torch.Tensor]:
    """On the first rank: W + scale · B A of every weight that has adapters, in fp32."""
    import onefold

    state = onefold.full_state_dict(run.model)
    out = {}
    for path, layer in run.model.named_modules():
        if state and hasattr(layer, "lora_A"):
            a, b = (state[f"{path}.lora_{part}.default.weight"].float() for part in "AB")
            delta = layer.scaling["default"] * (b @ a)
            weight = state[f"{path}.base_layer.weight"].float()
            name = path.removeprefix("base_model.model.") + ".weight"
            out[name] = weight + (delta.T if layer.fan_in_fan_out else delta)
    return out


def streamed(run: Run, merged: dict[str, torch.Tensor]) -> None:
    """Every rank is given the merged model's tensors. Collective."""
    import onefold

    given = dict(onefold.stream_params(run.model, "master", merge_adapters=True))
    assert given.keys() <= merged.keys() and len(merged.keys() - given.keys()) <= 1  # tied
    for name, tensor in given.items():
        assert type(tensor) is torch.Tensor
        near = 1e-6 if merged[name].dtype == tensor.dtype else 1e-2
        assert torch.allclose(tensor.float(), merged[name].float(), rtol=near, atol=1e-6), name
    plain = dict(onefold.stream_params(run.model))
    assert any("lora_A" in name for name in plain)


def _refused(config: Any, ranks: Ranks, root: Path) -> None:
    """What cannot go on from a checkpoint of adapters alone. Collective."""
    other = root / "elsewhere" / "files"
    if ranks.is_first:
        saved(root / "elsewhere", "files")
        weights = files(other)
        first = sorted(other.glob("*.safetensors"))[0]
        first.write_bytes(first.read_bytes()[:-2] + b"\0\1")
        assert weights.keys() == files(other).keys()
    ranks.from_first(None)
    for changed, said in (
        ({"model": str(other)}, "around other weights than those of --model"),
        ({"lora": 8}, "shapes differ"),
        ({"lora_targets": "q_proj"}, "are unknown to this model"),
    ):
        with pytest.raises(ValueError, match=said):
            start(config.model_copy(update=changed), ranks)


def runs(root: Path) -> dict[str, Any]:
    """On one of two ranks: losses of runs with adapters, whole and interrupted."""
    ranks, found = this_rank(), {}
    for name, options in VARIANTS.items():
        more: dict[str, Any] = {
            "lora": 4, "lr": 3e-2, "steps": 8, "stage": "3", "resume": "auto", "save_every": 4, **options
        }  # fmt: skip
        config = job(root / name, **more, output=str(root / "out" / name))
        run, keeper = start(config, ranks)
        whole = losses_of(run, keeper)
        found[name] = {"losses": whole, "trained": run.trained}
        assert export(run, root / "out" / name / "model") == "adapters"
        export_merged(run.model, root / "out" / name / "merged")
        for weight, expected in merged_by_hand(run).items():
            made = files(root / "out" / name / "merged")[weight].float()
            assert torch.allclose(made, expected, rtol=1e-2, atol=1e-6), (name, weight)
            if name != "files":
                assert torch.allclose(made, expected, rtol=1e-5, atol=1e-6), (name, weight)
        streamed(run, files(root / "out" / name / "merged"))
        del run
        if name == "files":
            halted = config.model_copy(update={"output": str(root / "again" / name)})
            first = losses_of(*start(halted, ranks), most=4)
            assert first + losses_of(*start(halted, ranks)) == whole, name
            (newest, *_) = newest_first(Path(halted.output) / checkpoints.CHECKPOINTS)
            found["checkpoint"] = newest
            _refused(halted, ranks, root)
    return found


def refused_merging() -> list[str]:
    import peft
    import transformers

    import onefold

    def two(model: Any) -> None:
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        model.base_model.set_adapter(["default", "other"])

    kinds: list[tuple[Any, dict[str, Any], Any]] = [
        (None, {}, None),
        ({"use_dora": True}, {}, None),
        ({"target_modules": ["lm_head"]}, {"tie_word_embeddings": True}, None),
        ({}, {}, two),
        ({}, {}, lambda model: model.merge_adapter()),
        ({}, {}, lambda model: model.base_model.disable_adapter_layers()),
    ]
    said = []
    for options, more, change in kinds:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **more}))
        if options is not None:
            config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})
            model = peft.get_peft_model(model, config)
        if change is not None:
            change(model)
        model = onefold.shard(model, onefold.Recipe.zero(3))
        with pytest.raises(ValueError) as error:
            list(onefold.stream_params(model, merge_adapters=True))
        said.append(str(error.value))
    return said


def test_a_stream_merges_adapters_that_add_to_linear_layers_and_refuses_others() -> None:
    for said in run_ranks(2, refused_merging):
        wrong = [
            "LlamaForCausalLM has no adapters of peft", "more than add B·A", "is on a weight that is tied",
            "active are ['default', 'other']", "in the weights already ['default']", "active are []",
        ]  # fmt: skip
        assert all(words in text for words, text in zip(wrong, said, strict=True)), said


def test_adapters_are_trained_alone_saved_as_pefts_and_merged(tmp_path: Path) -> None:
    import peft
    import transformers

    for name in ("llama", "gpt2", "files"):
        saved(tmp_path, name)
    first, second = run_ranks(2, runs, tmp_path, timeout=200)
    assert first == second
    names = {
        item.name for item in FolderSource(first["checkpoint"]).items() if item.kind == "parameter"
    }
    assert names and all("lora_" in name for name in names)  # the frozen model is in its folder
    tokens = torch.arange(14).reshape(2, 7)
    for name in ("llama", "gpt2", "files"):
        losses = first[name]["losses"]
        assert losses[-1] < losses[0], losses
        out = tmp_path / "out" / name
        settings = json.loads((out / "model" / "adapter_config.json").read_text())
        assert settings["r"] == 4 and settings["base_model_name_or_path"] == str(tmp_path / name)
        assert settings["lora_alpha"] == (6 if name == "llama" else 8)
        assert sorted(p.name for p in (out / "model").glob("*.safetensors")) == [
            "adapter_model.safetensors"
        ]
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32
        )
        theirs: Any = peft.PeftModel.from_pretrained(base, out / "model").eval()
        adapters = sum(p.numel() for n, p in theirs.named_parameters() if "lora_" in n)
        assert first[name]["trained"] == adapters
        merged: Any = transformers.AutoModelForCausalLM.from_pretrained(
            out / "merged", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            expected, actual = theirs(tokens).logits, merged(tokens).logits
        scale = expected.abs().max()
        if name != "files":  # there the base is what nf4 decodes to: compared by weights above
            assert float((expected - actual).abs().max() / scale) < 1e-5
        with theirs.disable_adapter(), torch.no_grad():
            before = theirs(tokens).logits
        assert float((expected - before).abs().max() / scale) > 1e-3  # they do something


def test_adapters_name_their_base_in_the_hub_with_its_revision(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    loaded = load_model(str(folder), "bytes", 0, 32)
    config = job(folder, lora=2).model_copy(update={"model": "tiny/llama@refs/pr/1"})
    adapter: Any = with_adapters(config, loaded).peft_config
    base = adapter["default"]
    assert (base.base_model_name_or_path, base.revision) == ("tiny/llama", "refs/pr/1")


def peak_of_merging(root: Path) -> float:
    """How far resident memory rose, in MiB, while the merged model was written."""
    ranks = this_rank()
    give_memory_back_at_once()
    for name in ("llama", "large"):
        config = job(root / name, lora=4, stage="3", frozen="nf4")
        run = prepare(config, ranks, lambda line: None)
        reset_peak()
        before = peak_resident()
        export_merged(run.model, root / "out" / name / "merged")
    return (peak_resident() - before) / MIB


@pytest.mark.slow
def test_merging_takes_the_memory_of_a_unit_and_a_buffer(tmp_path: Path) -> None:
    import transformers

    saved(tmp_path, "llama")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE))
    whole = 4 * sum(p.numel() for p in model.parameters()) / MIB
    model.save_pretrained(tmp_path / "large")
    unit = whole / 6 / 2  # decoded, on one of 2 ranks
    for found in run_ranks(2, peak_of_merging, tmp_path, timeout=200):
        assert found < unit + 16 < whole / 3, f"{found} MiB; the whole is {whole}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_targets": "q_porj"}, "no linear layer of that name. Did you mean 'q_proj'"),
        ({"lora_targets": "?"}, "no linear layer of that name. Known: "),
        ({"lora_targets": "embed_tokens"}, "no linear layer of that name"),
    ],
)
def test_layers_that_are_not_there_are_told(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=r"--lora-targets") as error:
        prepare(job(saved(tmp_path, "llama"), lora=2, **options), alone(), lambda line: None)
    assert said in str(error.value)


def test_adapters_that_cannot_be_merged_are_told(tmp_path: Path) -> None:
    """Those of experts and gates, which peft adds to parameters and not to linear layers."""
    folder = saved(tmp_path, "mixtral")
    run = prepare(job(folder, lora=2), alone(), lambda line: None)
    with pytest.raises(CheckpointError, match=r"the adapter at .*mlp"):
        export_merged(run.model, tmp_path / "merged")
