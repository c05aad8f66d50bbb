"""How many files a reader opens to follow one phase of a step, and how long the import takes:
`python -m benchmarks.phases [--against OTHER/src ...]`.

Two gloo ranks train a model of four blocks at stage 3. A profiling hook records every function that
rank 0 enters while a phase runs, and the files of these functions are counted.

| side          | files that count                                                          |
|---------------|---------------------------------------------------------------------------|
| "this"        | those of `onefold`; with `--against`, of other checkouts too              |
| "fsdp2"       | those of `torch.distributed`, where FSDP2, DTensor and DCP are            |

| phase         | what runs                                                                 |
|---------------|---------------------------------------------------------------------------|
| "shard"       | `onefold.shard(...)`; `fully_shard` of each block and of the model        |
| "forward", "backward", "step" | those of the fourth step, when the order of units is known |
| "save"        | `onefold.save(...)`; `get_state_dict` and `dcp.save`                      |

The import is timed in processes of their own, in turns: `import onefold` and its first use
(`onefold.shard`), beside `import torch`. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks import harness, launch

SCHEMA = "onefold-phases/1"
PHASES = ("shard", "forward", "backward", "step", "save")
OPTIMIZED = 1  # the flag of a function's code; bodies of modules and classes do not have it
IMPORT = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@contextmanager
def recorded(root: str, files: set[str]) -> Iterator[None]:
    """Inside, `files` collects the files below `root` whose functions are entered."""

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & OPTIMIZED and code.co_filename.startswith(root):
            files.add(code.co_filename[len(root) :])

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def measure(job: dict[str, Any]) -> dict[str, list[str]]:
    """Run all phases: {phase: files}."""
    folder, fsdp2 = job["folder"], job["side"] == "fsdp2"
    if fsdp2:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.fsdp import fully_shard

        root = Path(torch.__file__).parent / "distributed"
    else:
        import onefold

        root = Path(onefold.__file__).parent
    found: dict[str, set[str]] = {phase: set() for phase in PHASES}

    def phase(name: str) -> Any:
        return recorded(f"{root}{os.sep}", found[name])

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 32), *(Block() for _ in range(4)), nn.Linear(32, 8)
    )
    with phase("shard"):
        if fsdp2:
            for child in model.children():
                fully_shard(child)
            fully_shard(model)
        else:
            onefold.shard(model, onefold.Recipe.zero(stage=3), units=(Block,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ignored: set[str] = set()
    for last in (False, False, False, True):
        for name in ("forward", "backward", "step"):
            with phase(name) if last else recorded(f"{root}{os.sep}", ignored):
                if name == "forward":
                    loss = model(torch.ones(2, 8)).sum()
                elif name == "backward":
                    loss.backward()
                else:
                    optimizer.step()
        optimizer.zero_grad()
    with phase("save"):
        if fsdp2:
            states = get_state_dict(model, optimizer)
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=f"{folder}/saved")
        else:
            onefold.save(f"{folder}/saved", model=model, optimizer=optimizer)
    return {name: sorted(files) for name, files in found.items()}


def files_of(side: str, source: Path) -> dict[str, list[str]]:
    """{phase: the files that rank 0 enters}, Onefold's from `source`."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"side": side, "folder": folder}
        return launch.all_ranks("benchmarks.phases", job, 2, timeout=300, source=source)[0]


def import_seconds(statement: str, source: Path) -> float:
    """Seconds that a process of its own takes for `statement`."""
    asked = subprocess.run(
        [sys.executable, "-c", IMPORT.format(statement)],
        env=launch.environment(1, source),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(asked.stdout)


@harness.command("phases", __doc__, rounds=7, against=[])
def main(options: harness.Options) -> int:
    sources = harness.sources(options)
    timed = {"torch": ("import torch", sources["this"])}
    for name, source in sources.items():
        timed[f"{name}, import onefold"] = ("import onefold", source)
        timed[f"{name}, onefold.shard"] = ("import onefold; onefold.shard", source)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _, name in harness.in_turns(timed, options.rounds):
        seconds[name].append(import_seconds(*timed[name]))
    rows = []
    for name, source in (*sources.items(), ("fsdp2", sources["this"])):
        files = files_of("fsdp2" if name == "fsdp2" else "onefold", source)
        every = sorted(set().union(*files.values()))
        rows.append({"side": name, "files": files, "all": every})
        counts = "   ".join(f"{phase} {len(files[phase]):3}" for phase in PHASES)
        print(f"{name:10} {counts}   all {len(every):3}")
    for name, each in seconds.items():
        print(f"{name:28} {median(each):6.3f} s")
    imports = {name: {"median": median(each), "runs": each} for name, each in seconds.items()}
    harness.keep(options, SCHEMA, rows=rows, import_s=imports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
