"""Groups and codecs in the words of `onefold train`: read, refused, told, kept over a resume, and
seen in what the run leaves.
"""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from onefold import Recipe
from onefold.cli.app import app
from onefold.observe.report import build
from onefold.observe.report.page import render
from onefold.observe.runfile import read_observed
from onefold.processes.ranks import Ranks
from onefold.recipe.options import NODES
from onefold.train import checkpoints
from onefold.train.checkpoints import OPTIONS
from onefold.train.config import TrainConfig, resolve
from onefold.train.early import refuse_groups
from onefold.train.keeper import Keeper
from onefold.train.loop import Row, train
from onefold.train.output import write_config
from onefold.train.prepare import Run, prepare
from onefold.train.report import ConsoleReporter, Reporter, describe, observe, of_the_wire
from onefold.train.results import export
from onefold.wording import TrainError
from ranks import run_ranks
from small_lm import SmallLM
from started_runs import JOB, alone, this_rank

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "the quick brown fox jumps over the lazy dog. " * 200
CODECS = {"gather_codec": "int8", "reduce_codec": "int4"}
ALL = {"second_copy": True, **CODECS, "error_feedback": True, "wire_rounding": "stochastic"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"group": "2"}, {"group": 2}),
        ({"group": 2}, {"group": 2}),
        ({"group": "node"}, {"group": "node"}),
        ({"group": "flat"}, {"group": "flat"}),
        (
            {
                "group": "none",
                "gather_codec": "none",
                "frozen": "none",
                "wire_rounding": "nearest",
                "second_copy": False,
            },
            {},
        ),
        (
            {"shard_group": "4", "optimizer_over": "all"},
            {"shard_group": 4, "optimizer_over": "all"},
        ),
        (ALL, ALL),
        ({"frozen": "nf4"}, {"frozen": "nf4"}),
        ({"reduce": "native"}, {"reduce": "native"}),
        ({"reduce": "ordered"}, {"reduce": "ordered"}),
    ],
    ids=repr,
)
def test_words_become_arguments_that_a_recipe_takes(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = resolve(given)
    assert config.arguments(NODES) == expected
    assert config.recipe(3) == Recipe.zero(3, precision="fp32", **expected)


def test_files_say_the_same_as_the_command_line_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "group: 2\nsecond-copy: true\ngather-codec: int8\nreduce_codec: int4\nwire-rounding:"
        " stochastic\n"
    )
    (tmp_path / "a.toml").write_text(
        'group = 2\nsecond-copy = true\ngather-codec = "int8"\nreduce_codec = "int4"\nwire-rounding'
        ' = "stochastic"\n'
    )
    line = resolve({"group": "2", "second_copy": True, **CODECS, "wire_rounding": "stochastic"})
    assert resolve({}, tmp_path / "a.yaml") == resolve({}, tmp_path / "a.toml") == line
    write_config(line, tmp_path, {"stage": 3, "ranks": 4, "steps": 12, "global_batch": 8})
    assert resolve({}, tmp_path / "train.yaml").arguments(NODES) == line.arguments(NODES)
    assert TrainConfig.model_validate_json(line.model_dump_json(by_alias=True)) == line
    assert resolve({"gather_codec": "none"}, tmp_path / "a.yaml").arguments(NODES).keys() == {
        "group",
        "second_copy",
        "reduce_codec",
        "wire_rounding",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"group": "nodes"},
            "--group 'nodes': expected none or 'node' (the launcher's nodes), 'flat' (no groups) or the number of ranks of",
        ),
        ({"shard_group": 0}, "--shard-group 0: expected 'node' or the number of ranks"),
        ({"shard_group": True}, "--shard-group True: expected 'node'"),
        (
            {"shard_group": "flat"},
            "--shard-group 'flat': expected 'node' or the number of ranks of a group",
        ),
        (
            {"group": "flat", "second_copy": True},
            "the recipe says group='flat': give group='node' or a number of ranks",
        ),
        (
            {"gather_codec": "int9"},
            "--gather-codec 'int9': expected one of 'int8', 'fp8', 'int4', or none",
        ),
        ({"reduce_codec": "nf4"}, "--reduce-codec 'nf4': expected one of"),
        ({"stage": "1", "second_copy": True}, "needs sharded parameters: stage 3"),
        (
            {"stage": "2", "gather_codec": "int8"},
            "parameters that are kept whole are gathered in full; use stage 3",
        ),
        ({"stage": "0", "reduce_codec": "int4"}, "use stage 1, 2 or 3"),
        ({"stage": "0", "shard_group": "node"}, "at stage 0 nothing is divided"),
        ({"stage": "1", "frozen": "nf4"}, "use stage 3"),
        ({"reduce": "sorted"}, "--reduce 'sorted': expected 'ordered' or 'native'"),
        ({"reduce": "native", "reduce_codec": "int4"}, "leave one of them out"),
        ({"optimizer_over": "all"}, "needs a shard_group"),
        ({"shard_group": 2, "second_copy": True}, "divided inside the group already"),
        ({"shard_group": 2, "group": 4}, "they are the same groups; give one of them"),
        (
            {"frozen": "int8", "offload_param": "cpu", "offload_optimizer": "cpu"},
            "leave one of them out",
        ),
    ],
    ids=repr,
)
def test_what_cannot_be_is_told_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError) as error:
        resolve(given)
    assert words in str(error.value) and "Value error" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "size", "ranks", "fitting"),
    [("group", 3, 4, "1, 2, 4"), ("shard_group", 8, 4, "1, 2, 4"), ("group", 2, 1, "1")],
)
def test_groups_that_do_not_divide_the_ranks_are_told_with_those_that_do(
    name: str, size: int, ranks: int, fitting: str
) -> None:
    with pytest.raises(
        TrainError,
        match=(
            rf"--{name.replace('_', '-')} {size}: groups of {size} .*choose a size of {fitting}\."
        ),
    ):
        refuse_groups(resolve({name: size}), ranks)
    refuse_groups(resolve({name: int(fitting[-1])}), ranks)


