"""`serve`: make `import deepspeed` find Onefold's modules, in this process only.

    import deepspeed.zero  ->  sys.meta_path[0], a `Finder`  ->  a `ServedModule` with the table's names
    importlib.metadata.version("deepspeed")  ->  the same `Finder`  ->  "0.19.8+onefold"

transformers and accelerate look for DeepSpeed once, when they are imported. `serve` must be called
before that. It installs no files, and other processes are unaffected.
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

from onefold.deepspeed.table import (
    SERVED,
    VERSION,
    is_served,
    modules,
    refusal,
)

NAME = "deepspeed"
_HERE = "onefold.deepspeed"
#: Packages that look for DeepSpeed when they are imported.
_BEFORE = ("transformers", "accelerate")


class ServedModule(ModuleType):
    """One module under `deepspeed`.

    Each name is looked up in the table at its first use, and then stored on the module. Attributes
    that other code sets are kept.
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
        if name.startswith("__") and name.endswith("__"):  # names that Python itself looks up
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(_no(full))

    def __dir__(self) -> list[str]:
        below = {m.rpartition(".")[2] for m in modules() if m.rpartition(".")[0] == self.__name__}
        return sorted({*super().__dir__(), *SERVED.get(self.__name__, {}), *below})


def _no(full: str) -> str:
    """Return the error message for a name that is not served."""
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
    """The metadata that `importlib.metadata` finds for `deepspeed`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {NAME} is served by Onefold and has no files.")


class Finder(importlib.metadata.DistributionFinder):
    """Finds `deepspeed` and the modules below it, and no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in modules():
            if not fullname.startswith(f"{NAME}."):
                return None
            # The error has no `name=`: with one, `from deepspeed import x` would swallow it and
            # show its own message instead.
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


__all__ = ["Finder", "ServedModule", "is_served", "serve", "serving"]
