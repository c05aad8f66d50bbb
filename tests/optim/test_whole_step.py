"""Optimizers that look at whole matrices: equal to the bit to one process that is given the same
gradients, on any number of ranks, at any stage, and with a resume on others in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.layout.owners import traffic
from onefold.optim.owned import owned_by
from ranks import run_ranks
from whole_optimizers import MADE, PerTensor, Words, words_of

pytestmark = pytest.mark.one_in(6)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


class Twins:
    """A sharded model beside a plain one on every rank, which is given the same gradients.

    `path`: where a run before has left both.
    """

    def __init__(self, name: str, recipe: onefold.Recipe, path: Path | None = None) -> None:
        self.model = onefold.shard(Words(), recipe)
        self.plain = Words()
        self.optimizers = MADE[name](trainable(self.model))
        self.references = MADE[name](trainable(self.plain))
        self.steps = 0
        if path is not None:
            onefold.load(path / "sharded", model=self.model, optimizer=self.optimizers)
            known = torch.load(path / "plain.pt", weights_only=False)
            self.plain.load_state_dict(known["model"])
            for optimizer, state in zip(self.references, known["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.steps = known["steps"]

    def step(self, micro: int = 1) -> None:
        for number in range(micro):
            words = words_of(dist.get_rank(), 10 * self.steps + number)
            if number + 1 < micro:
                with onefold.no_sync(self.model):
                    (self.model(words) / micro).backward()
            else:
                (self.model(words) / micro).backward()
        self.steps += 1
        self.copy_gradients()
        for optimizer in [*self.optimizers, *self.references]:
            optimizer.step()
            optimizer.zero_grad()

    def copy_gradients(self) -> None:
        given = dict(trainable(self.model))
        for name, p in trainable(self.plain):
            p.grad = torch.tensor(given[name].grad.tolist())

    def save(self, path: Path) -> None:
        onefold.save(path / "sharded", model=self.model, optimizer=self.optimizers, overwrite=True)
        if dist.get_rank() == 0:
            torch.save(
                {
                    "model": self.plain.state_dict(),
                    "optimizers": [o.state_dict() for o in self.references],
                    "steps": self.steps,
                },
                path / "plain.pt",
            )
        dist.barrier()

    def differences(self) -> list[str]:
        """What differs in weights and states, on the first rank; [] elsewhere."""
        weights = onefold.full_state_dict(self.model)
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        if dist.get_rank():
            return []
        bad = [
            f"{name} by {(weights[name] - value).abs().max():.2e}"
            for name, value in self.plain.state_dict().items()
            if not torch.equal(weights[name], value)
        ]
        for mine, optimizer in zip(states, self.references, strict=True):
            bad += _different(mine, optimizer.state_dict())
        return bad


def _different(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    bad = [] if mine["param_groups"] == theirs["param_groups"] else ["the groups"]
    if set(mine["state"]) != set(theirs["state"]):
        return [*bad, f"states of {set(mine['state']) ^ set(theirs['state'])}"]
    for number, state in theirs["state"].items():
        found = mine["state"][number]
        for key in {*state, *found}:
            if key not in state or key not in found or not _same(state[key], found[key]):
                bad.append(f"{key!r} of {number}")
    return bad


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def a_part_of_a_run(name: str, options: dict[str, Any], path: Path, resumed: bool) -> list[str]:
    twins = Twins(
        name, onefold.Recipe.zero(**options, stall_timeout=60.0), path if resumed else None
    )
    found = twins.differences() if resumed else []
    for micro in (1, 2):
        twins.step(micro)
    found += twins.differences()
    twins.save(path)
    return found


#: (ranks, recipe) of the parts of a run.
RUN = (
    (2, {"stage": 1}),
    (3, {"stage": 3}),
    (5, {"stage": 2}),
    (4, {"stage": 3, "shard_group": 2}),
    (2, {"stage": 0}),
    (2, {"stage": 3, "offload_optimizer": "cpu"}),
)


@pytest.mark.parametrize("name", MADE)
def test_a_run_over_many_ranks_and_stages_equals_one_process_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    for number, (ranks, options) in enumerate(RUN):
        found = run_ranks(ranks, a_part_of_a_run, name, options, tmp_path, bool(number))
        assert found == [[]] * ranks, (ranks, options, found[0])


def orthogonalized() -> tuple[int, int, int]:
    """(matrices orthogonalized on this rank in 2 steps of 3 micro-batches, what the ledger has of
    the owners' messages in the last step, what the formula says).
    """
    import torch.optim._muon as muon

    calls = 0
    own = muon._zeropower_via_newtonschulz

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return own(*args, **kwargs)

    muon._zeropower_via_newtonschulz = counted
    twins = Twins("Muon and AdamW", onefold.Recipe.zero(3, stall_timeout=60.0))
    twins.references = []
    twins.step(3)  # which also tries the optimizer
    calls = 0
    before = _sent(twins.model)
    twins.step(3)
    sent = _sent(twins.model) - before
    return calls, sent, _formula(twins.optimizers[0], masters=True)


def _formula(optimizer: torch.optim.Optimizer, masters: bool) -> int:
    """Bytes that this rank should send in a step."""
    matrices = owned_by(optimizer).values()
    told = traffic(
        [each.matrix for each in matrices],
        {each.matrix.key: each.owner for each in matrices},
        dist.get_world_size(),
    )
    return 4 * told.sent(dist.get_rank(), masters)


def _sent(model: nn.Module) -> int:
    return onefold.engine_of(model).group.ledger.by_move().get("owners", 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_matrix_is_orthogonalized_once_in_a_step_and_bytes_equal_the_formula(
    ranks: int,
) -> None:
    found = run_ranks(ranks, orthogonalized)
    assert sum(calls for calls, _, _ in found) == 3
    for _, sent, formula in found:
        assert sent == formula
    assert sum(sent for _, sent, _ in found) > 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(512, 768, bias=False),
                nn.Linear(768, 640, bias=False),
                nn.Linear(640, 512, bias=False),
            )
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Raising(PerTensor):
    """Scales by a norm. `raises`: from the second step on, for a matrix of 40 columns."""

    raises = False

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.raises and p.dim() == 2 and p.shape[1] == 40:
            raise FloatingPointError("no convergence")
        p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def told(make: str) -> list[str]:
    """What each rank is told in a step that cannot be made."""
    options: dict[str, Any] = {"stage": 3}
    out: list[str] = []
    if make == "step in backward":
        options |= {"offload_optimizer": "cpu", "step_in_backward": True}
    if make == "one group":
        options["whole"] = ["mid.*"]
    model = onefold.shard(Words(), onefold.Recipe.zero(**options, stall_timeout=60.0))
    kind = torch.optim.SGD if make == "one group" else Raising
    optimizer = kind([p for _, p in trainable(model)], lr=0.01)
    for step in range(2):
        model(words_of(dist.get_rank(), step)).backward()
        before = onefold.full_state_dict(model)
        if make == "failure":
            optimizer.raises = step == 1
        if make == "divergence" and step == 1 and dist.get_rank() == 1:
            optimizer.zero_grad()
        try:
            optimizer.step()
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}")
            if make == "divergence":
                after = onefold.full_state_dict(model)
                assert all(torch.equal(after[k], before[k]) for k in after)
            return out
        optimizer.zero_grad()
    return [f"{type(s).__name__} {sorted(s)}" for s in dict.values(optimizer.state)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("step in backward", "step_in_backward=True"),
        ("failure", "Raising.step() failed on"),
        ("divergence", "gradients of different parameters"),
    ],
)
def test_what_cannot_be_stepped_whole_is_told_on_every_rank(make: str, said: str) -> None:
    for found in run_ranks(2, told, make):
        assert len(found) == 1 and said in found[0], found


def test_a_step_that_fails_on_one_rank_is_told_with_its_number_on_the_others() -> None:
    found = [each for (each,) in run_ranks(2, told, "failure")]
    (failed,) = [rank for rank, each in enumerate(found) if "FloatingPointError" in each]
    assert f"failed on rank {failed}, which steps some of the matrices" in found[1 - failed], found


def words_of_the_recipe() -> list[str]:
    """What the recipe's words make of an optimizer that looks at matrices."""
    out = []
    for options in ({"elementwise_optimizer": True}, {"whole": False}, {"whole": ["mid.*"]}):
        model = onefold.shard(Words(), onefold.Recipe.zero(3, **options, stall_timeout=60.0))
        named = dict(trainable(model))
        groups = [{"params": [named.pop("mid.weight")]}, {"params": list(named.values())}]
        kind: Any = torch.optim.SGD if options.get("whole") else Raising
        optimizer = kind(groups, lr=0.01)
        model(words_of(dist.get_rank(), 0)).backward()
        optimizer.step()
        names = {id(p): n for n, p in model.named_parameters()}
        out.append(", ".join(sorted(names[key] for key in owned_by(optimizer))))
    return out


def test_the_recipe_says_which_groups_are_stepped_whole() -> None:
    every = ", ".join(sorted(n for n, _ in trainable(Words())))
    for found in run_ranks(2, words_of_the_recipe):
        assert found == [every, "", "mid.weight"]


def clipped_and_scaled() -> list[str]:
    """fp16 with a scaler: one overflow, which is skipped on all ranks, and clipping."""
    recipe = onefold.Recipe.zero(3, stall_timeout=60.0)
    twins = Twins("Muon and AdamW", recipe)
    scaler = onefold.GradScaler(twins.model, init_scale=2.0**10, growth_interval=100)
    for step in range(3):
        scaler.scale(twins.model(words_of(dist.get_rank(), step))).backward()
        if step == 1:
            for _, p in trainable(twins.model):
                p.grad.mul_(float("inf"))
        for optimizer in twins.optimizers:
            scaler.unscale_(optimizer)
        onefold.clip_grad_norm_(twins.model, 0.1)
        twins.copy_gradients()
        for optimizer in twins.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        for optimizer in twins.references if step != 1 else ():
            optimizer.step()
    return twins.differences()


def test_scaling_and_clipping_come_before_the_whole_step() -> None:
    assert run_ranks(2, clipped_and_scaled) == [[]] * 2
