"""Record what runs and plans come to, and check that they still do.

    python tests/recording/record.py                      # every run and plan against the recording: 0 if all are equal, else 1
    python tests/recording/record.py --write              # make the recording anew; `git diff` shows what changed
    python tests/recording/record.py --against ../before  # two source trees on this machine, every
    bit of losses, weights and states
    python tests/recording/record.py --bits before.json   # the same in two steps: keep the bits of this tree,
    python tests/recording/record.py --against before.json    # ... and hold another one's against them

| kept in           | what                                                                                      | holds on        |
|-------------------|-------------------------------------------------------------------------------------------|-----------------|
| runs.json         | layouts, bytes at rest, at peak, on the wire and between tiers, every move, checkpoints'   | any machine     |
|                   | files; of the runs "any processor" hashes of losses, weights and states                   |                 |
| plans.json        | the answers of `onefold plan --json` and `onefold.plan()`, seconds to ten digits            | any machine     |
| --bits, --against | all of it, and the bits of losses, weights, optimizer states and files of every run         | one processor   |

--only PATTERN (a regular expression, on names) takes some of them; with --write the others stay as
they are. Where a tree to compare with has a recorder of its own (tests/recording/record.py), that
one is asked: it knows how things are called there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS, TREE = HERE.parent, HERE.parents[1]
RUNS, PLANS = "runs.json", "plans.json"
#: Runs that share a start of their ranks, and questions that share a process.
RUNS_TOGETHER, PLANS_TOGETHER = 16, 8
SHOWN = 60
Record = dict[str, Any]


def _import_from(tree: Path) -> None:
    """Take Onefold from `tree`, and helpers from the tests of this one; also in processes that are
    started. One thread each.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:] = [
        str(TESTS),
        str(tree / "src"),
        str(tree),
        *(p for p in sys.path if p and Path(p).resolve() != HERE),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])


# -- taking ----------------------------------------------------------------------------------------


def names(pattern: str = "") -> list[str]:
    """Everything that is recorded, runs first."""
    from recording import plans
    from recording.table import table

    every = [run.name for run in table()] + plans.names()
    return [name for name in every if re.search(pattern, name)]


