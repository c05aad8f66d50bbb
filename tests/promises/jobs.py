"""One training of a row, and everything that is promised of it.

A row is a recipe on some ranks with some model and loop. `train` trains it once and looks at
everything; `broken` says which promises do not hold:

| promise           | what is looked at                                      | what it must be                      |
|-------------------|--------------------------------------------------------|--------------------------------------|
| same numbers      | losses, norms, whole weights and states                | equal bits: the row's family;        |
|                   |                                                        | near: one process with every batch   |
| bytes on the wire | calls of torch.distributed; the ledger                 | the plan; the closed form            |
| bytes at rest     | living tensors; the ledgers of all tiers; gradients    | the plan; the closed form            |
| peak              | the ledgers                                            | the plan's replay; its bounds        |
| checkpoint        | weights and states that another row has read, at       | those that were saved; the losses of |
|                   | another stage and on other ranks                       | going on                             |
| nothing left      | the engine, tensors and files once the model is gone   | nothing                              |

Rows of one family on the same ranks, with the same model and loop, have the same bits, on any
processor. A family "" promises no bits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import looks
import onefold
from promises import formulas
from reference import by_rank_0
from zoo import SUBJECTS

STEPS = 3  # the order of units is learned in the first; the third is as all that follow
#: Bytes of tensors that a test may hold beside a model: generators, losses, a batch.
BESIDE = 16 << 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Mesh:
    """Ranks of each axis, those of a node as the launcher would say (0: it says nothing), and the
    backend: "gloo", or "standin" for tests/standin.
    """

    dp: int = 2
    tp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1
    replicate: int = 1
    per_node: int = 0
    backend: str = "gloo"

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp * self.replicate  # experts are inside dp


@dataclass(frozen=True)
class Loop:
    """`scaler`: the first scale of a GradScaler, 0 for none. `frozen`: paths of modules. `then`:
    what happens behind the steps (`AFTERWARDS`).
    """

    micro_batches: int = 1
    clip: float = 0.0
    optimizer: str = "adamw"
    scaler: float = 0.0
    frozen: tuple[str, ...] = ()
    then: str = ""


@dataclass(frozen=True)
class Row:
    """`options`: of Recipe.zero. `near`: how far losses and weights may be from one process, a share
    of them. `ci`: it runs in `make test`.
    """

    name: str
    stage: int
    options: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh = Mesh()
    loop: Loop = Loop()
    model: str = "gpt"
    family: str = "fp32"
    ci: bool = False
    near: float = 2e-5

    @property
    def key(self) -> tuple[Any, ...]:
        """Of rows that have the same bits; neither the backend nor recomputed activations change
        one.
        """
        model = SUBJECTS[self.model].recomputes or self.model
        return self.family or self.name, replace(self.mesh, backend="gloo"), model, self.loop

    @property
    def on_disk(self) -> bool:
        return "nvme" in str(self.options)

    def recipe(self, folder: Path) -> onefold.Recipe:
        options = {"stall_timeout": 60.0, **self.options}
        if self.on_disk:
            options = {"chunk": 65536, "nvme": str(folder), **options}
        return onefold.Recipe.zero(self.stage, **options)

    def module(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        made = SUBJECTS[self.model].make()
        for path in self.loop.frozen:
            made.get_submodule(path).requires_grad_(False)
        return made


@dataclass
class Seen:
    """What a rank saw of a row. Weights and states are whole, and on rank 0 only.

    Attributes:
        losses: of this rank, each followed by the norm where it clips. next: of a step more.
        units: (name, elements with padding). rest: {tier: {category: bytes}} between steps.
        living: bytes of all tensors there were then, without what the test holds.
        gradients: bytes behind each backward pass of the last step. evaluated: bytes sent by a
            forward pass without gradients.
        sent, by_link, between, moved, peak, host_peak: the ledgers' of the last step. counted: the
            same step, counted at torch.distributed's door.
        left: (the engine lives, bytes of tensors, files) once the model is gone.
    """

    losses: list[float] = field(default_factory=list)
    next: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    units: list[tuple[str, int]] = field(default_factory=list)
    rest: looks.Held = field(default_factory=dict)
    living: int = 0
    gradients: list[int] = field(default_factory=list)
    evaluated: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    by_link: dict[str, int] = field(default_factory=dict)
    between: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    host_peak: int = 0
    control: int = 0
    counted: formulas.Sent = field(default_factory=formulas.Sent)
    left: tuple[bool, int, int] = (False, 0, 0)


# -- the loop --------------------------------------------------------------------------------------


def _two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2}
    vectors = {"params": [p for p in params if p.dim() < 2], "lr": 2e-3, "betas": (0.8, 0.95)}
    return torch.optim.AdamW([matrices, vectors], lr=0.01, eps=1e-4)


def _of(kind: Any, **options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: kind(params, **options)


#: eps is well above rounding noise: Adam would otherwise turn the last bit of a gradient near zero
#: into a whole step.
_ADAM = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": _of(torch.optim.AdamW, **_ADAM),
    "fused adamw": _of(torch.optim.AdamW, **_ADAM, fused=True),
    "foreach adamw": _of(torch.optim.AdamW, **_ADAM, foreach=True),
    "amsgrad": _of(torch.optim.AdamW, **_ADAM, amsgrad=True),
    "two groups": _two_groups,
    "sgd": _of(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain sgd": _of(torch.optim.SGD, lr=0.1),
    "adagrad": _of(torch.optim.Adagrad, lr=0.02, eps=1e-4),
    "rmsprop": _of(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.9, centered=True),
    "adam, the rate a tensor": lambda params: torch.optim.Adam(
        params, lr=torch.tensor(1e-2), eps=1e-4
    ),
    "nadam": _of(torch.optim.NAdam, eps=1e-4),
    "radam": _of(torch.optim.RAdam, eps=1e-4),
    "adamax": _of(torch.optim.Adamax, eps=1e-4),
    "adadelta": _of(torch.optim.Adadelta, eps=1e-4),
    "rprop": _of(torch.optim.Rprop, lr=1e-4),
    "asgd": _of(torch.optim.ASGD),
}
#: Names by which the plan knows the states of an optimizer.
PLANNED = {"adamw": "adamw", "fused adamw": "adamw", "foreach adamw": "adamw", "two groups": "adamw",
           "sgd": "sgd-momentum", "plain sgd": "sgd", "adagrad": "adagrad"}  # fmt: skip


def _optimizer(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[row.loop.optimizer]([p for p in model.parameters() if p.requires_grad])


@dataclass
class Job:
    """A row under way: sharded over ranks on one of them, or in one process that computes with the
    batches of all (`of`).
    """

    row: Row
    model: Any
    optimizer: torch.optim.Optimizer
    of: list[int]
    scaler: Any = None
    called: Callable[..., Any] | None = None
    sharded: bool = True
    behind: Callable[[], None] = lambda: None  # each backward pass

    def loss(self, number: int, rank: int) -> Tensor:
        subject = SUBJECTS[self.row.model]
        torch.manual_seed(100 * number + rank)  # of dropout
        return subject.loss(self.called or self.model, subject.batch(100 * number + rank))

    def step(self, number: int) -> list[float]:
        """Losses of each micro-batch, and the norm. What a sharded model does under `no_sync`, one
        process does by itself.
        """
        loop, told = self.row.loop, []
        for micro in range(loop.micro_batches):
            last = micro + 1 == loop.micro_batches
            for rank in self.of:
                waits = self.sharded and not last
                with onefold.no_sync(self.model) if waits else contextlib.nullcontext():
                    loss = self.loss(number + 10 * micro, rank) / loop.micro_batches
                    (self.scaler.scale(loss) if self.scaler else loss).backward()
                told.append(loss.item())
            self.behind()
        for p in () if self.sharded else self.model.parameters():
            if p.grad is not None:
                p.grad /= len(self.of)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if loop.clip and self.sharded:
            told.append(float(onefold.clip_grad_norm_(self.model, loop.clip)))
        elif loop.clip:
            told.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), loop.clip)))
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            told.append(self.scaler.get_scale())
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return told


def sharded(row: Row, folder: Path, seed: int = 0, group: Any = None) -> Job:
    """Collective over `group`, or all ranks."""
    folder.mkdir(exist_ok=True)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if row.mesh.per_node:  # as a launcher says it
        os.environ["LOCAL_WORLD_SIZE"] = str(row.mesh.per_node)
    if row.mesh.backend == "standin":
        import standin

        group = standin.new_group()
    model = onefold.shard(row.module(seed), row.recipe(folder), group=group)
    scale = row.loop.scaler
    scaler = onefold.GradScaler(model, init_scale=scale) if scale else None
    return Job(row, model, _optimizer(row, model), [dist.get_rank()], scaler)


def whole_states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{"parameter: state": the whole of it} on rank 0. Collective for a sharded model."""
    states = optimizer.state_dict()["state"]
    return {
        f"{number}: {name}": torch.as_tensor(value, device="cpu").clone()
        for number, state in (states.items() if dist.get_rank() == 0 else ())
        for name, value in state.items()
    }


