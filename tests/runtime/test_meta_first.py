"""A model without initializers is sharded from the meta device and loaded afterwards. Using what
was never loaded is an error, by name.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks

STALL_TIMEOUT = 20.0
STAGES = (0, 1, 2, 3)


class Own(nn.Module):
    """Parameters and buffers of its own that nothing initializes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.to(self.weight.dtype) @ self.weight) * self.scale * self.hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Own(8) for _ in range(3))
        self.gain = nn.Parameter(torch.empty(8))
        self.head = nn.Linear(8, 2)  # knows how to reset its parameters

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head((x * self.gain).to(self.head.weight.dtype))


def real() -> Model:
    torch.manual_seed(0)
    model = Model()
    for p in model.parameters():
        nn.init.normal_(p)
    model.blocks[1].scale.fill_(2.0)
    return model


def said_by(call: Callable[[], Any]) -> str:
    import onefold

    try:
        call()
    except onefold.UninitializedError as error:
        return str(error)
    return ""


def read(model: nn.Module) -> None:
    import onefold

    with onefold.full_params(model):
        pass


X = torch.ones(4, 8)
PERSISTENT = ["gain", *(f"blocks.{i}.{n}" for i in range(3) for n in ("weight", "scale", "count"))]


def left_in(model: nn.Module) -> list[str]:
    import onefold

    engine = onefold.engine_of(model)
    engine.uninitialized.look()
    return engine.uninitialized.names()


def on_meta(stage: int, **options: Any) -> Any:
    import onefold

    with torch.device("meta"):
        model = Model()
    return onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT, **options))


def refused_before(model: nn.Module, folder: str) -> list[str]:
    """Everything that reads what nothing has given a value."""
    import onefold

    engine, problems = onefold.engine_of(model), []
    expected = {*PERSISTENT, *(f"blocks.{i}.hidden" for i in range(3))}
    if set(engine.uninitialized.names()) != expected:
        problems.append(f"unset: {engine.uninitialized.names()}")
    # One rank that holds everything as it is: each module answers for itself
    alone = engine.unsharded
    uses: dict[str, tuple[Callable[[], Any], str]] = {
        "forward": (lambda: model(X), "'gain'"),
        "evaluation": (lambda: model.eval()(X), "onefold.load("),
        "full_state_dict": (lambda: onefold.full_state_dict(model), "'gain'"),
        "save": (lambda: onefold.save(f"{folder}/none", model=model), "'gain'"),
        "export": (lambda: onefold.export(model, f"{folder}/out"), "'gain'"),
        "full_params": (lambda: read(model), "'gain'"),
        "gather": (lambda: model.blocks[1].weight.onefold.gather(), "'blocks.1.weight'"),
    }
    if engine.recipe.stage == 0 or alone:
        uses["state_dict"] = (model.state_dict, "'gain'")
    if alone:
        del uses["gather"]
    for name, (call, word) in uses.items():
        said = said_by(call)
        if word not in said or "built on the meta device" not in said:
            problems.append(f"{name} said {said!r}")
    model.train()
    return problems + [f"{path} is there" for path in Path(folder).glob("none*")]


def load_in_part(model: Any, state: dict[str, Tensor], folder: str) -> list[str]:
    import onefold

    part = {name: t for name, t in state.items() if "blocks.1" not in name}
    onefold.load_full_state_dict(model, part if dist.get_rank() == 0 else None, strict=False)
    left = left_in(model)
    problems = (
        [] if left == ["blocks.1.weight", "blocks.1.scale", "blocks.1.count"] else [f"left: {left}"]
    )
    said = said_by(lambda: model(X))
    problems += [] if "'blocks.1.weight', 'blocks.1.scale'" in said else [said]
    onefold.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    return problems