def take(wanted: list[str], processes: int = 2, quiet: bool = True) -> dict[str, Record]:
    """{name: record, bits included} of some runs and plans. `processes`: groups of ranks at a time.

    A run for which a package is missing is left out.
    """
    from recording import plans
    from recording.table import table

    runs = [run for run in table() if run.name in set(wanted) and _possible(run)]
    asked = [name for name in plans.names() if name in set(wanted)]
    slow = [name for name in asked if "--simulate" in name]
    jobs: list[tuple[int, list[Any]]] = [(0, [name]) for name in slow]
    for world in sorted({run.world for run in runs}, reverse=True):
        of_world = [run for run in runs if run.world == world]
        jobs += [
            (world, of_world[i : i + RUNS_TOGETHER]) for i in range(0, len(of_world), RUNS_TOGETHER)
        ]
    others = [name for name in asked if name not in slow]
    jobs += [(0, others[i : i + PLANS_TOGETHER]) for i in range(0, len(others), PLANS_TOGETHER)]
    out: dict[str, Record] = {}
    begun = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed(
            [pool.submit(_take_together, world, some) for world, some in jobs]
        ):
            out |= done.result()
            if not quiet:
                print(
                    f"{len(out)} of {len(runs) + len(asked)} after"
                    f" {time.monotonic() - begun:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return {name: out[name] for name in wanted if name in out}


def _take_together(world: int, some: list[Any]) -> dict[str, Record]:
    from ranks import outcomes_of
    from recording.plans import record_plans
    from recording.runs import record_runs
    from recording.store import merged

    labels = [one if world == 0 else one.name for one in some]
    if world == 0:
        outcomes = outcomes_of(1, record_plans, some, process_group=False, timeout=900.0)
    else:
        outcomes = outcomes_of(world, record_runs, some, timeout=900.0, grace=30.0)
    failed = [f"rank {o.rank}: {o.error}: {o.message}\n{o.trace}" for o in outcomes if o.error]
    if failed:
        return {label: {"raised": "\n".join(failed)} for label in labels}
    return {label: merged([o.value[i] for o in outcomes]) for i, label in enumerate(labels)}


def _possible(run: Any) -> bool:
    packed = run.options.get("moments") in ("int8", "fp8", "int4")
    return not packed or importlib.util.find_spec("torchao") is not None


# -- comparing -------------------------------------------------------------------------------------


def compared(recorded: dict[str, Record], now: dict[str, Record]) -> list[str]:
    """What is otherwise than recorded: `now` as `take` has it, `recorded` as it is committed."""
    from recording.store import committed, differences
    from recording.subjects import SUBJECTS
    from recording.table import table

    portable = {run.name for run in table() if SUBJECTS[run.subject].portable}
    wrong = []
    for name, record in now.items():
        if "raised" in record:
            wrong.append(f"{name}: raised {record['raised']}")
        elif name not in recorded:
            wrong.append(
                f"{name}: it is not in the recording; --write --only '{re.escape(name)}' adds it"
            )
        else:
            wrong += differences(name, recorded[name], committed(record, name in portable))
    return wrong


def recording(folder: Path = HERE) -> dict[str, Record]:
    """What is committed."""
    from recording.store import read

    return read(folder / RUNS) | read(folder / PLANS)


def keep(taken: dict[str, Record], folder: Path, every: bool) -> None:
    """Write the committed part; `every`: what is not among `taken` goes."""
    from recording.store import committed, write
    from recording.subjects import SUBJECTS
    from recording.table import table

    portable = {run.name for run in table() if SUBJECTS[run.subject].portable}
    before = {} if every else recording(folder)
    after = before | {name: committed(record, name in portable) for name, record in taken.items()}
    write(
        folder / RUNS,
        {name: record for name, record in after.items() if not name.startswith("plan ")},
    )
    write(
        folder / PLANS, {name: record for name, record in after.items() if name.startswith("plan ")}
    )


# -- bits ------------------------------------------------------------------------------------------


def this_machine() -> dict[str, str]:
    """What bits of matrix products depend on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "processor": model.group(1) if model else "unknown",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def bits_of_tree(tree: Path, pattern: str, processes: int) -> dict[str, Any]:
    """What --bits writes for another tree, by its own recorder if it has one."""
    if not (tree / "src" / "onefold").is_dir():
        raise SystemExit(f"{tree} is no source tree of Onefold: it has no src/onefold.")
    own = tree / "tests" / "recording" / "record.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bits.json")
        command = [
            sys.executable,
            str(own if own.exists() else HERE / "record.py"),
            "--bits",
            str(out),
            "-n",
            str(processes),
        ]
        command += ["--only", pattern, *([] if own.exists() else ["--tree", str(tree)])]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if subprocess.run(command, env=env).returncode:
            raise SystemExit(f"the recorder failed on {tree}.")
        return json.loads(out.read_text())


def against(where: Path, pattern: str, processes: int) -> list[str]:
    """What differs, to the bit, between this tree and another, or a file of its bits."""
    from recording.store import differences

    other = (
        json.loads(where.read_text())
        if where.is_file()
        else bits_of_tree(where.resolve(), pattern, processes)
    )
    if other["machine"] != this_machine():
        raise SystemExit(
            f"these bits were taken on another machine ({other['machine']}); this one is"
            f" {this_machine()}."
        )
    theirs = {name: record for name, record in other["records"].items() if re.search(pattern, name)}
    ours = json.loads(json.dumps(take(names(pattern), processes, quiet=False)))
    wrong = [
        f"{name}: only {'here' if name in ours else 'there'}"
        for name in sorted(set(theirs) ^ set(ours))
    ]
    for name in ours:
        if "raised" in ours[name]:
            wrong.append(f"{name}: raised {ours[name]['raised']}")
        elif name in theirs:
            wrong += differences(name, theirs[name], ours[name])
    return wrong


# -- the command -----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None, alone: bool = False) -> int:
    """The command. `alone`: it is the program, and says where Onefold is imported from, and what
    its processes import at once.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="compare with the recording (the default)"
    )
    what.add_argument("--write", action="store_true", help="write the recording")
    what.add_argument(
        "--against",
        type=Path,
        metavar="TREE|FILE",
        help="compare every bit with another source tree, or with a --bits file",
    )
    what.add_argument(
        "--bits",
        type=Path,
        metavar="FILE",
        help="write everything, bits included, to a file that is not committed",
    )
    what.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="a regular expression that names must match somewhere",
    )
    parser.add_argument(
        "-n", type=int, default=2, metavar="PROCESSES", help="groups of ranks at a time (default 2)"
    )
    parser.add_argument("--folder", type=Path, default=HERE, help="where the recording lies")
    parser.add_argument(
        "--tree",
        type=Path,
        default=TREE,
        help="the source tree whose src/onefold is recorded (default: this one)",
    )
    given = parser.parse_args(arguments)
    if alone:
        _import_from(given.tree.resolve())
    wanted = names(given.only)
    if given.list:
        print("\n".join(wanted))
        return 0
    if not wanted:
        print(f"no name matches --only {given.only!r}; --list prints all.", file=sys.stderr)
        return 2
    if alone:
        from ranks import preload
        from recording import seen

        preload(
            *seen.PRELOADED,
            *(["torchao.optim"] if any(name.startswith("moments") for name in wanted) else []),
        )
    if given.against is not None:
        return _tell(against(given.against, given.only, given.n), len(wanted))
    taken = take(wanted, given.n, quiet=False)
    if missing := [name for name in wanted if name not in taken]:
        print(f"left out, since torchao is not installed: {', '.join(missing)}", file=sys.stderr)
    raised = [
        f"{name}: raised {record['raised']}" for name, record in taken.items() if "raised" in record
    ]
    if given.bits is not None:
        given.bits.write_text(
            json.dumps({"machine": this_machine(), "records": taken}, sort_keys=True)
        )
        return _tell(raised, len(taken))
    if given.write:
        if raised or missing:
            print("nothing was written.", file=sys.stderr)
            return _tell(raised, len(taken)) or 1
        keep(taken, given.folder, every=not given.only)
        print(f"{len(taken)} written.")
        return 0
    known = recording(given.folder)
    wrong = compared(known, taken)
    if not given.only:
        wrong += [
            f"{name}: it is in the recording, and nothing makes it any more"
            for name in known
            if name not in wanted
        ]
    return _tell(wrong, len(taken))


def _tell(wrong: list[str], count: int) -> int:
    for sentence in wrong[:SHOWN]:
        print(sentence)
    if len(wrong) > SHOWN:
        print(f"... and {len(wrong) - SHOWN} more")
    print(
        f"{count} compared, {len(wrong)} differences." if wrong else f"{count} compared, all equal."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        status = main(alone=True)
    finally:
        if "ranks" in sys.modules:
            sys.modules["ranks"].stop_fork_servers()
    sys.exit(status)
