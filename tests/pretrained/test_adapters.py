"""Adapters alone: what peft opens, bit for bit, and back into a sharded model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import run_ranks

SERVER = "libraries"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)

TOKENS = torch.arange(14).reshape(2, 7)


def base(device: str = "cpu") -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


def wrapped(model: Any, rank: int = 3, seed: int | None = None, **options: Any) -> Any:
    """The model with LoRA adapters; with a seed, B is not zero either."""
    import peft

    config = peft.LoraConfig(
        r=rank, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options
    )
    out = peft.get_peft_model(model, config)
    if seed is not None:
        torch.manual_seed(seed)
        for name, parameter in out.named_parameters():
            if "lora_" in name:
                parameter.data.normal_()
    return out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base model, and adapters as peft saves them."""
    root = tmp_path_factory.mktemp("peft")
    base().save_pretrained(root / "base")
    wrapped(base(), seed=1).save_pretrained(root / "theirs")
    wrapped(base(), rank=2).save_pretrained(root / "other rank")
    return {name: root / name for name in ("base", "theirs", "other rank")}


def there_and_back(folders: dict[str, Path], root: Path, stages: list[int]) -> list[str]:
    import onefold
    from onefold.checkpoint.errors import CheckpointError
    from onefold.pretrained.adapters import load_adapters, save_adapters

    problems, theirs = [], tensors_of(folders["theirs"])
    for stage in stages:
        recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
        out = save_adapters(onefold.shard(wrapped(base(), seed=1), recipe), root / f"ours {stage}")
        ours = tensors_of(out)
        if ours.keys() != theirs.keys() or any(not torch.equal(ours[n], theirs[n]) for n in theirs):
            problems.append(f"stage {stage}: saved {sorted(ours)} or other values")
        model = onefold.shard(wrapped(base("meta")), recipe, weights=folders["base"])
        state = onefold.full_state_dict(model)
        wrong = [
            n
            for n, t in state.items()
            if ("lora_B" in n and t.any()) or ("lora_A" in n and not t.any())
        ]
        if wrong:
            problems.append(f"stage {stage}: adapters do not start as peft's do: {wrong}")
        load_adapters(model, folders["theirs"])
        expected = wrapped(base(), seed=1)
        state = onefold.full_state_dict(model)
        problems += [
            f"stage {stage}: {n}"
            for n, t in expected.state_dict().items()
            if state and not torch.equal(t, state[n])
        ]
        with torch.no_grad():
            if not torch.equal(model.eval()(TOKENS).logits, expected.eval()(TOKENS).logits):
                problems.append(f"stage {stage}: other logits")
        for folder, words in (
            (folders["other rank"], "rank and targets"),
            (folders["base"], "neither adapter_model.safetensors"),
        ):
            try:
                load_adapters(model, folder)
                problems.append(f"{folder} was loaded")
            except CheckpointError as error:
                problems += [] if words in str(error) else [str(error)]
    return problems


@pytest.mark.parametrize(("ranks", "stages"), [(1, [0]), (2, [0, 3]), (3, [3])])
def test_adapters_go_to_peft_and_come_back_bit_for_bit(
    ranks: int, stages: list[int], folders: dict[str, Path], tmp_path: Path
) -> None:
    import peft

    assert run_ranks(ranks, there_and_back, folders, tmp_path, stages) == [[]] * ranks
    with torch.no_grad():
        both = (tmp_path / f"ours {stages[-1]}", folders["theirs"])
        ours, theirs = (
            peft.PeftModel.from_pretrained(base(), str(f)).eval()(TOKENS).logits for f in both
        )
        plain = base().eval()(TOKENS).logits
    assert torch.equal(ours, theirs) and not torch.equal(ours, plain)
    first, second = (json.loads((f / "adapter_config.json").read_text()) for f in both)
    assert {k: v for k, v in first.items() if k != "target_modules"} == {
        k: v for k, v in second.items() if k != "target_modules"
    }
    assert sorted(first["target_modules"]) == sorted(second["target_modules"])
    cards = [(folder / "README.md").read_text() for folder in both]
    assert "library_name: peft" in cards[0] and cards[0] == cards[1]


#: What peft trains besides, or in place of adapters: copies of modules, which begin as these, and
#: prompts, which begin at random.
BESIDE: dict[str, dict[str, Any]] = {
    "copies": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "norm", "lm_head"],
    },
    "norms": {"target_modules": ["norm"]},
    "prompts": {"num_virtual_tokens": 3},
}


def beside(kind: str, device: str) -> Any:
    import peft

    made = {"copies": peft.LoraConfig, "norms": peft.LNTuningConfig}
    config = made.get(kind, peft.PromptTuningConfig)(task_type="CAUSAL_LM", **BESIDE[kind])
    return peft.get_peft_model(base(device), config)


