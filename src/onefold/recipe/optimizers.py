"""The optimizers that Onefold knows by name. Needs no torch: a misspelt name is reported at once.

One row says all that the package knows of an optimizer:

| who reads the row                    | what it reads                                                |
|--------------------------------------|--------------------------------------------------------------|
| the plan (plan/rank.py)              | `states`: their bytes                                        |
| the simulation                       | `simulated`: the class and its arguments; `update`           |
| `onefold train --optimizer`          | `options`: what `--optimizer-options` may set; `package`     |
| DeepSpeed's `"optimizer": {"type"}`  | `deepspeed`, or why it is refused: `refused`                 |

To add an optimizer, add a row. A class that no row names may step too: optim/verdict.py tries its
update. Of a class whose update looks at whole matrices, `STEP_MATRICES` or the recipe's `whole` says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

#: What the update of one element looks at:
#: - "element-wise": at its own gradient and states. Any part of a parameter can be stepped by itself.
#: - "whole": at its whole parameter, such as a matrix, and at no other.
#: - "refused": at other parameters too, or at what is not known.
Update = Literal["element-wise", "whole", "refused"]
ELEMENTWISE: Update = "element-wise"
WHOLE: Update = "whole"
REFUSED: Update = "refused"


@dataclass(frozen=True)
class KeptState:
    """A tensor that an optimizer keeps for each parameter, by its key in `optimizer.state`: of the
    parameter's shape, in the dtype of the master weights, unless it says otherwise.

    Attributes:
        number: it is one fp32 number.
        without: it has the parameter's shape without this dimension, of parameters of two or more.
        vectors: only parameters of less than two dimensions have it.
    """

    key: str
    number: bool = False
    without: int = 0
    vectors: bool = False

    def numel(self, shape: Sequence[int]) -> int:
        """Return its elements for a parameter of a shape."""
        if self.number:
            return 1
        if self.without:
            return prod(shape) // max(shape[self.without], 1) if len(shape) > 1 else 0
        return 0 if self.vectors and len(shape) > 1 else prod(shape)


@dataclass(frozen=True)
class KnownOptimizer:
    """A row of `KNOWN`.

    Attributes:
        name: of the class.
        module: where the class is; "" if no library that Onefold knows has it.
        package: what to install for the module; "" for torch's own.
        update: what the update looks at. tests/optim/test_optimizers.py holds it against a trial.
        refused: why no front end offers it, as a sentence without its end; "" if some do.
        states: what it keeps for a parameter; None: the plan does not count it.
        arguments: what the row's name says beyond the class.
        at_once: it makes its states when it is made, for every parameter that it is given.
        options: the names that `--optimizer-options` may set, if `onefold train` offers it.
        planned: the name of the row whose states the plan counts, if it is another.
        rest: the row that steps what this one, which takes matrices alone, does not take; "": it takes all. Front ends
            make one optimizer of both, `onefold.optim.muon.MuonWithAdamW`; `betas` are the other's.
        simulated: whether the simulation runs it.
        betas: whether `onefold train` gives it betas of its own.
        fused: where torch has a fused kernel for it: nowhere, on the CPU alone, or on any device.
    """

    name: str
    module: str = "torch.optim"
    package: str = ""
    update: Update = ELEMENTWISE
    refused: str = ""
    states: tuple[KeptState, ...] | None = None
    at_once: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    planned: str = ""
    rest: str = ""
    simulated: bool = False
    betas: bool = False
    fused: Literal["", "cpu", "any"] = ""

    @property
    def elementwise_states(self) -> int:
        """The states of the parameter's shape, whatever that is."""
        return sum(not (s.number or s.without or s.vectors) for s in self.states or ())

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers of one parameter."""
        return 4 * sum(state.number for state in self.states or ())

    def tensor_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of the other states of a parameter of a shape, each in `itemsize` bytes an
        element.
        """
        return itemsize * sum(s.numel(shape) for s in self.states or () if not s.number)

    def load(self) -> Any:
        """Import the class."""
        return getattr(importlib.import_module(self.module), self.name)

    def can_fuse(self, device: str) -> bool:
        """Return whether torch has a fused kernel for it on a type of device."""
        return self.fused == "any" or self.fused == device


