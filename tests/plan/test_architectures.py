"""The table of public architectures: published sizes, in units of their own code."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from onefold.plan.modules import architectures, known, model_shape, module_of

PUBLISHED = tomllib.loads((Path(__file__).parent / "data" / "published.toml").read_text("utf-8"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", architectures()[0])
def test_an_architecture_has_the_published_number_of_parameters(name: str) -> None:
    pytest.importorskip("transformers")
    (published, tolerance), model = PUBLISHED[name], model_shape(module_of(name), name=name)
    off = model.numel / published - 1
    assert abs(off) <= tolerance, f"{name}: {model.numel:,} against {published:.6g} ({off:+.2%})"
    names = [p.name for u in model.units for p in u.parameters]
    assert model.units[0].name == "(root)" and len(names) == len(set(names))
    assert len(model.units) > model.transformer.layers if model.transformer else False


def test_other_spellings_are_found_and_names_that_are_none_are_answered_with_the_nearest() -> None:
    assert known("meta-llama/Meta-Llama-3.1-8B") == "llama-3-8b"
    with pytest.raises(ValueError, match=r"Did you mean 'llama-3-70b'.*Or give a config.json"):
        module_of("llama-3-71b")


def test_a_name_without_transformers_is_answered_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError, match=r"llama-3-8b: .* not installed: pip install 'onefold\[train\]'"
    ):
        module_of("llama-3-8b")