def train(row: Row, folder: Path) -> Seen:
    """Train the row on this rank, look at everything, save it to `folder / "saved"`, and go on for
    a step.
    """
    if row.options.get("moments", "fp32") != "fp32" or row.options.get("frozen") == "nf4":
        job = sharded(row, folder / "disk")  # tables of a format are made once in a process
        for number in range(STEPS):
            job.step(number)
        del job
    gc.collect(0)
    gc.freeze()  # what is there goes into no count: some thousand tensors of other rows
    before, seen = looks.living(), Seen()
    job = sharded(row, folder / "disk")
    model, optimizer = job.model, job.optimizer
    seen.units = looks.units(model)
    for number in range(STEPS - 1):
        seen.losses += job.step(number)
    _watch(job, seen)
    seen.living = looks.living() - before - looks.spare(model)
    with torch.no_grad():
        seen.losses.append(job.loss(70, dist.get_rank()).item())
        with formulas.counted_sends() as evaluated:
            job.loss(70, dist.get_rank())
    seen.evaluated = evaluated.payload
    if row.loop.then:
        AFTERWARDS[row.loop.then](job)
    seen.weights = onefold.full_state_dict(model)
    seen.states = whole_states(optimizer)
    onefold.save(folder / "saved", model=model, optimizer=optimizer, scaler=job.scaler, step=STEPS)
    seen.next = job.step(STEPS)
    engine = weakref.ref(looks.engine(model))
    del model, optimizer, job
    dist.barrier()  # files of other ranks are there too
    held = sum(t.nbytes for t in (*seen.weights.values(), *seen.states.values()))
    files = [file for file in (folder / "disk").rglob("*") if file.is_file()]
    seen.left = engine() is not None, looks.living() - before - held, len(files)
    return seen


