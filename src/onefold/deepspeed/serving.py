"""`serve`: make `import deepspeed` find Onefold's modules, in this process only.

    import deepspeed.zero  ->  sys.meta_path[0], a `Finder`  ->  a `ServedModule` with the names of its files
    importlib.metadata.version("deepspeed")  ->  the same `Finder`  ->  "0.19.8+onefold"

transformers and accelerate look for DeepSpeed once, when they are imported. `serve` must be called
before that. It installs no files, and other processes are unaffected. Nothing is imported before it
is used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

NAME = "deepspeed"
#: The release whose configuration and calls are served.
VERSION = "0.19.8+onefold"
_HERE = "onefold.deepspeed"
#: Packages that look for DeepSpeed when they are imported.
_BEFORE = ("transformers", "accelerate")

#: {a file of this package, or another module: the modules that show its public names (`__all__`)}. Where
#: two files have a name, the first counts. Parents of these modules exist as well.
SERVED: Mapping[str, str] = {
    "utilities": (
        "deepspeed deepspeed.accelerator deepspeed.accelerator.real_accelerator deepspeed.checkpoint.utils "
        "deepspeed.comm deepspeed.comm.comm deepspeed.launcher.runner deepspeed.ops deepspeed.ops.aio "
        "deepspeed.ops.op_builder deepspeed.runtime.dataloader deepspeed.runtime.utils "
        "deepspeed.runtime.zero.partition_parameters deepspeed.runtime.zero.utils deepspeed.utils "
        "deepspeed.utils.init_on_device deepspeed.utils.logging deepspeed.utils.nvtx"
    ),
    "access": "deepspeed.utils deepspeed.utils.tensor_fragment",
    "checkpointing": "deepspeed.checkpointing deepspeed.runtime.activation_checkpointing.checkpointing",
    "engine": "deepspeed deepspeed.runtime.engine",
    "leaves": "deepspeed.utils deepspeed.utils.z3_leaf_module",
    "meaning": "deepspeed deepspeed.runtime.config",
    "optimizers": (
        "deepspeed deepspeed.ops.adagrad deepspeed.ops.adagrad.cpu_adagrad deepspeed.ops.adam "
        "deepspeed.ops.adam.cpu_adam deepspeed.ops.adam.fused_adam deepspeed.ops.lion deepspeed.ops.lion.cpu_lion "
        "deepspeed.ops.lion.fused_lion deepspeed.runtime.base_optimizer deepspeed.runtime.bf16_optimizer "
        "deepspeed.runtime.fp16.fused_optimizer deepspeed.runtime.fp16.unfused_optimizer "
        "deepspeed.runtime.zero.stage3 deepspeed.runtime.zero.stage_1_and_2"
    ),
    "precision": "deepspeed.runtime.torch_autocast",
    "reading": "deepspeed deepspeed.runtime.config",
    "schedules": "deepspeed.runtime.lr_schedules",
    "schema": "deepspeed.runtime.zero.config deepspeed.runtime.zero.offload_config",
    "setup": "deepspeed",
    "zero": "deepspeed.runtime.zero deepspeed.runtime.zero.partition_parameters deepspeed.zero",
    "zero_to_fp32": "deepspeed.utils.zero_to_fp32",
    "torch.distributed": "deepspeed.comm deepspeed.comm.comm",
}  # fmt: skip
#: All modules that can be imported.
MODULES = frozenset(
    ".".join(parts[: n + 1])
    for names in SERVED.values()
    for parts in (name.split(".") for name in names.split())
    for n in range(len(parts))
)

#: {why: known names that are refused, and every name below them, without "deepspeed."}
REFUSED: Mapping[str, str] = {
    "other axes than data are those of a mesh, as in onefold.shard(model, recipe, mesh=...)": (
        "PipelineModule checkpointing.get_cuda_rng_tracker checkpointing.model_parallel_cuda_manual_seed"
        " moe pipe"
        " runtime.pipe runtime.sequence_parallel sequence tp_model_init utils.groups"
    ),
    "generate under onefold.full_params(model) or onefold.keep_gathered(model)": (
        "DeepSpeedHybridEngine InferenceEngine inference init_inference module_inject runtime.hybrid_engine"
    ),
    "monitors and profilers are not part of Onefold; log from your loop": "monitor profiling",
    "give initialize lr_scheduler=, such as torch.optim.lr_scheduler.OneCycleLR": (
        "runtime.lr_schedules.LRRangeTest runtime.lr_schedules.OneCycle"
    ),
    "write the schedule into the configuration": (
        "add_tuning_arguments runtime.lr_schedules.add_tuning_arguments"
    ),
    "tuning by trial runs is not built; onefold.plan compares stages": "autotuning",
    'print(onefold.plan(model, gpus=8, gpu="h100-80")) tells what each stage holds': (
        "runtime.zero.stage3.estimate_zero3_model_states_mem_needs"
        " runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold"
        " runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live"
        " runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs"
        " runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold"
        " runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live"
    ),
    "a checkpoint is one folder, which onefold.load reads on any number of ranks as it is": (
        "checkpoint.DeepSpeedCheckpoint checkpoint.ds_to_universal elasticity"
    ),
    "`python zero_to_fp32.py . OUTPUT` in the checkpoint's folder writes the whole model": (
        "utils.zero_to_fp32.get_model_state_file utils.zero_to_fp32.get_optim_files"
    ),
    "compression, curricula and data routing are not part of Onefold": (
        "compression runtime.data_pipeline"
    ),
    "use peft's adapters; Recipe.zero(frozen=...) stores frozen weights encoded": "linear",
    "Onefold has no compiled operators; the optimizers on the host are torch's own": (
        "ops.aio.aio_handle ops.lamb ops.sparse_attention ops.transformer"
    ),
    "it is inside DeepSpeed's engine; Onefold's has no such part": (
        "runtime.fp16.loss_scaler runtime.fp16.onebit"
    ),
    "Recipe.zero(3, shard_group=...) divides inside groups": "runtime.zero.MiCS_Init zero.MiCS_Init",
    "onefold.tiling.tile_linears(model, '256MB') puts tiles in the place of large linear layers": (
        "runtime.zero.TiledLinear runtime.zero.tiling zero.TiledLinear"
    ),
}


def _files(module: str) -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield the files that a served module shows, each with its public names."""
    for file, names in SERVED.items():
        if module in names.split():
            found = importlib.import_module(file if "." in file else f"{_HERE}.{file}")
            public = [name for name in dir(found) if not name.startswith("_")]
            yield found, getattr(found, "__all__", public)


