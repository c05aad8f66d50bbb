"""What is told of a run before torch is imported: the commands here run where importing torch
fails.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold.processes.claim import Claim
from started_runs import SOURCE

pytestmark = pytest.mark.one_in(3)

LINE = '{"text": "some words of a text that is long enough for a sequence"}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working folder; in it, a torch that cannot be imported."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "ok.txt").write_text("a text. " * 100)
    return tmp_path


def command(place: Path, *arguments: str) -> tuple[int, str, str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    done = subprocess.run(
        [sys.executable, "-m", "onefold", *arguments], cwd=place, text=True, capture_output=True, timeout=300,
        env={**clean, "PYTHONPATH": os.pathsep.join([str(place / "broken"), SOURCE])},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def refused(place: Path, *arguments: str) -> str:
    """The sentence of `onefold train`."""
    options = [
        "--model",
        "llama:tiny",
        "--tokenizer",
        "bytes",
        "--device",
        "cpu",
        "--nproc",
        "2",
        "--seq",
        "16",
    ]
    status, out, err = command(place, "train", *options, *arguments)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, (
        status,
        out,
        err,
    )
    return err.removeprefix("error: ").strip()


def written(name: str, content: bytes | str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


DATA = {
    "binary": (written("d.bin", bytes(range(256)) * 9), "d.bin", "--data d.bin is no text in UTF-8"),
    "compressed": (written("d.gz", b"\x1f\x8b\x08" + bytes(range(1, 256)) * 9), "d.gz", "--data d.gz is no text in UTF-8"),
    "utf-16": (written("d.txt", "words".encode("utf-16")), "d.txt", "--data d.txt is no text in UTF-8"),
    "absent": (lambda place: None, "d.txt", "--data d.txt: expected topics, a text file, a folder, a .jsonl, .parquet or .arrow"),
    "no key": (written("d.jsonl", LINE + '{"txt": "a"}\n'), "d.jsonl", "line 2: expected a key `text` or `messages`, found txt"),
    "no JSON": (written("d.jsonl", LINE + "words\n"), "d.jsonl", "--data d.jsonl, line 2: not JSON in UTF-8"),
    "no text in JSON lines": (written("d.jsonl", b'{"text": "\xff"}\n'), "d.jsonl", "--data d.jsonl, line 1: not JSON in UTF-8"),
    "no lines": (written("d.jsonl", "\n\n"), "d.jsonl", "--data d.jsonl: the file has no lines"),
    "a folder without text": (written("d/a.png", "x"), "d", "--data d: no text file in this folder"),
    "a folder with a binary": (written("d/a.txt", b"\0"), "d", "--data d/a.txt is no text in UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_read_is_told_in_a_sentence(place: Path, case: str) -> None:
    prepare, name, said = DATA[case]
    prepare(place)
    assert said in refused(place, "--data", name, "--output", "run")
    assert not (place / "run").exists()


def test_a_folder_that_cannot_be_written_or_is_not_free_is_told_in_a_sentence(place: Path) -> None:
    data = ["--data", "ok.txt"]
    assert "a file of this name is in the way" in refused(place, *data, "--output", "ok.txt")
    assert "a part of the path is a file" in refused(place, *data, "--output", "ok.txt/run")
    assert "/proc/run cannot be written" in refused(place, *data, "--output", "/proc/run")
    written("old/metrics.jsonl", "")(place)
    assert "holds an earlier run (metrics.jsonl); name another folder, go on with it" in refused(
        place, *data, "--output", "old"
    )
    claim = Claim(place / "run")
    held = f"--output run is in use by process {os.getpid()} on {socket.gethostname()}"
    assert held in refused(place, *data, "--output", "run")
    assert held in refused(place, *data, "--output", "run", "--overwrite")
    claim.release()
    if os.geteuid():  # root may write anywhere
        (place / "closed").mkdir(mode=0o500)
        assert "closed/run cannot be written: Permission denied" in refused(
            place, *data, "--output", "closed/run"
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "gpt:huge"], "'huge' is no size"),
        (["--modle", "x"], ""),
        (
            ["--tokenizer", "absent"],
            "--tokenizer absent: expected auto, bytes, smollm2, or a local folder",
        ),
        (["--resume", "absent"], "--resume absent: there is no such folder"),
        (
            ["--nvme", "absent", "--offload-optimizer", "nvme"],
            "--nvme absent: there is no such folder",
        ),
        (["--optimizer", "adamm"], "--optimizer adamm: Did you mean"),
        (["--config", "ok.txt"], "expected a file that ends in .yaml"),
        (["--data", "x" * 300], "cannot be read: File name too long"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_cannot_be_are_told_without_torch(
    place: Path, options: list[str], said: str
) -> None:
    if not said:
        status, _, err = command(place, "train", *options)
        assert status == 2 and "No such option: --modle" in err and "Traceback" not in err
        return
    assert said in refused(place, "--data", "ok.txt", *options)