def _watch(job: Job, seen: Seen) -> None:
    """One more step, and what it sent, moved and held."""
    model = job.model
    looks.watch(model)
    job.behind = lambda: seen.gradients.append(looks.gradients(model))
    with formulas.counted_sends() as seen.counted:
        seen.losses += job.step(STEPS - 1)
    job.behind = lambda: None
    seen.sent = {move: nbytes for move, nbytes in looks.sent(model).items() if nbytes}
    seen.by_link, seen.between = looks.sent_by_link(model), looks.between_nodes(model)
    seen.moved, seen.control = looks.moved(model), looks.control(model)
    seen.peak = sum(looks.peak(model).values())
    seen.host_peak = sum(looks.host_peak(model).values())
    seen.rest = looks.held(model, job.optimizer)


def loaded(row: Row, folder: Path, group: Any = None, step: bool = True) -> Seen:
    """What another row, with other weights before, has read from `folder / "saved"`: weights and
    states, and the losses of the step that follows. Collective over `group`, or all ranks.
    """
    job, seen = sharded(row, folder / "of another", seed=5, group=group), Seen()
    onefold.load(
        folder / "saved", model=job.model, optimizer=job.optimizer, scaler=job.scaler, rng=False
    )
    seen.weights, seen.states = onefold.full_state_dict(job.model), whole_states(job.optimizer)
    seen.next = job.step(STEPS) if step else []
    return seen


