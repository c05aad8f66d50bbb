"""Facts about this machine and its environment for the ranks that run on it: the launcher, cores,
GPUs.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from onefold.cores import physical_cores
from onefold.processes.signals import CONTROL
from onefold.wording import TrainError

#: The variables that torch.distributed reads if another launcher has started the ranks.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Device files of GPU drivers: NVIDIA (two), AMD, NVIDIA Jetson, Windows under WSL.
DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/nvmap", "/dev/dxg")

#: The address at which the ranks of one machine meet.
LOOPBACK = "127.0.0.1"


def local_store(timeout: timedelta = timedelta(minutes=5)) -> Any:
    """Return torch's store as a server on the loopback interface. By itself it listens on all."""
    from torch.distributed import TCPStore

    server = socket.create_server((LOOPBACK, 0), backlog=4096)
    port: int = server.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.distributed reads, derived from those that `srun` sets; {} if
    RANK is set or there is only one task. Variables of the job itself are ignored: a batch script
    is one process, however many tasks were allocated.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST", "localhost")
    # "node7,node9" or "rack[1-2]node[07-09,12]-ib": the first host of the list
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", hosts)
    local = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    assert first is not None
    # Every task must compute the same port without communication; two steps of one job must differ
    step = int(environment["SLURM_JOB_ID"]) * 97 + int(environment["SLURM_STEP_ID"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": local.group() if local else "1",
        "MASTER_ADDR": re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()),
        "MASTER_PORT": str(20000 + step % 20000),
    }


def joins(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a rank: a launcher (torchrun, Slurm, ...) has set RANK.
    Raises TrainError if RANK is set without the other variables.
    """
    if "RANK" not in environment:
        return False
    missing = [name for name in LAUNCHED if name not in environment]
    if missing:
        raise TrainError(
            f"RANK={environment['RANK']} is set, so this process joins a run, but"
            f" {', '.join(missing)} is not. Set them as torchrun does, or unset RANK to let onefold"
            " start its own ranks."
        )
    return True


def gpus_here() -> int:
    """Return the number of GPUs that torch finds. Without a driver's device file, torch is not
    imported.
    """
    if sys.platform == "linux" and not any(Path(path).exists() for path in DRIVERS):
        return 0
    from onefold.device import device_count

    return device_count()


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of torch's allocator for ranks on GPUs; {} if the user has one, or the
    machine has no GPU.

    Gathered buffers and gradients have many sizes of hundreds of megabytes. With expandable segments
    the allocator maps pages where they are needed, so that a freed buffer serves one of another size.
    torch 2.13 and 2.14 read PYTORCH_CUDA_ALLOC_CONF first, an old name, and then
    PYTORCH_ALLOC_CONF.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(Path(path).exists() for path in DRIVERS) or any(n in environment for n in names):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def child_environment(
    environment: Mapping[str, str],
    nproc: int,
    control: Path,
    compiling: bool,
    online: bool = False,
) -> dict[str, str]:
    """Return the ranks' environment: cores divided among them, libraries quiet, and the hub's
    libraries offline. `online`: let them use the network, because data of the hub is streamed.
    Variables that the user has set take precedence.
    """
    ours = {
        **allocator_settings(environment),
        "OMP_NUM_THREADS": str(max(1, physical_cores() // nproc)),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if sys.platform == "linux":  # no rank is on another machine
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    if online:
        del ours["HF_HUB_OFFLINE"]
    if not compiling:  # torch creates this folder anyway; it is removed with the control folder
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(control / "inductor")
    return {**ours, **environment, CONTROL: str(control)}
