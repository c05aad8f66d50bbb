"""`onefold plan`: will it fit, how fast will it go, which stage is needed. Answers in seconds, for a model of any size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

Checkpointing = Literal["auto", "none", "selective", "full"]
Reduce = Literal["auto", "micro-batch", "boundary"]
Offload = Literal["auto", "none", "optimizer", "parameters", "optimizer-nvme", "parameters-nvme", "nvme"]
Tier = Literal["cpu", "nvme"]
Moments = Literal["fp32", "bf16", "int8", "fp8", "int4"]
Codec = Literal["none", "int8", "fp8", "int4"]
Stored = Literal["none", "int8", "nf4", "int4", "fp8"]
_MODEL, _MACHINE, _JOB, _TIERS, _WIRES = "What is trained", "On what", "How", "Where state rests", "What travels, where links are slow"


def plan_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="An architecture's name (llama-3-70b), a folder, config.json, or module:factory.", show_default=False),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option("--params", help="Only a number of parameters, such as 7.5e9 or 7.5B.", show_default=False, rich_help_panel=_MODEL),
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
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Memory of one node's host: 64GB.", show_default=False, rich_help_panel=_MACHINE)
    ] = None,
    disk_space: Annotated[
        str | None, typer.Option("--disk-space", help="Room on one node's disks: 2TB.", show_default=False, rich_help_panel=_MACHINE)
    ] = None,
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
    reduce_at: Annotated[
        Reduce, typer.Option("--reduce-at", help="When stages 2 and 3 reduce gradients (auto: every micro-batch).", rich_help_panel=_JOB)
    ] = "auto",
    checkpointing: Annotated[
        Checkpointing, typer.Option("--checkpointing", help="Which blocks are recomputed.", rich_help_panel=_JOB)
    ] = "auto",
    optimizer: Annotated[str, typer.Option("--optimizer", rich_help_panel=_JOB)] = "adamw",
    lora: Annotated[int, typer.Option("--lora", help="Rank of LoRA adapters; 0 trains everything.", rich_help_panel=_JOB)] = 0,
    offload: Annotated[
        Offload, typer.Option("--offload", help="States off the device (auto: as little as fits).", rich_help_panel=_TIERS)
    ] = "auto",
    offload_optimizer: Annotated[
        str | None,
        typer.Option("--offload-optimizer", help="cpu, nvme, 0.6, 6GB, nvme:0.6.", show_default=False, rich_help_panel=_TIERS),
    ] = None,
    offload_gradients: Annotated[
        Tier | None, typer.Option("--offload-gradients", help="Where states are on NVMe.", show_default=False, rich_help_panel=_TIERS)
    ] = None,
    offload_param: Annotated[
        Tier | None, typer.Option("--offload-param", help="At stage 3.", show_default=False, rich_help_panel=_TIERS)
    ] = None,
    offload_activations: Annotated[
        str | None, typer.Option("--offload-activations", help="cpu, or a budget: 8GB.", show_default=False, rich_help_panel=_TIERS)
    ] = None,
    nvme: Annotated[
        list[str] | None, typer.Option("--nvme", help="Folders on disks, for the recipe.", show_default=False, rich_help_panel=_TIERS)
    ] = None,
    tile: Annotated[
        str | None, typer.Option("--tile", help="Larger weights are computed in tiles: 512MB.", show_default=False, rich_help_panel=_TIERS)
    ] = None,
    moments: Annotated[
        Moments | None, typer.Option("--moments", help="What Adam's moments rest in.", show_default=False, rich_help_panel=_TIERS)
    ] = None,
    step_in_backward: Annotated[
        bool, typer.Option("--step-in-backward", help="Step units behind the backward pass.", rich_help_panel=_TIERS)
    ] = False,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Moves go inside groups and across: node, ranks; flat.", show_default=False, rich_help_panel=_WIRES),
    ] = None,
    shard_group: Annotated[
        str | None,
        typer.Option("--shard-group", help="HSDP, MiCS: divided in each group.", show_default=False, rich_help_panel=_WIRES),
    ] = None,
    optimizer_over: Annotated[
        Literal["none", "all"] | None,
        typer.Option("--optimizer-over", help="With --shard-group, optimizer states.", show_default=False, rich_help_panel=_WIRES),
    ] = None,
    second_copy: Annotated[
        bool, typer.Option("--second-copy", help="ZeRO++ hpZ: parameters in each group too.", rich_help_panel=_WIRES)
    ] = False,
    gather_codec: Annotated[
        Codec | None, typer.Option("--gather-codec", help="ZeRO++ qwZ: of parameters.", show_default=False, rich_help_panel=_WIRES)
    ] = None,
    reduce_codec: Annotated[
        Codec | None, typer.Option("--reduce-codec", help="ZeRO++ qgZ: of gradients.", show_default=False, rich_help_panel=_WIRES)
    ] = None,
    error_feedback: Annotated[
        bool, typer.Option("--error-feedback", help="With --reduce-codec: keep what it loses.", rich_help_panel=_WIRES)
    ] = False,
    wire_rounding: Annotated[
        Literal["nearest", "stochastic"], typer.Option("--wire-rounding", help="Of encoded gradients.", rich_help_panel=_WIRES)
    ] = "nearest",
    reduce: Annotated[
        Literal["ordered", "native"], typer.Option("--reduce", help="Who adds gradients up; native: NCCL.", rich_help_panel=_WIRES)
    ] = "ordered",
    frozen: Annotated[
        Stored | None, typer.Option("--frozen", help="What frozen matrices rest in.", show_default=False, rich_help_panel=_WIRES)
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Also run the engine as one of all ranks, on fake samples, and compare bytes and seconds."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="With --simulate: write the step's timeline as a file for Perfetto.", show_default=False),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="With --simulate: which rank.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell before the run what each rank will hold, send and take, stage by stage, and which stage to use.

    Status 0: answered, also where nothing fits ("recommended" is null then). Status 2: the question cannot be answered.
    """
    from onefold.cli.plan_groups import groups_asked
    from onefold.cli.plan_tiers import places_asked, with_host
    from onefold.plan.job import Job

    try:
        wanted = _subject(model, params)
        _check_machine(context, here)
        places = places_asked(
            offload_optimizer=offload_optimizer,
            offload_gradients=offload_gradients,
            offload_param=offload_param,
            offload_activations=offload_activations,
            nvme=nvme,
            tile=tile,
            moments=moments,
            step_in_backward=step_in_backward,
        )
        places |= groups_asked(
            group=group,
            shard_group=shard_group,
            optimizer_over=optimizer_over,
            second_copy=second_copy,
            gather_codec=gather_codec,
            reduce_codec=reduce_codec,
            error_feedback=error_feedback,
            wire_rounding=wire_rounding,
            frozen=frozen,
        )
        if reduce != "ordered":
            places["reduce"] = reduce
        if reduce_at != "auto":
            places["reduce_at"] = reduce_at
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
            options=tuple(places.items()),
        )
        if rank and not simulate:
            raise ValueError(f"--rank {rank} belongs to --simulate; a plan is the same for every rank.")
        if trace is not None and not simulate:
            raise ValueError(f"--trace {trace} belongs to --simulate, which makes the timeline.")
        machine = with_host(_machine(here, ranks, gpus, per_node, gpu, link, machines), host_memory, disk_space)
        found = _plan(wanted, machine, job, _stages(stage))
    except (ValueError, OSError) as error:
        _refuse(error, as_json)
    if not as_json:
        from onefold.cli.plan_tables import show

        show(found)
    try:
        ran = _simulated(found, wanted, rank, trace) if simulate else None
    except (ValueError, OSError) as error:  # the plan stands all the same
        _refuse(error, as_json, found)
    if as_json:
        simulation = {"simulation": {"scheme": str(found.shown.scheme)} | ran.to_json()} if ran is not None else {}
        print(json.dumps(found.to_json() | simulation))
    elif ran is not None:
        from onefold.cli.plan_simulation import show_simulation, show_timeline

        show_simulation(ran, found.shown.scheme)
        show_timeline(ran, found.shown)
        if trace is not None:
            print(f"timeline written to {trace}: open it in https://ui.perfetto.dev")


