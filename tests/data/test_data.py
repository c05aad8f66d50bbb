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

from onefold.data.samples import IGNORE, Data, load_data
from onefold.data.text import ByteTokenizer, encode_with_spans, render_chat
from onefold.data.tokens import tokens_of
from onefold.wording import TrainError
from started_runs import alone


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(data: str | Path, root: Path, seq: int, fraction: float = 0.2) -> Data:
    words = ByteTokenizer()
    tokens = tokens_of(str(data), None, words, root / ".tokens", alone(), lambda line: None)
    return load_data(str(data), tokens, 256, seq, 0, fraction)


def test_documents_are_packed_with_an_end_between_and_held_out_samples_are_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("abcde" * 20)
    (tmp_path / "b.md").write_text("xyz" * 30)
    (tmp_path / "c.bin").write_bytes(b"\0" * 1000)
    data = loaded(tmp_path, tmp_path.parent, seq=10)
    assert (data.size(), data.size(held_out=True)) == (15, 4)
    order = data.order(15, 0)
    trained, held = order.at(0), order.read(np.arange(4), held_out=True)
    rows = data.samples.batch(np.concatenate([trained, held]))["input_ids"]
    assert sorted([*trained, *held]) == list(range(19))
    assert (rows == 256).sum() == 1 and not (rows == 0).any()
    batch = data.samples.batch(np.array([3, 1]))
    assert batch["input_ids"].shape == (2, 10) and torch.equal(batch["input_ids"], batch["labels"])
    assert data.samples.counted(np.array([3, 1])) == 18
    again = loaded(tmp_path, tmp_path.parent, seq=10)
    assert np.array_equal(again.order(15, 0).read(np.arange(4), held_out=True), held)


def test_json_lines_with_text_are_packed(tmp_path: Path) -> None:
    file = lines(tmp_path / "d.jsonl", [{"text": "a" * 50}, {"text": "b" * 50}])
    data = loaded(file, tmp_path, 10, 0.1)
    assert data.size() + data.size(held_out=True) == 10


def test_only_what_the_assistant_says_is_learned_from(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yes"}]
    file = lines(tmp_path / "d.jsonl", [{"messages": chat}] * 4 + [{"messages": chat[:1]}])
    data = loaded(file, tmp_path, 64, 0.25)
    assert (data.size(), data.size(held_out=True)) == (3, 1)
    assert data.notes == ["1 of 5 conversations left out: no word of an assistant within 64 tokens"]
    batch = data.samples.batch(np.array([0]))
    learned = batch["input_ids"][batch["labels"] != IGNORE]
    assert bytes(learned.tolist()).decode() == "Yes\n"
    assert data.samples.counted(np.array([0, 1])) == 8


def test_batches_are_padded_to_their_longest_and_padding_does_not_count(tmp_path: Path) -> None:
    chats = [[{"role": "assistant", "content": "x" * n}] for n in (1, 3)]
    file = lines(tmp_path / "d.jsonl", [{"messages": chat} for chat in chats])
    batch = loaded(file, tmp_path, 64).samples.batch(np.array([0, 1]))
    assert batch["input_ids"].shape == (2, len("assistant: xxx\n"))
    assert batch["input_ids"][0, -2:].tolist() == [256, 256]
    assert batch["labels"][0, -2:].tolist() == [IGNORE, IGNORE]
    assert (batch["labels"] != IGNORE).sum(dim=1).tolist() == [2, 4]


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
        (
            '{"text": "a"}\n{"text": "\\ud800"}',
            "line 2: not JSON in UTF-8 ('utf-8' codec can't encode",
        ),
        (
            '{"messages": [{"role": "user", "content": "\\uDC00"}]}',
            "line 1: not JSON in UTF-8 ('utf-8' codec can't encode",
        ),
        (
            '{"text": "a", "n": ' + "9" * 5000 + "}",
            "line 1: not JSON in UTF-8 (Exceeds the limit",
        ),
        ('{"text": ' + "[" * 100_000, "line 1: not JSON in UTF-8 (Nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(content)
    with pytest.raises(TrainError) as error:
        loaded(file, tmp_path, 16)
    assert message in str(error.value)


def test_absent_data_and_folders_without_text_are_named(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "none.txt")):
        with pytest.raises(TrainError, match=name):
            loaded(name, tmp_path, 16)