class ServedModule(ModuleType):
    """One module under `deepspeed`.

    Each name is looked up in the files at its first use, and then stored on the module. Attributes
    that other code sets are kept.
    """

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name == "__all__":  # `from deepspeed.utils import *`
            return [known for _, names in _files(self.__name__) for known in names]
        # Before modules: `z3_leaf_module` is a function too
        for file, names in _files(self.__name__):
            if name in names:
                found = self.__dict__[name] = getattr(file, name)
                return found
        if full in MODULES:
            return importlib.import_module(full)
        if name.startswith("__") and name.endswith("__"):  # names that Python itself looks up
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(_no(full))

    def __dir__(self) -> list[str]:
        below = {m.rpartition(".")[2] for m in MODULES if m.rpartition(".")[0] == self.__name__}
        return sorted({*super().__dir__(), *self.__all__, *below})


def _no(full: str) -> str:
    """Return the error message for a name that is not served."""
    for why, names in REFUSED.items():
        if any(f"{full}.".startswith(f"{NAME}.{known}.") for known in names.split()):
            return f"{full} is not served here: {why}."
    return (
        f"there is no {full} here: the name deepspeed is served by Onefold, which does not"
        " have this one. docs/coming-from.md lists what is served."
    )


class _Distribution(importlib.metadata.Distribution):
    """The metadata that `importlib.metadata` finds for `deepspeed`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {NAME} is served by Onefold and has no files.")


class Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds `deepspeed` and the modules below it, and no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            if not fullname.startswith(f"{NAME}."):
                return None
            # The error has no `name=`: with one, `from deepspeed import x` would swallow it and
            # show its own message instead.
            raise ModuleNotFoundError(_no(fullname))
        return importlib.machinery.ModuleSpec(fullname, self, origin="onefold", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ServedModule(spec.name, f"`{spec.name}`, served by Onefold.")

    def exec_module(self, module: ModuleType) -> None:
        pass

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and (context.name or "").lower() == NAME:
            yield _Distribution()


def serving() -> bool:
    """Whether `serve` was called in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def serve(say: bool = True) -> None:
    """Serve the name `deepspeed` in this process. A second call does nothing.

    Args:
        say: print one line on the first rank, which says that Onefold serves the name.

    Raises:
        RuntimeError: DeepSpeed, transformers or accelerate was imported before.
    """
    if serving():
        return
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        raise RuntimeError(
            "DeepSpeed itself is loaded in this process, from"
            f" {getattr(loaded, '__file__', None) or 'memory'}: call onefold.deepspeed.serve()"
            " before anything imports deepspeed, or start the script with `python -m"
            " onefold.deepspeed`."
        )
    early = [name for name in _BEFORE if name in sys.modules]
    if early:
        raise RuntimeError(
            f"{' and '.join(early)} looked for DeepSpeed when imported, and found none: call"
            " onefold.deepspeed.serve() before that import, at the top of the script, or start the"
            " script with `python -m onefold.deepspeed`."
        )
    sys.meta_path.insert(0, Finder())
    importlib.invalidate_caches()
    if say and os.environ.get("RANK", "0") == "0":
        line = f"onefold serves the name deepspeed in this process (as version {VERSION})"
        print(line, file=sys.stderr, flush=True)
