"""Lightning's Trainer on Onefold: a tiny GPT on two ranks, its training state divided among them.

python examples/lightning_gpt.py FOLDER        (Lightning starts the ranks; again: it goes on)
"""

import sys
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from own_loop import TinyGPT

import onefold.lightning


class Writer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyGPT()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: str) -> None:
    text = torch.tensor(list(Path(__file__).read_bytes() * 4))
    rows = text[: len(text) // 65 * 65].view(-1, 65)
    last = Path(folder) / "last.ckpt"
    trainer = L.Trainer(
        strategy=onefold.lightning.Strategy(stage=3),
        accelerator="cpu",
        devices=2,
        max_epochs=4 if last.exists() else 2,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        logger=L.loggers.CSVLogger(folder),
        log_every_n_steps=4,
        callbacks=[L.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0)],
    )
    module = Writer()
    data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    whole = onefold.full_state_dict(module)  # on every rank: rank 0 has it
    if trainer.is_global_zero:
        loss, held = trainer.callback_metrics["loss"], len(whole)
        print(f"{trainer.global_step} steps, loss {loss:.3f}, {held} tensors in {last}")


if __name__ == "__main__":
    main(sys.argv[1])
