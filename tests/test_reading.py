"""The readers of files that a stranger may have written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from onefold.reading import LARGEST, open_regular, parse_json, read_bytes, read_json


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1" * 5000, "value has 5000 digits"),
        ('{"a":\n [-' + "7" * 4301 + "]}", "value has 4301 digits"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "Nested too deeply"),
        ("[" * 100_000, "Nested too deeply"),
        (b'{"a": "\xff"}', "utf-8.*position 7"),
        ("", "Expecting value"),
        ("{'a': 1}", "Expecting property name"),
    ],
)
def test_every_unreadable_json_is_one_kind_of_error(text: str | bytes, words: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=words):
        parse_json(text)


def test_readable_json_is_read_as_json_reads_it(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, None, True, "\u00e9\ud800"], "b": {"c": 2**128}}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "a.json") == value


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/zero")
    for name, words in (("fifo", "a fifo"), ("folder", "a folder"), ("null", "a device")):
        with pytest.raises(OSError, match=f"it is {words}, expected a file"):
            open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")


def test_a_file_larger_than_its_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(OSError, match="it has 256 MiB, expected at most 256 MiB"):
        read_bytes(tmp_path / "large")
    (tmp_path / "link").symlink_to("large")
    (tmp_path / "large").write_bytes(b"abc")
    assert read_bytes(tmp_path / "link", limit=3) == b"abc"
