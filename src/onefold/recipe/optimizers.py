"""The optimizers that Onefold knows by name. Needs no torch: a misspelt name is reported at once.

One row says all that the package knows of an optimizer:

| who reads the row                    | what it reads                                                |
|--------------------------------------|--------------------------------------------------------------|
| the plan (plan/states.py)            | `states`: their bytes                                        |
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
        builtin: a module of Onefold with the same update, for front ends that need no package.
        update: what the update looks at. tests/recipe/test_optimizer_table.py holds it against a trial.
        refused: why no front end offers it, as a sentence without its end; "" if some do.
        states: what it keeps for a parameter, if the plan counts it.
        arguments: what the row's name says beyond the class.
        trained: whether `onefold train --optimizer` offers it.
        options: the names that `--optimizer-options` may set.
        planned: the name of the row whose states the plan counts; "": the plan does not know it.
        rest: the row that steps what this one does not take: all but the matrices of the body.
        simulated: whether the simulation runs it.
        betas: whether `--beta1` and `--beta2` are its betas.
        fused: where torch has a fused kernel for it: nowhere, on the CPU alone, or on any device.
        deepspeed: whether a DeepSpeed configuration may name it.
        matrices: it takes matrices alone. Front ends give AdamW the rest: they make one optimizer of
            both, `onefold.optim.muon.MuonWithAdamW`. `betas` are then AdamW's.
    """

    name: str
    module: str = "torch.optim"
    package: str = ""
    builtin: str = ""
    update: Update = ELEMENTWISE
    refused: str = ""
    states: tuple[KeptState, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False
    options: tuple[str, ...] = ()
    planned: str = ""
    rest: str = ""
    simulated: bool = False
    betas: bool = False
    fused: Literal["", "cpu", "any"] = ""
    deepspeed: bool = False
    matrices: bool = False

    @property
    def elementwise_states(self) -> int:
        """The states of the parameter's shape, whatever that is."""
        return sum(not (s.number or s.without or s.vectors) for s in self.states)

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers of one parameter."""
        return 4 * sum(state.number for state in self.states)

    def tensor_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of the other states of a parameter of a shape, each in `itemsize` bytes an
        element.
        """
        return itemsize * sum(s.numel(shape) for s in self.states if not s.number)

    def load(self, package: bool = True) -> Any:
        """Import the class. `package`: from `module`, else from `builtin` if there is one."""
        module = self.module if package else self.builtin or self.module
        return getattr(importlib.import_module(module), self.name)

    def can_fuse(self, device: str) -> bool:
        """Return whether torch has a fused kernel for it on a type of device."""
        return self.fused == "any" or self.fused == device


_STEP = KeptState("step", number=True)
_ADAM = (KeptState("exp_avg"), KeptState("exp_avg_sq"), _STEP)
_OF_ADAM = ("betas", "eps", "amsgrad")

#: {the name on command lines and in files, in lower case: the row}
KNOWN: Mapping[str, KnownOptimizer] = {
    "adamw": KnownOptimizer(
        "AdamW", states=_ADAM, trained=True, options=_OF_ADAM, planned="adamw",
        simulated=True, betas=True, fused="any", deepspeed=True,
    ),
    "adam": KnownOptimizer(
        "Adam", states=_ADAM, trained=True, options=(*_OF_ADAM, "decoupled_weight_decay"), planned="adam",
        simulated=True, betas=True, fused="any", deepspeed=True,
    ),
    "nadam": KnownOptimizer(
        "NAdam", trained=True, options=("betas", "eps", "momentum_decay", "decoupled_weight_decay"), planned="adam",
        betas=True, deepspeed=True,
    ),
    "radam": KnownOptimizer(
        "RAdam", trained=True, options=("betas", "eps", "decoupled_weight_decay"), planned="adam",
        betas=True, deepspeed=True,
    ),
    "adamax": KnownOptimizer(
        "Adamax", trained=True, options=("betas", "eps"), planned="adam", betas=True, deepspeed=True,
    ),
    "sgd": KnownOptimizer(
        "SGD", trained=True, options=("momentum", "dampening", "nesterov"), planned="sgd",
        simulated=True, fused="any", deepspeed=True,
    ),
    "sgd-momentum": KnownOptimizer(
        "SGD", states=(KeptState("momentum_buffer"),), arguments={"momentum": 0.9},
        planned="sgd-momentum", simulated=True, fused="any",
    ),
    "rmsprop": KnownOptimizer(
        "RMSprop", states=(KeptState("square_avg"), _STEP), trained=True, options=("alpha", "eps", "momentum", "centered"),
        planned="rmsprop", deepspeed=True,
    ),
    "adagrad": KnownOptimizer(
        "Adagrad", states=(KeptState("sum"), _STEP), trained=True, options=("lr_decay", "initial_accumulator_value", "eps"),
        planned="adagrad", fused="cpu", deepspeed=True,
    ),
    "adadelta": KnownOptimizer(
        "Adadelta", trained=True, options=("rho", "eps"), planned="adam", deepspeed=True,
    ),
    "lion": KnownOptimizer(
        "Lion", "lion_pytorch", "lion-pytorch", "onefold.integrations.deepspeed.lion",
        states=(KeptState("exp_avg"),), trained=True, options=("betas",), planned="lion", deepspeed=True,
    ),
    "asgd": KnownOptimizer("ASGD", deepspeed=True),
    "rprop": KnownOptimizer("Rprop", deepspeed=True),
    "adafactor": KnownOptimizer(
        "Adafactor", update=WHOLE, trained=True, options=("beta2_decay", "d"),
        states=(KeptState("row_var", without=-1), KeptState("col_var", without=-2), KeptState("variance", vectors=True), _STEP),
        planned="adafactor", deepspeed=True,
    ),
    "muon": KnownOptimizer(
        "Muon", update=WHOLE, trained=True, options=("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
        states=(KeptState("momentum_buffer"),), planned="muon", rest="adamw", simulated=True, betas=True, deepspeed=True,
        matrices=True,
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

PLANNED = {name: row for name, row in KNOWN.items() if row.planned == name}
SIMULATED = {name: row for name, row in KNOWN.items() if row.simulated}
TRAINED = {name: row for name, row in KNOWN.items() if row.trained}
#: Classes, in lower case, whose update looks at each parameter by itself, as a whole. Subclasses
#: count too. Of other classes the recipe's `whole` says so.
STEP_MATRICES = frozenset((
    "adafactor", "adamuon", "came", "lamb", "lars", "muon", "muonwithadamw", "racs", "shampoo", "soap", "splus",
))  # fmt: skip
#: By the name of the class, as a DeepSpeed configuration spells it.
OF_DEEPSPEED = {
    row.name: row
    for row in sorted(KNOWN.values(), key=lambda row: row.name.lower())
    if row.deepspeed
}
