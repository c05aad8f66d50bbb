"""Room `optim`: the step of sharded parameters: clipping, loss scaling, and which optimizers may
step intervals. It does not depend on the forward pass.
"""

from onefold.optim.clip import GradScaler, clip_grad_norm
from onefold.optim.state_dicts import held_elsewhere, load_local_state_dict, local_state_dict
from onefold.optim.step_hooks import (
    install_step_hooks,
    refuse_unless_elementwise,
    remove_step_hooks,
)

__all__ = [
    "GradScaler",
    "clip_grad_norm",
    "held_elsewhere",
    "install_step_hooks",
    "load_local_state_dict",
    "local_state_dict",
    "refuse_unless_elementwise",
    "remove_step_hooks",
]  # fmt: skip
