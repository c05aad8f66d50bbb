"""The command `onefold`, held where it has just imported a module: a signal that is sent then meets
it there, however busy the machine is.

    python tests/held.py MODULE ARGUMENT ...

Behind the last line of MODULE it says `HELD` on the standard error, and waits.
"""

from __future__ import annotations

import runpy
import sys
import time
from types import ModuleType
from typing import Any

HELD = "held"
#: Seconds; the signal ends the wait long before.
WAITING = 600.0


class Holding:
    """Finds one module, as the others find it, and waits behind its last line."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec: Any = next(spec for spec in found if spec is not None)
        run = spec.loader.exec_module

        def run_and_wait(module: ModuleType) -> None:
            run(module)
            print(HELD, file=sys.stderr, flush=True)
            time.sleep(WAITING)

        spec.loader.exec_module = run_and_wait
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, Holding(sys.argv[1]))  # type: ignore[arg-type]
    sys.argv[:2] = ["onefold"]
    sys.path[0] = ""  # as with -m
    runpy.run_module("onefold", run_name="__main__", alter_sys=True)
