"""Onefold as a plugin of axolotl and of LLaMA-Factory, and beside accelerate's dataloaders: what
ranks call by name. Each host's own trainer, or the calls that it makes, beside DDP.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def by_axolotl(folder: str) -> dict[str, list[float]]:
    """Losses of axolotl's trainer, under DDP and by the plugin."""
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.integrations.base import load_plugin
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset
    from hf_trials import arguments, built, fresh_state, start
    from trainer_script import Data

    start(folder)
    items = [Data()[index] for index in range(len(Data()))]
    rows = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in items]
    data = Dataset.from_list(rows)
    plugin, out = load_plugin("onefold.integrations.axolotl.Plugin"), {}
    for name, recipe in {"ddp": None, "1": 1, "3": {"stage": 3}}.items():
        kind: Any = AxolotlTrainer
        if recipe is not None:
            kind = plugin.get_trainer_cls(DictDefault({"onefold": recipe}))
        with fresh_state():
            # axolotl's trainer forgets what its arguments say of the CPU, and logs 5 digits
            os.environ |= {"ACCELERATE_USE_CPU": "true", "AXOLOTL_METRIC_NDIGITS": "12"}
            args = AxolotlTrainingArguments(**arguments(folder, name))
            trainer = kind(model=built(folder), args=args, train_dataset=data)
            trainer.axolotl_cfg = DictDefault({})
            trainer.train()
            out[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            sharded = hasattr(next(trainer.model.parameters()), "onefold")
            assert sharded == (recipe is not None), name
    return out


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 61, (12,), generator=torch.Generator().manual_seed(index))
        return {"tokens": row}


def under_ddp(batches: list[torch.Tensor]) -> list[float]:
    from zoo import TinyGPT

    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(TinyGPT())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for tokens in batches:
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def beside_accelerate(recipe: str) -> dict[str, list[float]]:
    """The recipe as the page prints it, beside DDP on the same batches.

    Args:
        recipe: the page's Python.
    """
    import os

    import torch.distributed as dist
    from hf_trials import fresh_state

    from zoo import TinyGPT

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    seen: list[torch.Tensor] = []
    losses: list[float] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyGPT()

        def forward(self, tokens: torch.Tensor) -> Any:
            seen.append(tokens)
            loss = self.inner(tokens)
            losses.append(loss.item())
            return SimpleNamespace(loss=loss)

    with fresh_state():
        torch.manual_seed(3)
        model = Model()
        os.environ["ACCELERATE_USE_CPU"] = "true"
        loader = torch.utils.data.DataLoader(Texts(), batch_size=2)
        exec(compile(recipe, "docs/launchers.md", "exec"), {"model": model, "loader": loader})
    assert dist.get_world_size() == 2 and not torch.equal(seen[0], torch.zeros_like(seen[0]))
    return {"onefold": losses, "ddp": under_ddp(seen), "rows": [float(t.sum()) for t in seen]}


def by_llamafactory(folder: str) -> dict[str, Any]:
    """What its trainer calls: shard, clip, step, save, resume, save the model."""
    from hf_trials import built, start
    from llamafactory.v1.config.arg_utils import PluginConfig
    from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin

    import onefold.integrations.llamafactory as ours

    start(folder)
    ours.register()
    out: dict[str, Any] = {}
    plugin: Any = DistributedPlugin("fsdp2")

    def steps(model: Any, optimizer: Any, count: int) -> list[float]:
        tokens = torch.arange(8).view(1, 8) + torch.distributed.get_rank()
        seen = []
        for _ in range(count):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    model = plugin(built(folder), PluginConfig(name="fsdp2", stage=3), bf16=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out["first"] = steps(model, optimizer, 2)
    plugin.save_checkpoint(model, optimizer, f"{folder}/checkpoint-2", save_ckpt_as_hf=False)
    out["second"] = steps(model, optimizer, 2)
    plugin.save_model(model, f"{folder}/saved", None)
    again = plugin(built(folder), PluginConfig(name="fsdp2", stage=1), bf16=False)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    plugin.load_checkpoint(again, optimizer, f"{folder}/checkpoint-2")
    out["again"] = steps(again, optimizer, 2)
    out["saved"] = sorted(path.name for path in Path(f"{folder}/saved").rglob("*.safetensors"))
    return out
