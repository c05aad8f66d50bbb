"""The table of public architectures: published sizes, and the very parameters of transformers'
modules.
"""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch

from onefold.plan import shapes
from onefold.plan.shapes import ARCHITECTURES, architecture
from onefold.simulation.stand_in import _config as config_of

with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_published_number_of_parameters(name: str) -> None:
    row, model = ARCHITECTURES[name], architecture(name)
    off = model.numel / row.published - 1
    assert abs(off) <= row.tolerance, (
        f"{name}: {model.numel:,} against {row.published:.6g} ({off:+.2%}); {row.source}"
    )
    assert model.units[0].name == "(root)"
    names = [p.name for u in model.units for p in u.parameters]
    assert len(names) == len(set(names))


@with_transformers
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt2-xl",
        "llama-2-7b",
        "llama-2-70b",
        "llama-3-8b",
        "llama-3.2-1b",
        "mixtral-8x7b",
        "bloom",
    ],
)
def test_the_parameters_are_those_of_the_real_module_unit_by_unit(name: str) -> None:
    import transformers

    from onefold.runtime.units import find_units

    row = shapes.find(name)
    if row.family in ("mixtral",) and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 keeps each expert in matrices of its own; the table follows 5")
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = config_of(transformers, row.family, row.dims)
        module = transformers.AutoModelForCausalLM.from_config(config)
    real = {
        spec.name or "(root)": sorted((f.names[0], tuple(f.param.shape)) for f in spec.found)
        for spec in find_units(module, None)
    }
    ours = {
        u.name: sorted((p.name, p.shape) for p in u.parameters) for u in architecture(name).units
    }
    assert list(ours) == list(real)
    assert ours == real
    embedding = {u.name for u in architecture(name).units if u.looks_up_only}
    assert embedding == {
        n for n in real if n != "(root)" and type(module.get_submodule(n)) is torch.nn.Embedding
    }
