"""Every row of data/planner_cases.csv is answered within its tolerance.

The file holds questions with inputs, published or computed values, tolerances and, in its last
column, the source of each. Nothing of what
is expected stands here: `ANSWERS` maps a question's id to the code that answers it from the row's
inputs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import papers
import pytest
from benchmarks.validation.formulas import activations, compute, states, traffic
from benchmarks.validation.systems import SYSTEMS, blocks_of

from benchmarks import reach

ROWS = list(
    csv.DictReader(
        (Path(__file__).parent / "data" / "planner_cases.csv")
        .read_text(encoding="utf-8")
        .splitlines()
    )
)
GB, TB, GIB, TIB, BILLION = 1e9, 1e12, 2**30, 2**40, 1e9
ADAM = states.CONVENTIONS["16"]
GPT3 = {"layers": 96, "hidden": 12_288}
Inputs = Mapping[str, Any]


def states_gb(i: Inputs) -> float:
    return states.model_states(i["P"], ADAM, i["stage"], i["N"]) / GB


def smallest_degree(i: Inputs) -> float:
    return papers.smallest_degree(
        i["P"], ADAM, i["stage"], i["capacity_GB"] * GB, (1, 4, 16, 64, 256, 1024)
    )


def largest_by_states(i: Inputs) -> float:
    return states.largest_model(i["capacity_GB"] * GB, ADAM, i["stage"], i["dp"], i["mp"]) / BILLION


def relative_traffic(i: Inputs) -> float:
    return traffic.volume(f"zero-{i['stage']}", i["m"]) / traffic.volume("ddp", i["m"])


def infinity_efficiency(i: Inputs) -> float:
    given = {
        "batch": i.get("bsz", 1),
        "seq": i.get("seq", 1024),
        "hidden": i.get("hidden", 0),
        "interval": i.get("ci", 1),
    }
    return papers.efficiency(papers.intensity(i["component"], **given), i["bw"] * GB)


def largest_on_nvme(i: Inputs) -> float:
    return states.largest_trainable(i["nvme_TB"] * TB, states.CONVENTIONS["20"].total) / BILLION


def largest_with_host_optimizer(i: Inputs) -> float:
    """Gradients and optimizer states are on the host: only 16-bit parameters stay."""
    return states.largest_trainable(i["hbm_GB"] * GB * i["gpus"], ADAM.parameters) / BILLION


def estimator(i: Inputs) -> float:
    return papers.zero3_on_a_gpu(i["P"], i["L"], i["N"]) / GIB


def estimator_host(i: Inputs) -> float:
    return papers.zero3_on_a_host(i["P"], i["nodes"]) / GIB


def flops_rate(system: str, numel: float, micro_batch: int, seq: int, gpus: int) -> float:
    """TFLOP/s a GPU, recompute counted, as the sources print it."""
    found = SYSTEMS[system]
    flops = compute.megatron_flops(micro_batch, seq, GPT3["layers"], GPT3["hidden"])
    return flops / found.run(numel, GPT3["layers"], flops, found.machine(gpus)).step


def megatron_comparison(i: Inputs) -> float:
    few, many = (
        flops_rate("megatron-zero3", i["P"], b, i["seq"], n)
        for b, n in zip(i["micro_batch"], i["gpus"], strict=True)
    )
    return many / few


def azure_scaling(i: Inputs) -> float:
    few, many = (flops_rate("azure", i["P"], i["micro_batch"], 1024, n) for n in i["gpus"])
    return many / few


def zeropp_speedup(i: Inputs) -> float:
    system = SYSTEMS["zero++"]
    machine = system.machine(i["gpus"], f"{i['node_bw_Gbps']}g")
    flops = compute.infinity_flops(i["P"], 1, i["tokens"])
    plain, better = (
        system.run(i["P"], blocks_of(i["P"]), flops, machine, scheme)
        for scheme in ("zero-3", "zero++")
    )
    return plain.step / better.step


ANSWERS: Mapping[str, Callable[[Inputs], float]] = {
    "E01": states_gb,
    "E02": states_gb,
    "E03": states_gb,
    "E05": smallest_degree,
    "E06": lambda i: papers.reduction_factor(ADAM, i["stage"], i["N"]),
    "E07": largest_by_states,
    "E09": lambda i: states.USABLE * largest_by_states(i),
    "E10": (
        lambda i: 2 * papers.zero_elements(i["layers"], i["hidden"], i["batch"], i["seq"]) / GB
    ),
    "E11": relative_traffic,
    "E12": lambda i: traffic.wire_bytes(i["P"], "zero-3", i["N"], i["bytes"]) / GB,
    "E13": lambda i: traffic.zeropp_bytes(i["P"])["between"] / GB,
    "E14": lambda i: traffic.between_groups(i["M"], i["G"], i["W"], element_bytes=1),
    "E15": lambda i: traffic.offload_bytes(i["P"], i["N"]) / GB,
    "E16": lambda i: papers.tensor_parallel_elements(i["b"], i["s"], i["h"], i["t"]),
    "E17": lambda i: papers.infinity_states(i["layers"], i["hidden"], i["bytes_per_param"]) / TIB,
    "E20": (
        lambda i: (
            2
            * activations.checkpoint_elements(i["layers"], i["hidden"], i["batch"], i["seq"])
            / TIB
        )
    ),
    "E21": infinity_efficiency,
    "E22": infinity_efficiency,
    "E24": infinity_efficiency,
    "E25": lambda i: papers.ranks_to_hold(i["P"], i["bytes_per_param"], i["capacity_GB"] * GB),
    "E26": largest_on_nvme,
    "E27": largest_with_host_optimizer,
    "E28": estimator,
    "E29": estimator_host,
    "E33": (
        lambda i: (
            states.freed_by_more_ranks(
                i["P"], states.CONVENTIONS["fp32"], i["stage"], i["N1"], i["N2"]
            )
            / GIB
        )
    ),
    "E35": lambda i: papers.checkpoint_bytes(i["P"]) / GIB,
    "E36": lambda i: states.model_states(1, states.CONVENTIONS["18"], 1, i["d"]),
    "E37": lambda i: states.model_states(i["P"], states.CONVENTIONS["20"], 0, 1) / GB,
    "E38": states_gb,
    "E39": lambda i: papers.korthikanti_layer(i["s"], i["b"], i["h"], i["a"], i["t"]) / GB,
    "E41": lambda i: papers.selective_recompute_saves(i["s"], i["h"], i["a"]),
    "E42": lambda i: compute.megatron_parameters(i["l"], i["h"]) / BILLION,
    "E45": megatron_comparison,
    "E46": azure_scaling,
    "E47": azure_scaling,
    "E50": zeropp_speedup,
}


def test_every_question_has_one_answer() -> None:
    assert sorted(ANSWERS) == sorted(row["id"] for row in ROWS)
    assert len(ROWS) == len({row["question"] for row in ROWS})


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_the_answer_lies_within_the_tolerance(row: dict[str, str]) -> None:
    answer = ANSWERS[row["id"]](json.loads(row["inputs_json"]))
    expected = float(row["value"])
    if row["tolerance_type"] == "range":
        low, high = map(float, row["tolerance"].split(".."))
    elif row["tolerance_type"] == "rel":
        low, high = sorted(
            (expected * (1 - float(row["tolerance"])), expected * (1 + float(row["tolerance"])))
        )
    else:
        assert row["tolerance_type"] == "abs"
        low, high = expected - float(row["tolerance"]), expected + float(row["tolerance"])
    assert low <= answer <= high, (
        f"{row['question']} {row['inputs_json']}: {answer:.6g} {row['unit']}, expected {expected:g}"
        f" ({low:g} to {high:g}; {row['source']})"
    )


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["reference_formula_value"]], ids=lambda r: r["id"]
)
def test_the_answer_is_the_formulas_value_where_one_is_given(row: dict[str, str]) -> None:
    answer = ANSWERS[row["id"]](json.loads(row["inputs_json"]))
    assert answer == pytest.approx(float(row["reference_formula_value"]), rel=2e-4), row["question"]


def test_the_page_of_what_fits_says_what_the_plan_answers() -> None:
    """Run `python -m benchmarks reach` after a change."""
    (place,) = (p for p in reach.PLACES if p.memory == 80)
    at = 1 + reach.PLACES.index(place)
    rows = [
        line.strip("|").split("|") for line in reach.PAGE.read_text(encoding="utf-8").split("\n")
    ]
    shown = {cells[0].strip(): cells[at].strip() for cells in rows if len(cells) > at}
    told = shown["llama-3-8b"].removesuffix(" ●")
    assert told == reach.cell(reach.answered("llama-3-8b", place))
