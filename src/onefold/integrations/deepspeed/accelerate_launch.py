"""`onefold accelerate launch ...`: run accelerate's launcher with the name deepspeed served.

The name is served in the launcher and in every process that it starts.

    onefold accelerate launch --use_deepspeed --zero_stage 3 --num_processes 8 train.py --lr 1e-4
    └─ accelerate's parser, which asks whether deepspeed is installed
       └─ python -m onefold.deepspeed train.py --lr 1e-4      on each rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.integrations.deepspeed.names.serving import serve

#: The multi-node launcher that works without the command `deepspeed`, unlike accelerate's default.
STANDARD = "standard"
SERVING = "onefold.deepspeed"


def launch(arguments: Sequence[str]) -> None:
    """Run `accelerate launch` with these arguments, and the script under `python -m
    onefold.deepspeed`.

    Raises:
        ValueError: accelerate is not installed, or the arguments ask for something that only the
            command `deepspeed` can start.
        SystemExit: accelerate's parser refuses the arguments, or the script failed.
    """
    serve()
    try:
        from accelerate.commands.launch import launch_command, launch_command_parser
    except ModuleNotFoundError as error:
        raise ValueError(
            f"onefold accelerate launch needs {error.name}, which is not installed: pip install"
            " accelerate"
        ) from None
    launch_command(under_onefold(launch_command_parser().parse_args(list(arguments))))


def under_onefold(args: Any) -> Any:
    """Change accelerate's parsed arguments to run the script under `python -m onefold.deepspeed`.

    Raises:
        ValueError: the script is not a Python script, or several machines are to be started by the
            command `deepspeed`.
    """
    if args.no_python:
        raise ValueError(
            "--no_python starts something that is no Python script, in which nobody can serve the"
            " name deepspeed. Leave --no_python out."
        )
    machines = args.num_machines or 1
    launcher = args.deepspeed_multinode_launcher or "pdsh"
    if args.use_deepspeed and machines > 1 and launcher != STANDARD:
        raise ValueError(
            f"--num_machines {machines} with the launcher {launcher!r} needs the command deepspeed,"
            f" which Onefold does not have. Give --deepspeed_multinode_launcher {STANDARD}, and run"
            " the same line on each machine with its --machine_rank."
        )
    if args.training_script != SERVING:
        module = ["-m"] if args.module else []
        args.training_script_args = [*module, args.training_script, *args.training_script_args]
        args.training_script, args.module = SERVING, True
    return args
