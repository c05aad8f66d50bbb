"""A script may set another default device (`torch.set_default_device("cuda")`): Onefold's own
tensors are where Onefold needs them. Here the default is "meta", on which a tensor has no elements.
"""

from __future__ import annotations

import ast
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from saved import Run
from zoo import TinyMLP, features_of

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "onefold"

#: Functions that put their result on the default device.
FACTORIES = frozenset(
    (
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
        *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
        *("tensor", "tril_indices", "triu_indices", "zeros"),
    )
)


def without_a_device(source: str) -> list[int]:
    """The lines of calls that make a tensor on the default device. The constructor of a module may
    do that, as torch's own modules do.
    """
    tree = ast.parse(source)
    modules = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "nn.Module" in map(ast.unparse, node.bases)
    ]
    built = {
        id(node)
        for module in modules
        for method in module.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for node in ast.walk(method)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        and id(node) not in built
    ]


def test_the_package_names_the_device_of_every_tensor_that_it_makes() -> None:
    assert without_a_device("import torch\nx = torch.zeros(3)\ny = torch.ones(3, device=d)") == [2]
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 300
    assert [f"{file}:{line}" for file in files for line in without_a_device(file.read_text())] == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}),
        (3, {"gather_codec": "int8", "reduce_codec": "int8", "error_feedback": True}),
        (3, {"gather_codec": "int4", "reduce_codec": "fp8"}),
        (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        (3, {"offload_optimizer": "nvme", "nvme": "FOLDER"}),
        (2, {"moments": "int8"}),
    ],
    ids=["stage 1", "int8", "int4 and fp8", "host", "NVMe", "moments"],
)
def test_training_saving_and_loading_are_the_same_with_another_default_device(
    ranks: int, stage: int, options: dict[str, Any]
) -> None:
    assert run_ranks(ranks, differing, stage, options) == [[]] * ranks


def differing(stage: int, options: dict[str, Any]) -> list[str]:
    """The numbers that depend on the default device."""
    expected = trained(stage, options, "cpu")
    found = trained(stage, options, "meta")
    return [
        name
        for name, value in expected.items()
        if found[name].is_meta or not torch.equal(value, found[name])
    ]


def trained(stage: int, options: dict[str, Any], default: str) -> dict[str, Any]:
    """Everything that two steps, a save, a step, a load and another step leave, by name."""
    import onefold

    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory())]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        if "nvme" in options:
            options = options | {"nvme": str(folder)}
        inputs = [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(4)]
        model: Any = TinyMLP()
        found: dict[str, Any] = {}
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
        adam = "moments" in options
        # torch makes Adam's step counter on the default device: in a first step, before it is set
        context = stack.enter_context if not adam else lambda context: None
        context(torch.device(default))
        model = onefold.shard(model, recipe, device="cpu")
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(model.parameters(), lr=0.01)
            if adam
            else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )

        def step(number: int) -> None:
            model(inputs[number]).square().mean().backward()
            found[f"norm {number}"] = onefold.clip_grad_norm_(model, 0.1)
            if "nvme" not in options:
                weight = model.enter.weight
                found[f"equal {number}"] = torch.tensor(weight.equal(weight), device="cpu")
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        if adam:
            stack.enter_context(torch.device(default))
        average = onefold.ema.EMA(model, 0.5)
        step(1)
        average.update()
        onefold.save(folder / "saved", model=model, optimizer=optimizer)
        step(2)
        onefold.load(folder / "saved", model=model, optimizer=optimizer)
        step(3)
        found |= {f"ema {name}": value for name, value in average.state_dict().items()}
        found |= {f"weight {n}": value for n, value in onefold.full_state_dict(model).items()}
        dist.barrier()
    return found


def a_batch() -> list[torch.Tensor]:
    from onefold.data.samples import Samples

    rows = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
    samples = Samples(rows, rows, starts=lambda row: np.array([0, 2]))
    return list(samples.batch(np.array([0, 1])).values())


def rows_of_tensors() -> list[torch.Tensor]:
    from onefold.pretrained.hf_names import Tags

    return [Tags().add("a", (3, 4))]


def levels() -> list[torch.Tensor]:
    from onefold.quant import fp8, nf4, numbers

    for cached in (fp8.numbers_of_bytes, numbers.levels, numbers.borders):
        cached.cache_clear()
    return [
        fp8.numbers_of_bytes().nan_to_num(),
        *nf4._cells.__wrapped__(torch.device("cpu")),
        *(torch.tensor(f(), device="cpu") for f in (numbers.levels, numbers.borders)),
    ]


@pytest.mark.parametrize("make", [a_batch, rows_of_tensors, levels])
def test_tensors_of_the_host_are_the_same_with_another_default_device(
    make: Callable[[], list[torch.Tensor]],
) -> None:
    expected = make()
    with torch.device("meta"):
        found = make()
    assert all(map(torch.equal, expected, found))


def test_a_checkpoint_is_written_anew_with_another_default_device(tmp_path: Path) -> None:
    from onefold.checkpoint.folder_source import FolderSource
    from onefold.inspection.diff import differences
    from onefold.inspection.reshard import reshard

    saved = Run().save(tmp_path / "a")
    with torch.device("meta"):
        reshard(saved, tmp_path / "b", 3)
        with (
            contextlib.closing(FolderSource(saved)) as a,
            contextlib.closing(FolderSource(tmp_path / "b")) as b,
        ):
            assert differences(a, b).equal
