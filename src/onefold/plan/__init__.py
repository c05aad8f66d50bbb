"""Room `plan`: what a job will hold, send and take, before it runs. It knows no running engine.

| question                                      | files, in the order to read them           |
|-----------------------------------------------|--------------------------------------------|
| What is asked, on which machine?              | `job`, `degrees`, `hardware`, `api`        |
| What is the model?                            | `shapes`, `modules`, `subject`             |
| What does a rank hold between steps?          | `rank`, `owned`                            |
| What does it hold off its device?             | `offloaded`                                |
| What do a micro-batch's activations hold?     | `activity`                                 |
| What does a step do, and hold meanwhile?      | `program`                                  |
| How long does it take?                        | `times`                                    |
| What is the account of one scheme?            | `schema`, `account`                        |
| Which scheme or mesh, and what else?          | `search`                                   |
| How is the plan shown?                        | `api`, `tables`                            |

Other rooms look at what cannot be counted: `tracing` at a module's activations, `machine` at
measured speeds, `simulation` at a step of the engine itself.

`onefold.plan(model, ...)` is `onefold.plan.api.plan`: the room itself can be called.
`onefold.plan.recipe_for(model, ...)` is the recipe for the machine that this process runs on.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """This package, which can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from onefold.plan.api import plan

        return plan(*args, **kwargs)


def recipe_for(model: Any, **job: Any) -> Any:
    """Return a recipe of the lowest stage whose peak fits this machine. Collective; see
    `onefold.plan.api.recipe_for`.
    """
    from onefold.plan.api import recipe_for as find

    return find(model, **job)


sys.modules[__name__].__class__ = _Room
