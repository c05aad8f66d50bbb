"""Muon for matrices and AdamW for everything else, as one optimizer: `MuonWithAdamW`.

    groups with use_muon=True   ─► torch.optim.Muon's own step    ─┐
                                                                   ├─ one `state`, one `param_groups`
    all other groups            ─► torch.optim.AdamW's own step   ─┘

torch.optim.Muon takes matrices alone, so a model needs two optimizers. With one object for both,
schedulers, loss scalers, checkpoints and closures need no second one. `onefold train --optimizer
muon` and DeepSpeed's `"type": "Muon"` make it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.runtime.stepper import raw_step


class MuonWithAdamW(Optimizer):
    """Steps groups with `use_muon=True` by torch.optim.Muon, and the others by torch.optim.AdamW.

    Args:
        params: groups. Each has the options of the class that steps it, with that class's defaults.
        lr: of groups that give none.
        use_muon: the same.

    Raises:
        ValueError: a group with `use_muon=True` has a parameter that is no matrix, or an option is
            out of range.
    """

    def __init__(self, params: Any, lr: float = 1e-3, use_muon: bool = False) -> None:
        self._make_halves()
        super().__init__(params, {"lr": lr, "use_muon": use_muon})

    def _make_halves(self) -> None:
        #: {use_muon: the optimizer whose step is used}. They have no parameters between steps.
        self._halves: dict[bool, Optimizer] = {
            True: torch.optim.Muon([{"params": []}]),
            False: torch.optim.AdamW([{"params": []}]),
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        use_muon = bool(param_group.get("use_muon", self.defaults["use_muon"]))
        half = self._halves[use_muon]
        known = inspect.signature(type(half)).parameters.keys() - {"params"}
        # Its own class checks the options
        kind: Any = type(half)
        kind([{"params": []}], **{k: v for k, v in param_group.items() if k in known})
        given = {**half.defaults, **self.defaults, **param_group, "use_muon": use_muon}
        super().add_param_group(given)
        shapes = [tuple(p.shape) for p in self.param_groups[-1]["params"]]
        wrong = next((shape for shape in shapes if len(shape) != 2), None)
        if use_muon and wrong is not None:
            self.param_groups.pop()
            raise ValueError(
                f"a group with use_muon=True has a parameter of shape {wrong}: Muon steps matrices,"
                " of two dimensions. Put it into a group without use_muon, which AdamW steps."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_halves" not in self.__dict__:  # a copy, or from a pickle
            self._make_halves()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon, half in self._halves.items():
            groups = [group for group in self.param_groups if group["use_muon"] == use_muon]
            if not groups:
                continue
            half.param_groups, half.state = groups, self.state
            try:
                raw_step(half)
            finally:
                half.param_groups, half.state = [], defaultdict(dict)
        return loss
