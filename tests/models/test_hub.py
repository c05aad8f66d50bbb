"""`--model org/name`: from the hub's cache, or downloaded once for all ranks of a machine."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_folders import JOB, saved
from onefold.models.build import load_on_first_rank
from onefold.models.names import check_hub
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import environment, options, rows_of, this_rank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub of one repository, tiny/llama, that counts what is asked of it."""

    folder: Path
    asked: Counter[str]

    def _answer(self) -> None:
        path = self.path.partition("?")[0].replace("/datasets/tiny/text", "/models/tiny/llama")
        path = path.replace("/models/tiny/llama/resolve", "/tiny/llama/resolve")
        files = sorted(p.name for p in self.folder.iterdir())
        if path.startswith("/api/models/tiny/llama/tree"):
            tree = [{"type": "file", "path": n, "size": (self.folder / n).stat().st_size,
                     "oid": hashlib.sha1(n.encode()).hexdigest()} for n in files]  # fmt: skip
            self._send(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/tiny/llama/paths-info"):
            length = int(self.headers["Content-Length"])
            wanted = json.loads(self.rfile.read(length))["paths"]
            tree = [{"type": "file", "path": n, "size": (self.folder / n).stat().st_size,
                     "oid": hashlib.sha1(n.encode()).hexdigest()} for n in files if n in wanted]  # fmt: skip
            self._send(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/tiny/llama"):
            siblings = [{"rfilename": name} for name in files]
            said = {"id": "tiny/llama", "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(said).encode())
        elif path.startswith("/tiny/llama/resolve/") and path.rpartition("/")[2] in files:
            name = path.rpartition("/")[2]
            self.asked[f"{self.command} {name}"] += 1
            body, part = (self.folder / name).read_bytes(), self.headers.get("Range")
            if part is None:
                self._send(200, body, name)
            else:
                first, _, last = part.removeprefix("bytes=").partition("-")
                self._send(206, body[int(first) : int(last) + 1 if last else None], name)
        else:
            self.asked[f"404 {self.command} {self.path}"] += 1
            self._send(404, b"{}")

    def _send(self, code: int, body: bytes, name: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        if name:
            self.send_header("ETag", f'"{hashlib.sha1(name.encode()).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = _answer

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    """(its address, what was asked of it) of a hub that has the files of `folder`."""
    kind = type("OneHub", (Hub,), {"folder": folder, "asked": Counter()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", kind.asked  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def command(place: Path, address: str, *arguments: str, **more: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in environment(place / "tmp").items() if k != "HF_HUB_OFFLINE"}
    given = {"HF_ENDPOINT": address, "HF_HOME": str(place / "hub"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "onefold", "train", *arguments],
        cwd=place, env={**clean, **given, **more}, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once_and_then_read_from_the_cache(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path, "files")  # in bf16, in several files
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another form")
    (tmp_path / "text.txt").write_text("some words of a text. " * 60)
    job = {**JOB, "steps": 1, "data": "text.txt", "model": "tiny/llama"}
    del job["precision"]
    with hub(folder) as (address, asked):
        code, out, err = command(
            tmp_path, address, *options(job), "--nproc", "2", "--output", "a", "--json"
        )
        assert code == 0, err
    got = {key: count for key, count in asked.items() if key.startswith("GET")}
    wanted = {f"GET {p.name}": 1 for p in folder.iterdir() if p.suffix != ".bin"}
    assert got == wanted
    plan = next(row for row in map(json.loads, out.splitlines()) if row["event"] == "plan")
    assert plan["model"] == "tiny/llama" and plan["precision"] == "bf16"
    assert rows_of(tmp_path / "a")[-1]["done"]
    # The cache is enough; a name that is not in it is told before torch is imported
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path / "broken"), environment(tmp_path / "tmp")["PYTHONPATH"]])
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    code, _, err = command(tmp_path, address, "--model", "tiny/other", **offline)
    assert code == 2 and err.count("\n") == 1, err
    assert (
        "--model tiny/other: no such folder, and no such model is whole in the hub's cache" in err
    )
    assert "Unset it, or download" in err and "hf download tiny/other" in err
    code, _, err = command(tmp_path, address, *options(job), "--nproc", "1", **offline)
    assert "torch was imported" in err, err  # it went on


def in_the_cache(root: Path) -> Path:
    """The folder of tiny/llama in the cache `root`, to be filled."""
    there = root / "models--tiny--llama"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text(COMMIT)
    (there / "snapshots").mkdir()
    return there / "snapshots" / COMMIT


def weights_here(root: Path) -> Path | None:
    """Where this rank reads the weights if its cache is its own."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = str(root / os.environ["RANK"])
    return load_on_first_rank("tiny/llama", "bytes", 0, 32, this_rank()).weights


def test_each_machine_reads_a_model_from_its_own_cache(tmp_path: Path) -> None:
    places = [in_the_cache(tmp_path / str(rank)) for rank in range(2)]
    for place in places:
        shutil.copytree(saved(tmp_path, "llama"), place)
    assert run_ranks(2, weights_here, tmp_path, server="libraries") == places


def test_a_model_in_the_cache_of_which_a_file_is_missing_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = saved(tmp_path, "files")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    there = in_the_cache(tmp_path / "hub")
    folder.rename(there)
    check_hub("tiny/llama")
    next(there.glob("model-*.safetensors")).unlink()
    with pytest.raises(TrainError, match="no such model is whole in the hub's cache"):
        check_hub("tiny/llama")