def write_in_part(model: Any, state: dict[str, Tensor], folder: str) -> list[str]:
    """As `.data` and in place; parameters on rank 0 alone, whose values are everybody's."""
    import onefold

    with onefold.full_params(model, write=True), torch.no_grad():
        for name, p in model.named_parameters() if dist.get_rank() == 0 else ():
            if name != "gain":
                p.data.copy_(state[name])
        for name, b in model.named_buffers():
            b.copy_(state.get(name, torch.ones(1)))
    left = left_in(model)
    said = said_by(lambda: model(X))
    with onefold.full_params(model, write=True), torch.no_grad():
        model.gain.copy_(state["gain"])
    return [] if left == ["gain"] and ("'gain'" in said) else [f"left {left}, said {said!r}"]


def load_checkpoint(model: Any, state: dict[str, Tensor], folder: str) -> list[str]:
    import onefold

    onefold.save(
        f"{folder}/saved",
        model=onefold.shard(real(), onefold.Recipe.zero(1, stall_timeout=STALL_TIMEOUT)),
    )
    onefold.load(f"{folder}/saved", model=model)
    return []


def load_safetensors(model: Any, state: dict[str, Tensor], folder: str) -> list[str]:
    from safetensors.torch import save_file

    import onefold

    if dist.get_rank() == 0:
        save_file({n: t.contiguous() for n, t in state.items()}, f"{folder}/model.safetensors")
    dist.barrier()
    onefold.load_pretrained(model, folder)
    return []


