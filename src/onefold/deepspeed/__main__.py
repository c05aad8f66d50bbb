"""Run a script that imports DeepSpeed, or uses it through transformers, accelerate, TRL or
Lightning, on Onefold.

python -m onefold.deepspeed train.py --arguments
torchrun --nproc-per-node 8 -m onefold.deepspeed train.py --arguments
accelerate launch --module onefold.deepspeed train.py --arguments

At the top of a script: `import onefold.deepspeed; onefold.deepspeed.serve()`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from onefold.deepspeed import serve

_USAGE = (
    "usage: python -m onefold.deepspeed [-m MODULE | SCRIPT.py] [its arguments]\n"
    "It serves the name deepspeed in the process of the script."
)


def main(arguments: Sequence[str]) -> None:
    """Serve the name, then run the script or the module as Python itself would.

    Args:
        arguments: a script's path, or "-m" and a module's name; then the arguments it gets.

    Raises:
        SystemExit: no script or module is given, or the script does not exist.
    """
    given = list(arguments)
    asked = given[:1] in (["-h"], ["--help"])
    if not given or asked or given == ["-m"]:
        print(_USAGE, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    is_module = given[0] == "-m"
    target, *rest = given[1:] if is_module else given
    if not is_module and not os.path.exists(target):
        raise SystemExit(f"there is no script {target!r}: give its path, or -m and a module.")
    serve()
    sys.argv = [target, *rest]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # As Python itself does, search the script's folder first, not the current one
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
