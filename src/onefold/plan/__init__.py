"""Room `plan`: what a job will hold, send and take, before it runs. Knows no running engine.

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