@by_rank_0
def in_one_process(row: Row) -> list[Seen]:
    """The same loop over the batches of all ranks, by plain PyTorch: what each rank must see. In 16
    bits the model computes with rounded copies of weights in fp32.
    """
    module, dtype = row.module(), DTYPES[row.options.get("precision", "fp32")]
    if SUBJECTS[row.model].recomputes:
        module.checkpointing = "none"  # type: ignore[assignment]

    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = {id(p) for m in norms for p in m.parameters()}  # which stay in fp32

    def rounded(*batch: Tensor, **named: Tensor) -> Any:
        weights = {
            name: p if id(p) in kept else p.to(dtype) for name, p in module.named_parameters()
        }
        cast = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
        return functional_call(module, weights, cast, named)

    of = list(range(row.mesh.ranks))
    scaler = (
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=row.loop.scaler)
        if row.loop.scaler
        else None
    )
    called = None if dtype == torch.float32 else rounded
    optimizer = _optimizer(row, module)
    job = Job(row, module, optimizer, of, scaler, called, sharded=False)
    seen = [Seen() for _ in of]

    def step(number: int) -> list[list[float]]:
        """The losses of each rank, and what all are told."""
        told, losses = job.step(number), len(of) * row.loop.micro_batches
        return [told[rank : losses : len(of)] + told[losses:] for rank in of]

    for number in range(STEPS):
        for each, told in zip(seen, step(number), strict=True):
            each.losses += told
    with torch.no_grad():
        for rank, each in enumerate(seen):
            each.losses.append(job.loss(70, rank).item())
    if row.loop.then:
        AFTERWARDS[row.loop.then](job)
    weights = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
    states = whole_states(optimizer)
    for each, told in zip(seen, step(STEPS), strict=True):
        each.weights, each.states, each.next = weights, states, told
    return seen


# -- what may happen behind the steps --------------------------------------------------------------


def _halve_the_weights(job: Job) -> None:
    whole = onefold.full_params(job.model, write=True) if job.sharded else contextlib.nullcontext()
    with torch.no_grad(), whole:
        for p in job.model.parameters():
            p.mul_(0.5)


def _evaluate_kept_gathered(job: Job) -> None:
    kept = onefold.keep_gathered(job.model) if job.sharded else contextlib.nullcontext()
    with torch.no_grad(), kept:
        for number in range(3):
            job.loss(number, 0)


AFTERWARDS: dict[str, Callable[[Job], None]] = {
    "halve the weights": _halve_the_weights,
    "evaluate kept gathered": _evaluate_kept_gathered,
}


# -- the promises ----------------------------------------------------------------------------------


def broken(
    row: Row, first: Seen | None, one: Seen, seen: Seen, planned: looks.Planned
) -> list[str]:
    """A sentence for each promise that this rank saw broken. `first`: of the row's family."""
    rank = dist.get_rank()
    wrong = [
        *(_bits(first, seen) if first is not None else ()),
        *_near(row, one, seen),
        *_wire(row, seen, planned, rank),
        *_memory(row, seen, planned),
    ]
    if seen.left[0] or seen.left[1] > BESIDE or seen.left[2]:
        wrong.append(f"left behind: (the engine, bytes, files) {seen.left}")
    return [f"{row.name}: {sentence}" for sentence in wrong]


def _bits(first: Seen, seen: Seen) -> Iterator[str]:
    if seen.losses != first.losses:
        yield f"same bits: losses {seen.losses} for {first.losses}"
    if seen.next != first.next:
        yield f"same bits: a step later {seen.next} for {first.next}"
    yield from differing("same bits", first.weights, seen.weights)
    yield from differing("same bits", first.states, seen.states)


