"""`onefold plan`: does a model fit, how fast does it train, and which stage does it need. Answers
in seconds, for a model of any size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from onefold.cli.options import asked_of, option, recipe_parameter, refuse, with_parameters
from onefold.recipe.core import DIVISION, OPTIONS, TIERS
from onefold.recipe.options import Precision, bytes_of

Schedule = Literal["1f1b", "gpipe"]
Checkpointing = Literal["auto", "none", "selective", "full"]
Offload = Literal[
    "auto", "none", "optimizer", "parameters", "optimizer-nvme", "parameters-nvme", "nvme"
]
_MODEL, _MACHINE, _JOB, _AXES = "What is trained", "On what", "How", "Other axes than data"
#: Fewer bytes than this cannot be what the user meant.
_FEWEST = 1 << 14


# fmt: off
def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="An architecture's name (llama-3-70b), a folder, config.json, or module:factory.", show_default=False),
    ] = None,
    params: Annotated[str | None, option("Only a number of parameters, such as 7.5e9 or 7.5B.", _MODEL)] = None,
    gpus: Annotated[int, option("GPUs in all.", _MACHINE, shown=True)] = 8,
    per_node: Annotated[int, option("GPUs of one node.", _MACHINE, shown=True)] = 8,
    gpu: Annotated[str, option("Which GPU, such as h100-80.", _MACHINE, shown=True)] = "h100-80",
    link: Annotated[str, option("Link between nodes: a name, or a rate such as 8x200g.", _MACHINE, shown=True)] = "8x200g",
    machines: Annotated[Path | None, option("TOML file with GPUs and links of your own.", _MACHINE)] = None,
    here: Annotated[bool, option("This machine, as onefold doctor --calibrate measured it.", _MACHINE, "--here")] = False,
    host_memory: Annotated[str | None, option("Memory of one node's host: 64GB.", _MACHINE)] = None,
    disk_space: Annotated[str | None, option("Room on one node's disks: 2TB.", _MACHINE)] = None,
    seq: Annotated[int, option("Tokens of a sample.", _JOB, shown=True)] = 2048,
    micro_batch: Annotated[
        str, option("Samples a rank computes at once, or auto for the largest that fit.", _JOB, shown=True)
    ] = "1",
    global_batch: Annotated[int, option("Samples of a step (0: one micro-batch a rank).", _JOB, shown=True)] = 0,
    activation_checkpointing: Annotated[Checkpointing, option("Blocks to recompute.", _JOB, shown=True, words=Checkpointing)] = "auto",
    optimizer: Annotated[str, option("The optimizer, by the name of its class.", _JOB, shown=True)] = "adamw",
    lora: Annotated[int, option("Rank of LoRA adapters; 0 trains everything.", _JOB, shown=True)] = 0,
    stage: Annotated[str, option("0, 1, 2, 3 or auto.", DIVISION, shown=True)] = "auto",
    precision: Annotated[Precision, option("Compute precision.", DIVISION, shown=True)] = "bf16",
    offload: Annotated[Offload, option("States off the device (auto: as little as fits).", TIERS, shown=True, words=Offload)] = "auto",
    tp: Annotated[str, option("Tensor-parallel ranks, or auto: search.", _AXES, shown=True)] = "1",
    pp: Annotated[str, option("Stages of the pipeline, or auto.", _AXES, shown=True)] = "1",
    cp: Annotated[str, option("Context-parallel ranks, or auto.", _AXES, shown=True)] = "1",
    ep: Annotated[str, option("Data-parallel ranks with different experts, or auto.", _AXES, shown=True)] = "1",
    chunks: Annotated[int, option("Parts of the model on each stage (interleaved).", _AXES, shown=True)] = 1,
    schedule: Annotated[Schedule, option("The pipeline's.", _AXES, shown=True)] = "1f1b",
    no_sequence_parallel: Annotated[bool, option("Norms are not divided by tokens.", _AXES, "--no-sequence-parallel")] = False,
    no_expert_tp: Annotated[bool, option("Tensor parallelism leaves experts whole.", _AXES, "--no-expert-tp")] = False,
    simulate: Annotated[
        bool, option("Also run the engine as one of all ranks, on fake samples, and compare bytes.", None, "--simulate")
    ] = False,
    rank: Annotated[int, option("With --simulate: which rank.", shown=True)] = 0,
    explain: Annotated[bool, option("Also say what the next steps would buy and what figures rest on.", None, "--explain")] = False,
    as_json: Annotated[bool, option("Print one JSON object.", None, "--json")] = False,
    **recipe: Any,
) -> None:
    # fmt: on
    """Tell before the run what each rank will hold, send and take, stage by stage, and which stage
    to use.

    Status 0: answered, also where nothing fits ("recommended" is null then). Status 2: the question
    cannot be answered.
    """
    from onefold.plan import planner
    from onefold.plan.job import Job

    try:
        wanted = _subject(model, params)
        _check_machine(context, here)
        options = asked_of(recipe)
        _refuse_few_bytes(options, recipe)
        job = Job(
            seq=seq,
            micro_batch=_whole("--micro-batch", micro_batch),
            global_batch=global_batch,
            precision=precision,
            accumulate_dtype=options.pop("accumulate_dtype", "fp32"),
            checkpointing="" if activation_checkpointing == "auto" else activation_checkpointing,
            optimizer=optimizer,
            lora_rank=lora,
            offload="" if offload == "auto" else offload,
            options=tuple(options.items()),
        )
        if rank and not simulate:
            raise ValueError(
                f"--rank {rank} belongs to --simulate; a plan is the same for every rank."
            )
        machine = _with_host(
            _machine(here, gpus, per_node, gpu, link, machines), host_memory, disk_space
        )
        axes: dict[str, Any] = {}
        if _asked_axes(context):
            axes = {
                "axes": {n: _degree(n, d) for n, d in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep))},
                "chunks": chunks,
                "schedule": schedule,
                "sequence_parallel": not no_sequence_parallel,
                "expert_tp": not no_expert_tp,
            }
        found = planner.plan(wanted, machine, job, stages=_stages(stage), **axes)
    except (ValueError, OSError) as error:
        _refuse(error, as_json)
    if not as_json:
        from onefold.plan.tables import show

        show(found, explain=explain)
    ran: list[Any] = []
    try:
        if simulate:
            from onefold.cli import plan_simulation

            given = _given(context, "rank")
            ran = plan_simulation.simulated(found, wanted, rank if given or not axes else None)
    except (ValueError, OSError) as error:  # report the plan together with the error
        _refuse(error, as_json, **found.to_json())
    if as_json:
        simulation = {"simulation": [one.to_json() for one in ran]} if ran else {}
        print(json.dumps(found.to_json() | simulation))
    elif ran:
        plan_simulation.show_simulation(ran, found.shown.scheme)


_AXES_OPTIONS = (
    "tp", "pp", "cp", "ep", "chunks", "schedule", "no_sequence_parallel", "no_expert_tp",
)  # fmt: skip


def _given(context: typer.Context, name: str) -> bool:
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def _asked_axes(context: typer.Context) -> bool:
    """Whether an option about other axes is given."""
    return any(_given(context, name) for name in _AXES_OPTIONS)


def _degree(name: str, given: str) -> int | str:
    if given == "auto" or (given.isdigit() and int(given) > 0):
        return given if given == "auto" else int(given)
    raise ValueError(f"--{name} {given}: expected a whole number, 1 or more, or auto.")


plan_command = with_parameters(
    plan,
    [
        recipe_parameter(row, both=False)
        for row in OPTIONS.values()
        if "plan" in row.commands and row.name not in ("stage", "precision")
    ],
)


def _refuse(error: Exception, as_json: bool, **beside: Any) -> NoReturn:
    """Report an error in the words of the command line, and exit."""
    name, _, rest = str(error).partition("=")
    if name in _OPTION_OF:
        refuse(f"{_OPTION_OF[name]} {rest}", as_json, kind=type(error).__name__, **beside)
    refuse(error, as_json, **beside)


#: {field of a job that begins a message: the command's option}
_OPTION_OF = {
    "seq": "--seq", "micro_batch": "--micro-batch", "global_batch": "--global-batch", "lora_rank": "--lora", "optimizer": "--optimizer",
}  # fmt: skip


def _refuse_few_bytes(options: dict[str, Any], words: dict[str, Any]) -> None:
    """Raise ValueError for too few bytes. A number without a unit means bytes, and a very small one
    was probably meant in another unit.
    """
    wanted = {
        "offload_amount": "give a share of at most 1 such as 0.6, or at least",
        "offload_activations": "give at least",
    }
    for name in options.keys() & wanted.keys():
        nbytes = OPTIONS[name].read(options[name])
        if isinstance(nbytes, int) and nbytes < _FEWEST:
            raise ValueError(
                f"{OPTIONS[name].flag} {words[name]} is {nbytes:,} byte{'s' if nbytes > 1 else ''}:"
                f" {wanted[name]} {_FEWEST:,}, such as 512MB."
            )


def _with_host(machine: Any, memory: str | None, disk: str | None) -> Any:
    """Return the machine with the given host memory and disk space.
    Raises ValueError if one is not a number of bytes.
    """
    both = (("memory", "--host-memory", memory), ("nvme", "--disk-space", disk))
    given = {name: float(bytes_of(flag, text)) for name, flag, text in both if text is not None}
    return replace(machine, host=replace(machine.host, **given))


def _subject(model: str | None, params: str | None) -> str | float:
    if (model is None) == (params is None):
        raise ValueError(
            "give a model (a name such as llama-3-8b, a folder, config.json, module:factory) or"
            " --params, one of the two."
        )
    return _number(params) if params is not None else str(model)


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


def _check_machine(context: typer.Context, here: bool) -> None:
    """Raise ValueError for options of a named machine beside --here, which would be ignored."""
    options = ("gpus", "per_node", "gpu", "link", "machines")
    given = [f"--{name.replace('_', '-')}" for name in options if _given(context, name)]
    if given and here:
        raise ValueError(
            f"{', '.join(given)} beside --here: this machine is what was measured; leave one of the"
            " two out."
        )


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


def _machine(
    here: bool, gpus: int, per_node: int, gpu: str, link: str, file: Path | None
) -> Any:
    from onefold.plan import hardware

    if not here:
        for option, count in (("--gpus", gpus), ("--per-node", per_node)):
            if count < 1:
                raise ValueError(f"{option} {count}: expected a whole number, 1 or more.")
        return hardware.machine(gpus, min(per_node, gpus), gpu, link, file)
    from onefold.machine.calibration import Calibration

    return hardware.calibrated(Calibration.load())
