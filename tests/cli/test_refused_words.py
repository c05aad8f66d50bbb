"""What no command takes: each is refused with one sentence, on stderr or in JSON, with exit status 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

typer = pytest.importorskip("typer", reason="typer is not installed")
from typer.testing import CliRunner

from onefold.cli.app import app

BIG = "1" + "0" * 30
EMPTY, NUMBER = "is an empty text", "expected a finite number of at most 64 bits"
BYTES = "train --model small_lm:plain --tokenizer bytes --seq 64 --device cpu"
ON_16 = "plan gpt2 --gpus 16 --link 1g --seq 64"

#: What is asked, and words of the sentence that refuses it.
ROWS = [
    ("train --output ''", "--output " + EMPTY),
    ("train --model ''", "--model " + EMPTY),
    ("train --resume ''", "--resume " + EMPTY),
    ("train --model llama:", "'' is no size"),
    ("train --model gpt:huge", "'huge' is no size"),
    ("train --model llama:" + "9" * 400 + "b", "is no size"),
    ("train --seed " + "9" * 20, "input should be less than 9223372036854775808"),
    ("train --steps " + BIG, "input should be less than"),
    ("train --steps " + "9" * 15, "--steps '999999999999999': input should be less than"),
    ("train --micro-batch " + BIG, "from 1 to 2147483647, or auto"),
    ("train --optimizer-options eps=1e400", "eps=1e400: input should be a finite number"),
    (BYTES + " --offload-optimizer nvme --nvme absent", "--nvme absent: there is no such folder"),
    (BYTES + " --offload-optimizer cpu --offload-param cpu --stage 2", "use stage 3"),
    ("plan ''", "an argument " + EMPTY),
    ("plan", "one of the two"),
    ("plan --params 7B --machines ''", "--machines " + EMPTY),
    ("plan --params 7B --seq " + BIG, "--seq " + BIG + ": " + NUMBER),
    ("plan --params 7B --seq " + "9" * 15, "seq=999999999999999: expected a whole"),
    ("plan --params 7e9 --lora 8", "real shapes"),
    ("plan package.nowhere:factory", "No module named"),
    ("plan Qwen/Qwen2-7B", "nothing is downloaded"),
    ("plan gpt2 --gpus 16 --link 8x", "link"),
    ("plan gpt2 --stage 1 --offload-optimizer nvme --offload-param nvme", "use stage 3"),
    ("plan gpt2 --offload-param nvme", "give offload_optimizer='nvme' too"),
    ("plan gpt2 --offload nvme", "offload='nvme': expected 'none'"),
    ("plan gpt2 --host-memory much", "--host-memory='much': expected a number of bytes"),
    ("plan gpt2 --here --gpus 4", "leave one of the two out"),
    ("plan gpt2 --machines nowhere.toml", "nowhere.toml"),
    (ON_16 + " --group 0", "--group 0: expected 'node', 'flat'"),
    (ON_16 + " --shard-group 3", "groups of 3 ranks do not divide 16 ranks"),
    (ON_16 + " --shard-group node --second-copy", "leave one of them out"),
    (ON_16 + " --second-copy --stage 2", "needs sharded parameters: stage 3"),
    ("checkpoint export a b --like ''", "--like " + EMPTY),
    ("config explain ''", "an argument " + EMPTY),
    ("doctor --disk ''", "--disk " + EMPTY),
    ("doctor --ranks 2", "--ranks and --disk say how to measure: add --calibrate"),
    ("doctor --output nowhere.toml", "there is no calibration at nowhere.toml"),
    ("doctor --calibrate --ranks 1000000", "1000000 ranks take"),
    ("doctor --calibrate --output .", "this is a folder"),
    ("doctor --calibrate --output /proc/machine.toml", "cannot be written to /proc/machine.toml"),
    ("doctor --check --calibrate", "--check and --calibrate: one at a time"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), ROWS)
def test_what_cannot_be_is_refused_in_a_sentence_before_anything_starts(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, shlex.split(words))
    assert found.exit_code == 2 and not isinstance(found.exception, Exception), found
    assert said in found.stderr and found.stderr.count("\n") == 1, found.stderr
    assert (not found.stdout or "--json" in words) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    ["train --model gpt:huge", "plan gtp2", "doctor --ranks 2", "checkpoint verify nothing"],
)
def test_json_says_what_is_refused_in_the_same_words(words: str) -> None:
    said = CliRunner().invoke(app, words.split()).stderr
    event = json.loads(CliRunner().invoke(app, [*words.split(), "--json"]).stdout)
    assert event["event"] == "error" and said == f"error: {event['message']}\n"


DEEP = '{"a":' * 100_000
DIGITS = '{"train_batch_size": ' + "9" * 5000 + "}"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (DEEP, 2, "Nested too deeply"),
        (DIGITS, 2, "5000 digits"),
        ("{train_batch_size: " + "9" * 5000 + "}", 2, "5000 digits"),
        ('{"train_batch_size": 1e400}', 1, "expected a finite number"),
        ('{"\\ud800": 1}', 2, "a key of the configuration"),
    ],
)
def test_a_deepspeed_file_that_python_cannot_read_is_told(
    tmp_path: Path, text: str, status: int, said: str
) -> None:
    (tmp_path / "ds.json").write_text(text)
    found = CliRunner().invoke(app, ["config", "explain", str(tmp_path / "ds.json")])
    assert found.exit_code == status and not isinstance(found.exception, Exception), found
    assert said in found.output
