"""Published optimizers of whole matrices, by the code of a package that people install for them: equal
to the bit to one process that is given the same gradients, and resumed on other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from optim.test_whole_step import Twins
from ranks import run_ranks
from whole_optimizers import MADE, is_matrix

pytest.importorskip("pytorch_optimizer")

#: Factors and bases of rows and columns; second moments of rows and columns; norms of a layer.
NAMES = ("soap", "splus", "shampoo", "racs", "came", "adafactor", "lamb", "lars", "muon")
RESUMED = ("soap", "shampoo", "came", "muon")


def maker(name: str) -> Callable[[Any], list[torch.optim.Optimizer]]:
    def make(named: Any) -> list[torch.optim.Optimizer]:
        import pytorch_optimizer

        kind, named = pytorch_optimizer.load_optimizer(name), list(named)
        if name != "muon":
            return [kind([p for _, p in named], lr=0.01)]
        matrices = [p for n, p in named if is_matrix(n, p)]
        rest = [p for n, p in named if not is_matrix(n, p)]
        return [kind([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])]

    return make


def steps_of_each(names: tuple[str, ...]) -> list[str]:
    warnings.simplefilter("ignore")  # of the package's own, about torch's newer names
    out = []
    for name in names:
        for stage in (1, 3):
            MADE[name] = maker(name)
            twins = Twins(name, onefold.Recipe.zero(stage, stall_timeout=60.0))
            for _ in range(3):
                twins.step()
            out += [f"{name} at stage {stage}: {each}" for each in twins.differences()]
    return out


def test_published_optimizers_equal_one_process_to_the_bit() -> None:
    assert run_ranks(3, steps_of_each, NAMES) == [[]] * 3


def a_part(name: str, options: dict[str, Any], path: Path, resumed: bool) -> list[str]:
    warnings.simplefilter("ignore")
    MADE[name] = maker(name)
    twins = Twins(name, onefold.Recipe.zero(**options), path if resumed else None)
    found = twins.differences() if resumed else []
    for _ in range(2):
        twins.step()
    found += twins.differences()
    twins.save(path)
    return found


@pytest.mark.parametrize("name", RESUMED)
def test_published_optimizers_resume_on_other_ranks(name: str, tmp_path: Path) -> None:
    for ranks, options in ((2, {"stage": 3}), (3, {"stage": 1})):
        found = run_ranks(ranks, a_part, name, options, tmp_path, ranks == 3)
        assert found == [[]] * ranks, (ranks, found[0])
