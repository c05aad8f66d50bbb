"""Onefold as an engine of verl, where verl is installed: not in `make test`, since it asks for
versions of its own.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import absolute_path, run_ranks

HERE = Path(__file__).parent

sys.path.append(str(Path(__file__).parent))
from verl_trials import by_verl, interface, states

missing = importlib.util.find_spec("verl") is None
pytestmark = pytest.mark.skipif(missing, reason="verl is not installed")


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows]


def test_verls_training_worker_has_the_losses_of_its_fsdp2(tmp_path: Path) -> None:
    seen = run_ranks(2, by_verl, str(tmp_path), fresh=True)[0]
    for name, theirs, rel in (("fp32", "fp32 fsdp2", 1e-6), ("bf16", "bf16 fsdp2", 1e-3)):
        ours = [key for key in seen if key.startswith(name) and key != theirs]
        assert len(ours) == (2 if name == "fp32" else 1)
        for key in [*ours, *(["lora 3"] if name == "fp32" else [])]:
            expected = seen["lora fsdp2" if key == "lora 3" else theirs]
            assert len(expected) == 3 and len(set(column(expected, "loss"))) == 3
            for what in ("loss", "grad_norm", "lr"):
                assert column(seen[key], what) == pytest.approx(column(expected, what), rel=rel)


def test_verls_checkpoint_comes_back_and_inference_gets_whole_tensors(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, states, str(tmp_path), fresh=True)[0]
    assert seen["names"][0] == seen["names"][1] and len(seen["equal"]) == len(seen["names"][0])
    assert all(seen["equal"]) and all(seen["exported"]) and seen["exported"]
    assert seen["kept"] == ["global_step_2"]
    assert seen["reference"] == pytest.approx(seen["before"], rel=1e-3)
    assert seen["before"] != seen["evaluated"]
    assert seen["evaluated again"] == pytest.approx(seen["evaluated"], rel=1e-6)
    for what in ("loss", "grad_norm", "lr"):
        expected = pytest.approx(column(seen["second"], what), rel=1e-6)
        assert column(seen["again"], what) == expected
    assert seen["merged"]["names"] == seen["names"][0]
    assert seen["merged"]["off"] < 1e-6 < seen["merged"]["moved"]


def test_the_engine_fits_verls_interface_and_refuses_what_it_does_not_read() -> None:
    seen = run_ranks(1, interface, fresh=True)[0]
    assert seen["registered"] == ["cpu", "cuda"]
    assert seen["unknown"] == [] and seen["composed"] == ["onefold SHARDED"] * 3
    for key, sentence in seen["refused"].items():
        assert key in sentence, (key, sentence)
    assert "names no stage" in seen["no recipe"] and "given twice" in seen["precision twice"]
    assert seen["computes"] == ["torch.bfloat16", "torch.float32", "None"]


def prepared(folder: Path) -> None:
    """A model with a tokenizer that knows chats, and chats."""
    import pandas
    import torch
    import trainer_script
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{n}" for n in range(40)]
    known = ["<pad>", "<s>", "</s>", "user", "assistant", ":", *words]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(known)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**trainer_script.CONFIG | {"tie_word_embeddings": False})
    ).save_pretrained(folder / "model")
    drawn = random.Random(0)
    chats = [
        [
            {"role": role, "content": " ".join(drawn.choices(words, k=drawn.randint(4, 8)))}
            for role in ("user", "assistant")
        ]
        for _ in range(32)
    ]
    pandas.DataFrame({"messages": chats}).to_parquet(folder / "train.parquet")


def by_the_command(
    folder: Path, stage: int | None, into: str, *more: str
) -> dict[int, list[float]]:
    """verl's own command on two ranks, by its FSDP2 (None) or by Onefold: {step: loss, norm, rate}
    as it prints them.
    """
    engine = (
        ["engine.strategy=fsdp2"]
        if stage is None
        else [
            "engine._target_=onefold.integrations.verl.EngineConfig", "engine.strategy=onefold",
            f"+engine.recipe={{stage: {stage}}}",
        ]
    )  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "verl.trainer.sft_trainer", *engine,
            "+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32}",
            "engine.use_torch_compile=false", "data.train_files=train.parquet",
            "data.train_batch_size=8", "data.micro_batch_size_per_gpu=2",
            "data.use_dynamic_bsz=false", "data.num_workers=0", "data.max_length=64",
            "model.path=model", "model.use_remove_padding=false",
            "+model.override_config.attn_implementation=eager", "optim.lr=1e-2",
            "trainer.logger=[console]", "trainer.device=cpu", "trainer.total_epochs=1",
            f"trainer.default_local_dir={into}", *more,
        ],
        cwd=folder,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), absolute_path()]),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu,onefold.integrations.verl",
            # verl's engine for FSDP is registered for CUDA; it runs on the CPU, too
            "VERL_ENGINE_DEVICE": "cuda" if stage is None else "cpu",
        },
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    number = r"([-+\de.]+)"
    found = re.findall(
        rf"step:(\d+) .*train/loss:{number} .*train/grad_norm:{number} .*train/lr:{number}",
        done.stdout + done.stderr,
    )
    return {int(step): [float(value) for value in values] for step, *values in found}


def test_verls_command_has_the_losses_of_its_fsdp2_and_resumes_at_another_stage(
    tmp_path: Path,
) -> None:
    """`torchrun -m verl.trainer.sft_trainer`, as a user starts it."""
    if importlib.util.find_spec("uvicorn") is None:
        pytest.skip("verl's command imports uvicorn, which is not installed")
    prepared(tmp_path)
    theirs = by_the_command(tmp_path, None, "theirs")
    assert list(theirs) == [1, 2, 3, 4] and len({loss for loss, *_ in theirs.values()}) == 4
    ours = by_the_command(tmp_path, 3, "ours", "trainer.save_freq=2")
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=1e-6), step
    shutil.rmtree(tmp_path / "ours" / "global_step_4")
    (tmp_path / "ours" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = by_the_command(tmp_path, 1, "ours")
    assert list(resumed) == [3, 4] and [resumed[n] for n in (3, 4)] == [ours[n] for n in (3, 4)]
