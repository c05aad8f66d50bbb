"""Plant faults in a copy of the source one by one, and see that a test turns red.

    python tests/faults.py [--only TEXT ...] [--list] [-n PROCESSES]

Each fault breaks one promise that a user relies on, and names the tests that should see it. They
run against a copy of `src` with the fault in it. A test that fails is run once more on the source as
it is, where it must pass.

Statuses: found; MISSED (the tests pass); BROKEN (no test could run, or the test that failed does so
without the fault too). If any is missed or broken, the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "onefold"
#: Seconds after which the tests of a fault hang, and have found it.
LIMIT = 900.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        promise: the group of promises. breaks: what is wrong with the fault in place.
        file: in src/onefold. old: a text that stands there once. new: what takes its place.
        see: tests that should turn red: files, or tests by their node ids.
    """

    promise: str
    breaks: str
    file: str
    old: str
    new: str
    see: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.promise}: {self.breaks}"

    def plant(self, package: Path) -> None:
        """Put the fault into `package`, a copy of src/onefold."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def row(name: str) -> str:
    """The node id of a row of tests/promises/table.py."""
    ranks = name.split(" on ")[1].split(",")[0]
    count = {"1": "one_rank_keeps", "2": "two_ranks_keep", "4": "four_ranks_keep"}[ranks]
    return f"tests/promises/test_promises.py::test_{count}_every_promise[{name}]"


FAULTS = [
    # -- numbers -----------------------------------------------------------------------------------
    Fault(
        "numbers",
        "each rank adds the parts of a gradient in an order of its own, where they arrive in fp32",
        "runtime/hops.py",
        "[part for _, part in sorted(parts.items())]",
        "[part for _, part in sorted(parts.items(), key=lambda p: (p[0] - here) % self.group.size)]",
        [
            "tests/promises/test_gradients.py::test_the_parts_of_a_gradient_are_added_in_the_order_of_the_ranks"
        ],
    ),
    Fault(
        "numbers",
        "the gradient of experts is divided once more, where their holders are fewer than data ranks",
        "layout/holders.py",
        "return 1.0 / (self.data * self.copies)",
        "return min(1.0, self.size / self.data) / (self.data * self.copies)",
        ["tests/parallel/test_axes.py::test_four_ranks_keep_every_promise[dp 2, ep 2]"],
    ),
    Fault(
        "numbers",
        "gradients are rounded to the wire's dtype before they are scaled, and once more after it",
        "runtime/hops.py",
        "        add_up(parts, target, self.late, round_to=round_to, dtype=self.sums)",
        "        add_up(parts, target, 1.0, round_to=round_to, dtype=self.sums)\n"
        "        target.mul_(self.late)",
        ["tests/promises/test_means.py"],
    ),
    Fault(
        "numbers",
        "the sums of stages 1 to 3 are not rounded to the dtype of the wire, as stage 0's are",
        "runtime/hops.py",
        "round_to = self.wire if self.last else None",
        "round_to = None",
        ["tests/promises/test_means.py"],
    ),
    Fault(
        "numbers",
        "the small gradients of a micro-batch replace those of the micro-batches before",
        "runtime/reduce.py",
        "torch._foreach_add_(views, grads, alpha=scale)",
        "torch._foreach_copy_(views, grads)",
        [row("accumulation: 0 on 2, 3 micro-batches, clipped to 0.5")],
    ),
    Fault(
        "numbers",
        "gradients of several micro-batches are added in 16 bits",
        "layout/spec.py",
        "            recipe.gradients.dtype,\n",
        "            recipe.gradients.wire or compute,\n",
        ["tests/promises/test_means.py"],
    ),
    Fault(
        "numbers",
        "a gradient that comes after its unit was reduced is lost",
        "runtime/agree.py",
        "[u.late for u in units]",
        "[False for u in units]",
        ["tests/scripts/test_scripts.py::test_every_habit_is_right_or_refused_as_declared[loops]"],
    ),
    Fault(
        "numbers",
        "a write to weights through .data does not reach the copies that passes compute with",
        "runtime/parameters/parameter.py",
        "    out = param.detach()",
        "    out = param.data",
        ["tests/promises/test_copies.py"],
    ),
    Fault(
        "numbers",
        "a cached shard is not made anew after a step",
        "runtime/gather.py",
        "self.cached_of == flat.version)",
        "self.cached_of >= 0)",
        [row("groups: 3 on 4, group=2, second_copy=True, clipped to 0.5")],
    ),
    Fault(
        "numbers",
        "the sums that a group holds until the boundary are lost",
        "runtime/reduce.py",
        "total.add_(held)\n",
        "total.add_(held, alpha=0)\n",
        [row("groups: 3 on 4, shard_group=2, precision=bf16, 3 micro-batches, clipped to 0.5")],
    ),
    Fault(
        "numbers",
        "in a large unit, a parameter that this rank did not use gets what was in the buffer before",
        "runtime/reduce.py",
        "                    flat.view(buffer, entry).zero_()\n            r =",
        "                    pass\n            r =",
        ["tests/promises/test_unused_parts.py"],
    ),
    Fault(
        "numbers",
        "an average of weights gives an update the weight of the one before",
        "ema.py",
        "1 / (self.updates + 1)",
        "1 / max(self.updates, 1)",
        ["tests/core/test_values.py::test_an_average_is_averaged_models_on_every_tier"],
    ),
    Fault(
        "numbers",
        "the gradients of a pipeline are not divided by the number of micro-batches",
        "parallel/stage.py",
        "reduce_grad(self.submod, grad_scale_factor)",
        "reduce_grad(self.submod)",
        ["tests/parallel/test_pipelines.py::test_four_ranks_train_as_one_process[1F1B]"],
    ),
    # -- wire --------------------------------------------------------------------------------------
    Fault(
        "wire",
        "the last unit of the forward pass is gathered again for the backward pass",
        "runtime/gather.py",
        "last = self._kept_last if not aborted and self.group.broken is None else ()",
        "last = ()",
        [row("stages: 3 on 2, clipped to 0.5")],
    ),
    Fault(
        "wire",
        "gradients travel in the dtype of the computation, whatever the recipe says",
        "layout/spec.py",
        "recipe.gradients.wire or compute,",
        "compute,",
        [row("accumulation: 3 on 2, wire=bf16, 3 micro-batches")],
    ),
    Fault(
        "wire",
        "the border of a node is crossed flat: every rank sends to every other",
        "comm/communicators.py",
        "return len(nodes) if uneven or each == 1 else each",
        "return len(nodes)",
        [row("groups: 3 on 4, 2 a node, clipped to 0.5")],
    ),
    Fault(
        "wire",
        "frozen parameters send gradients",
        "runtime/flat.py",
        "return bool(self.awaited)",
        "return not self.unsharded",
        [row("models: 3 on 2, half-frozen gpt")],
    ),
    # -- rest and peak -----------------------------------------------------------------------------
    Fault(
        "rest and peak",
        "every rank holds all masters, at every stage",
        "layout/spec.py",
        "return self.ranks == 1 or not self.recipe.optimizer.sharded",
        "return True",
        [row("stages: 3 on 2, precision=bf16, clipped to 0.5")],
    ),
    Fault(
        "rest and peak",
        "one unit more than asked is gathered ahead",
        "runtime/gather.py",
        "self.recipe.units_ahead(self.group.topology.two_levels)",
        "self.recipe.units_ahead(self.group.topology.two_levels) + 1",
        [row("schedule: 3 on 2, in_flight=0, large mlp")],
    ),
    Fault(
        "rest and peak",
        "of a share of the states to offload, half stays on the device",
        "runtime/units.py",
        "budget = sum(sizes) * recipe.offload_share",
        "budget = sum(sizes) * recipe.offload_share / 2",
        ["tests/promises/test_shares.py"],
    ),
    Fault(
        "rest and peak",
        "the plan forgets the buffers in which gradients arrive",
        "plan/program.py",
        "            taken = [self.pool.take(room.received, room.dtype, REDUCTION)] if room.rows else []\n",
        "            taken: list[torch.Tensor] = []\n",
        [row("stages: 0 on 2, clipped to 0.5")],
    ),
    Fault(
        "rest and peak",
        "a unit that another rank used and this one did not stays gathered in the pass",
        "runtime/gather.py",
        "if backward or unit not in self._kept_last:",
        "if False and unit not in self._kept_last:",
        ["tests/core/test_schedule.py", "tests/failures/test_diverging.py"],
    ),
    # -- checkpoints -------------------------------------------------------------------------------
    Fault(
        "checkpoints",
        "the last rank accounts for one element less than it has",
        "runtime/flat.py",
        "        return self._within(flat.layout.interval(flat.rank if position is None else position))",
        "        rank = flat.rank if position is None else position\n"
        "        a, b = self._within(flat.layout.interval(rank))\n"
        "        return a, b - (b > a and flat.rank == flat.group.size - 1)",
        [row("stages: 3 on 2, clipped to 0.5")],
    ),
    Fault(
        "checkpoints",
        "the folder gets its name before the names of its files are on the disk",
        "checkpoint/folder.py",
        "        flush(self.folder)\n",
        "",
        ["tests/checkpoints/test_flushed.py"],
    ),
    Fault(
        "checkpoints",
        "a save whose name the disk refuses raises, and its checkpoint is there",
        "checkpoint/folder.py",
        "            undo(self.target, self.folder)",
        "            pass",
        ["tests/checkpoints/test_flushed.py"],
    ),
    Fault(
        "checkpoints",
        "a stranger's file with fewer checksums than blocks is opened",
        "checkpoint/tensorfile.py",
        " or span.end - span.begin != 4 * span.sums:",
        ":",
        ["tests/checkpoints/test_hostile_files.py"],
    ),
    Fault(
        "checkpoints",
        "the folder gets its name before the manifest is on the disk",
        "checkpoint/saving.py",
        "                flush(path)",
        "                path.stat()",
        ["tests/checkpoints/test_flushed.py"],
    ),
    Fault(
        "checkpoints",
        "a checkpoint is removed before the one that replaces it has its name",
        "checkpoint/folder.py",
        "            exchange(self.folder, self.target)\n",
        "            shutil.rmtree(self.target)\n            os.rename(self.folder, self.target)\n",
        ["tests/checkpoints/test_whole_or_absent.py"],
    ),
    Fault(
        "checkpoints",
        "the step count of Adam begins anew after a load",
        "checkpoint/apply.py",
        "key: placed(value, entry.param, group)",
        'key: placed(value * 0 if key == "step" else value, entry.param, group)',
        [row("stages: 3 on 2, clipped to 0.5")],
    ),
    Fault(
        "checkpoints",
        "buffers are saved as the last rank has them",
        "checkpoint/parts.py",
        "if group.rank == 0:\n            out.add_own(Item(",
        "if group.rank == group.size - 1:\n            out.add_own(Item(",
        ["tests/checkpoints/test_buffers.py"],
    ),
    Fault(
        "checkpoints",
        "the next step does not wait for the copy of an asynchronous save",
        "checkpoint/background.py",
        "        if not self._done.is_set():",
        "        if False and not self._done.is_set():",
        ["tests/checkpoints/test_asynchronous.py"],
    ),
    Fault(
        "checkpoints",
        "what is written under the copy of an asynchronous save goes unnoticed",
        "checkpoint/background.py",
        "torn = [i for i, version in self._versions.items() if now[i] != version]",
        "torn: list[int] = []",
        ["tests/checkpoints/test_asynchronous.py"],
    ),
    Fault(
        "checkpoints",
        "bytes that have changed on the disk load in silence",
        "checkpoint/tensorfile.py",
        "for begin in range(0, len(into), BLOCK) if self._checked else ():",
        "for begin in range(0, 0):",
        ["tests/checkpoints/test_hostile_files.py"],
    ),
    Fault(
        "checkpoints",
        "the checkpoint that was just saved may be removed as an old one",
        "checkpoint/folder.py",
        "        if folder.name != just_saved.name:\n",
        "        if folder:\n",
        ["tests/checkpoints/test_asynchronous.py"],
    ),
    # -- ranks -------------------------------------------------------------------------------------
    Fault(
        "ranks",
        "a rank that did not use a unit sends nothing for it",
        "runtime/reduce.py",
        "            unit.ready = True\n        self._advance()",
        "            unit.ready = True",
        ["tests/scripts/test_scripts.py::test_every_habit_is_right_or_refused_as_declared[kinds]"],
    ),
    Fault(
        "ranks",
        "the overflow of one rank is not told to the others",
        "runtime/engine.py",
        "found.fill_(values.max().to(found.device))",
        "values.max()",
        ["tests/optim/test_overflow.py"],
    ),
    Fault(
        "ranks",
        "the error of a stall does not name the unit",
        "comm/pending.py",
        'f"waiting in {self.move} of unit {self.unit!r} (',
        'f"waiting in {self.move} (',
        ["tests/failures/test_steps_that_differ.py", "tests/stores/test_comm.py"],
    ),
    Fault(
        "ranks",
        "shard() does not compare the models and recipes of the ranks",
        "runtime/state/checks.py",
        "        if others:\n            raise ValueError(",
        "        if others and not others:\n            raise ValueError(",
        ["tests/failures/test_diverging.py::test_ranks_that_shard_different_things_are_told_so"],
    ),
    Fault(
        "ranks",
        "ranks that step different optimizers go on",
        "runtime/agree.py",
        "    if not alike(done):",
        "    if False and not alike(done):",
        [
            "tests/failures/test_steps_that_differ.py::test_ranks_that_step_differently_stop_on_every_rank"
        ],
    ),
    # -- exactly once ------------------------------------------------------------------------------
    Fault(
        "exactly once",
        "at stage 0 a replicated parameter counts for each rank of tensor parallelism in the norm",
        "optim/clip.py",
        "        if flat.shared:",
        "        if flat.shared and flat.ranks.copies == 1:",
        ["tests/parallel/test_axes.py::test_four_ranks_keep_every_promise[Muon]"],
    ),
    Fault(
        "exactly once",
        "two ranks step a matrix",
        "optim/whole.py",
        "return self.group.rank == self.owner",
        "return self.group.rank in (self.owner, (self.owner + 1) % self.group.size)",
        ["tests/optim/test_whole.py"],
    ),
    Fault(
        "exactly once",
        "where groups hold the same elements, the states of a matrix are saved by none",
        "optim/whole.py",
        "return here == next(filter(self.at, range(group.size)))",
        "return here == next(filter(self.at, range(group.size))) and self.group is group",
        ["tests/checkpoints/test_owners.py"],
    ),
    Fault(
        "exactly once",
        "each stage of a pipeline clips by the norm of its own gradients",
        "optim/clip.py",
        "total = _total_norm(engines, across, p)",
        "total = _total_norm(engines, engines[0].group, p)",
        ["tests/parallel/test_pipelines.py::test_four_ranks_train_as_one_process[1F1B]"],
    ),
    Fault(
        "exactly once",
        "samples that are held out are trained on too",
        "data/order.py",
        "[own[here]] + self.held",
        "[own[here]]",
        ["tests/data/test_data.py", "tests/data/test_order.py"],
    ),
    # -- scripts -----------------------------------------------------------------------------------
    Fault(
        "scripts",
        "p.shape is that of this rank's part",
        "runtime/parameters/parameter.py",
        "self.shape = torch.Size(entry.shape)",
        "self.shape = torch.Size((entry.owned()[1] - entry.owned()[0],))",
        [
            "tests/scripts/test_dicts.py::test_a_parameter_keeps_its_face_its_marks_and_rank_0s_values"
        ],
    ),
    Fault(
        "scripts",
        "state_dict() gives this rank's part in silence",
        "runtime/hooks.py",
        "            if divided and not _is_for_keys():",
        "            if divided and divided < 0:",
        ["tests/scripts/test_refused.py"],
    ),
    Fault(
        "scripts",
        "the .grad of a parameter that no rank used is zeros",
        "runtime/reduce.py",
        "[e for e in flat.entries if e in used]",
        "list(flat.entries)",
        ["tests/scripts/test_scripts.py::test_every_habit_is_right_or_refused_as_declared[kinds]"],
    ),
    Fault(
        "scripts",
        "a backward pass behind the step uses the new weights in silence",
        "runtime/parameters/values.py",
        "    if found:\n        others = f",
        "    if found and not found:\n        others = f",
        [
            "tests/scripts/test_late.py::test_a_step_between_forward_and_backward_is_an_error_that_names_a_parameter"
        ],
    ),
    Fault(
        "scripts",
        "a write in place to what autograd has saved gives wrong gradients in silence",
        "runtime/saved.py",
        "refuse_other_version(self.tensor, self.version, self.tensor.size())",
        "pass",
        ["tests/scripts/test_late.py", "tests/stores/test_activations.py"],
    ),
    Fault(
        "scripts",
        "after the first pass each rank keeps its own buffers",
        "runtime/passes.py",
        "engine.buffers.due = graded and engine.sync",
        "engine.buffers.due = False",
        [
            "tests/scripts/test_scripts.py::test_every_habit_is_right_or_refused_as_declared[buffers]"
        ],
    ),
    Fault(
        "scripts",
        "an optimizer that looks at whole matrices steps this rank's part of them",
        "optim/verdict.py",
        "otherwise = WHOLE if known_whole else REFUSED",
        "otherwise = ELEMENTWISE if known_whole else REFUSED",
        ["tests/optim/test_whole.py"],
    ),
    Fault(
        "scripts",
        "an optimizer that looks at large matrices only passes as element-wise",
        "optim/verdict.py",
        "_MATRICES = ((16, 24), (160, 144))",
        "_MATRICES = ((16, 24),)",
        ["tests/optim/test_optimizers.py"],
    ),
    Fault(
        "scripts",
        "what a module writes to its weights in the forward pass is lost",
        "runtime/passes.py",
        "            flat.storage.keep_written(full[slice(*flat.owned)])",
        "            pass",
        ["tests/scripts/test_scripts.py::test_every_habit_is_right_or_refused_as_declared[loops]"],
    ),
    Fault(
        "scripts",
        "under no_sync stage 0 reduces the gradients of every micro-batch",
        "runtime/engine.py",
        "before, self.synced = self.synced, False",
        "before, self.synced = self.synced, True",
        [row("accumulation: 0 on 2, 3 micro-batches, clipped to 0.5")],
    ),
    # -- stores ------------------------------------------------------------------------------------
    Fault(
        "stores",
        "a short read from a disk is not continued",
        "offload/nvme.py",
        "            while done < total:",
        "            for _ in range(1):",
        ["tests/stores/test_nvme.py::test_a_transfer_of_fewer_bytes_than_asked_is_continued"],
    ),
    Fault(
        "stores",
        "a buffer is given away while a view still reads it",
        "memory.py",
        "        unread = owners_of(buffer) <= 1",
        "        unread = True",
        ["tests/stores/test_memory.py"],
    ),
    Fault(
        "stores",
        "a block of moments crosses the border between two ranks",
        "layout/spec.py",
        "block = max(self.recipe.block, at_rest)",
        "block = at_rest",
        [row("moments: 3 on 2, moments=int8, wide gpt")],
    ),
    Fault(
        "stores",
        "a block of frozen weights that are stored encoded crosses the border between two ranks",
        "layout/spec.py",
        "block = max(self.recipe.block, at_rest)",
        "block = self.recipe.block",
        [
            "tests/scripts/test_dicts.py::test_encoded_weights_compute_what_they_decode_to_and_survive_files"
        ],
    ),
    Fault(
        "stores",
        "a rank adds its own part of a gradient encoded, as it would be sent",
        "quant/encoded.py",
        "        self._encode(buffer[: self.mine.start], coded[:here])\n",
        "        self._encode(buffer[: self.mine.start], coded[:here])\n"
        "        own = torch.empty(self.used, dtype=torch.uint8)\n"
        "        self.codec.encode(mine.contiguous(), own)\n"
        "        self.codec.decode(own, mine)\n",
        [
            "tests/promises/test_gradients.py::test_a_rank_adds_its_own_part_of_an_encoded_gradient_as_it_is"
        ],
    ),
    Fault(
        "stores",
        "an activation that comes back from the host is not checked for later writes",
        "offload/activations.py",
        "            refuse_other_version(saved.watch, saved.version, saved.size)\n            with self._lock:",
        "            with self._lock:",
        ["tests/stores/test_activations.py"],
    ),
    Fault(
        "stores",
        "the ranks of a group lie on several nodes",
        "layout/flat.py",
        "return list(range(position % self.outer, self.size, self.outer))",
        "return list(range(position % self.inner, self.size, self.inner))",
        ["tests/stores/test_layout.py"],
    ),
    Fault(
        "stores",
        "the range of a hop is an element too long",
        "layout/spec.py",
        "return self.size * self.own",
        "return self.size * self.own + (self.size > 1)",
        ["tests/stores/test_layout.py"],
    ),
    Fault(
        "stores",
        "a block is decoded with the scale of another one",
        "quant/codecs.py",
        "values = values.mul_(by._scales(magnitudes)[..., None])",
        "values = values.mul_(by._scales(magnitudes).roll(1)[..., None])",
        ["tests/stores/test_codecs.py"],
    ),
    Fault(
        "stores",
        "a pool hands a buffer out twice",
        "memory.py",
        "            buffer, _ = self._free[numel, dtype].pop()",
        "            buffer, _ = self._free[numel, dtype][-1]",
        ["tests/stores/test_memory.py"],
    ),
    Fault(
        "stores",
        "memory of the device is let go of under a copy",
        "device/copies.py",
        "            first.stream.wait_event(first.ticket)",
        "            pass",
        ["tests/stores/test_device.py"],
    ),
    Fault(
        "stores",
        "a read of a disk does not wait for a write of the same bytes",
        "offload/nvme.py",
        "if other_lo < lo + nbytes and lo < other_hi and WRITE in (op, other_op):",
        "if False:",
        ["tests/stores/test_nvme.py"],
    ),
    Fault(
        "stores",
        "two versions of a tensor share a copy on the host",
        "offload/activations.py",
        "if copy is not None and copy.version == version and copy.root() is root:",
        "if copy is not None and copy.root() is root:",
        ["tests/stores/test_activations.py"],
    ),
    # -- exits -------------------------------------------------------------------------------------
    Fault(
        "exits",
        "the engine keeps its model alive",
        "sharding.py",
        "        engines[module] = engine\n",
        "        engines[module] = engine\n        engine.model = module  # type: ignore[attr-defined]\n",
        ["tests/failures/test_exit.py"],
    ),
    Fault(
        "exits",
        "the communicators of a model outlive it",
        "runtime/engine.py",
        "            group.close()\n",
        "            pass\n",
        ["tests/failures/test_exit.py"],
    ),
    Fault(
        "exits",
        "an import of Onefold changes torch.nn.Module",
        "runtime/hooks.py",
        "\ndef is_sharded(module: nn.Module) -> bool:",
        "\nnn.Module.is_sharded = property(lambda self: self in engines)  # type: ignore\n\n"
        "\ndef is_sharded(module: nn.Module) -> bool:",
        ["tests/failures/test_import.py"],
    ),
    # -- front ends --------------------------------------------------------------------------------
    Fault(
        "front ends",
        "the gradient_clipping of a DeepSpeed configuration has no effect",
        "deepspeed/engine.py",
        "config, limit = self.settings, self.settings.gradient_clipping or math.inf",
        "config, limit = self.settings, math.inf",
        ["tests/ds/test_engine_surface.py"],
    ),
    Fault(
        "front ends",
        "engine.backward divides by the accumulation steps twice",
        "deepspeed/engine.py",
        "return 1.0 if self._dividing else 1.0 / self.gradient_accumulation_steps()",
        "return 1.0 / self.gradient_accumulation_steps()",
        ["tests/ds/test_engine_passes.py"],
    ),
    Fault(
        "front ends",
        "Trainer takes the largest gradient norm for 1, whatever its arguments say",
        "hf/trainer.py",
        "return onefold.clip_grad_norm_(self.model, self.args.max_grad_norm)",
        "return onefold.clip_grad_norm_(self.model, 1.0)",
        ["tests/others/test_trainer.py"],
    ),
    Fault(
        "front ends",
        "a resumed run reads the samples of its last step twice",
        "train/checkpoints.py",
        "    run.start = point.step\n",
        "    run.start = max(0, point.step - 1)\n",
        ["tests/train/test_resume.py"],
    ),
    Fault(
        "front ends",
        "a second Ctrl-C does not end the ranks of a run",
        "processes/signals.py",
        "again = bool(self.asked & Stop.INTERRUPT) and number == signal.SIGINT",
        "again = False",
        ["tests/train/test_survival.py::test_what_a_signal_asks_of_a_rank"],
    ),
    Fault(
        "front ends",
        "an unknown option passes",
        "recipe/options.py",
        "    if unknown := sorted(set(given) - set(known)):",
        "    if unknown := sorted(set()):",
        ["tests/recipe/test_refusals.py", "tests/plan/test_api.py"],
    ),
    Fault(
        "front ends",
        "each micro-batch of a run weighs the same, however many tokens count in it",
        "train/loop.py",
        "part = loss * (count / counted)",
        "part = loss / (len(mine) * run.parts)",
        ["tests/train/test_run.py"],
    ),
    Fault(
        "front ends",
        "DeepSpeed's schedule of the learning rate moves on at a step that was skipped",
        "deepspeed/engine.py",
        "            self.skipped_steps += 1\n        elif self.lr_scheduler is not None:",
        "            self.skipped_steps += 1\n        if self.lr_scheduler is not None:",
        ["tests/ds/test_engine_precision.py", "tests/ds/test_engine_surface.py"],
    ),
    Fault(
        "front ends",
        "--clip of a run has no effect",
        "train/loop.py",
        "return onefold.clip_grad_norm_(run.model, run.config.clip or math.inf)",
        "return onefold.clip_grad_norm_(run.model, math.inf)",
        ["tests/train/test_run.py"],
    ),
    Fault(
        "front ends",
        "the plan recommends a mesh that does not fit the device",
        "plan/account.py",
        "        fits=needed <= usable\n",
        "        fits=account.rest_bytes <= usable\n",
        [
            "tests/plan/test_axes_planned.py::test_a_mesh_fits_from_the_byte_on_that_its_peak_needs_and_is_not_recommended_below"
        ],
    ),
]


@dataclass(frozen=True)
class Outcome:
    status: str
    by: str
    seconds: float


def look(fault: Fault) -> Outcome:
    """Run the tests of a fault with the fault in the source."""
    begun = time.monotonic()
    with copied() as package:
        fault.plant(package)
        code, text = pytest_on(package.parent, fault.see)
    if code is None:
        return Outcome("found", "(hangs)", time.monotonic() - begun)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", text, re.MULTILINE)
    seconds = time.monotonic() - begun
    if code == 0:
        return Outcome("MISSED", "", seconds)
    if code != 1 or not failed:
        return Outcome("BROKEN", text.strip()[-2000:], seconds)
    code, _ = pytest_on(SOURCE.parent, failed[:1])
    if code != 0:
        return Outcome("BROKEN", f"{failed[0]} fails without the fault too", seconds)
    return Outcome("found", failed[0], seconds)


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of src/onefold, for a while."""
    with tempfile.TemporaryDirectory(prefix="onefold-faults-") as folder:
        package = Path(folder, "onefold")
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        yield package


def pytest_on(source: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Run tests until one fails. Returns (exit status, or None if they hang; what was printed)."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=ROOT, env=environment, stdout=printed, stderr=printed, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return code, printed.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="faults with such a text in them")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("-n", type=int, default=1, metavar="PROCESSES", help="faults at a time")
    given = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if any(text in f"{fault.name} {fault.file} {' '.join(fault.see)}" for text in given.only)
    ]
    if given.list:
        for fault in chosen:
            print(f"{fault.name}\n    {fault.file}\n    {' '.join(fault.see)}")
        return 0
    wrong = 0
    with ThreadPoolExecutor(given.n) as several:
        for fault, outcome in zip(chosen, several.map(look, chosen), strict=True):
            wrong += outcome.status != "found"
            print(f"{outcome.status:6} {outcome.seconds:5.0f} s  {fault.name}\n{'':17}{outcome.by}")
            sys.stdout.flush()
    print(f"{len(chosen)} faults, {len(chosen) - wrong} found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
