"""`onefold plan`: does a model fit, how fast does it train, and which stage does it need. Answers
in seconds, for a model of any size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from onefold.cli.options import asked_of, option, recipe_parameter, with_parameters
from onefold.cli.show import answered
from onefold.recipe.core import DIVISION, OPTIONS, TIERS
from onefold.recipe.options import Precision, bytes_of

Stage = Literal["auto", "0", "1", "2", "3"]
Checkpointing = Literal["auto", "none", "selective", "full"]
_MODEL, _MACHINE, _JOB, _AXES = "What is trained", "On what", "How", "Other axes than data"


# fmt: off
def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="An architecture's name (llama-3-70b), a folder, config.json, or module:factory.", show_default=False),
    ] = None,
    params: Annotated[str | None, option("Only a number of parameters, such as 7.5e9 or 7.5B.", _MODEL)] = None,
    gpus: Annotated[int | None, option("GPUs in all (default: 8).", _MACHINE)] = None,
    per_node: Annotated[int | None, option("GPUs of one node (default: 8).", _MACHINE)] = None,
    gpu: Annotated[str | None, option("Which GPU (default: h100-80).", _MACHINE)] = None,
    link: Annotated[str | None, option("Link between nodes: a name, or a rate (default: 8x200g).", _MACHINE)] = None,
    machines: Annotated[Path | None, option("TOML file with GPUs and links of your own.", _MACHINE)] = None,
    here: Annotated[bool, option("This machine, as onefold doctor --calibrate measured it.", _MACHINE, "--here")] = False,
    host_memory: Annotated[str | None, option("Memory of one node's host: 64GB.", _MACHINE)] = None,
    disk_space: Annotated[str | None, option("Room on one node's disks: 2TB.", _MACHINE)] = None,
    seq: Annotated[int, option("Tokens of a sample (0: 2,048, or the model's positions if those are fewer).", _JOB, shown=True)] = 0,
    micro_batch: Annotated[
        str, option("Samples a rank computes at once, or auto for the largest that fit.", _JOB, shown=True)
    ] = "1",
    global_batch: Annotated[int, option("Samples of a step (0: one micro-batch a rank).", _JOB, shown=True)] = 0,
    activation_checkpointing: Annotated[Checkpointing, option("Blocks to recompute.", _JOB, shown=True, words=Checkpointing)] = "auto",
    optimizer: Annotated[str, option("The optimizer, by the name of its class.", _JOB, shown=True)] = "adamw",
    lora: Annotated[int, option("Rank of LoRA adapters; 0 trains everything.", _JOB, shown=True)] = 0,
    stage: Annotated[Stage, option("Stage.", DIVISION, shown=True, words=Stage)] = "auto",
    precision: Annotated[Precision, option("Compute precision.", DIVISION, shown=True)] = "bf16",
    offload: Annotated[str, option("States off the device: auto (as little as fits), or none.", TIERS, shown=True)] = "auto",
    tp: Annotated[str, option("Tensor-parallel ranks, or auto: search.", _AXES)] = "1",
    pp: Annotated[str, option("Stages of the pipeline, or auto.", _AXES)] = "1",
    cp: Annotated[str, option("Context-parallel ranks, or auto.", _AXES)] = "1",
    ep: Annotated[str, option("Data-parallel ranks with different experts, or auto.", _AXES)] = "1",
    chunks: Annotated[int, option("Parts of the model on each stage (interleaved).", _AXES)] = 1,
    no_sequence_parallel: Annotated[bool, option("Norms are not divided by tokens.", _AXES, "--no-sequence-parallel")] = False,
    simulate: Annotated[
        bool, option("Also run the engine as one of all ranks, on fake samples, and compare bytes.", None, "--simulate")
    ] = False,
    rank: Annotated[int | None, option("With --simulate: which rank.")] = None,
    explain: Annotated[bool, option("Also say what the next steps would buy and what figures rest on.", None, "--explain")] = False,
    as_json: Annotated[bool, option("Print one JSON object.", None, "--json")] = False,
    **recipe: Any,
) -> int:
    # fmt: on
    """Tell before the run what each rank will hold, send and take, stage by stage, and which stage
    to use.

    Status 0: answered, also where nothing fits ("recommended" is null then). Status 2: the question
    cannot be answered.
    """
    from onefold.plan import api
    from onefold.plan.tables import show

    if (model is None) == (params is None):
        raise ValueError(
            "give a model (a name such as llama-3-8b, a folder, config.json, module:factory) or"
            " --params, one of the two."
        )
    if rank is not None and not simulate:
        raise ValueError(f"--rank {rank} belongs to --simulate; a plan is the same for every rank.")
    wanted = str(model) if params is None else _number(params)
    named = {"gpus": gpus, "per_node": per_node, "gpu": gpu, "link": link, "file": machines}
    machine = _machine(here, {k: v for k, v in named.items() if v is not None})
    host = {
        name: float(bytes_of(flag, text))
        for name, flag, text in (("memory", "--host-memory", host_memory), ("nvme", "--disk-space", disk_space))
        if text is not None
    }  # fmt: skip
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    axes: dict[str, Any] = {n: _counted(f"--{n}", d) for n, d in degrees.items()}
    found = api.plan(
        wanted,
        replace(machine, host=machine.host.model_copy(update=host)),
        stage=None if stage == "auto" else int(stage),
        **axes,
        chunks=chunks,
        sequence_parallel=not no_sequence_parallel,
        seq=seq,
        micro_batch=0 if micro_batch == "auto" else _counted("--micro-batch", micro_batch),
        global_batch=global_batch,
        precision=precision,
        checkpointing="" if activation_checkpointing == "auto" else activation_checkpointing,
        optimizer=optimizer,
        lora_rank=lora,
        offload="" if offload == "auto" else offload,
        **asked_of(recipe),
    )
    if not as_json:
        show(found, explain=explain)
    ran = []
    if simulate:
        from onefold.cli.plan_simulation import show_simulation, simulated

        ran = simulated(found, wanted, rank)
        if not as_json:
            show_simulation(ran, found.shown.scheme)
    if as_json:
        print(json.dumps(found.to_json() | ({"simulation": [one.to_json() for one in ran]} if ran else {})))
    return 0


plan_command = with_parameters(
    answered(plan),
    [
        recipe_parameter(row, both=False)
        for row in OPTIONS.values()
        if "plan" in row.commands and row.name not in ("stage", "precision")
    ],
)


def _counted(flag: str, given: str) -> int | str:
    """Parse a whole number of 1 or more, or auto."""
    if given != "auto" and not (given.isdigit() and int(given)):
        raise ValueError(f"{flag} {given}: expected a whole number, 1 or more, or auto.")
    return given if given == "auto" else int(given)


def _number(given: str) -> float:
    """Parse a number such as 7.5e9, 7.5B or 7,500,000,000."""
    plain = given.strip().replace(",", "").replace("_", "").upper()
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(plain[-1:], 1.0)
    try:
        return float(plain.rstrip("KMBT") if unit > 1 else plain) * unit
    except ValueError:
        raise ValueError(
            f"--params {given}: expected a number of parameters, such as 7.5e9 or 7.5B."
        ) from None


def _machine(here: bool, named: dict[str, Any]) -> Any:
    """Return this machine, or that of the table with what is `named` of it."""
    from onefold.plan import hardware

    if here and named:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ValueError(
            f"{flags} beside --here: this machine is what was measured; leave one of the two out."
        )
    if here:
        from onefold.machine.calibration import Calibration

        return hardware.calibrated(Calibration.load())
    return hardware.machine(**{"gpus": 8, "gpu": "h100-80", **named})
