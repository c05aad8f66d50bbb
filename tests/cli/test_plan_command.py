"""`onefold plan` as a user runs it: every option, what it prints, what it refuses, and the lines
that the docs claim.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onefold.cli.app import app
from onefold.plan.schema import Account

pytestmark = pytest.mark.one_in(8)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def said(*arguments: str) -> dict[str, Any]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_70_billion_model_on_64_gpus_is_answered() -> None:
    found = said("llama-3-70b", "--gpus", "64", "--gpu", "h100-80", "--seq", "4096")
    assert found["schema"] == 2 and found["model"]["parameters"] == pytest.approx(70.6e9, rel=0.01)
    assert [c["fits"] for c in found["stages"][:3]] == [False] * 3
    best = found["recommended"]
    assert best["stage"] == 3 and best["fits"]
    account = Account(**best["account"])
    assert 0 < account.rest_bytes < account.peak_bytes <= best["usable"]
    assert account.links["inside"] + account.links["between"] == pytest.approx(
        account.wire_bytes, rel=1e-6
    )
    assert account.seconds["step"] > account.seconds["compute"] > 0 and 0 < (account.mfu or 0) < 1
    assert found["largest_micro_batch"]["3"] >= 1


def test_tables_say_what_the_json_says() -> None:
    result = command("gpt2", "--gpus", "4", "--seq", "512")
    assert result.exit_code == 0, result.output
    for words in (
        "gpt2: 124M parameters", "4 × NVIDIA H100", "at rest", "at peak", "sent in a step", "a step takes", "tokens/s", "MFU",
        "largest micro-batch", "use stage 1",
    ):  # fmt: skip
        assert words in result.stdout, (words, result.stdout)
    assert "…" not in result.stdout


def test_without_a_length_a_sample_has_no_more_tokens_than_the_model_has_positions() -> None:
    result = command("gpt2", "--gpus", "1")
    assert result.exit_code == 0 and " 1,024 tokens a sample" in result.stdout, result.output
    assert " 2,048 tokens a sample" in command("--params", "1e8", "--gpus", "1").stdout


def test_where_state_rests_is_said_as_in_training_and_shown_by_tier() -> None:
    asked = ("gpt2-xl", "--gpus", "1", "--gpu", "rtx4090", "--seq", "512")
    asked_for = "--offload-optimizer nvme --offload-amount 0.6 --offload-gradients cpu --nvme /mnt/fast --stage 2"
    tiers = asked_for.split()
    found = said(*asked, *tiers)
    recipe, account = found["recipe"], found["recommended"]["account"]
    assert (
        recipe["offload_optimizer"] == "nvme"
        and recipe["offload_amount"] == 0.6
        and recipe["nvme"] == ["/mnt/fast"]
    )
    assert set(account["offloaded"]) == {"host", "nvme"}
    assert set(account["moved"]) == {"up", "down", "read", "written"}
    table = command(*asked, *tiers).stdout
    for words in ("host", "NVMe", "moved between tiers in a step", "written", "busy: disk"):
        assert words in table, (words, table)
    plain = (*asked, "--offload", "none", "--activation-checkpointing", "none")
    whole = said(*plain)["stages"][3]["account"]
    held = said(*plain, "--offload-activations", "cpu")["stages"][3]["account"]
    assert (
        sum(held["peak"].values()) < sum(whole["peak"].values())
        and held["offloaded"]["host"]["activations"] > 0
    )


def test_a_machine_file_adds_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[gpu.mine]\ncapacity = 48e9\nmemory_bandwidth = 1e12\nbf16 ="
        " 150e12\n[link.ours]\nbandwidth = 50e9\n"
    )
    given = ("--gpu", "mine", "--link", "ours", "--machines", str(file), "--gpus", "16")
    found = said("gpt2", "--seq", "1024", *given)
    assert found["machine"]["gpu"] == "mine" and found["machine"]["bytes"] == 48e9


def test_what_fits_nowhere_names_what_is_nearest_and_what_would_do() -> None:
    found = said("llama-3-70b", "--gpus", "8", "--gpu", "a100-40", "--offload", "none")
    assert found["recommended"] is None
    assert (
        "does not fit: the nearest is stage 3, " in found["why_not"]
        and "exceeds the 34.7 GiB of a device" in found["why_not"]
    )
    assert "On " in found["why_not"] and "devices stage 3" in found["why_not"], found["why_not"]
    table = command("llama-3-70b", "--gpus", "8", "--gpu", "a100-40", "--offload", "none")
    assert table.exit_code == 0 and "nothing fits." in table.stdout


def test_every_option_is_in_the_recipe_that_comes_out() -> None:
    plain = ("gpt2", "--gpus", "16", "--link", "1g", "--seq", "64")
    asked = "--second-copy --gather-codec int8 --reduce-codec int8 --group 4 --frozen nf4"
    found = said(*plain, *asked.split())
    wanted = {
        "stage": 3, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int8", "group": 4, "frozen": "nf4",
    }  # fmt: skip
    assert found["recipe"].items() >= wanted.items() and found["slow_links"] == []
    assert [c["stage"] for c in found["stages"]] == [3]
    hybrid = said(*plain, "--shard-group", "node", "--optimizer-over", "all")["recipe"]
    assert hybrid.items() >= {"shard_group": "node", "optimizer_over": "all", "stage": 3}.items()
