"""What no run could mean is refused when a recipe is built, and what has no effect is noted: a row of
a table for each, with words of the sentence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import onefold
from onefold import Recipe
from zoo import TinyMLP

DISK = {"offload_optimizer": "nvme", "nvme": "/nvme"}
DTYPES_EXPECTED = "expected 'fp64', 'fp32', 'bf16'"
BYTES_EXPECTED = "expected a number of bytes above 0, or a text such as '6GB' or '512MiB'"

#: (stage, option, values, words). Each value is named in the sentence too.
VALUES: list[tuple[int, str, list[Any], list[str]]] = [
    (3, "precision", ["fp8", 16, True, ["bf16"], ""], ["'fp32', 'bf16', 'fp16' or None"]),
    (3, "precision", ["bfloat16", torch.bfloat16], ["Did you mean 'bf16'?"]),
    (3, "second_copy", [1, "False", None], ["True or False"]),
    (3, "prefetch", [-1, 1.0, "2", True, None], ["whole number"]),
    (1, "stall_timeout", [0, 0.0, -1, math.nan, "30", None, [30], True, math.inf], ["seconds above 0"]),
    (3, "units", ["blocks.0", torch.nn.Linear], ["a list"]),
    (3, "units", [5, [3], ("a", None), {"a"}, {"a": 1}], []),
    (2, "reduce_at", ["never", "micro_batch", True, 1], ["'micro-batch'", "'boundary'"]),
    (1, "reduce_at", ["micro-batch"], ["stage 1", "stage 2 or 3"]),
    (3, "wire", [16, torch.int8, "int8"], [DTYPES_EXPECTED]),
    (3, "master_dtype", [None, torch.bool, torch.float64], [DTYPES_EXPECTED]),
    (3, "sync_buffers", [1, 0, "yes", "Norms", None], ["True", "'norms'", "False"]),
    (3, "moments", ["int2", torch.bfloat16], ["expected 'fp32', 'bf16', 'int8'"]),
    (3, "offload_param", ["gpu", "", True, 0.5, ["cpu"]], ["expected 'cpu', 'nvme' or None"]),
    (3, "offload_gradients", ["disk", True], ["expected 'cpu', 'nvme' or None"]),
    (3, "offload_optimizer", ["CPU", "host"], ["Did you mean 'cpu'?"]),
    (3, "offload_optimizer", [0.6, True, ["cpu"]], ["expected 'cpu', 'nvme' or None"]),
    (3, "offload_optimizer", ["cpu:0.6"], ["Did you mean 'cpu'? How much of it is offload_amount."]),
    (1, "offload_amount", [0.0, -0.5, 0, -3, 2, 1.5, True, "999B", ["6GB"], {"bytes": 1}], ["a share above 0", "a budget such as '6GB'"]),
    (1, "offload_amount", ["fast", "", "nvme:0.6"], [BYTES_EXPECTED]),
    (1, "offload_activations", ["", "GB", "6XB", "-1GB", "1,5GB", math.nan, [1]], [BYTES_EXPECTED]),
    (1, "offload_activations", [0, -1, "0GB", True], [BYTES_EXPECTED]),
    (1, "nvme", ["", [], 3, [3], {"/a"}, [None], ["/a", ""]], ["expected a folder"]),
    (3, "gather_codec", ["int3", 8], ["expected 'int8'"]),
]  # fmt: skip
#: (arguments, words)
TOGETHER: list[tuple[dict[str, Any], list[str]]] = [
    *(({"stage": stage}, [f"stage={stage!r}", "0, 1, 2 or 3"]) for stage in (4, -1, 3.0, "3", True, None, (3,))),
    *(({"stage": 3, wrong: 1}, [f"Did you mean {meant!r}?"]) for wrong, meant in {
        "prefech": "prefetch", "inflight": "in_flight", "reshard_after_foward": "reshard_after_forward", "unit": "units",
        "stall_time_out": "stall_timeout", "sync_buffer": "sync_buffers", "master_type": "master_dtype",
        "offload_params": "offload_param", "moment": "moments"}.items()),
    ({"stage": 3, "error_feedback": True}, ["has no error_feedback any more: leave it out"]),
    ({"stage": 3, "gradients": "sum"}, ["write reduce_op"]),
    ({"stage": 3, "overlap": False}, ["write prefetch=0, in_flight=0"]),
    ({"stage": 3, "elementwise_optimizer": True}, ["write whole=False"]),
    ({"stage": 3, "tile": "1GB"}, ["tile_linears"]),
    ({"stage": 3, "wibble": 1, "quux": 2}, ["wibble", "quux"]),
    *(({"stage": s, **DISK, "offload_param": "nvme"}, ["every rank computes from all", "leave offload_param out"]) for s in (0, 1, 2)),
    ({"stage": 3, "nvme": "/a", "offload_param": "nvme"}, ["give offload_optimizer='nvme' too"]),
    ({"stage": 3, **DISK, "offload_optimizer": "cpu", "offload_param": "nvme"}, ["give offload_optimizer='nvme' too"]),
    ({"stage": 2, "offload_gradients": "cpu"}, ["stored on 'host'", "states on 'device'"]),
    ({"stage": 2, "nvme": "/a", "offload_gradients": "nvme", "offload_optimizer": "cpu"}, ["states on 'host'"]),
    ({"stage": 3, "offload_optimizer": "nvme"}, ["names no folder: give nvme="]),
    ({"stage": 3, **DISK, "chunk": 65536, "moments": "int8"}, ["a multiple of 262144 elements"]),
    ({"stage": 3, "step_in_backward": True}, ["offload_optimizer says where they are"]),
    *(({"stage": s, "gather_codec": "int8"}, ["are gathered in full; use stage 3"]) for s in (0, 1, 2)),
    ({"stage": 0, "reduce_codec": "int8"}, ["stage 0 reduces and gathers sums"]),
    ({"stage": 2, "reduce_codec": "int8", "accumulate_dtype": "bf16"}, ["leave accumulate_dtype out"]),
    ({"stage": 2, "reduce_codec": "int8", "reduce": "native"}, ["leave one of them out"]),
    ({"stage": 2, "frozen": "int8"}, ["use stage 3"]),
    ({"stage": 3, "frozen": "int8", "offload_param": "cpu"}, ["offload_optimizer may stay"]),
    ({"stage": 3, "second_copy": True, "shard_group": 2}, ["second_copy=True with a shard_group"]),
    ({"stage": 0, "shard_group": 2}, ["stage 0"]),
    ({"stage": 2, "second_copy": True}, ["stage 3"]),
]  # fmt: skip
#: (how a recipe is made, words)
ROWS: list[tuple[Any, str]] = [
    (lambda: onefold.shard(TinyMLP(), Recipe.zero(3), units="blocks.0"), "units='blocks.0'"),
    *((lambda option=option, value=value: Recipe.zero(3).replace(**{option: value}), f"{option}={value!r}")
      for option, value in [("prefetch", -1), ("cast_inputs", "no"), ("stall_timeout", 0), ("units", "blocks"), ("reduce_at", "never"),
                            ("offload_activations", "much")]),
    (lambda: Recipe.zero(3).replace(prefech=1), "Did you mean 'prefetch'"),
    (lambda: Recipe.zero(1).replace(reduce_at="micro-batch"), "reduce_at='micro-batch' cannot apply"),
]  # fmt: skip
#: (recipe, what begins each note). A note says that an option has no effect, and why.
NOTES: list[tuple[Recipe, list[str]]] = [
    (Recipe.zero(3, prefetch=2, reshard_after_forward=False, in_flight=3, units=["a"], stall_timeout=5), []),
    (Recipe.zero(3, precision="bf16", reduce_at="boundary", wire="fp32", sync_buffers=False), []),
    (Recipe.zero(1, precision="bf16", in_flight=1, cast_inputs=True, wire="bf16"), []),
    *((Recipe.zero(s, prefetch=2), ["prefetch=2"]) for s in (0, 1, 2)),
    *((Recipe.zero(s, reshard_after_forward=False), ["reshard_after_forward=False"]) for s in (0, 1, 2)),
    (Recipe.zero(3, precision="fp32", cast_inputs=False), ["cast_inputs=False"]),
    (Recipe.zero(0, whole=False), ["whole=False"]),
    (Recipe.zero(2, nvme="/a"), ["nvme="]),
    (Recipe.zero(2, nvme="/a", offload_optimizer="cpu", chunk=65536), ["nvme=", "chunk=65536"]),
    (Recipe.zero(2, **DISK, chunk=65536, nvme_threads=8), []),
    (Recipe.zero(2).replace(offload_amount=0.5), ["offload_amount=0.5"]),
    (Recipe.zero(3, offload_param="cpu", offload_optimizer="cpu"), []),
    (Recipe.zero(3, offload_param="cpu"), ["offload_param='cpu'"]),
]  # fmt: skip


def cases() -> Iterator[tuple[Any, list[str]]]:
    for stage, option, values, words in VALUES:
        for value in values:
            given = {"nvme": "/nvme"} if option == "offload_optimizer" else {}
            named = [f"{option}={value!r}"]
            yield {"stage": stage, **given, option: value}, [*named, *words]
    yield from TOGETHER


def test_what_no_run_could_mean_is_refused_in_a_sentence_that_names_it() -> None:
    wrong = []
    made: list[tuple[Any, Any, list[str]]] = [
        (arguments, lambda arguments=arguments: Recipe.zero(**arguments), words)
        for arguments, words in cases()
    ]
    made += [(words, make, [words]) for make, words in ROWS]
    for title, make, words in made:
        try:
            make()
        except ValueError as error:
            missing = [word for word in words if word not in str(error)]
            if missing or not str(error).endswith((".", "?", ")")):
                wrong.append(f"{title}: {missing} not in: {error}")
        else:
            wrong.append(f"{title}: nothing was refused")
    assert not wrong, "\n".join(wrong)


def test_what_has_no_effect_is_noted_and_what_has_is_not() -> None:
    for recipe, begins in NOTES:
        found = recipe.notes
        assert len(found) == len(begins), (recipe, found)
        for note, begin in zip(sorted(found), sorted(begins), strict=True):
            assert note.startswith(begin) and "no effect" in note, note


def test_notes_are_logged_once_shown_and_go_with_their_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = Recipe.zero(1, prefetch=2, reshard_after_forward=False)
    with caplog.at_level(logging.WARNING, logger="onefold"):
        onefold.shard(TinyMLP(), recipe)
    logged = [record.getMessage() for record in caplog.records if record.name == "onefold"]
    assert len(recipe.notes) == 2 and logged == list(recipe.notes)
    assert all(note in recipe.describe() for note in recipe.notes)
    assert recipe.replace(prefetch=1, reshard_after_forward=True).replace(in_flight=1).notes == ()
    assert Recipe.zero(1, prefetch=1) == Recipe.zero(1)
