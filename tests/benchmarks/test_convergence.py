"""`benchmarks/convergence`: its ranks really train what the side says, its verdicts follow from the
losses, and what has ended is kept.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.convergence import __main__ as command
from benchmarks.convergence.rows import Run, missed, rows
from benchmarks.convergence.settings import CASES, SIDES, Case, chosen

from benchmarks import pages
from ranks import run_ranks

SERVER = "libraries"
TINY = replace(
    CASES["scratch"],
    model="llama:tiny",
    tokenizer="bytes",
    steps=12,
    seq=32,
    lr=5e-3,
    held_out=6,
    eval_batch=2,
    every=5,
    ranks=2,
    ranks_a_node=1,
)


def trained_sides(cases: list[tuple[str, Case, str]]) -> dict[str, dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from benchmarks.convergence import worker

    from onefold.processes.ranks import Ranks

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    ranks = Ranks(
        dist.get_rank(),
        2,
        dist.get_rank(),
        2,
        torch.device("cpu"),
        "gloo",
        dist.new_group(backend="gloo"),
    )
    return {name: worker.train(case, side, ranks, 60.0) for name, case, side in cases}


def made_up(side: str, *held_out: float, masters: float | None = None, sent: float = 100.0) -> Run:
    curve = {
        "losses": [2.0, 1.0], "held_out": [[10 * i, loss] for i, loss in enumerate(held_out)], "masters": masters, "step_s": [0.1, 0.3],
        "between_bytes": sent, "parameters": 1, "trained": 1, "held_out_samples": 1,
    }  # fmt: skip
    return Run(side, "ok", curve, wall_s=1.0)


def test_two_ranks_train_each_side_on_the_same_samples() -> None:
    lora = replace(TINY, lora=4, steps=2, every=2)
    asked = [(side, TINY, side) for side in ("plain", "hpz", "qgz", "all", "nudged")]
    asked += [(f"lora {side}", lora, side) for side in ("plain", "frozen-nf4")]
    first, second = run_ranks(2, trained_sides, asked)
    plain, hpz, qgz, everything = (first[side] for side in ("plain", "hpz", "qgz", "all"))
    for name, curve in first.items():
        told = ("losses", "held_out", "between_bytes")
        assert [curve[k] for k in told] == [second[name][k] for k in told], (
            f"{name}: ranks disagree on what all of them say"
        )
    assert [step for step, _ in plain["held_out"]] == [0, 5, 10, 12] and len(plain["losses"]) == 12
    assert plain["held_out"][-1][1] < 0.9 * plain["held_out"][0][1], plain["held_out"]
    assert hpz["losses"] == plain["losses"], "a second copy changes no bit"
    assert qgz["losses"][0] == plain["losses"][0] and qgz["losses"][2:] != plain["losses"][2:], (
        "a step's gradients come after its loss"
    )
    apart = [
        abs(a / b - 1) for a, b in zip(first["nudged"]["losses"], plain["losses"], strict=True)
    ]
    assert 0 < max(apart) < 1e-4, "a millionth of each weight"
    assert (
        plain["masters"] is None
        and abs(everything["masters"] / everything["held_out"][-1][1] - 1) < 0.02
    )
    assert everything["between_bytes"] < 0.25 * plain["between_bytes"], (
        "a quarter once for twice a whole, and an eighth"
    )
    adapters, nf4 = first["lora plain"], first["lora frozen-nf4"]
    assert 0 < adapters["trained"] == nf4["trained"] < adapters["parameters"] / 4
    assert nf4["losses"] != adapters["losses"] and nf4["between_bytes"] < adapters["between_bytes"]


def test_a_verdict_follows_from_the_last_held_out_loss() -> None:
    case = replace(TINY, limit=0.01)
    runs = [
        made_up("other-order", 5.0, 3.0, 2.1),
        made_up("plain", 5.0, 3.0, 2.0),
        made_up("qwz", 5.1, 3.3, 2.019, masters=2.01, sent=50.0),
        made_up("qgz", 5.0, 3.0, 2.021),
        made_up("hpz", 5.0, 3.0, 1.979),
        Run("all", "failed", error="Traceback\nValueError: boom\n"),
    ]
    found = {row["side"]: row for row in rows(case, runs)}
    assert list(found) == [
        "plain",
        "qwz",
        "hpz",
        "qgz",
        "all",
        "other-order",
    ], "in the order of SIDES"
    qwz = found["qwz"]
    assert (qwz["first"], qwz["final"], qwz["bytes_ratio"], qwz["trained"], qwz["step_s"]) == (
        5.1,
        2.019,
        0.5,
        1.5,
        0.2,
    )
    assert (qwz["difference"], qwz["masters_difference"], qwz["largest"]) == pytest.approx(
        (0.0095, 0.005, 0.1)
    )
    verdicts = {side: row["verdict"] for side, row in found.items()}
    assert verdicts["qwz"] == "within 1%" and verdicts["qgz"] == verdicts["hpz"] == "NOT within 1%"
    assert (
        verdicts["all"] == "failed"
        and verdicts["other-order"] == "a yardstick"
        and "fell by 60.0%" in verdicts["plain"]
    )
    assert missed(list(found.values())) == ["hpz", "qgz", "all"]
    assert "all: failed: ValueError: boom" in pages.table(command.COLUMNS, list(found.values()))
    idle = rows(case, [made_up("plain", 5.0, 4.9), made_up("qwz", 5.0, 4.9)])
    assert all("shows nothing" in row["verdict"] for row in idle) and missed(idle) == [
        "plain",
        "qwz",
    ]
    assert rows(case, [made_up("qwz", 5.0, 4.0)])[0]["verdict"] == "no reference to compare with"


def test_sides_that_have_ended_are_kept_and_the_reference_is_always_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(case: Case, side: str, threads: int, timeout: float) -> Run:
        ran.append(side)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return made_up(side, 5.0, 2.0 + 0.001 * len(ran))

    asked = ["--cases", "scratch", "--sides", "qgz", "hpz", "--output", str(tmp_path)]
    assert command.main(asked, run) == 130 and ran == ["plain", "hpz", "qgz"]
    assert json.loads((tmp_path / "convergence.json").read_text())["finished"] is False
    assert (
        command.main([*asked, "--resume", "--steps", "7"], run) == 2
        and "steps 500 then and 7 now" in capsys.readouterr().err
    )
    assert command.main([*asked, "--resume"], run) == 0 and ran == ["plain", "hpz", "qgz", "qgz"]
    assert command.main(
        ["--cases", "qlora", "--resume", "--output", str(tmp_path)], run
    ) == 0 and ran[4:] == list(CASES["qlora"].sides)
    document = json.loads((tmp_path / "convergence.json").read_text())
    assert (
        document["schema"] == command.Convergence.schema
        and document["finished"] is True
        and str(tmp_path) not in json.dumps(document)
    )
    assert {name: [run["side"] for run in found["runs"]] for name, found in document["cases"].items()} == {
        "qlora": list(CASES["qlora"].sides), "scratch": ["plain", "hpz", "qgz"],
    }  # fmt: skip
    assert "| qgz | 5.0000 | 2.0040 | +0.15% |" in (tmp_path / "convergence.md").read_text()
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--cases", "bert"], "smollm2, qlora, scratch"),
        (["--sides", "zero"], "qwz"),
        (["--ranks", "3"], "divides --ranks"),
        (["--steps", "0"], "steps=0"),
    ],
)
def test_a_wrong_command_line_is_told_what_to_write(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(asked) == 2
    assert said in capsys.readouterr().err


def test_every_side_is_a_recipe_and_every_case_begins_with_the_reference() -> None:
    import onefold

    for side in SIDES.values():
        assert onefold.Recipe.zero(3, group="node", **side.arguments).notes == ()
    for case in CASES.values():
        assert chosen(case, None) == list(case.sides) and case.sides[0] == "plain"
        assert Case.of(json.loads(json.dumps(case.to_json()))) == case
