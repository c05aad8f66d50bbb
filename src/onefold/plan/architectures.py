"""Public architectures by name, from `architectures.toml`: arguments of transformers' configs. Their
code is built where there is no memory and no network (plan/modules.py).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        model_type: transformers' name of the family. config: the arguments of its config.
        published: the number of parameters as its source states it.
        tolerance: relative; how far the sum of the shapes may be from it.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    published: float
    tolerance: float


@cache
def architectures() -> Mapping[str, Architecture]:
    """Return every architecture by its name and its other spellings."""
    text = resources.files("onefold.plan").joinpath("architectures.toml").read_text("utf-8")
    families = tomllib.loads(text)
    aliases = families.pop("aliases")
    found = {
        name: Architecture(name, family, row, row.pop("published"), row.pop("tolerance"))
        for family, rows in families.items()
        for name, row in rows.items()
    }
    return found | {alias: found[name] for alias, name in aliases.items()}


def known(name: object) -> Architecture | None:
    """Return the row of that name, without organization, case and suffixes: "meta-llama/Llama-2-7b-hf"
    is "llama-2-7b". None if there is none, or if a folder with a config.json is called so.
    """
    if os.path.isfile(os.path.join(str(name), "config.json")):
        return None
    plain = str(name).strip().lower().replace("_", "-").rsplit("/", 1)[-1]
    for part in ("meta-", "-hf", "-v0.1"):
        plain = plain.removeprefix(part).removesuffix(part)
    return architectures().get(plain)