def begun(root: Path) -> list[str]:
    """What does not begin as peft has it, of models whose weights are read in parts."""
    import onefold

    problems = []
    for kind in BESIDE:
        model = beside(kind, "meta")
        recipe = onefold.Recipe.zero(3, stall_timeout=20.0)
        init = model._init_weights  # of what the folder has not
        state = onefold.full_state_dict(onefold.shard(model, recipe, init=init, weights=root))
        with torch.random.fork_rng():
            theirs = beside(kind, "cpu")
            theirs.get_base_model().load_state_dict(tensors_of_base(root, theirs), strict=False)
        for name, tensor in theirs.state_dict().items() if state else ():
            drawn = "prompt" in name or "lora_A" in name
            if drawn and not 0.5 < float(state[name].std() / tensor.std()) < 2:
                problems.append(
                    f"{kind}: {name} spreads by {state[name].std()}, not {tensor.std()}"
                )
            if not drawn and not torch.equal(state[name], tensor):
                problems.append(f"{kind}: {name}")
    return problems


def tensors_of_base(root: Path, model: Any) -> dict[str, Tensor]:
    """The folder's, for modules of peft and for the copies that they train."""
    from safetensors.torch import load_file

    there, out = load_file(root / "model.safetensors"), {}
    there["lm_head.weight"] = there["model.embed_tokens.weight"]  # tied, and the copies are not
    for name in model.get_base_model().state_dict():
        plain = name
        for part in ("base_layer.", "original_module.", "modules_to_save.default.",
                     "ln_tuning_layers.default."):  # fmt: skip
            plain = plain.replace(part, "")
        if plain in there:
            out[name] = there[plain]
    return out


def test_copies_begin_as_the_modules_of_the_folder_and_prompts_at_random(tmp_path: Path) -> None:
    import peft

    import onefold
    from onefold.checkpoint.errors import CheckpointError

    model = base()
    for p in model.parameters():
        p.data.add_(0.125)  # norms that are not all ones
    model.save_pretrained(tmp_path)
    assert run_ranks(2, begun, tmp_path) == [[], []]
    config = peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]
    )
    with pytest.raises(CheckpointError, match=r"of the kind IA3 .*ia3_l.* build it in memory"):
        onefold.shard(
            peft.get_peft_model(base("meta"), config), onefold.Recipe.zero(0), weights=tmp_path
        )


def prompted() -> Any:
    import peft

    torch.manual_seed(5)
    return peft.get_peft_model(
        base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )


def prompts_saved(root: Path) -> bool:
    import onefold

    model = onefold.shard(prompted(), onefold.Recipe.zero(3, stall_timeout=20.0))
    onefold.save_adapters(model, root / "ours")
    onefold.save_adapters(model, root / "ours", overwrite=True)
    return bool(model.prompt_encoder.training)


def test_prompts_are_saved_as_pefts(tmp_path: Path) -> None:
    """They are no tensors of the model: an encoder makes them."""
    import peft

    assert run_ranks(2, prompts_saved, tmp_path) == [True, True]
    prompted().save_pretrained(tmp_path / "theirs")
    ours, theirs = (tensors_of(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    again = peft.PeftModel.from_pretrained(base(), str(tmp_path / "ours"))
    assert again.peft_config["default"].num_virtual_tokens == 3


def only_adapters_train(folders: dict[str, Path]) -> list[str]:
    """The base is frozen, read from its folder, and does not change. At first B moves alone: A's
    gradient is something times B, 0.
    """
    import onefold

    model = onefold.shard(
        wrapped(base("meta")), onefold.Recipe.zero(3, stall_timeout=20.0), weights=folders["base"]
    )
    before = onefold.full_state_dict(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0
    )
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    after = onefold.full_state_dict(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    wanted = {name for name in before if "lora_B" in name}
    return (
        []
        if dist.get_rank() or moved == wanted
        else [f"moved {sorted(moved)}, expected {sorted(wanted)}"]
    )


def test_adapters_on_a_base_read_from_its_folder_train_alone(folders: dict[str, Path]) -> None:
    assert run_ranks(2, only_adapters_train, folders) == [[], []]


def test_what_cannot_be_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    import onefold
    from onefold.checkpoint.errors import CheckpointError
    from onefold.pretrained.adapters import load_adapters, save_adapters
    from onefold.pretrained.export import export

    plain = onefold.shard(base(), onefold.Recipe.zero(0))
    with pytest.raises(CheckpointError, match="has no adapters of peft"):
        save_adapters(plain, tmp_path / "out")
    model = onefold.shard(wrapped(base()), onefold.Recipe.zero(0))
    with pytest.raises(CheckpointError, match="no adapter 'other'; it has default"):
        load_adapters(model, folders["theirs"], "other")
    with pytest.raises(CheckpointError, match="save_adapters"):
        export(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="starts from the base model's weights"):
        onefold.shard(
            wrapped(base("meta"), use_dora=True), onefold.Recipe.zero(0), weights=folders["base"]
        )
    assert list(tmp_path.iterdir()) == []
