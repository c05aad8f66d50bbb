"""The optimizers and schedules that a configuration may name, with the schedules' parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onefold.deepspeed.config.keys import REMOVED, Key, Section
from onefold.recipe.optimizers import KNOWN, OF_DEEPSPEED

_WARMUP: Section = {
    "warmup_min_lr": Key("numbers", low=0),
    "warmup_max_lr": Key("numbers", low=0),
    "warmup_num_steps": Key("count", low=0),
    "warmup_type": Key("text", choices=("log", "linear")),
    "last_batch_iteration": Key("count", low=-1),
}

# DeepSpeed's own schedules; any class of torch.optim.lr_scheduler may be named as well.
SCHEDULES: Mapping[str, Section] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "total_num_steps": Key("count", low=1, required=True)},
    "WarmupCosineLR": {
        "total_num_steps": Key("count", low=1, required=True),
        "warmup_min_ratio": Key("number", low=0),
        "warmup_num_steps": Key("count", low=0),
        "cos_min_ratio": Key("number", low=0),
        "warmup_type": Key("text", choices=("log", "linear")),
        "last_batch_iteration": Key("count", low=-1),
    },
    "OneCycle": {
        "cycle_min_lr": Key("numbers", low=0, required=True),
        "cycle_max_lr": Key("numbers", low=0, required=True),
        "decay_lr_rate": Key("number", low=0),
        "cycle_first_step_size": Key("count", low=1),
        "cycle_second_step_size": Key("count", low=0),
        "cycle_first_stair_count": Key("count", low=0),
        "cycle_second_stair_count": Key("count", low=0),
        "decay_step_size": Key("count", low=0),
        "cycle_momentum": Key("flag"),
        "cycle_min_mom": Key("numbers", low=0),
        "cycle_max_mom": Key("numbers", low=0),
        "decay_mom_rate": Key("number", low=0),
        "last_batch_iteration": Key("count", low=-1),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": Key("numbers", low=0),
        "lr_range_test_step_size": Key("count", low=1),
        "lr_range_test_step_rate": Key("number", low=0),
        "lr_range_test_staircase": Key("flag"),
        "last_batch_iteration": Key("count", low=-1),
    },
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of a name in `OF_DEEPSPEED`: torch's, or Onefold's `Lion`."""
    found: type[torch.optim.Optimizer] = OF_DEEPSPEED[name].load(package=False)
    return found


_OWN = "it is not part of torch: build it yourself and pass it to initialize(optimizer=...)"

REFUSED_OPTIMIZERS: Mapping[str, str] = {
    **{name: row.refused for name, row in KNOWN.items() if row.refused},
    "muadam": _OWN,
    "muadamw": _OWN,
    "musgd": _OWN,
    "onebitadam": REMOVED,
    "onebitlamb": REMOVED,
    "zerooneadam": REMOVED,
}

# The keys of DeepSpeed's Muon, which has AdamW for what is no hidden matrix; ../muon.py reads them.
MUON: Section = {
    "lr": Key("number", low=0),
    "muon_lr": Key("number", low=0),
    "adam_lr": Key("number", low=0),
    "weight_decay": Key("number", low=0),
    "momentum": Key("number", low=0),
    "betas": Key("numbers", low=0),
    "eps": Key("number", low=0),
    "adam_w_mode": Key("flag"),
    "torch_adam": Key("flag"),
    "foreach": Key("flag"),
    "fp32_optimizer_states": Key("flag"),
    "ns_method": Key(
        "text",
        choices=("gram", "standard"),
        inert="torch.optim.Muon has one method; both are the same iteration but for rounding",
    ),
    "per_head_muon": Key("flag"),
}

# Keys of DeepSpeed's Adam that torch's Adam lacks; `specs._adam` reads those that are not inert.
ADAM_EXTRAS: Section = {
    "adam_w_mode": Key("flag"),
    "torch_adam": Key("flag"),
    "bias_correction": Key("flag"),
    "set_grad_none": Key("flag", inert="gradients are dropped after each step"),
    "fp32_optimizer_states": Key("flag"),
}
