"""Groups and codecs in the words of `onefold train`: read, refused, told, kept over a resume, and
seen in what the run leaves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from onefold.processes.ranks import Ranks
from onefold.train.checkpoints import Keeper
from onefold.train.config import resolve
from onefold.train.loop import Row, train
from onefold.train.prepare import Run
from onefold.train.report import Reporter, describe, observe
from onefold.wording import TrainError
from ranks import run_ranks
from small_lm import SmallLM
from started_runs import JOB, alone, begun, this_rank

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "the quick brown fox jumps over the lazy dog. " * 200
CODECS = {"gather_codec": "int8", "reduce_codec": "int4"}
OTHERS = {"second_copy": True, **CODECS, "gather_codec": "int4"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"group": "nodes"},
            "--group 'nodes': expected 'node', 'flat', a number of ranks or none",
        ),
        ({"shard_group": 0}, "--shard-group 0: expected 'node', a number of ranks"),
        (
            {"shard_group": "flat"},
            "--shard-group 'flat': expected 'node', a number of ranks",
        ),
        (
            {"group": "flat", "second_copy": True},
            "the recipe says group='flat': give group='node' or a number of ranks",
        ),
        (
            {"gather_codec": "int9"},
            "--gather-codec 'int9': expected 'int8', 'int4' or none",
        ),
        (
            {"stage": "2", "gather_codec": "int8"},
            "parameters that are kept whole are gathered in full; use stage 3",
        ),
        ({"reduce": "sorted"}, "--reduce 'sorted': expected 'ordered', 'native'"),
        ({"reduce": "native", "reduce_codec": "int4"}, "leave one of them out"),
        ({"optimizer_over": "all"}, "needs a shard_group"),
        ({"shard_group": 2, "group": 4}, "they are the same groups; give one of them"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_told_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError) as error:
        resolve(given)
    assert words in str(error.value) and "Value error" not in str(error.value)


def job(folder: Path, **more: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    given = {
        "model": "small_lm:plain",
        "data": str(text),
        "output": str(folder / "run"),
        "steps": 2,
        "seq": 32,
        "stage": "auto",
    }
    return {**JOB, "save_every": None, "micro_batch": 1, **given, **more}


def ran(ranks: Ranks, options: dict[str, Any]) -> tuple[Run, list[Row], list[str]]:
    """(the run, its rows, what was said of going on) of a run in this process, its files left in
    the output folder.
    """
    config = resolve(options)
    folder, rows = Path(options["output"]), list[Row]()
    run, said = begun(config, ranks)
    keeper = Keeper(run, folder, Reporter())
    train(run, lambda: 0, rows.append, keeper=keeper)
    keeper.close()
    observe(run, folder, rows)
    return run, rows, said


def every_way(folder: str) -> dict[str, Any]:
    """On one of four ranks, two to a node: what rows and notes say of runs with groups and
    codecs.
    """
    os.environ |= {"LOCAL_WORLD_SIZE": "4"}
    ranks, root, found = this_rank(), Path(folder), dict[str, Any]()

    def one(name: str, **options: Any) -> None:
        run, rows, said = ran(ranks, job(root, **{"output": str(root / name), **options}))
        wanted = "loss", "wire_bytes", "wire_bytes_between", "wire_bytes_plain"
        found[name] = {
            "rows": [{k: row[k] for k in wanted} for row in rows], "said": said, "stage": run.choice.stage,
            "reason": run.choice.reason, "borders": describe(run)["borders"],
        }  # fmt: skip

    def refused(name: str, **options: Any) -> None:
        try:
            one(name, **options)
        except TrainError as error:
            found[name] = str(error)

    one("one node")
    one("two groups", shard_group=2, stage="3")
    refused("of three", group=3)
    refused("nothing is frozen", frozen="nf4")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    one("by itself", stage="1")
    one("flat", stage="1", group="flat")
    one("plain", second_copy=True)
    one("encoded", second_copy=True, **CODECS, save_every=2)
    one("goes on", shard_group=1, resume=str(root / "encoded"), steps=4)
    one("goes on encoded", resume=str(root / "encoded"), steps=4, **OTHERS)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("wires")
    job(folder)
    return folder, run_ranks(4, every_way, str(folder))


@pytest.mark.slow
def test_rows_say_what_went_between_nodes_and_what_it_would_be_without_codecs(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in seen[1]:
        for name, across, coded in (
            ("one node", False, False),
            ("two groups", True, False),
            ("plain", True, False),
            ("encoded", True, True),
        ):
            for row in rank[name]["rows"]:
                assert (row["wire_bytes_between"] > 0) == across, (name, row)
                assert (row["wire_bytes_plain"] != row["wire_bytes"]) == coded, (name, row)
        for plain, encoded in zip(rank["plain"]["rows"], rank["encoded"]["rows"], strict=True):
            assert encoded["wire_bytes_plain"] == plain["wire_bytes"], (
                "what would have been sent is what was, without codecs"
            )
            assert (
                encoded["wire_bytes"] < 0.5 * plain["wire_bytes"]
                and encoded["wire_bytes_between"] < 0.5 * plain["wire_bytes_between"]
            )
            assert 0 < plain["wire_bytes_between"] < plain["wire_bytes"]
            assert abs(encoded["loss"] - plain["loss"]) < 0.05 * plain["loss"]
        assert (
            rank["one node"]["borders"] == ""
            and rank["two groups"]["borders"] == "2 groups"
            and rank["plain"]["borders"] == "2 nodes"
        )


@pytest.mark.slow
def test_a_run_goes_on_over_other_groups_and_with_other_codecs_and_says_so(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in seen[1]:
        before = rank["encoded"]["rows"][-1]
        said = "\n".join(rank["goes on"]["said"])
        for change in (
            "--second-copy True -> False",
            "--gather-codec int8 -> none",
            "--reduce-codec int4 -> none",
            "--shard-group none -> 1",
        ):
            assert change in said, said
        again = rank["goes on"]["rows"]
        assert len(again) == 2 and again[0]["loss"] < 1.05 * before["loss"]
        assert again[0]["wire_bytes_plain"] == again[0]["wire_bytes"], "nothing is encoded any more"
        assert "--gather-codec int8 -> int4" in "\n".join(rank["goes on encoded"]["said"])
        encoded = rank["goes on encoded"]["rows"][0]
        assert encoded["wire_bytes"] < 0.5 * encoded["wire_bytes_plain"]


def half_frozen() -> Any:
    """Blocks that are frozen, and rest encoded, between an embedding and a head that train."""
    model = SmallLM(0.0)
    model.blocks.requires_grad_(False)
    return model


def test_a_run_over_frozen_weights_in_4_bits_goes_on_bit_for_bit(tmp_path: Path) -> None:
    given = {"model": f"{__name__}:half_frozen", "stage": "3", "schedule": "constant", "warmup": 0}
    for precision in ("fp32", "bf16"):
        one = {**given, "frozen": "nf4", "precision": precision}
        at_once, broken_off, going_on = (
            str(tmp_path / f"{precision}-{name}") for name in ("at-once", "broken-off", "going-on")
        )
        whole = ran(alone(), job(tmp_path, **one, steps=4, output=at_once))[1]
        ran(alone(), job(tmp_path, **one, steps=2, output=broken_off, save_every=2))
        rest = ran(alone(), job(tmp_path, **one, steps=4, output=going_on, resume=broken_off))[1]
        assert [row["loss"] for row in rest] == [row["loss"] for row in whole[2:]]