def differing(promise: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> Iterator[str]:
    """One sentence if any tensor is not the same, bit for bit."""
    names = [
        name
        for name in sorted(a.keys() | b.keys())
        if name not in a or name not in b or not _same(a[name], b[name])
    ]
    if names:
        yield f"{promise}: {len(names)} of {len(a)} tensors are others: {', '.join(names[:4])}"


def _same(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _near(row: Row, one: Seen, seen: Seen) -> Iterator[str]:
    for name, a, b in (("losses", one.losses, seen.losses), ("a step later", one.next, seen.next)):
        if len(a) != len(b) or not torch.allclose(
            torch.tensor(b), torch.tensor(a), row.near, row.near / 10
        ):
            yield f"one process: {name} {b} for {a}"
    for what in ("weights", "states"):
        expected, found = getattr(one, what), getattr(seen, what)
        for name in expected.keys() & found.keys():
            a, b = expected[name].float(), found[name].float()
            if a.shape != b.shape or not torch.allclose(b, a, 5 * row.near, row.near):
                gap = (a - b).abs().max().item() if a.shape == b.shape else tuple(b.shape)
                yield f"one process: {name} is off by {gap}"
        if found and expected.keys() - found.keys():
            yield f"one process: {sorted(expected.keys() - found.keys())} are missing"


def _wire(row: Row, seen: Seen, planned: looks.Planned, rank: int) -> Iterator[str]:
    buffers, far = seen.sent.get("state", 0), seen.between.get("state", 0)  # no plan has them
    if seen.sent != planned.sent | ({"state": buffers} if buffers else {}):
        yield f"wire: sent {seen.sent}, planned {planned.sent}"
    links = {"inside": planned.by_link["inside"] + buffers - far,
             "between": planned.by_link["between"] + far}  # fmt: skip
    if seen.by_link != links or seen.between != planned.between | ({"state": far} if far else {}):
        yield f"wire: by link {seen.by_link}, {seen.between}, planned {links}, {planned.between}"
    counted, total = seen.counted, sum(seen.sent.values())
    if row.mesh.backend == "gloo":
        if counted.others:
            yield f"wire: a collective that is not counted: {counted.others}"
        if counted.payload + counted.control != total + seen.control:
            yield f"wire: {counted} counted outside, the ledger has {seen.sent} and {seen.control}"
        if seen.control > 2048 * row.loop.micro_batches * row.mesh.ranks:
            yield f"wire: control messages are not tiny: {seen.control}"
    expected = formulas.sent(row, seen.units)
    if expected is not None and seen.by_link != expected:
        yield f"wire: by link {seen.by_link}, by the closed form {expected}"
    evaluated = formulas.evaluated(row, seen.units)
    if evaluated is not None and row.mesh.backend == "gloo" and seen.evaluated != evaluated:
        yield f"wire: an evaluation sent {seen.evaluated}, by the closed form {evaluated}"


def _memory(row: Row, seen: Seen, planned: looks.Planned) -> Iterator[str]:
    odd = SUBJECTS[row.model].unforeseen
    known = row.loop.optimizer in PLANNED and not odd
    rest, expected = (_without_moments(h) if not known else h for h in (seen.rest, planned.rest))
    if rest != expected:
        yield f"rest: {rest}, planned {expected}"
    held = sum(n for tier in ("device", "host") for n in seen.rest.get(tier, {}).values())
    if not row.on_disk and abs(seen.living - held) > BESIDE:
        yield f"rest: living tensors have {seen.living}, the ledgers {held}"
    closed, device = formulas.at_rest(row, seen.units), seen.rest.get("device", {})
    masters, moments = device.get("master weights", 0), device.get("moments", 0)
    stored = masters + device.get("parameters", 0)
    if closed is not None and not (stored == closed[0] and closed[1] <= moments <= closed[2]):
        yield f"rest: {seen.rest}, by the closed form {closed}"
    gradients = formulas.gradients(row, seen.units)
    if gradients is not None and seen.gradients != gradients:
        yield f"rest: gradients behind each pass {seen.gradients}, by the closed form {gradients}"
    bound = formulas.peak_bound(row, seen.units)
    if bound is not None and seen.peak > bound:
        yield f"peak: {seen.peak}, by the closed form at most {bound}"
    if "offload_activations" in row.options:
        return
    if known and seen.moved != planned.moved:
        yield f"moved: {seen.moved}, planned {planned.moved}"
    # A copy down that ends sooner than the computation needs lets go of its gradients sooner
    sooner = torch.get_default_device().type != "cpu" and seen.peak < planned.peak
    if not odd and not sooner and seen.peak != planned.peak:
        yield f"peak: {seen.peak}, planned {planned.peak}"
    if seen.peak > 1.05 * planned.peak:
        yield f"peak: {seen.peak}, more than 5 % above the planned {planned.peak}"
    if known and seen.host_peak > planned.host_bound:
        yield f"peak: {seen.host_peak} on the host, above its bound of {planned.host_bound}"


def _without_moments(held: looks.Held) -> looks.Held:
    found = {t: {k: n for k, n in what.items() if k != "moments"} for t, what in held.items()}
    return {tier: what for tier, what in found.items() if what}


# -- asking ----------------------------------------------------------------------------------------

_first: dict[tuple[Any, ...], Seen] = {}
_one: dict[tuple[Any, ...], list[Seen]] = {}
_groups: dict[int, Any] = {}


def first_ranks(count: int) -> Any:
    """A group of the first `count` ranks. Collective over all."""
    if count not in _groups:
        _groups[count] = dist.new_group(list(range(count)))
    return _groups[count]


def ask(row: Row, rows: list[Row], folder: Path, every: bool = True) -> list[str]:
    """What is broken of a row, its checkpoint under others included. Collective.

    Args:
        rows: the table; the first of a family is trained once in a process.
        every: its checkpoint is read in both ways, and not in one of them.
    """
    wrong: list[str] = []
    family = sorted((r for r in rows if r.key == row.key), key=lambda r: not r.ci) or [row]
    if row.key not in _one:
        _one[row.key] = in_one_process(replace(row, options=family[0].options))
    if row.family and row.key not in _first and family[0] != row:
        (folder / "first").mkdir(exist_ok=True)
        _first[row.key] = train(family[0], folder / "first")
    seen = train(row, folder)
    if row.family:
        _first.setdefault(row.key, seen)
    planned = planned_of(row, folder)
    first = _first.get(row.key)
    one = _one[row.key][dist.get_rank()]
    wrong += broken(row, first if first is not seen else None, one, seen, planned)
    dist.barrier()
    return wrong + checkpoint(row, family, seen, folder, every)


def planned_of(row: Row, folder: Path) -> looks.Planned:
    """What the plan says of this rank."""
    return looks.planned(
        row.module(),
        row.recipe(folder / "disk"),
        dist.get_world_size(),
        dist.get_rank(),
        row.loop.micro_batches,
        PLANNED.get(row.loop.optimizer, "adamw"),
        formulas.node_of(row),
        row.mesh.backend != "gloo",
        torch.get_default_device().type != "cpu",
    )


#: Options of a row without which its checkpoint cannot be read back to the same bits.
KEPT = ("precision", "master_dtype", "moments", "frozen")


def checkpoint(
    row: Row, family: list[Row], seen: Seen, folder: Path, every: bool = True
) -> list[str]:
    """The row's checkpoint under the next row of its family, which goes on with the same losses; and
    at another stage on fewer ranks. Without `every` it is one of the two, by its place.
    """
    at = family.index(row)
    number = at + row.stage
    wrong = []
    if every or number % 2 or row.mesh.ranks == 1:
        follower = family[(at + 1) % len(family)]
        found = loaded(follower, folder)
        wrong += _read(f"checkpoint under {follower.name}", seen, found)
        if found.next != seen.next:
            wrong.append(f"checkpoint under {follower.name}: {found.next}, not {seen.next}")
        dist.barrier()
    if every or not number % 2:
        fewer, stage = max(1, row.mesh.ranks // 2), (row.stage + 1 + at % 3) % 4
        options = {k: v for k, v in row.options.items() if k in KEPT}
        stage = 3 if "frozen" in options else stage
        other = replace(row, stage=stage, options=options, mesh=Mesh(dp=fewer))
        group = first_ranks(fewer) if fewer < row.mesh.ranks else None
        if dist.get_rank() < fewer:
            found = loaded(other, folder, group, step=False)
            wrong += _read(f"checkpoint at stage {stage} on {fewer}", seen, found)
        dist.barrier()
    return [f"{row.name}: {sentence}" for sentence in wrong]


def _read(promise: str, seen: Seen, found: Seen) -> list[str]:
    return [
        *differing(promise, seen.weights, found.weights),
        *differing(promise, seen.states, found.states),
    ]
