"""Text in, samples out: packing, conversations whose assistant alone is learned from, and errors
that name the line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onefold.data.samples import IGNORE, Samples, load_data
from onefold.data.text import ByteTokenizer, encode_with_spans, render_chat
from onefold.wording import TrainError


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_documents_are_packed_with_an_end_between_and_held_out_samples_are_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("abcde" * 20)
    (tmp_path / "b.md").write_text("xyz" * 30)
    (tmp_path / "c.bin").write_bytes(b"\0" * 1000)
    data = load_data(str(tmp_path), ByteTokenizer(), seq=10, seed=0, eval_fraction=0.2)
    assert (len(data.train), len(data.held_out)) == (15, 4)
    whole = [part.batch(np.arange(len(part)))["input_ids"] for part in (data.train, data.held_out)]
    rows = torch.cat(whole)
    assert (rows == 256).sum() == 1 and not (rows == 0).any()
    batch = data.train.batch(np.array([3, 1]))
    assert batch["input_ids"].shape == (2, 10) and torch.equal(batch["input_ids"], batch["labels"])
    assert data.train.counts(np.array([3, 1])) == 18
    again = load_data(str(tmp_path), ByteTokenizer(), seq=10, seed=0, eval_fraction=0.2)
    assert torch.equal(again.held_out.batch(np.arange(4))["input_ids"], whole[1])


def test_json_lines_with_text_are_packed(tmp_path: Path) -> None:
    data = load_data(
        lines(tmp_path / "d.jsonl", [{"text": "a" * 50}, {"text": "b" * 50}]),
        ByteTokenizer(),
        10,
        0,
        0.1,
    )
    assert len(data.train) + len(data.held_out) == 10


def test_only_what_the_assistant_says_is_learned_from(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yes"}]
    file = lines(tmp_path / "d.jsonl", [{"messages": chat}] * 4 + [{"messages": chat[:1]}])
    data = load_data(file, ByteTokenizer(), seq=64, seed=0, eval_fraction=0.25)
    assert (len(data.train), len(data.held_out)) == (3, 1)
    assert data.notes == ["1 of 5 conversations left out: no word of an assistant within 64 tokens"]
    batch = data.train.batch(np.array([0]))
    learned = batch["input_ids"][batch["labels"] != IGNORE]
    assert bytes(learned.tolist()).decode() == "Yes\n"
    assert data.train.counts(np.array([0, 1])) == 8


def test_batches_are_padded_to_their_longest_and_padding_does_not_count() -> None:
    rows = [np.arange(n, dtype=np.int32) for n in (3, 5)]
    batch = Samples(rows, rows, padding=9).batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 9, 9], [0, 1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[0, 1, 2, IGNORE, IGNORE], [0, 1, 2, 3, 4]]


class Template:
    """A chat template as transformers has it, in miniature, that may drop earlier turns."""

    chat_template = "yes"

    def __init__(self, forgets: bool) -> None:
        self.forgets = forgets

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        kept = messages[-1:] if self.forgets else messages
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in kept)
        return text + ("<assistant>" if add_generation_prompt else "")


def test_spans_follow_the_chat_template_and_are_none_where_it_rewrites_turns() -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    text, spans = render_chat(Template(forgets=False), chat)
    assert spans is not None and [text[a:b] for a, b in spans] == ["b</>", "d</>"]
    assert render_chat(Template(forgets=True), chat)[1] is None
    assert encode_with_spans(object(), text, spans) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}]}',
            "line 2: has `messages`",
        ),
        ('{"text": "a"}\n\n{"txt": "a"}', "line 3: expected a key `text` or `messages`, found txt"),
        ('{"text": 3}', "line 1: `text` must be a string"),
        ('{"messages": [{"role": "user"}]}', "line 1: `messages` must be a list of"),
        ("{", "line 1: not JSON"),
        ("", "no lines"),
        ('{"text": "a"}', "less than one sequence of --seq 16"),
        ('{"text": "a"}\n{"text": "\\ud800"}', "line 2: '\\ud800' alone is half of a character"),
        (
            '{"messages": [{"role": "user", "content": "\\uDC00"}]}',
            "line 1: '\\udc00' alone is half of a character",
        ),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "line 1: not JSON (A number of 5000 digits)"),
        ('{"text": ' + "[" * 100_000, "line 1: not JSON (Nested too deeply)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(content)
    with pytest.raises(TrainError) as error:
        load_data(str(file), ByteTokenizer(), 16, 0, 0.1)
    assert message in str(error.value)


def test_absent_data_and_folders_without_text_are_named(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "none.txt")):
        with pytest.raises(TrainError, match=name):
            load_data(name, ByteTokenizer(), 16, 0, 0.1)
