"""A loop as accelerate's documentation writes it."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
set_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
if "ddp" in sys.argv:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
if "ddp" in sys.argv:
    data = accelerator.prepare(data)
else:
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for (x,) in data:
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
with open(os.path.join(sys.argv[1], f"rank{accelerator.process_index}"), "w") as out:
    print(type(model).__module__, accelerator.num_processes, *losses, file=out)
accelerator.end_training()
