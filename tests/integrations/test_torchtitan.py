"""Onefold in torchtitan's trainer, where torchtitan is installed: not in `make test`."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import absolute_path, run_ranks

CPU = Path(__file__).parent / "titan_cpu"

sys.path.append(str(Path(__file__).parent))
from torchtitan_trials import AXES, STEPS, by_muon, by_torchtitan, over_axes, resumed

missing = importlib.util.find_spec("torchtitan") is None
pytestmark = pytest.mark.skipif(missing, reason="torchtitan is not installed")


def flat(rows: list[tuple[float, float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_torchtitans_trainer_has_the_losses_and_norms_of_its_fsdp2(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, by_torchtitan, str(tmp_path), fresh=True)[0]
    for precision, stages, rel in (("fp32", (1, 3), 1e-6), ("bf16", (3,), 1e-3)):
        theirs = flat(seen[f"{precision} fsdp2"])
        assert len(set(theirs)) == 2 * STEPS
        for stage in stages:
            assert flat(seen[f"{precision} {stage}"]) == pytest.approx(theirs, rel=rel)
    assert len(seen["drawn"]) > 10
    for name, (mean, std, their_mean, their_std) in seen["drawn"].items():  # as torchtitan draws
        assert mean == pytest.approx(their_mean, abs=0.02), name
        assert std == pytest.approx(their_std, rel=0.05), name


@pytest.mark.parametrize("name", AXES)
def test_torchtitans_degrees_have_the_losses_and_norms_of_its_fsdp2(
    name: str, tmp_path: Path
) -> None:
    seen = run_ranks(4, over_axes, str(tmp_path), [name], fresh=True)[0][name]
    losses, norms = zip(*seen["fsdp2"], strict=True)
    assert len(set(losses)) == len(set(norms)) == STEPS
    for stage in ("stage 1", "stage 3"):
        our_losses, our_norms = zip(*seen[stage], strict=True)
        assert our_losses == pytest.approx(losses, rel=1e-5), stage
        # A token between two experts goes to one or the other; FSDP2's replicas on gloo are 4e-5 apart
        assert our_norms == pytest.approx(norms, rel=1e-3), stage
    assert seen["stage 1"] == seen["stage 3"]


def test_torchtitans_muon_is_torchs_on_whole_matrices(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, by_muon, str(tmp_path), fresh=True)[0]
    for name, kinds in (("muon", ["Muon", "AdamW"]), ("adafactor", ["Adafactor"])):
        (_, plain), *others = seen[name]
        assert [made for made, _ in seen[name]] == [kinds] * len(seen[name])
        assert len(set(plain)) == STEPS
        for _, found in others:
            assert flat(found) == pytest.approx(flat(plain), rel=1e-6), name
    assert "layers.0.attention.wo.weight, in blocks of rows" in seen["blocks"]
    assert "DistMuon was given" in seen["all"] and "of shape (256,)" in seen["all"]


def test_torchtitans_run_resumes_at_another_stage(tmp_path: Path) -> None:
    seen: dict[str, Any] = run_ranks(2, resumed, str(tmp_path), fresh=True)[0]
    assert len(seen["whole"]) == STEPS and len(seen["first"]) == 2
    assert flat(seen["first"] + seen["second"]) == pytest.approx(flat(seen["whole"]), rel=1e-6)
    assert seen["parsed"] == ("Trainer.Config", '{"stage": 2}', "CrossEntropyLoss.Config")
    assert len(seen["refused"]) == 7
    for key, sentence in seen["refused"].items():
        word = {"training.disable_cuda_graphs": "CUDA graphs", "validator.enable": "validator"}
        word |= {"compile.enable": "compile", "recipe": "names no stage"}
        assert word.get(key, key) in sentence, (key, sentence)


def assets(folder: Path) -> None:
    """A tokenizer and texts where torchtitan's debug model looks for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{n}" for n in range(500)]
    made = Tokenizer(
        models.WordLevel({w: n for n, w in enumerate(["<unk>", "<s>", "</s>", *words])}, "<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer, texts = folder / "tests/assets/tokenizer", folder / "tests/assets/c4_test"
    tokenizer.mkdir(parents=True)
    texts.mkdir()
    made.save(str(tokenizer / "tokenizer.json"))
    said = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (tokenizer / "tokenizer_config.json").write_text(said)
    drawn = random.Random(0)
    rows = [json.dumps({"text": " ".join(drawn.choices(words, k=60))}) for _ in range(200)]
    (texts / "data.json").write_text("\n".join(rows))


def by_the_command(folder: Path, stage: int, into: str, *more: str) -> dict[int, str]:
    """torchtitan's own command on two ranks: what it prints of each step, without its timings."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "torchtitan.train", "--module", "titan_debugmodel", "--config", "debugmodel",
            "--recipe", json.dumps({"stage": stage}), "--training.local_batch_size", "2",
            "--training.seq_len", "32", "--lr_scheduler.total_steps", "8", "--debug.seed", "1",
            "--dump_folder", into, *more,
        ],
        cwd=folder,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(CPU), absolute_path()]),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(folder / "cache"), "NO_COLOR": "1", "WANDB_MODE": "disabled",
        },
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    found = re.findall(r"step: +(\d+) +(loss: +[\d.]+ +grad_norm: +[\d.]+)", plain)
    said = {int(step): words for step, words in found}
    assert len(found) == 2 * len(said), "both ranks print what all ranks have"
    return said


def test_torchtitans_command_trains_and_resumes_at_another_stage(tmp_path: Path) -> None:
    """`torchrun -m torchtitan.train` with a file of configurations, as a user starts it."""
    assets(tmp_path)
    whole = by_the_command(tmp_path, 3, "whole", "--training.steps", str(STEPS))
    assert list(whole) == [1, 2, 3, 4] and len(set(whole.values())) == STEPS
    keep = ["--checkpoint.enable", "--checkpoint.interval", "2", "--training.steps"]
    first = by_the_command(tmp_path, 1, "broken", *keep, "2")
    second = by_the_command(tmp_path, 2, "broken", *keep, str(STEPS))
    assert (list(first), list(second)) == ([1, 2], [3, 4])
    assert first | second == whole
