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
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.runtime.stepper import raw_step

#: {use_muon: the class that steps such a group}
_KINDS: dict[bool, Any] = {True: torch.optim.Muon, False: torch.optim.AdamW}


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
        super().__init__(params, {"lr": lr, "use_muon": use_muon})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        asked = {**self.defaults, **param_group}
        kind: Any = _KINDS[bool(asked["use_muon"])]
        known = inspect.signature(kind).parameters.keys() - {"params"}
        # Its own class checks the options and the shapes, and knows the defaults
        made = kind([param_group], **{k: v for k, v in asked.items() if k in known})
        super().add_param_group({**asked, **made.param_groups[0]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon, kind in _KINDS.items():
            groups = [group for group in self.param_groups if group["use_muon"] == use_muon]
            if groups:
                half = kind([{"params": []}])
                half.param_groups, half.state = groups, self.state
                raw_step(half)
        return loss
