"""`serve`: from here on `import deepspeed` finds Onefold's modules, in this process and nowhere
else.

    import deepspeed.zero  ->  sys.meta_path[0], a `Finder`  ->  a `ServedModule` with the table's names
    importlib.metadata.version("deepspeed")  ->  the same `Finder`  ->  "0.18.1+onefold"

transformers and accelerate decide once, when they are imported, whether there is a DeepSpeed. So
this has to come before them. No file of that name is installed, and other processes are as they
were.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from onefold.integrations.deepspeed.names.table import (
    SERVED,
    VERSION,
    is_served,
    modules,
    refusal,
)

NAME = "deepspeed"
_HERE = "onefold.integrations.deepspeed.names"
#: They look for DeepSpeed when they are imported.
_BEFORE = ("transformers", "accelerate")


class ServedModule(ModuleType):
    """One module under `deepspeed`. Names are found when they are first asked for; what is set
    stays set.
    """

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name == "__all__":  # `from deepspeed.utils import *`
            return [known for known in SERVED.get(self.__name__, {}) if not known.startswith("_")]
        if (where := SERVED.get(self.__name__, {}).get(name)) is not None:
            module, _, attribute = where.partition(":")
            inside = module if "." in module or module == "torch" else f"{_HERE}.{module}"
            found = getattr(importlib.import_module(inside), attribute)
            self.__dict__[name] = found
            return found
        if full in modules():
            return importlib.import_module(full)
        if name.startswith("__") and name.endswith("__"):  # Python's own questions
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(_no(full))

    def __dir__(self) -> list[str]:
        below = {m.rpartition(".")[2] for m in modules() if m.rpartition(".")[0] == self.__name__}
        return sorted({*super().__dir__(), *SERVED.get(self.__name__, {}), *below})


def _no(full: str) -> str:
    """The sentence for a name that is not served."""
    why = refusal(full)
    return (
        f"{full} is not served here: {why}."
        if why is not None
        else f"there is no {full} here: the name deepspeed is served by Onefold, which does not"
        " have this one. docs/coming-from.md lists what is served."
    )


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ServedModule(spec.name, f"`{spec.name}`, served by Onefold.")

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` says of `deepspeed`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {NAME} is served by Onefold and has no files.")


class Finder(importlib.metadata.DistributionFinder):
    """Answers for `deepspeed` and what is below it, and for nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in modules():
            if not fullname.startswith(f"{NAME}."):
                return None
            # Without `name=`: by that, `from deepspeed import x` knows an error to pass over
            raise ModuleNotFoundError(_no(fullname))
        return importlib.machinery.ModuleSpec(
            fullname, _Loader(), origin="onefold", is_package=True
        )

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
        say: print the line that says who serves, on the first rank.

    Raises:
        RuntimeError: DeepSpeed itself is loaded, or transformers or accelerate are.
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


__all__ = ["Finder", "ServedModule", "is_served", "serve", "serving"]