def write_directly(model: Any, state: dict[str, Tensor], folder: str) -> list[str]:
    """Every rank writes into what it has, as initializing loops do."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(0.5)
            state[name] = torch.full_like(state[name], 0.5)
        for name, b in model.named_buffers():
            b.copy_(state.get(name, torch.ones(1)))
    return []


WAYS = (load_in_part, write_in_part, load_checkpoint, load_safetensors, write_directly)


def loaded_later(folder: str, settings: list[tuple[int, dict[str, Any]]]) -> list[str]:
    import onefold

    problems = []
    for way in WAYS:
        for at, (stage, options) in enumerate(settings):
            here = f"{folder}/{way.__name__}-{at}"
            Path(here).mkdir(exist_ok=True)
            case, model = f"{way.__name__}, stage {stage}, {options}", on_meta(stage, **options)
            problems += [f"{case}: {p}" for p in refused_before(model, here)]
            for block in model.blocks:
                block.hidden = torch.ones(1)  # in no state dict: assigned
            state = {name: t.clone() for name, t in real().state_dict().items()}
            problems += [f"{case}: {p}" for p in way(model, state, here)]
            out = model(X)
            problems += [
                f"{case}: {name} is left" for name in onefold.engine_of(model).uninitialized.names()
            ]
            whole = onefold.full_state_dict(model)
            problems += [
                f"{case}: {n}"
                for n, t in whole.items()
                if not torch.equal(t.to(state[n].dtype), state[n])
            ]
            like = real()
            like.load_state_dict(state)
            if not torch.allclose(
                out.float(), like(X), rtol=0.03 if options else 1e-5, atol=0.03 if options else 1e-6
            ):
                problems.append(f"{case}: computes {out}, not {like(X)}")
            out.sum().backward()
            # Of what this rank owns
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if not grads or not all(g.detach().isfinite().all() for g in grads):
                problems.append(f"{case}: no gradients")
    return problems


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_the_meta_device_is_loaded_after_it_was_sharded(ranks: int) -> None:
    settings: list[tuple[int, dict[str, Any]]] = [
        (s, {}) for s in (STAGES if ranks > 1 else (3,))
    ] + [(3, {"precision": "bf16"})]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(ranks, loaded_later, folder, settings, timeout=240.0) == [[]] * ranks


def encoded_and_offloaded(folder: str) -> list[str]:
    """Weights that rest encoded, off the device, or in tiles are known by the names that a load
    brings.
    """
    import onefold

    problems = []
    for options in (
        {"frozen": "int8"},
        {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {"tile": 256},
    ):
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        for name, p in model.named_parameters():
            p.requires_grad_("frozen" not in options or "bias" in name)
        for module in model:
            module.__class__ = type(
                "Silent" + type(module).__name__, (type(module),), {"reset_parameters": None}
            )
        if "tile" in options:
            for module in model:
                module.__class__ = type(module).__bases__[0]
        torch.manual_seed(0)
        like = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        onefold.shard(
            model,
            onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT, **options),
            init=nothing if "tile" in options else None,
        )
        said = said_by(lambda model=model: model(X))
        problems += [] if ".weight'" in said or "'0." in said else [f"{options}: said {said!r}"]
        state = {name: t for name, t in like.state_dict().items() if name.startswith("0.")}
        onefold.load_full_state_dict(model, state, strict=False)
        left = {name.partition(".")[0] for name in onefold.engine_of(model).uninitialized.names()}
        problems += [] if left == {"2"} else [f"{options}: left {left}"]
        onefold.load_full_state_dict(model, like.state_dict())
        if not torch.allclose(model(X), like(X), atol=0.05):
            problems.append(f"{options}: computes something else")
    return problems


def nothing(module: nn.Module) -> None:
    """An init that initializes nothing."""


def test_what_rests_encoded_off_the_device_or_in_tiles_is_loaded_later_too(tmp_path: Path) -> None:
    assert run_ranks(2, encoded_and_offloaded, str(tmp_path)) == [[], []]


def init_that_forgets() -> list[str]:
    """An init function and a module's own reset that leave a parameter out; a body in memory beside
    a head on the meta device.
    """
    import onefold

    def forgets(module: nn.Module) -> None:
        with contextlib.suppress(AttributeError):
            nn.init.ones_(module.head.weight)  # type: ignore[arg-type, union-attr]
        for name, p in module.named_parameters(recurse=False):
            if name != "gain":
                p.data.fill_(0.5)  # no version counter tells

    problems = []
    for stage in STAGES:
        with torch.device("meta"):
            model: Any = Model()
        model.blocks[2] = Own(8)
        with torch.no_grad():
            model.blocks[2].weight.fill_(0.5)
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT), init=forgets)
        left = left_in(model)
        expected = [
            "gain",
            *(f"blocks.{i}.{n}" for i in range(2) for n in ("scale", "count", "hidden")),
        ]
        problems += [] if left == expected else [f"stage {stage}: {left}"]
    return problems


def test_an_initializer_that_leaves_something_out_is_noticed() -> None:
    assert run_ranks(2, init_that_forgets) == [[], []]


def real_on_rank_0_alone() -> list[str]:
    """Rank 0 has the model in memory, the other on the meta device: everything has a value."""
    import onefold

    problems = []
    for stage in STAGES:
        with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
            model = Model()
        if dist.get_rank() == 0:
            model.load_state_dict(real().state_dict())
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT))
        problems += onefold.engine_of(model).uninitialized.names()
        problems += [] if torch.allclose(model(X), real()(X), rtol=1e-5) else [f"stage {stage}"]
    return problems


def test_what_rank_0_has_in_memory_has_a_value() -> None:
    assert run_ranks(2, real_on_rank_0_alone) == [[], []]


def small_copies_read_twice(stage: int) -> list[float]:
    """Rank 0 has the model in memory, the others on the meta device; small trained units beside
    frozen ones. After a step, two passes without gradients.
    """
    import onefold

    with contextlib.nullcontext() if dist.get_rank() == 0 else torch.device("meta"):
        model: Any = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        )
    for block in model:
        block[0].requires_grad_(False)
    recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT)
    onefold.shard(model, recipe, units=[f"{n}" for n in range(3)], device="cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.arange(16.0).reshape(2, 8) / 16
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append(float(model(x).sum()))
    sent = onefold.engine_of(model).traffic.total()
    with torch.no_grad():
        model(x)
    assert stage == 3 or onefold.engine_of(model).traffic.total() == sent  # nothing was written to
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gather_of_small_copies_is_no_write_on_ranks_that_began_on_meta(stage: int) -> None:
    first, second = run_ranks(2, small_copies_read_twice, stage)
    assert first == second and first[0] == first[1]
