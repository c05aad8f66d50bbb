"""Sentences of a plan about what its recipe asks for and what changes nothing, so that nothing is
silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from onefold.plan.choose import Question
from onefold.plan.evaluate import Candidate
from onefold.plan.states import units_of
from onefold.plan.tiled import is_in_tiles
from onefold.plan.traffic import topology_of
from onefold.plan.wires import WIRES, as_recipe
from onefold.recipe import Recipe
from onefold.recipe.groups import FLAT
from onefold.runtime.placement import offload_notes


def said_of(question: Question, shown: Candidate) -> tuple[str, ...]:
    """Of the recipe of the candidate that a plan shows."""
    recipe = shown.scheme.recipe(question.job)
    without_effect = (n for n in recipe.notes if " has no effect " in n)
    return (
        *without_effect,
        *_of_groups(question, recipe),
        *_of_sizes(question, recipe),
        *_of_nodes(question, shown),
    )


def _of_groups(question: Question, recipe: Recipe) -> Iterator[str]:
    """The same that an engine says when it is made (runtime/notes.py)."""
    machine, asked = question.machine, question.job.wires
    topology = topology_of(recipe, machine.ranks, machine.local if machine.nodes > 1 else None)
    named = next((name for name in ("group", "shard_group") if name in asked), "")
    divides = "second_copy" in asked or "shard_group" in asked
    if machine.ranks == 1 and (divides or "gather_codec" in asked or "reduce_codec" in asked):
        yield f"{', '.join(sorted(asked))}: no effect on one rank, from which nothing travels"
    elif topology.outer == 1 and (named or divides) and recipe.group != FLAT:
        why = "they are on one node" if recipe.group == "node" else "they are all"
        yield (
            f"group={recipe.group!r} makes one group of the {machine.ranks} ranks ({why}): nothing"
            " is divided inside groups only"
        )
    if recipe.frozen is not None:
        units = units_of(
            question.model,
            recipe,
            machine.ranks,
            per_node=machine.local if machine.nodes > 1 else None,
        )
        if not any(f.stored for u in units for f in u.flats):
            yield (
                f"frozen={recipe.frozen!r} has no effect: no matrix but embeddings is frozen"
                " (--lora freezes those of the model)"
            )


def _of_nodes(question: Question, shown: Candidate) -> Iterator[str]:
    """Where nobody knows how fast links between nodes are, nothing is chosen for them."""
    machine, scheme = question.machine, shown.scheme
    if (
        machine.nodes < 2
        or machine.measured is not None
        or machine.gpu.name != "here"
        or question.job.wires
        or scheme.stage < 3
    ):
        return
    with_copy = question.answer(scheme.with_(wires="hpZ"))
    plain, less = (c.account.node_links.get("between", 0) for c in (shown, with_copy))
    way = as_recipe(scheme.stage, WIRES["hpZ"].options)
    yield (
        f"a node sends {plain / 1e9:,.2f} GB to the others in a step, and {less / 1e9:,.2f} GB with"
        f" {way}: the plan does not know how fast they are linked, so that is yours to choose"
    )


def _of_sizes(question: Question, recipe: Recipe) -> Iterator[str]:
    sizes = [sum(p.numel for p in u.parameters if p.trainable) for u in question.model.units]
    yield from offload_notes(sizes, recipe, question.machine.ranks)
    if recipe.tile is not None and not is_in_tiles(question.model):
        yield (
            f"tile={recipe.tile:,} bytes has no effect: no weight that can be computed in tiles is"
            " larger"
        )