_STEP = KeptState("step", number=True)
_ADAM = (KeptState("exp_avg"), KeptState("exp_avg_sq"), _STEP)
_OF_ADAM = ("betas", "eps", "amsgrad")

#: {the name on command lines and in files, in lower case: the row}
KNOWN: Mapping[str, KnownOptimizer] = {
    "adamw": KnownOptimizer(
        "AdamW", states=_ADAM, options=_OF_ADAM,
        simulated=True, betas=True, fused="any",
    ),
    "adam": KnownOptimizer(
        "Adam", states=_ADAM, options=(*_OF_ADAM, "decoupled_weight_decay"),
        simulated=True, betas=True, fused="any",
    ),
    "adam-amsgrad": KnownOptimizer(
        "Adam", states=(*_ADAM, KeptState("max_exp_avg_sq")), arguments={"amsgrad": True},
        simulated=True, fused="any",
    ),
    "nadam": KnownOptimizer(
        "NAdam", options=("betas", "eps", "momentum_decay", "decoupled_weight_decay"), planned="adam",
        betas=True,
    ),
    "radam": KnownOptimizer(
        "RAdam", options=("betas", "eps", "decoupled_weight_decay"), planned="adam",
        betas=True,
    ),
    "adamax": KnownOptimizer(
        "Adamax", options=("betas", "eps"), planned="adam", betas=True,
    ),
    "sgd": KnownOptimizer(
        "SGD", states=(), options=("momentum", "dampening", "nesterov"),
        simulated=True, fused="any",
    ),
    "sgd-momentum": KnownOptimizer(
        "SGD", states=(KeptState("momentum_buffer"),), arguments={"momentum": 0.9},
        simulated=True, fused="any",
    ),
    "rmsprop": KnownOptimizer(
        "RMSprop", states=(KeptState("square_avg"), _STEP), options=("alpha", "eps", "momentum", "centered"),

    ),
    "adagrad": KnownOptimizer(
        "Adagrad", states=(KeptState("sum"), _STEP), at_once=True, options=("lr_decay", "initial_accumulator_value", "eps"),
        fused="cpu",
    ),
    "adadelta": KnownOptimizer(
        "Adadelta", options=("rho", "eps"), planned="adam",
    ),
    "lion": KnownOptimizer(
        "Lion", "lion_pytorch", "lion-pytorch",
        states=(KeptState("exp_avg"),), options=("betas",),
    ),
    "asgd": KnownOptimizer("ASGD"),
    "rprop": KnownOptimizer("Rprop"),
    "adafactor": KnownOptimizer(
        "Adafactor", update=WHOLE, options=("beta2_decay", "d"),
        states=(KeptState("row_var", without=-1), KeptState("col_var", without=-2), KeptState("variance", vectors=True), _STEP),

    ),
    "muon": KnownOptimizer(
        "Muon", update=WHOLE, options=("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
        states=(KeptState("momentum_buffer"),), rest="adamw", simulated=True, betas=True,
    ),
    "lamb": KnownOptimizer(
        "Lamb", "", update=WHOLE,
        refused="it is not part of torch: build it yourself and pass it to initialize(optimizer=...)",
    ),
    "lbfgs": KnownOptimizer(
        "LBFGS", update=REFUSED,
        refused="its update looks at all parameters together, and a rank holds a part of them",
    ),
    "sparseadam": KnownOptimizer(
        "SparseAdam", update=REFUSED,
        refused="it needs sparse gradients, and reduced gradients are dense",
    ),
}  # fmt: skip

PLANNED = {name: row for name, row in KNOWN.items() if row.states is not None}
SIMULATED = {name: row for name, row in KNOWN.items() if row.simulated}
TRAINED = {name: row for name, row in KNOWN.items() if row.options}
#: Classes, in lower case, whose update looks at each parameter by itself, as a whole. Subclasses
#: count too. Of other classes the recipe's `whole` says so.
STEP_MATRICES = frozenset((
    "adafactor", "adamuon", "came", "lamb", "lars", "muon", "muonwithadamw", "racs", "shampoo", "soap", "splus",
))  # fmt: skip
#: By the name of the class, as a DeepSpeed configuration spells it.
OF_DEEPSPEED = {
    row.name: row
    for row in sorted(KNOWN.values(), key=lambda row: row.name.lower())
    if not row.refused and not row.arguments
}
