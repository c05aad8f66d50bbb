"""torch.compile: of blocks and of whole models, by inductor too, and what stage 3 refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.runtime import differentiate
from ranks import run_ranks
from zoo import TinyGPT, TinyMLP, features_of, tokens_of


def frames_of_a_compiled_model(stage: int, backward: bool) -> tuple[int, int, list[str]]:
    """(graphs compiled in four steps, frames and graphs compiled in three further steps, functions
    of Onefold that were compiled). `backward`: the backward pass is in the compiled code too.
    """
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(depth=6), onefold.Recipe.zero(stage, stall_timeout=60.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph.print_readable(print_output=False))
        return graph.forward

    def passes(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    fast: Any = torch.compile(passes if backward else model, backend=backend)
    torch._dynamo.config.fail_on_recompile_limit_hit = True

    def step(number: int) -> None:
        out = fast(features_of(number, 4, 7))
        if not backward:
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(4):
        step(number)
    before = len(seen), counters["frames"]["total"]
    for number in range(3):
        step(number)
    ours = [name for name in _compiled_functions() if "/onefold/" in name]
    return before[0], len(seen) + counters["frames"]["total"] - sum(before), ours


def _compiled_functions() -> list[str]:
    """The functions whose frames torch.compile has looked at, as file:name."""
    from torch._dynamo.convert_frame import input_codes

    codes = [code() for code in input_codes.seen]
    return [f"{code.co_filename}:{code.co_name}" for code in codes if code is not None]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_model_compiles_none_of_the_hooks(stage: int, backward: bool) -> None:
    first, later, ours = run_ranks(2, frames_of_a_compiled_model, stage, backward, timeout=250.0)[0]
    assert first > 0, "nothing was compiled"
    assert ours == [], f"compiled: {ours}"
    assert later == 0, f"{later} frames were compiled after four steps"


# -- CUDA graphs -----------------------------------------------------------------------------------


def blocks_with_graphs(model: nn.Module, mode: str) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = torch.compile(block.forward, mode=mode)  # type: ignore
    return model


def refused_in_the_first_pass(stage: int, where: str, mode: str) -> str:
    """What the first pass raises on a device for which torch records graphs."""
    differentiate.GRAPHED = frozenset(("cpu",))
    model = TinyGPT(depth=1)
    if where == "forward":
        blocks_with_graphs(model, mode)
    elif where == "compile()":
        model.blocks[0].compile(mode=mode)
    sharded: Any = onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=30.0))
    fast = torch.compile(sharded, mode=mode) if where == "around" else sharded
    try:
        fast(tokens_of(0)).backward()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["forward", "compile()", "around"])
def test_stage_3_refuses_cuda_graphs_in_the_first_pass(where: str) -> None:
    mode = "max-autotune" if where == "forward" else "reduce-overhead"
    for said in run_ranks(2, refused_in_the_first_pass, 3, where, mode, timeout=250.0):
        named = "'blocks.0'" if where != "around" else "the model"
        assert said.startswith(f"{named} was compiled with CUDA graphs"), said
        assert "max-autotune-no-cudagraphs" in said and "stage 2" in said


@pytest.mark.slow
def test_other_modes_and_stages_are_not_refused() -> None:
    for stage, mode in ((3, "default"), (2, "reduce-overhead")):
        found = run_ranks(2, refused_in_the_first_pass, stage, "forward", mode, timeout=250.0)
        assert found == ["", ""]


def test_devices_without_cuda_graphs_ask_nothing() -> None:
    import torch._dynamo  # noqa: F401: nothing is asked before it is imported

    model = TinyGPT(depth=1)
    model.blocks[0].forward = _Graphed()  # type: ignore[assignment]
    differentiate.refuse_cuda_graphs(model, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'blocks\.0' was compiled with CUDA graphs"):
        differentiate.refuse_cuda_graphs(model, torch.device("cuda"))


class _Graphed:
    def get_compiler_config(self) -> dict[str, Any]:
        return {"triton.cudagraphs": True}