def _refuse(error: Exception, as_json: bool, found: Any = None) -> NoReturn:
    """Say what was wrong, in JSON beside the plan if there is one, and end with status 2."""
    message = _by_option(str(error))
    if as_json:
        said = {"event": "error", "kind": type(error).__name__, "message": message}
        print(json.dumps((found.to_json() if found is not None else {}) | said))
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2) from None


#: Fields of a job that a message may begin with, and the option that they are here.
_OPTION_OF = {
    "seq": "--seq", "micro_batch": "--micro-batch", "global_batch": "--global-batch", "lora_rank": "--lora", "optimizer": "--optimizer",
}  # fmt: skip


def _by_option(message: str) -> str:
    """The message in the words of the command line."""
    name, _, rest = message.partition("=")
    return f"{_OPTION_OF[name]} {rest}" if name in _OPTION_OF else message


def _plan(wanted: Any, machine: Any, job: Any, stages: tuple[int, ...]) -> Any:
    from onefold.plan.planner import plan

    return plan(wanted, machine, job, stages=stages)


def _simulated(found: Any, wanted: Any, rank: int, trace: Path | None) -> Any:
    from onefold.cli.plan_simulation import simulated, write_trace

    ran = simulated(found, wanted, rank)
    if trace is not None:
        write_trace(ran, found.shown.scheme, trace)
    return ran


def _subject(model: str | None, params: str | None) -> str | float:
    if (model is None) == (params is None):
        raise ValueError("give a model (a name such as llama-3-8b, a folder, config.json, module:factory) or --params, one of the two.")
    return _number(params) if params is not None else str(model)


def _number(given: str) -> float:
    """7.5e9, 7.5B or 7,500,000,000 as a number."""
    plain = given.strip().replace(",", "").replace("_", "").upper()
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(plain[-1:], 1.0)
    try:
        return float(plain.rstrip("KMBT") if unit > 1 else plain) * unit
    except ValueError:
        raise ValueError(f"--params {given}: expected a number of parameters, such as 7.5e9 or 7.5B.") from None


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
        for option, count in (("--gpus", gpus), ("--per-node", per_node)):
            if count < 1:
                raise ValueError(f"{option} {count}: expected a whole number, 1 or more.")
        return hardware.machine(gpus, min(per_node, gpus), gpu, link, file)
    from onefold.plan.calibrate import Calibration

    calibration = Calibration.load()
    return hardware.calibrated(calibration, ranks or max(calibration.measured_ranks))
