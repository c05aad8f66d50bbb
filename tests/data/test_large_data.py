"""Data of any size: read from what `datasets` opens, tokenized once into files that all ranks map,
mixed by weights, and its documents kept apart.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_folders import (
    MIB,
    SMALL,
    give_memory_back_at_once,
    job,
    peak_resident,
    reset_peak,
    resident,
    saved,
)
from onefold.data import sources
from onefold.data.samples import IGNORE, Data, load_data
from onefold.data.sources import rows_of
from onefold.data.text import ByteTokenizer
from onefold.data.tokens import tokens_of
from onefold.train.config import resolve
from onefold.train.launch import check_early
from onefold.train.loop import Row, train
from onefold.train.prepare import prepare
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import alone, this_rank

#: Of ranks.SERVERS.
SERVER = "libraries"

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is not installed"
)
TEXTS = [f"document {number} " + "word " * (number % 13) for number in range(60)]
CHATS = [
    [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "ab" * (n % 9)}]
    for n in range(1, 40)
]


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def everything(data: Data) -> list[dict[str, list[Any]]]:
    found = [data.samples.batch(np.array([at])) for at in range(sum(data.samples.counts))]
    return [{name: t.tolist() for name, t in batch.items()} for batch in found]


def cached(
    data: str, root: Path, field: str | None = None, pack: str = "rows", seq: int = 16
) -> Data:
    words = ByteTokenizer()
    found = tokens_of(data, field, words, root / "tokens", alone(), lambda line: None)
    return load_data(data, found, 256, seq, 3, 0.2, pack)


@pytest.mark.parametrize("pack", ["rows", "documents"])
@pytest.mark.parametrize("key", ["text", "messages"])
def test_as_many_tokens_are_counted_as_batches_have(key: str, pack: str, tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", [{key: row} for row in (TEXTS if key == "text" else CHATS)])
    samples = cached(data, tmp_path, pack=pack, seq=32).samples
    some = np.arange(sum(samples.counts))
    assert samples.counted(some) == sum(
        int((samples.batch(np.array([at]))["labels"][:, 1:] != IGNORE).sum()) for at in some
    )


def test_tokens_are_made_once_for_the_same_content_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[str] = Counter()
    tokenize = ByteTokenizer.__call__

    def counting(tokenizer: ByteTokenizer, texts: list[str], **options: Any) -> Any:
        made["texts"] += len(texts)
        return tokenize(tokenizer, texts, **options)

    monkeypatch.setattr(ByteTokenizer, "__call__", counting)
    data = lines(tmp_path / "d.jsonl", [{"text": t, "other": t + "!"} for t in TEXTS])
    first = everything(cached(data, tmp_path))
    assert everything(cached(data, tmp_path, seq=16)) == first and made["texts"] == 60
    shutil.copy2(data, tmp_path / "copy.jsonl")
    cached(str(tmp_path / "copy.jsonl"), tmp_path)  # another name
    assert made["texts"] == 60
    made.clear()
    cached(data, tmp_path, field="other")
    assert made["texts"] == 60
    lines(tmp_path / "d.jsonl", [{"text": t + "?"} for t in TEXTS])
    cached(data, tmp_path)
    assert made["texts"] == 120
    assert all((folder / "meta.json").is_file() for folder in (tmp_path / "tokens").iterdir())


def test_a_line_that_cannot_be_read_leaves_no_tokens(tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS] + [{"txt": "a"}])
    with pytest.raises(TrainError, match=r"line 61: expected a key `text` or `messages`"):
        cached(data, tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_large_text_in_pieces_loses_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"Zeile {n} é 漢字 {'x' * (n % 50)}\n" for n in range(4000))
    for name, content in (("a.txt", text), ("b.txt", text.replace("\n", " "))):
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(sources, "SMALL", 1000)
    monkeypatch.setattr(sources, "PIECE", 1 << 10)
    monkeypatch.setattr(sources, "_LOOK", 1 << 10)
    for name in ("a.txt", "b.txt"):
        pieces = list(rows_of(str(tmp_path / name)))
        assert len(pieces) > 10 and [last for _, _, last in pieces].count(True) == 1
        assert pieces[-1][2]
        assert "".join(piece for _, piece, _ in pieces) == (tmp_path / name).read_text("utf-8")
        (made,) = cached(str(tmp_path / name), tmp_path).samples.parts
        whole = np.asarray(made.tokens)
        content = (tmp_path / name).read_bytes()
        assert bytes(whole[:-1].astype(np.uint8)) == content and whole[-1] == 256


# -- mixing ----------------------------------------------------------------------------------------


def test_parts_with_weights_give_their_shares_of_every_epoch(tmp_path: Path) -> None:
    one = lines(tmp_path / "a.jsonl", [{"text": "a" * 15}] * 300)
    two = lines(tmp_path / "b.jsonl", [{"text": "b" * 15}] * 100)
    data = cached(f"{one}:0.25,{two}:0.75", tmp_path)
    assert data.size() == 320
    order = data.order(64, seed=5)
    chosen = np.concatenate([order.at(step) for step in range(16)])
    letters = data.samples.batch(chosen)["input_ids"][:, 0].tolist()
    assert Counter(map(chr, letters)) == {"a": 256, "b": 768}
    assert order.at(3).tolist() == data.order(64, seed=5).at(3).tolist()
    assert order.at(3).tolist() != data.order(64, seed=6).at(3).tolist()
    with pytest.raises(TrainError, match="a part is never read"):
        cached(f"{one}:0.9999,{two}:0.0001", tmp_path)
    without = cached(f"{one},{two}", tmp_path)
    read = without.order(20, 5).read(np.arange(320))
    assert len(np.unique(read)) == 320
    with pytest.raises(TrainError, match="made on other data"):
        data.order(20, 5).load_state_dict(without.order(20, 5).state_dict())


# -- documents apart -------------------------------------------------------------------------------


def test_documents_of_a_row_begin_at_position_0_and_are_not_foretold(tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", [{"text": text} for text in ("abc", "de", "fghijklmno")])
    samples = cached(data, tmp_path, pack="documents", seq=6).samples
    batch = samples.batch(np.arange(sum(samples.counts)))
    rows = {
        bytes(min(t, 255) for t in ids): at for at, ids in enumerate(batch["input_ids"].tolist())
    }
    first, second = rows[b"abc\xffde"], rows[b"\xfffghij"]
    assert batch["position_ids"][first].tolist() == [0, 1, 2, 3, 0, 1]
    assert batch["position_ids"][second].tolist() == [0, 0, 1, 2, 3, 4]
    assert batch["labels"][first].tolist() == [IGNORE, *b"bc", 256, IGNORE, *b"e"]
    assert batch["labels"][second].tolist() == [IGNORE, IGNORE, *b"ghij"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_packed_documents_are_read_as_if_each_were_alone(
    family: str, attention: str, tmp_path: Path
) -> None:
    import transformers

    options: dict[str, Any] = SMALL if family == "Llama" else {
        "vocab_size": 257, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    config: Any = getattr(transformers, f"{family}Config")(**options, attn_implementation=attention)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config.use_cache = False
    texts = ["abcdefg", "hij", "klmnopqrst" * 2, "u", "vwxyz"]
    data = lines(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    total = sum(len(text) + 1 for text in texts)
    samples = cached(data, tmp_path, pack="documents", seq=total).samples
    batch = samples.batch(np.array([0]))
    with torch.no_grad():
        packed = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
        begin = 0
        for text in texts:
            ids = torch.tensor([[*text.encode(), 256]])
            alone_ = model(input_ids=ids).logits[0]
            there = packed[begin : begin + ids.shape[1]]
            assert torch.allclose(alone_, there, atol=1e-5), text
            begin += ids.shape[1]
        crossing = model(input_ids=batch["input_ids"]).logits[0]
        assert not torch.allclose(crossing[-3:], packed[-3:], atol=1e-3)
        loss = float(model(**batch).loss)
    each = [
        torch.nn.functional.cross_entropy(
            packed[begin : begin + n], torch.tensor([*text.encode()[1:], 256]), reduction="sum"
        )
        for text, n, begin in zip(
            texts, map(len, texts), np.cumsum([0, *[len(t) + 1 for t in texts]]), strict=False
        )
    ]
    assert loss == pytest.approx(float(sum(each)) / samples.counted(np.array([0])), rel=1e-5)


# -- runs ------------------------------------------------------------------------------------------


def mixed_runs(root: Path) -> list[float]:
    """On one of some ranks: the losses of a run on mixed data with documents apart."""
    data = f"{root / 'a.jsonl'}:0.7,{root / 'b.parquet'}:0.3"
    ranks = this_rank() if "RANK" in os.environ else alone()
    size = {"micro_batch": 2 if ranks.world_size == 2 else 4, "pack": "documents", "stage": "3"}
    config = job(root / "llama", data=data, data_cache=str(root / "cache"), steps=3, **size)
    run = prepare(config, ranks, lambda line: None)
    rows: list[Row] = []
    train(run, lambda: 0, rows.append)
    return [row["loss"] for row in rows]


@needs_datasets
def test_ranks_share_one_cache_and_take_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    saved(tmp_path, "llama")
    lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    datasets.Dataset.from_list([{"text": t[::-1]} for t in TEXTS]).to_parquet(
        tmp_path / "b.parquet"
    )
    first, second = run_ranks(2, mixed_runs, tmp_path)
    assert first == second and len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.delenv("RANK", raising=False)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")}
    assert mixed_runs(tmp_path) == pytest.approx(first, rel=1e-5)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")}


def peak_of_reading(root: Path) -> dict[str, float]:
    """How far resident memory rose, in MiB, while data became tokens on the disk; and that of this
    process's own while samples were read (mapped pages belong to the system, which takes them back).
    """
    give_memory_back_at_once()
    words, ranks = ByteTokenizer(), this_rank()
    found: dict[str, float] = {}
    for name in ("warm", "small.txt", "large.txt", "large.jsonl"):
        data = str(root / (name if name != "warm" else "small.txt"))
        reset_peak()
        before = peak_resident()
        made = tokens_of(data, None, words, root / f"tokens-{name}", ranks, lambda line: None)
        found[name] = (peak_resident() - before) / MIB
        before = resident()
        samples = load_data(data, made, 256, 4096, 0, 0.01)
        for step in range(20):
            samples.samples.batch(samples.order(4, 0).at(step))
        found[name] = max(found[name], (resident() - before) / MIB)
        del made, samples
    return found


@pytest.mark.slow
def test_large_data_takes_the_memory_of_small_data(tmp_path: Path) -> None:
    line = "some words of a text that goes on and on, until nobody can remember how it began\n"
    block = line * (MIB // len(line))
    (tmp_path / "small.txt").write_text(block)
    row = json.dumps({"text": line * 20}) + "\n"
    with (tmp_path / "large.txt").open("w") as text, (tmp_path / "large.jsonl").open("w") as rows:
        for _ in range(48):
            text.write(block)
            rows.write(row * (MIB // len(row)))
    for found in run_ranks(2, peak_of_reading, tmp_path):
        most = found["small.txt"] + 24
        assert max(found["large.txt"], found["large.jsonl"]) < most < 48, found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text_field": "body"}, "line 1: has no key 'body', which --text-field names. Did you mean 'bodi'?"),
        ({"text_field": "n"}, "line 1: `n` must be a string or a list"),
        ({"data": "topics,d.jsonl:1"}, "topics has no weight, and others have"),
        ({"data": "topics,c.jsonl"}, "topics holds text and c.jsonl conversations; use one kind"),
        ({"data": "topics,gone.jsonl"}, "--data gone.jsonl: expected topics"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_is_told_early(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "nothing"))
    lines(tmp_path / "d.jsonl", [{"bodi": "some words", "n": 3}] * 9)
    lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in CHATS])
    with pytest.raises(TrainError) as error:
        check_early(resolve({"model": "llama:tiny", "data": "d.jsonl", "seq": 16, **options}))
    assert said in str(error.value)
