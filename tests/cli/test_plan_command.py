"""`onefold plan` as a user runs it: every option, what it prints, what it refuses, and the lines
that the docs claim.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from onefold.cli.plan import plan_command
from onefold.plan.schema import Account

pytestmark = pytest.mark.one_in(8)

CLAIMS = Path(__file__).parents[2] / "benchmarks" / "results" / "validation.md"


def command(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan_command)
    return CliRunner().invoke(app, list(arguments))


def said(*arguments: str) -> dict[str, Any]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: str) -> str:
    """The sentence; the same in JSON."""
    result = command(*arguments)
    assert result.exit_code == 2 and not result.stdout, result.output
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    as_json = command(*arguments, "--json")
    event = json.loads(as_json.stdout)
    assert event["event"] == "error" and f"error: {event['message']}\n" == result.stderr
    return str(event["message"])


def test_a_70_billion_model_on_64_gpus_is_answered() -> None:
    found = said("llama-3-70b", "--gpus", "64", "--gpu", "h100-80", "--seq", "4096")
    assert found["schema"] == 1 and found["model"]["parameters"] == pytest.approx(70.6e9, rel=0.01)
    assert found["machine"] | {"bytes": 0} == {
        "gpu": "h100-80",
        "ranks": 64,
        "per_node": 8,
        "bytes": 0,
    }
    assert [c["fits"] for c in found["stages"][:3]] == [False] * 3
    best = found["recommended"]
    assert best["stage"] == 3 and best["fits"]
    account = Account.from_json(best["account"])
    assert 0 < account.rest_bytes < account.peak_bytes <= min(account.bound, best["usable"])
    assert account.links["inside"] + account.links["between"] == pytest.approx(
        account.wire_bytes, rel=1e-6
    )
    assert account.seconds["step"] > account.seconds["compute"] > 0 and 0 < (account.mfu or 0) < 1
    assert (
        found["largest_model"]["3"] > found["model"]["parameters"]
        and found["largest_micro_batch"]["3"] >= 1
    )


def test_tables_say_what_the_json_says() -> None:
    result = command("gpt2", "--gpus", "4", "--seq", "512")
    assert result.exit_code == 0, result.output
    for words in (
        "gpt2: 124M parameters", "4 × NVIDIA H100", "at rest", "at peak", "never above", "sent in a step", "a step takes", "tokens/s",
        "MFU", "largest micro-batch", "largest model of this width", "use stage 1", "what the next steps would buy", "= 18;", "stage 3",
        "bytes per trained parameter", "6N + 12Lhs",
    ):  # fmt: skip
        assert words in result.stdout, (words, result.stdout)
    assert "…" not in result.stdout


def peak(*more: str) -> int:
    """Bytes at stage 1."""
    found = said("gpt2", "--gpus", "8", "--gpu", "a100-40", *more)
    return Account.from_json(found["stages"][1]["account"]).peak_bytes


def test_where_state_rests_is_said_as_in_training_and_shown_by_tier() -> None:
    asked = ("gpt2-xl", "--gpus", "1", "--gpu", "rtx4090", "--seq", "512")
    tiers = (
        "--offload-optimizer",
        "nvme:0.6",
        "--offload-gradients",
        "cpu",
        "--nvme",
        "/mnt/fast",
        "--stage",
        "2",
    )
    found = said(*asked, *tiers, "--step-in-backward")
    recipe, account = found["recipe"], found["recommended"]["account"]
    assert (
        recipe["offload_optimizer"] == "nvme:0.6"
        and recipe["nvme"] == ["/mnt/fast"]
        and recipe["step_in_backward"] is True
    )
    assert set(account["offloaded"]) == {"host", "nvme"} and account["moved"].keys() == {
        "up",
        "down",
        "read",
        "written",
    }
    assert account["tiers"]["disk"] > 0 and account["nvme"] == sum(
        account["offloaded"]["nvme"].values()
    )
    table = command(*asked, *tiers).stdout
    for words in (
        "where it is at peak",
        "device",
        "host",
        "NVMe",
        "between tiers in a step",
        "hidden behind the update",
        "exposed",
    ):
        assert words in table, (words, table)
    plain = (*asked, "--offload", "none", "--activation-checkpointing", "none")
    whole = said(*plain)["stages"][3]["account"]
    held = said(*plain, "--offload-activations", "cpu")["stages"][3]["account"]
    assert (
        said(*plain, "--moments", "int8")["stages"][3]["account"]["rest"]["moments"]
        < 0.27 * whole["rest"]["moments"]
    )
    assert (
        sum(held["peak"].values()) < sum(whole["peak"].values())
        and held["offloaded"]["host"]["activations"] > 0
    )
    only = said(*asked, "--offload-param", "cpu", "--offload-optimizer", "cpu")
    assert [c["stage"] for c in only["stages"]] == [3] and only["recommended"]["account"][
        "rest"
    ] == {}


def test_a_machine_file_adds_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[gpu.mine]\ncapacity = 48e9\nmemory_bandwidth = 1e12\nbf16 ="
        " 150e12\n[link.ours]\nbandwidth = 50e9\n"
    )
    found = said("gpt2", "--gpu", "mine", "--link", "ours", "--machines", str(file), "--gpus", "16")
    assert found["machine"]["gpu"] == "mine" and found["machine"]["bytes"] == 48e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("gpt2 --gpu h100", "h100-80"),
        ("gpt2 --gpus 16 --link 8x", "link"),
        ("gtp2", "Did you mean 'gpt2'"),
        ("no/such/folder", "no such folder"),
        ("package.nowhere:factory", "cannot import"),
        ("", "one of the two"),
        ("gpt2 --params 1e9", "one of the two"),
        ("--params 0", "positive number"),
        ("gpt2 --gpus 12", "do not fill nodes of 8: use 8 or 16"),
        ("gpt2 --gpus 0", "1 or more"),
        ("gpt2 --global-batch 100 --micro-batch 8", "use 128"),
        ("gpt2 --global-batch 100 --micro-batch auto --gpus 16", "does not divide"),
        ("gpt2 --micro-batch 0", "1 or more, or auto"),
        ("gpt2 --stage 4", "0, 1, 2, 3 or auto"),
        ("gpt2 --seq 0", "--seq 0: expected"),
        ("gpt2 --per-node 0", "--per-node 0"),
        ("gpt2 --lora 100000", "use at most 768"),
        ("--params 1e30", "at most 1e+15"),
        ("--params many", "such as 7.5e9 or 7.5B"),
        ("Qwen/Qwen2-7B", "the config.json of Qwen/Qwen2-7B"),
        ("gpt2 --optimizer adamz", "adamw"),
        ("gpt2 --stage 1 --offload nvme", "use stage 3"),
        (
            "gpt2 --stage 1 --offload-optimizer cpu --offload-param cpu",
            "Shard the parameters (stage 3)",
        ),
        ("gpt2 --offload-param nvme", "give offload_optimizer='nvme' too"),
        ("gpt2 --offload nvme --offload-optimizer cpu", "both say where states are stored"),
        ("gpt2 --host-memory much", "--host-memory='much': expected a number of bytes"),
        ("--params 7e9 --lora 8", "real shapes"),
        ("gpt2 --here --gpus 4", "leave one of the two out"),
        ("gpt2 --ranks 4", "--here"),
        ("gpt2 --machines nowhere.toml", "no hardware file"),
    ],
)
def test_what_cannot_be_gets_a_sentence(arguments: str, words: str) -> None:
    assert words in refused(*shlex.split(arguments))


def test_what_fits_nowhere_names_what_is_nearest_and_what_would_do(every: bool) -> None:
    found = said("llama-3-70b", "--gpus", "8", "--gpu", "a100-40", "--offload", "none")
    assert found["recommended"] is None
    assert (
        "does not fit: the nearest is stage 3, " in found["why_not"]
        and "exceeds the 34.7 GiB of a device" in found["why_not"]
    )
    assert "On " in found["why_not"] and "devices stage 3" in found["why_not"], found["why_not"]
    table = command("llama-3-70b", "--gpus", "8", "--gpu", "a100-40", "--offload", "none")
    assert table.exit_code == 0 and "nothing fits." in table.stdout
    fixed = said(
        "llama-3-8b", "--gpus", "8", "--gpu", "a100-40", "--stage", "1", "--offload", "none"
    )
    assert fixed["recommended"] is not None or "Here stage" in fixed["why_not"], fixed["why_not"]
    if every:
        never = said("mt-nlg-530b", "--gpus", "8", "--gpu", "v100-32")
        assert "No number of devices would do" in never["why_not"]


def lines() -> list[tuple[str, str]]:
    """Every `onefold plan` line of benchmarks/results/validation.md with the cell that says where it shows its
    figures.
    """
    rows = [
        row.split(" | ")
        for row in CLAIMS.read_text(encoding="utf-8").splitlines()
        if "`onefold plan " in row
    ]
    return [(row[2].strip("`"), row[3].removesuffix(" |")) for row in rows]
