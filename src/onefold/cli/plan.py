"""`onefold plan`: will it fit, how fast will it go, which stage is needed. Answers in seconds, for a model of any size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Checkpointing = Literal["auto", "none", "selective", "full"]
Offload = Literal["auto", "none", "optimizer", "parameters", "nvme"]
_MODEL, _MACHINE, _JOB = "What is trained", "On what", "How"


def plan_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="An architecture's name (llama-3-70b), a folder, config.json, or module:factory.", show_default=False),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option("--params", help="Only a number of parameters, such as 7.5e9.", show_default=False, rich_help_panel=_MODEL),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs in all.", rich_help_panel=_MACHINE)] = 8,
    per_node: Annotated[int, typer.Option("--per-node", help="GPUs of one node.", rich_help_panel=_MACHINE)] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="Which GPU, such as h100-80.", rich_help_panel=_MACHINE)] = "h100-80",
    link: Annotated[
        str, typer.Option("--link", help="Link between nodes: a name, or a rate such as 8x200g.", rich_help_panel=_MACHINE)
    ] = "8x200g",
    machines: Annotated[
        Path | None,
        typer.Option("--machines", help="TOML file with GPUs and links of your own.", show_default=False, rich_help_panel=_MACHINE),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="This machine, as onefold doctor --calibrate measured it.", rich_help_panel=_MACHINE)
    ] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", help="With --here: ranks (0: as many as were measured).", rich_help_panel=_MACHINE)
    ] = 0,
    stage: Annotated[str, typer.Option("--stage", help="0, 1, 2, 3 or auto.", rich_help_panel=_JOB)] = "auto",
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a sample.", rich_help_panel=_JOB)] = 2048,
    micro_batch: Annotated[
        str, typer.Option("--micro-batch", help="Samples a rank computes at once, or auto for the largest that fit.", rich_help_panel=_JOB)
    ] = "1",
    global_batch: Annotated[
        int, typer.Option("--global-batch", help="Samples of a step (0: one micro-batch a rank).", rich_help_panel=_JOB)
    ] = 0,
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option("--precision", rich_help_panel=_JOB)] = "bf16",
    accumulate: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option("--accumulate", help="Dtype of summed gradients.", rich_help_panel=_JOB)
    ] = "fp32",
    checkpointing: Annotated[
        Checkpointing, typer.Option("--checkpointing", help="Which blocks are recomputed.", rich_help_panel=_JOB)
    ] = "auto",
    optimizer: Annotated[str, typer.Option("--optimizer", rich_help_panel=_JOB)] = "adamw",
    lora: Annotated[int, typer.Option("--lora", help="Rank of LoRA adapters; 0 trains everything.", rich_help_panel=_JOB)] = 0,
    offload: Annotated[Offload, typer.Option("--offload", help="States off the device.", rich_help_panel=_JOB)] = "auto",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the engine as one of all ranks, without memory or network, and compare.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", help="With --simulate: which rank.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell before the run what each rank will hold, send and take, stage by stage, and which stage to use."""
    from onefold.plan.job import Job

    try:
        wanted = _subject(model, params)
        _check_machine(context, here)
        job = Job(
            seq=seq,
            micro_batch=_whole("--micro-batch", micro_batch),
            global_batch=global_batch,
            precision=precision,
            accumulate=accumulate,
            checkpointing="" if checkpointing == "auto" else checkpointing,
            optimizer=optimizer,
            lora_rank=lora,
            offload="" if offload == "auto" else offload,
        )
        if rank and not simulate:
            raise ValueError(f"--rank {rank} belongs to --simulate; a plan is the same for every rank.")
        found = _plan(wanted, _machine(here, ranks, gpus, per_node, gpu, link, machines), job, _stages(stage))
        ran = _simulated(found, wanted, rank) if simulate else None
    except (ValueError, OSError) as error:
        if as_json:
            print(json.dumps({"event": "error", "kind": type(error).__name__, "message": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(found.to_json() | ({"simulation": ran.to_json()} if ran is not None else {})))
        return
    from onefold.cli.plan_tables import show

    show(found)
    if ran is not None:
        from onefold.cli.plan_simulation import show_simulation

        show_simulation(ran)


def _plan(wanted: Any, machine: Any, job: Any, stages: tuple[int, ...]) -> Any:
    from onefold.plan.planner import plan

    return plan(wanted, machine, job, stages=stages)


def _simulated(found: Any, wanted: Any, rank: int) -> Any:
    from onefold.cli.plan_simulation import simulated

    return simulated(found, wanted, rank)


def _subject(model: str | None, params: float | None) -> str | float:
    if (model is None) == (params is None):
        raise ValueError("give a model (a name such as llama-3-8b, a folder, config.json, module:factory) or --params, one of the two.")
    return params if params is not None else str(model)


def _check_machine(context: typer.Context, here: bool) -> None:
    """An option of the other kind of machine would be silently ignored."""
    idle = ("gpus", "per_node", "gpu", "link", "machines") if here else ("ranks",)
    given = [f"--{name.replace('_', '-')}" for name in idle if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    if given and here:
        raise ValueError(f"{', '.join(given)} beside --here: this machine is what was measured; leave one of the two out.")
    if given:
        raise ValueError("--ranks belongs to --here; how many GPUs a named machine has is said with --gpus.")


def _whole(option: str, given: str) -> int:
    if given == "auto":
        return 0
    if not given.isdigit() or int(given) < 1:
        raise ValueError(f"{option} {given}: expected a whole number, 1 or more, or auto.")
    return int(given)


def _stages(given: str) -> tuple[int, ...]:
    if given == "auto":
        return ()
    if given not in ("0", "1", "2", "3"):
        raise ValueError(f"--stage {given}: expected 0, 1, 2, 3 or auto.")
    return (int(given),)


def _machine(here: bool, ranks: int, gpus: int, per_node: int, gpu: str, link: str, file: Path | None) -> Any:
    from onefold.plan import hardware

    if not here:
        return hardware.machine(gpus, min(per_node, max(gpus, 1)), gpu, link, file)
    from onefold.plan.calibrate import Calibration

    calibration = Calibration.load()
    return hardware.calibrated(calibration, ranks or max(calibration.measured_ranks))
