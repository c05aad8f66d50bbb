"""Onefold inside other trainers: axolotl, LLaMA-Factory, accelerate's dataloaders.

The first two are tested where they are installed, which is not so in `make test`: each asks for
versions of transformers of its own.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ranks import run_ranks

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
from plugin_trials import beside_accelerate, by_axolotl, by_llamafactory

PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def test_the_recipe_for_accelerate_trains_as_ddp_does() -> None:
    """As docs/launchers.md prints it."""
    block = re.search(r'```python title="accelerate"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert block is not None
    ranks = run_ranks(2, beside_accelerate, block[1].replace("1.0)  ", "1e9)"), server="libraries")
    for seen in ranks:
        assert len(seen["onefold"]) == 4 and seen["onefold"] == pytest.approx(seen["ddp"], rel=1e-6)
    assert not set(ranks[0]["rows"]) & set(ranks[1]["rows"])  # each rank has its own


@needs("axolotl")
def test_axolotls_trainer_by_the_plugin_has_ddps_losses(tmp_path: Path) -> None:
    seen = run_ranks(2, by_axolotl, str(tmp_path), server="libraries")[0]
    assert len(seen["ddp"]) == 4
    assert seen["1"] == seen["3"] == pytest.approx(seen["ddp"], rel=1e-6)


@needs("axolotl")
def test_the_plugin_has_axolotls_methods_and_refuses_other_engines() -> None:
    from axolotl.integrations.base import BasePlugin

    from onefold.integrations.axolotl import Options, Plugin

    for name in ("get_input_args", "get_trainer_cls"):
        assert callable(getattr(BasePlugin, name)), name
    assert Plugin().get_input_args() == "onefold.integrations.axolotl.Options"
    assert Options(onefold={"stage": 3}).onefold == {"stage": 3}
    with pytest.raises(ValueError, match=r"fsdp_config beside"):
        Plugin().get_trainer_cls({"onefold": 3, "fsdp_config": {"x": 1}})
    with pytest.raises(ValueError, match=r"onefold: \{stage: 3\}"):
        Plugin().get_trainer_cls({})


@needs("llamafactory")
def test_llamafactory_shards_saves_and_resumes(tmp_path: Path) -> None:
    seen = run_ranks(2, by_llamafactory, str(tmp_path), server="libraries")[0]
    assert seen["first"][0] > seen["second"][1]
    assert seen["again"] == pytest.approx(seen["second"], rel=1e-6)
    assert seen["saved"], "no weights were saved"
