"""Room `plan`: what a job will hold, send and take, before it runs. Knows no running engine.

| question                                  | files, in the order to read them                                           |
|-------------------------------------------|----------------------------------------------------------------------------|
| What is asked, on which machine?          | `job`, `hardware`, `api`                                                   |
| What is the model?                        | `shapes`, `architectures`, `from_module`, `model_code`, `tiles`, `subject` |
| What does a rank hold, send and copy?     | `states`, `wire`, `copies`, `offloaded`                                    |
| What does it hold at most?                | `replay` and `replayed`, `bound`, `activity`, `formulas`                   |
| How long does it take?                    | `traffic`, `times`, `efficiency`                                           |
| What is one scheme's account?             | `schema`, `evaluate`                                                       |
| Which scheme, and what else would do?     | `choose`, `slow_links`, `sums`, `cannot_fit`                               |
| How is it told?                           | `planner`, `tables`                                                        |

What is not counted is looked at, in rooms of their own: a module's activations in `tracing`, a
machine's speeds in `doctor`, a step of the engine itself in `simulation`.

`onefold.plan(model, ...)` is `onefold.plan.api.plan`: the room can be called by its own name.
`onefold.plan.recipe_for(model, ...)` is the recipe for the machine that this process runs on.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """This package, which answers when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from onefold.plan.api import plan

        return plan(*args, **kwargs)


def recipe_for(model: Any, **job: Any) -> Any:
    """The lowest stage whose peak fits this machine, from a plan of `model`. Collective; see
    `onefold.plan.api.recipe_for`.
    """
    from onefold.plan.api import recipe_for as find

    return find(model, **job)


sys.modules[__name__].__class__ = _Room
