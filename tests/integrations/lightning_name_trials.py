"""Runs of Lightning's own DeepSpeedStrategy with `deepspeed` served in the process, beside DDP."""

from __future__ import annotations

from typing import Any

#: {name of a run: what DeepSpeedStrategy and Trainer are given}.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {}),
    "stage 3": ({"stage": 3}, {}),
    "stage 3, accumulated": ({"stage": 3}, {"accumulate_grad_batches": 2, "max_epochs": 2}),
    "stage 2, on the host": ({"stage": 2, "offload_optimizer": True}, {}),
    "stage 3, on the host": (
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        {},
    ),
    "stage 3, bf16": ({"stage": 3}, {"precision": "bf16-true"}),
}


def strategy(**options: Any) -> Any:
    """DeepSpeedStrategy without its question for CUDA."""
    import lightning.pytorch as L
    from lightning.fabric.utilities.seed import reset_seed

    class OnHost(L.strategies.DeepSpeedStrategy):
        """It asks for CUDA by the class of the accelerator, and for the numbers of its devices."""

        def setup_environment(self) -> None:
            L.strategies.ParallelStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    return OnHost(**options)


def runs(folder: str, chosen: list[str]) -> dict[str, Any]:
    """{name: losses, evaluated losses and more of rank 0} of each run, those of `RUNS` that are
    chosen.
    """
    import onefold.deepspeed

    onefold.deepspeed.serve()
    import lightning_trials as trials

    trials.as_torchrun()
    out: dict[str, Any] = {}

    def fitted(name: str, by: Any, path: str | None = None, **options: Any) -> Any:
        module = trials.Tuned()
        used = trials.trainer(by, folder, gradient_clip_val=0.5, **options)
        used.fit(module, trials.loader(), trials.loader(8), ckpt_path=path)
        out[name] = {
            "loss": module.losses,
            "val_loss": module.evaluated,
            "rate": used.optimizers[0].param_groups[0]["lr"],
            "engine": type(used.strategy.model).__name__,
            "steps": used.global_step,
        }
        return used

    trained = fitted("ddp", "ddp").lightning_module
    expected = {name: value.clone() for name, value in trained.state_dict().items()}
    fitted("ddp, accumulated", "ddp", accumulate_grad_batches=2, max_epochs=2)
    fitted("ddp, bf16", "ddp", precision="bf16-true")
    for name in chosen:
        given, options = RUNS[name]
        used = fitted(name, strategy(**given), **options)
        if name in ("stage 2", "stage 3"):
            used.save_checkpoint(f"{folder}/{name}.ckpt")
    # One epoch is four steps: the second goes on from the checkpoint, at the other stage
    fitted("ddp, longer", "ddp", max_epochs=2)
    for stage, saved in ((3, "stage 2"), (2, "stage 3")):
        fitted(f"from {saved}", strategy(stage=stage), f"{folder}/{saved}.ckpt", max_epochs=2)
    fresh = trials.Tuned()
    tests = trials.trainer(strategy(stage=3), folder)
    tests.test(fresh, trials.loader(8), ckpt_path=f"{folder}/stage 3.ckpt", verbose=False)
    out["tested"] = fresh.evaluated
    out["converted"] = converted(folder, expected)
    return out


def converted(folder: str, expected: dict[str, Any]) -> dict[str, Any]:
    """What Lightning's converter makes of the checkpoints, and whether it is DDP's model."""
    import lightning_trials as trials
    import torch
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    seen: dict[str, Any] = {}
    for saved in ("stage 2", "stage 3"):
        file = f"{folder}/{saved} of rank {torch.distributed.get_rank()}.ckpt"
        state = convert_zero_checkpoint_to_fp32_state_dict(f"{folder}/{saved}.ckpt", file)
        module = trials.Tuned.load_from_checkpoint(file, map_location="cpu", weights_only=False)
        seen[saved] = {
            "epoch": state["epoch"],
            "names": module.state_dict().keys() == expected.keys(),
            "near": all(
                torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6)
                for name, value in module.state_dict().items()
            ),
        }
    return seen
