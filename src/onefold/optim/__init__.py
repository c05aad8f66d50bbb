"""Room `optim`: the sharded step: clipping, scaling, and which optimizers may step intervals. Knows no modules' forward."""

from onefold.optim.clip import clip_grad_norm
from onefold.optim.codec import require_torchao
from onefold.optim.scaler import GradScaler
from onefold.optim.watch import refuse_unless_elementwise, unwatch, watch

__all__ = ["GradScaler", "clip_grad_norm", "refuse_unless_elementwise", "require_torchao", "unwatch", "watch"]
