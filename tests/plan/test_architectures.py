"""The table of public architectures: published sizes, in units of their own code."""

from __future__ import annotations

import sys

import pytest

from onefold.plan.modules import architecture, architectures, known, module_of


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [name for name, row in architectures().items() if row.name == name]
)
def test_an_architecture_has_the_published_number_of_parameters(name: str) -> None:
    pytest.importorskip("transformers")
    row, model = architectures()[name], architecture(name)
    off = model.numel / row.published - 1
    assert abs(off) <= row.tolerance, (
        f"{name}: {model.numel:,} against {row.published:.6g} ({off:+.2%})"
    )
    names = [p.name for u in model.units for p in u.parameters]
    assert model.units[0].name == "(root)" and len(names) == len(set(names))
    assert len(model.units) > model.transformer.layers if model.transformer else False


def test_other_spellings_are_found_and_names_that_are_none_are_answered_with_the_nearest() -> None:
    row = known("meta-llama/Meta-Llama-3.1-8B")
    assert row is not None and row.name == "llama-3-8b"
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