def test_the_command_refuses_groups_before_it_starts_any_rank() -> None:
    done = CliRunner().invoke(
        app, ["train", "--model", "llama:tiny", "--nproc", "4", "--device", "cpu", "--group", "3"]
    )
    assert (
        done.exit_code == 2
        and "--group 3: groups of 3 ranks do not divide 4 ranks" in done.output
        and "Traceback" not in done.output
    )


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
    point = checkpoints.find(config, restarted=False)
    run = prepare(config, ranks, lambda line: None, point)
    said = checkpoints.load(run, point) if point is not None else []
    keeper = Keeper(run, folder, Reporter(), time.time())
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
        wanted = (
            "loss",
            "wire_bytes",
            "wire_bytes_total",
            "wire_bytes_between",
            "wire_bytes_plain",
        )
        wanted += ("wire_bytes_between_total", "wire_bytes_plain_total")
        facts = describe(run)
        found[name] = {
            "rows": [{k: row[k] for k in wanted if k in row} for row in rows], "said": said, "stage": run.choice.stage,
            "reason": run.choice.reason, "wires": facts["wires"], "borders": facts["borders"],
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
    one("goes on encoded", resume=str(root / "encoded"), steps=4, **ALL)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("wires")
    job(folder)
    return folder, run_ranks(4, every_way, str(folder))


def test_rows_say_what_went_between_nodes_and_what_it_would_be_without_codecs(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in seen[1]:
        alike = {"loss", "wire_bytes", "wire_bytes_total"}
        across = {"wire_bytes_between", "wire_bytes_between_total"}
        coded = {"wire_bytes_plain", "wire_bytes_plain_total"}
        for name, keys in (
            ("one node", alike),
            ("two groups", alike | across),
            ("plain", alike | across),
            ("encoded", alike | across | coded),
        ):
            assert all(set(row) == keys for row in rank[name]["rows"]), (name, rank[name]["rows"])
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


def test_nodes_are_groups_by_themselves_and_flat_sends_more_between_them(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in seen[1]:
        for two_levels, flat in zip(rank["by itself"]["rows"], rank["flat"]["rows"], strict=True):
            assert (
                two_levels["wire_bytes"] == flat["wire_bytes"]
                and 2 * two_levels["wire_bytes_between"] == flat["wire_bytes_between"]
            )
            assert abs(two_levels["loss"] - flat["loss"]) < 1e-4 * flat["loss"]
        assert rank["by itself"]["wires"] == {} and rank["flat"]["wires"] == {"group": "flat"}


def test_stage_auto_takes_one_that_the_options_can_be_with(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    found = seen[1][0]
    assert found["one node"]["stage"] == 1 and found["encoded"]["stage"] == 3
    assert found["encoded"]["reason"].startswith("stage 3")
    assert found["encoded"]["wires"] == {"second_copy": True, **CODECS}


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
        for total in ("wire_bytes_total", "wire_bytes_between_total", "wire_bytes_plain_total"):
            assert again[0][total] > before[total], "totals go on"
        assert "wire_bytes_plain" not in again[0], "nothing is encoded any more"
        assert "--error-feedback False -> True" in "\n".join(rank["goes on encoded"]["said"])
        assert "wire_bytes_plain" in rank["goes on encoded"]["rows"][0]


def test_what_cannot_be_on_these_ranks_or_with_this_model_is_a_sentence(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in seen[1]:
        assert (
            rank["of three"]
            == "--group 3: groups of 3 ranks do not divide 4 ranks: choose a size of 1, 2, 4."
        )
        assert (
            "every parameter of small_lm:plain is trained" in rank["nothing is frozen"]
            and "module:factory" in rank["nothing is frozen"]
        )


def test_the_files_of_a_run_hold_bytes_inside_and_between_encoded_and_plain(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    runs = {name: read_observed(seen[0] / name) for name in ("plain", "encoded")}
    for plain, encoded in zip(runs["plain"].ranks, runs["encoded"].ranks, strict=True):
        assert set(encoded.wire) == set(plain.wire) == {"all-gather", "reduce-scatter"}
        for move, sent in encoded.wire.items():
            without = plain.wire[move]
            assert (sent.plain, sent.plain_between) == (without.nbytes, without.between), (
                move,
                sent,
                without,
            )
            assert without.plain == without.nbytes and sent.between < sent.nbytes < sent.plain
        for rank in (plain, encoded):
            assert rank.measured.wire == {move: sent.nbytes for move, sent in rank.wire.items()}
            assert rank.measured.links["between"] == sum(
                sent.between for sent in rank.wire.values()
            )
            assert sum(rank.measured.links.values()) == rank.measured.wire_bytes
            assert (
                rank.step is not None
                and rank.step.borders == "2 nodes"
                and rank.step.sent() == rank.wire
            )
    for name, borders in (("one node", ""), ("two groups", "2 groups")):
        for rank in read_observed(seen[0] / name).ranks:
            assert (
                set(rank.measured.links) == {"inside"}
                and rank.step is not None
                and rank.step.borders == borders
            )
    rows = {row.state: row for row in runs["encoded"].recipe}
    assert (
        rows["parameters"].placement == "sharded in each group"
        and rows["parameters"].wire == "float32 as int8"
    )
    assert rows["gradients"].wire == "float32 as int4" and rows["gradients"].placement == "sharded"
    own = json.loads((seen[0] / "encoded" / "observed-rank2.json").read_text())
    assert own["wire"]["all-gather"] == asdict(runs["encoded"].ranks[2].wire["all-gather"])


def test_the_report_shows_what_went_where_and_nothing_of_it_for_one_node_without_codecs(
    seen: tuple[Path, list[dict[str, Any]]],
) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    reports = {
        name: build(seen[0] / name) for name in ("one node", "two groups", "plain", "encoded")
    }
    assert (
        "wires" not in reports["one node"].tables
        and "between" not in reports["one node"].said["traffic"]
    )
    assert [line.name for line in reports["two groups"].tables["wires"]][-2:] == [
        "all",
        "all, between groups",
    ]
    assert all(line.plain == "" for line in reports["plain"].tables["wires"])
    assert "without codecs" not in render(reports["plain"])
    lines = {line.name: line for line in reports["encoded"].tables["wires"]}
    assert set(lines) == {
        f"{move}{where}"
        for move in ("all-gather", "reduce-scatter", "all")
        for where in ("", ", between nodes")
    }
    assert lines["all"].plain == next(
        line.sent for line in reports["plain"].tables["wires"] if line.name == "all"
    )
    assert (
        float(lines["all-gather"].ratio) > 2
        and float(lines["reduce-scatter, between nodes"].ratio) > 3
    )
    page = render(reports["encoded"])
    assert (
        "go to another of the 2 nodes" in page
        and "<td>float32 as int8</td>" in page
        and ">times as much</th>" in page
    )
    tile = next(tile for tile in reports["encoded"].tiles if tile.label == "Sent in a step")
    assert "between nodes" in tile.note and "without codecs" in tile.note
    assert "sent between nodes" in {
        spread.name for spread in reports["encoded"].tables["imbalance"]
    }


def test_lines_and_the_closing_sentence_name_nodes_and_codecs_where_there_are_any() -> None:
    plain = {
        "step": 1,
        "loss": 1.0,
        "tokens_per_s": 1.0,
        "memory": 1,
        "memory_peak": 1,
        "wire_bytes": 3 << 20,
    }
    row = {**plain, "wire_bytes_between": 1 << 20, "wire_bytes_plain": 9 << 20}
    assert of_the_wire(plain, "") == ""
    assert of_the_wire(row, "2 nodes") == " (1 MiB between nodes, 9 MiB without codecs)"
    out = io.StringIO()
    say = ConsoleReporter(1, Console(file=out, width=200, highlight=False))
    say._borders = "2 groups"
    say.say("step", **row)
    closing = {
        "stopped": False,
        "steps": 1,
        "seconds": 1.0,
        "first_loss": 1.0,
        "last_loss": 1.0,
        "model": None,
        "checkpoint": None,
        "metrics": "m",
    }
    total = {"wire_bytes_total": 3 << 20, "wire_bytes_between_total": 2 << 20}
    say.say("done", **closing, memory_peak=1, **total)
    assert "wire 3 MiB/step (1 MiB between groups, 9 MiB without codecs)" in out.getvalue()
    assert "3 MiB sent by each rank (2 MiB between groups), peak" in out.getvalue()


def test_on_one_rank_codecs_do_nothing_and_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, coded = (
        ran(alone(), job(tmp_path, output=str(tmp_path / n), stage="3", precision="bf16", **o))[1]
        for n, o in (("a", {}), ("b", ALL))
    )
    assert [row["loss"] for row in plain] == [row["loss"] for row in coded]
    assert "wire_bytes_plain" not in coded[0]
    assert (
        "gather_codec='int8' and reduce_codec='int4' and a division inside groups: no effect on one"
        " rank" in caplog.text
    )
    assert set(OPTIONS) <= set(TrainConfig.model_fields)


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


def with_adapters() -> Any:
    """A small Llama whose base is frozen, with peft's adapters around two of its matrices."""
    import peft
    import transformers

    shape = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, pad_token_id=256, bos_token_id=256, eos_token_id=256)
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def test_frozen_weights_rest_in_4_bits_under_adapters_that_are_trained_and_exported(
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    (tmp_path / "text.txt").write_text(TEXT)
    text = str(tmp_path / "text.txt")
    given = {
        "model": f"{__name__}:with_adapters",
        "tokenizer": "bytes",
        "data": text,
        "seq": 32,
        "steps": 4,
        "lr": 1e-2,
        "eval_every": 0,
    }
    given |= {"stage": "3", "schedule": "constant", "warmup": 0}
    losses, held = {}, {}
    for frozen in ("none", "nf4"):
        run = prepare(resolve({**given, "frozen": frozen}), alone(), lambda line: None)
        rows: list[Row] = []
        train(run, lambda: 0, rows.append)
        losses[frozen] = [row["loss"] for row in rows]
        held[frozen] = rows[-1]["held"]["now"]
        assert export(run, tmp_path / frozen) == "adapters"
    assert losses["nf4"][-1] < losses["nf4"][0] and losses["nf4"] != losses["none"]
    assert losses["nf4"] == pytest.approx(losses["none"], rel=0.02)
    assert sum(held["nf4"].values()) < 0.75 * sum(held["none"].values()), held
    opened = peft.PeftModel.from_pretrained(with_adapters().get_base_model(), str(tmp_path / "nf4"))
    assert any(bool(t.any()) for name, t in opened.state_dict().items() if "lora_B" in name)
