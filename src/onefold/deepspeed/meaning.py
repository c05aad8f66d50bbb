"""What a configuration means here: the arguments of `Recipe.zero`, batch sizes, loss scaling, the
optimizer and the schedule to make.

| the file says                                     | becomes                                                          |
|---------------------------------------------------|------------------------------------------------------------------|
| stage, overlap_comm, fp16/bf16.enabled            | stage, in_flight and prefetch, precision                         |
| stage3_prefetch_bucket_size: 0                    | prefetch=0                                                       |
| communication_data_type, grad_accum_dtype         | wire, accumulate_dtype                                           |
| gradient_allreduce_op                             | reduce_op                                                        |
| offload_optimizer: device, ratio                  | offload_optimizer, offload_amount                                |
| offload_param: device                             | offload_param                                                    |
| nvme_path of either                               | nvme: the folder; striped over both where they differ            |
| sub_group_size                                    | chunk: the next smaller multiple of 4,096 elements, 65,536 or more |
| aio: queue_depth x intra_op_parallelism           | nvme_threads, at most 64                                         |
| zero_hpz_partition_size: n above 1                | second_copy=True, group=n                                        |
| zero_quantized_weights, zero_quantized_gradients  | gather_codec="int8", reduce_codec="int4"                         |
| zero_quantized_nontrainable_weights               | frozen="int8"                                                    |

As in DeepSpeed, ZeRO++ and offload_param have an effect at stage 3 only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.deepspeed.named import optimizer_of, schedule_of
from onefold.deepspeed.reading import DeepSpeedConfigError, Outcome, Read, read
from onefold.deepspeed.schema import FP16
from onefold.deepspeed.utilities import get_world_size
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.options import SECTOR

__all__ = ["DeepSpeedConfig"]
#: Each of these three follows from the other two.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
#: Beginnings of the paths that decide the recipe. The rest of a file concerns `initialize` only.
OF_RECIPES = (
    "fp16.enabled", "bf16.enabled", "zero_optimization.", "communication_data_type", "data_types.",
    "gradient_allreduce_op",
)  # fmt: skip
#: "auto" may stay where DeepSpeed tunes itself, but for these, and is the key's own default in one.
_TUNING = ("zero_optimization.", "aio.", "data_types.keep_in_fp32_modules")
_DECIDING = (
    "zero_optimization.stage", "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
)  # fmt: skip
#: {outcome: what is told of its keys at the start}
_NOTED = {
    "inert": "accepted, without effect",
    "unknown": "unknown, without effect",
    "auto": '"auto" counts as not set, since nothing fills it in here',
}
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
#: DeepSpeed's default of sub_group_size, at which it divides nothing.
_WHOLE = 1e9
_MOST_THREADS = 64
#: Of autocast in fp16: the rule of torch.amp.GradScaler, which has no minimum.
_OF_AUTOCAST = FP16(loss_scale_window=2000, hysteresis=1, min_loss_scale=2.0**-24)


class DeepSpeedConfig:
    """A DeepSpeed configuration in Onefold's terms. Other attributes are those of `root` and of its
    section "zero_optimization".

    Attributes:
        root: the values of the file, and DeepSpeed's defaults.
        given: the configuration itself.
        outcomes: what became of each key.
        remarks: other sentences for the start of the run.
        recipe_arguments: the arguments of `Recipe.zero`.
        world_size: number of data-parallel ranks.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: each follows
            from the others and `world_size`.
        precision: "fp16", "bf16", or None: as in DeepSpeed, the model then keeps its dtypes.
        autocast: the dtype of torch.autocast around forward passes, or None.
        optimizer, scheduler: what to make, or None.
        loss_scaling: None unless a pass computes in fp16.
        skips_nonfinite: whether steps with gradients that are not finite are skipped on every rank.

    Args:
        config: a dict, the path of a JSON file, or what `read` returned.
        ranks: number of data-parallel ranks, for which batch sizes are checked if there are any; 0
            checks none. None takes those of the process group, and wants batch sizes.

    Raises:
        DeepSpeedConfigError: the configuration contradicts itself.
        NotImplementedError: it asks for something that Onefold does not do.
        FileNotFoundError: there is no such file.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        ranks: int | None = None,
    ) -> None:
        if mpu is not None or mesh_device is not None:
            raise NotImplementedError(
                "mpu and mesh_device: give onefold.shard(mesh=...) the axes beside data."
            )
        found = config if isinstance(config, Read) else read(config)
        found.refuse()
        self.root, self.given, self.remarks = found.root, found.given, list[str]()
        root, fp16, bf16 = found.root, found.root.fp16, found.root.bf16
        zero = self.zero_config = root.zero_optimization
        if fp16.enabled and bf16.enabled:
            raise DeepSpeedConfigError(
                "fp16.enabled and bf16.enabled are both true: a run computes in one of them; set"
                " the other to false."
            )
        self.precision = "fp16" if fp16.enabled else "bf16" if bf16.enabled else None
        self.autocast = self._autocast()
        self.optimizer = None if root.optimizer is None else optimizer_of(root.optimizer)
        self.scheduler = None if root.scheduler is None else schedule_of(root.scheduler)
        in_fp16 = fp16.enabled or self.autocast == torch.float16
        self.loss_scaling = fp16 if fp16.enabled else _OF_AUTOCAST if in_fp16 else None
        self.skips_nonfinite = in_fp16 or (bf16.enabled and bf16.check_grad_overflow)
        # The names of DeepSpeed's object
        self.zero_optimization_stage, self.zero_enabled = zero.stage, zero.stage > 0
        self.fp16_enabled, self.bfloat16_enabled = fp16.enabled, bf16.enabled
        self.optimizer_name = self.optimizer and self.optimizer.given.lower()
        self.optimizer_params = root.optimizer and root.optimizer.params.given
        self.scheduler_name = self.scheduler and self.scheduler.given
        self.world_size = world_size_of(None) if ranks is None else ranks
        sized = root.train_batch_size or root.train_micro_batch_size_per_gpu
        if ranks is None or (ranks and sized):
            self._configure_train_batch_size()
        one_by_one = "overlap_comm" in zero.model_fields_set and not zero.overlap_comm
        unfetched = zero.prefetch_bucket_size == 0 or (one_by_one and zero.stage == 3)
        arguments = {
            "stage": zero.stage,
            "precision": self.precision,
            "reduce_op": root.gradient_allreduce_op,
            "prefetch": 0 if unfetched else None,
            "in_flight": 0 if one_by_one else None,
            "cast_inputs": fp16.auto_cast if fp16.enabled else None,
            "wire": root.communication_data_type,
            "accumulate_dtype": root.data_types.grad_accum_dtype,
            **self._masters(),
            **self._zeropp(),
            **self._tiers(),
        }
        self.recipe_arguments = {k: v for k, v in arguments.items() if v is not None}
        idle = dict(self._idle())
        self.outcomes = [
            replace(o, outcome="inert", why=why)
            if o.outcome == "served"
            and (why := next((w for part, w in idle.items() if part in o.path), None))
            else o
            for o in found.outcomes
        ]
        if "gradient_clipping" not in root.model_fields_set:
            self.remarks.append(
                "gradient_clipping is not set: gradients are clipped to norm 1.0, as in DeepSpeed"
                " 0.19.8; write 0 to clip nothing"
            )

    def __getattr__(self, name: str) -> Any:
        root = self.__dict__.get("root")
        for section in () if root is None else (root, self.zero_config):
            if name in type(section).model_fields:
                found = self.__dict__[name] = getattr(section, name)  # an engine asks in every pass
                return found
        raise AttributeError(
            f"DeepSpeedConfig.{name} is not served here: the values that Onefold reads are listed by"
            " `onefold config explain FILE`, and the file itself is a dict."
        )

    def set_batch(self, train: int | None, micro: int | None, accumulation: int | None) -> None:
        """Set the batch sizes, those that are None from the others: train = micro x accumulation x ranks.

        With only `train` or only `micro` given, accumulation is 1, as in DeepSpeed.

        Raises:
            DeepSpeedConfigError: they contradict each other, or none is given.
        """
        ranks = self.world_size
        if train is None and micro is None:
            raise DeepSpeedConfigError(
                "the configuration has no batch size: set train_micro_batch_size_per_gpu, or"
                " train_batch_size."
            )
        if micro is None:
            micro = (train or 0) // ((accumulation or 1) * ranks)
        if accumulation is None:
            accumulation = 1 if train is None else train // (micro * ranks) if micro else 0
        whole = micro * accumulation * ranks
        if not whole or train not in (None, whole):
            raise DeepSpeedConfigError(
                f"train_batch_size={train}, but {micro} x {accumulation} x {ranks} = {whole}:"
                " train_batch_size must be train_micro_batch_size_per_gpu x"
                f" gradient_accumulation_steps x {ranks} ranks; leave one of the three out."
            )
        self.train_batch_size, self.train_micro_batch_size_per_gpu = whole, micro
        self.gradient_accumulation_steps = accumulation

    def _configure_train_batch_size(self) -> None:
        self.set_batch(*(getattr(self, name) for name in BATCH))

    # -- the arguments of Recipe.zero --------------------------------------------------------------

    def _zeropp(self) -> dict[str, Any]:
        zero, size = self.zero_config, self.zero_config.zero_hpz_partition_size
        if zero.stage < 3:
            return {}
        if size > 1 and self.world_size % size:
            raise DeepSpeedConfigError(
                f"zero_optimization.zero_hpz_partition_size={size} does not divide"
                f" {self.world_size} ranks."
            )
        return {
            "second_copy": size > 1 or None,
            "group": size if size > 1 else None,
            "gather_codec": "int8" if zero.zero_quantized_weights else None,
            "reduce_codec": "int4" if zero.zero_quantized_gradients else None,
            "frozen": "int8" if zero.zero_quantized_nontrainable_weights else None,
        }

    def _tiers(self) -> dict[str, Any]:
        zero, aio = self.zero_config, self.root.aio
        states, weights = zero.offload_optimizer, zero.offload_param if zero.stage == 3 else None
        used = {
            name: section
            for name, section in (("offload_optimizer", states), ("offload_param", weights))
            if section is not None and section.device != "none" and getattr(section, "ratio", True)
        }
        out: dict[str, Any] = {name: str(section.device) for name, section in used.items()}
        if states in used.values() and states is not None and states.ratio < 1:
            out["offload_amount"] = states.ratio
        on_disk = [name for name, device in out.items() if device == "nvme"]
        if not on_disk:
            return out
        if "offload_optimizer" not in on_disk:
            raise DeepSpeedConfigError(
                'zero_optimization.offload_param.device="nvme", and the optimizer\'s states, three'
                ' times as many bytes, are to stay in faster memory: write "nvme" as'
                " zero_optimization.offload_optimizer.device too."
            )
        folders = list(dict.fromkeys(p for name in on_disk if (p := used[name].nvme_path)))
        if not folders:
            raise DeepSpeedConfigError(
                f'zero_optimization.{on_disk[0]}.device="nvme" has no folder: name one on the disk,'
                ' as in "nvme_path": "/local_nvme".'
            )
        if len(folders) > 1:
            self.remarks.append(f"everything on NVMe is striped over {' and '.join(folders)}")
        if zero.stage in (1, 2):
            self.remarks.append(
                "states are stored on NVMe, as written; DeepSpeed 0.19.8 keeps them on the host at"
                f" stage {zero.stage}"
            )
        out["nvme"] = folders
        if (size := zero.sub_group_size) < _WHOLE:
            out["chunk"] = max(16 * SECTOR, int(size) // SECTOR * SECTOR)
        if aio.model_fields_set & {"queue_depth", "intra_op_parallelism"}:
            out["nvme_threads"] = min(aio.queue_depth * aio.intra_op_parallelism, _MOST_THREADS)
        return out

    def _masters(self) -> dict[str, Any]:
        """Master weights and optimizer states in 16 bits.

        Only `bf16_optimizer_states` asks for states in 16 bits. Left to itself, torch's Adam makes
        its states in the dtype of the master weights. In fp16 squares of small gradients are 0, and
        steps come out many times too large.
        """
        fp16, bf16 = self.root.fp16, self.root.bf16
        adam = self.optimizer is not None and issubclass(self.optimizer.kind, _ADAMS)
        short = bf16.enabled and bf16.bf16_optimizer_states
        masters = "fp16" if fp16.enabled and fp16.fp16_master_weights_and_grads else None
        if bf16.enabled and bf16.bf16_master_weights_and_grads:
            masters = "bf16"
            if not adam and not short:
                self.remarks.append(
                    "bf16_master_weights_and_grads: an optimizer other than Adam and AdamW makes its"
                    " states in the dtype of the master weights, so they are bf16 too"
                )
        if masters is None:
            return {"moments": "bf16" if short else None}
        return {"master_dtype": masters, "moments": "fp32" if adam and not short else None}

    def _idle(self) -> Iterator[tuple[str, str]]:
        """Yield (a part of the path, why) of keys that have no effect beside the file's others."""
        zero = self.zero_config
        if "nvme" not in self.recipe_arguments:
            yield "aio.", "nothing is stored on NVMe in this configuration"
            yield "nvme_path", "only what is stored on NVMe needs a folder there"
            yield (
                "sub_group_size",
                "states that are not on NVMe are stepped a unit of the model at a time",
            )
        elif zero.sub_group_size >= _WHOLE:
            yield (
                "sub_group_size",
                "at this size DeepSpeed divides nothing, and chunks have Onefold's own size",
            )
        if zero.stage < 3:
            yield (
                "offload_param",
                "parameters are divided at stage 3 only; below it every rank has all",
            )
            yield "zero_hpz_", "DeepSpeed has ZeRO++ at stage 3 only"
            yield "zero_quantized_", "DeepSpeed has ZeRO++ at stage 3 only"
        if zero.stage not in (1, 2):
            yield (
                "ignore_unused_parameters",
                "parameters without a gradient are looked for at stages 1 and 2 only",
            )
        if zero.prefetch_bucket_size:
            yield (
                "prefetch_bucket_size",
                "blocks are prefetched one at a time, whatever their size; 0 turns it off",
            )
        if zero.offload_optimizer is not None and not zero.offload_optimizer.ratio:
            yield "offload_optimizer.device", "a ratio of 0 leaves all states on the device"
        for name in ("fp16", "bf16"):
            if self.precision != name:
                yield f"{name}.{name}_", f"{name}.enabled is not true"

    def recipe(self, optimizer: Any = None) -> Recipe:
        """Return the recipe. A given Adam over master weights in 16 bits keeps its moments in fp32,
        unless the file says otherwise.
        """
        arguments = dict(self.recipe_arguments)
        adam = isinstance(optimizer, _ADAMS)
        if adam and "master_dtype" in arguments and not self.bf16.bf16_optimizer_states:
            arguments["moments"] = "fp32"
        try:
            return Recipe.zero(**arguments)
        except ValueError as error:
            raise DeepSpeedConfigError(
                f"the configuration stands for {_written(arguments)}, and {error}"
            ) from None

    # -- dtypes ------------------------------------------------------------------------------------

    def _autocast(self) -> torch.dtype | None:
        said = self.root.torch_autocast
        if not said.enabled:
            return None
        if said.dtype is None:
            raise DeepSpeedConfigError(
                "torch_autocast.dtype is not set: write 'bfloat16' or 'float16'."
            )
        return _dtype("torch_autocast.dtype", said.dtype)

    def cast_buffers(self, model: nn.Module) -> None:
        """Cast floating-point buffers, in place, to `data_types.buffer_dtype`, but for those that
        stay in fp32: what `keep_in_fp32_modules` names, else what transformers' models list. `*`
        stands for any text, and a name may stand anywhere in the full one.
        """
        said, kept = self.root.data_types, list[str]()
        wanted = said.buffer_dtype and _dtype("data_types.buffer_dtype", said.buffer_dtype)
        if said.keep_in_fp32_modules is not None:
            kept = [name.replace("*", ".*") for name in said.keep_in_fp32_modules]
        elif self.precision is not None:
            lists = ["_keep_in_fp32_modules_strict"]
            lists += ["_keep_in_fp32_modules"] if self.precision == "fp16" else []
            for path, part in model.named_modules():
                begin = f"^{re.escape(path)}\\..*" if path else ""
                kept += [
                    f"{begin}{name}" for each in lists for name in getattr(part, each, None) or ()
                ]
        for name, buffer in model.named_buffers():
            dtype = torch.float32 if any(re.search(k, name) for k in kept) else wanted
            if dtype and buffer.is_floating_point() and buffer.element_size() > 1:  # no 8 bits
                buffer.data = buffer.data.to(dtype)

    # -- what is told ------------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show once at the start of a run: what has no effect, and the remarks."""
        told: dict[tuple[str, str], list[str]] = {}
        for o in self.outcomes:
            if o.outcome in _NOTED and (o.outcome != "auto" or _is_left(o)):
                why = f" (because {o.why})" if o.why else ""
                told.setdefault((_NOTED[o.outcome], why), []).append(o.path)
        lines = [f"{begin}: {', '.join(paths)}{why}" for (begin, why), paths in told.items()]
        return (*lines, *self.remarks)

    def undecided(self, *settled: str) -> list[str]:
        """Return the paths at "auto" that decide what is trained, and that nothing else decides.

        Args:
            settled: beginnings of paths that the caller decides.
        """
        left = [o.path for o in self.outcomes if _is_left(o)]
        other = {"bf16": ("fp16.",), "fp16": ("bf16.",)}.get(self.precision or "", ())
        enough = self.train_batch_size is not None and sum(path in BATCH for path in left) == 1
        settled = (*settled, *other, *(BATCH if enough else ()))
        deciding = [p for p in left if p in _DECIDING or not p.startswith(_TUNING)]
        return [p for p in deciding if not p.startswith(settled)]


def _is_left(key: Outcome) -> bool:
    """Whether a key that would have an effect is at "auto"."""
    return key.outcome == "auto" and key.value == "auto" and not key.why


def _written(arguments: Mapping[str, Any]) -> str:
    return f"Recipe.zero({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _dtype(path: str, name: str) -> torch.dtype:
    plain = name.lower().removeprefix("torch.")
    found: Any = COMPUTE_DTYPES.get(plain, getattr(torch, plain, None))
    if found not in COMPUTE_DTYPES.values():
        raise DeepSpeedConfigError(
            f"{path}={name!r}: there is no such dtype; expected 'fp32', 'fp16' or 'bf16'."
        )
    return found


def world_size_of(group: Any) -> int:
    return get_world_size(group.get_group() if hasattr(group, "get_group") else group)


def refuse_auto(paths: Collection[str]) -> None:
    """Raise DeepSpeedConfigError for paths at "auto"."""
    if paths:
        raise DeepSpeedConfigError(
            'the configuration says "auto" where nothing can fill it in: the Hugging Face Trainer'
            " does that from its own arguments, and it does not run here. Write values in place of"
            f" it: {', '.join(paths)}."
        )


def recipe_from(config: Any, world_size: int | None = None) -> Recipe:
    """Return the recipe of a DeepSpeed configuration (a dict, or the path of a JSON file).

    The recipe's `notes` list the keys that have no effect here. Batch sizes are checked against
    `world_size` if it is given.

    Raises:
        ValueError: the configuration contradicts itself, or says "auto" for a value that decides
            the recipe.
        NotImplementedError: the configuration asks for a capability that is not built.
    """
    read = DeepSpeedConfig(config, ranks=world_size or 0)
    refuse_auto([path for path in read.undecided() if path.startswith(OF_RECIPES)])
    served = (o.path for o in read.outcomes if o.outcome == "served")
    beside = (path for path in served if not path.startswith((*OF_RECIPES, "aio.")))
    named = ", ".join(dict.fromkeys(path.partition(".")[0] for path in beside))
    more = f"not part of a recipe: {named}; use onefold.initialize, or apply them in your loop"
    return read.recipe().replace(remarks=(*read.notes, *([more] if named else ())))


@dataclass(frozen=True)
class Explanation:
    """The outcome of every key in the order of the file; why the file as a whole is refused, or
    None; other sentences about it.
    """

    keys: list[Outcome]
    refusal: str | None = None
    remarks: tuple[str, ...] = ()


def explain(config: Any, world_size: int | None = None) -> Explanation:
    """Explain each key of a configuration. Batch sizes are checked for `world_size` ranks, if given."""
    found = read(config)
    try:
        meant = DeepSpeedConfig(found, ranks=world_size or 0)
        meant.recipe()
    except (ValueError, NotImplementedError) as error:
        alone = all(o.outcome != "refused" for o in found.outcomes)
        return Explanation(found.outcomes, str(error) if alone else None)
    return Explanation(meant.outcomes, None, (_written(meant.recipe_arguments), *meant.remarks))
