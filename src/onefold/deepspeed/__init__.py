"""DeepSpeed's training loop on `onefold.shard`, and its name for scripts that import it.

onefold.deepspeed.serve()        `import deepspeed` finds Onefold, in this process
onefold.initialize(...)          DeepSpeed's four-tuple
onefold.deepspeed.recipe_from()  the recipe that a DeepSpeed JSON stands for
"""

from typing import Any

from onefold.deepspeed.serving import serve, serving

__all__ = ["recipe_from", "serve", "serving"]


def __getattr__(name: str) -> Any:
    """Import `recipe_from` at its first use: a script that calls `serve` does so before all else."""
    if name != "recipe_from":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onefold.deepspeed.meaning import recipe_from

    return recipe_from
