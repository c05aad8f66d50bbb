"""Translate a DeepSpeed configuration's offloading keys to arguments of `Recipe.zero`.

| the file says                                     | becomes                                                          |
|---------------------------------------------------|------------------------------------------------------------------|
| offload_optimizer: device, ratio                  | offload_optimizer, offload_amount                                |
| offload_param: device                             | offload_param                                                    |
| nvme_path of either                               | nvme: the folder; striped over both where they differ            |
| sub_group_size                                    | chunk: the next smaller multiple of 4,096 elements, 65,536 or more |
| aio: queue_depth x intra_op_parallelism           | nvme_threads, at most 64                                         |
| cpu_offload, cpu_offload_param (older files)      | the device "cpu" of the two sections                             |

DeepSpeed's own rules differ in places:

- below stage 3 it keeps states on the host even if the device is "nvme" (a remark says so);
- it accepts a ratio at stage 3 only;
- below stage 3 it ignores offload_param, as Onefold does (listed as without effect).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.deepspeed.config.keys import AIO, AIO_ALIASES, OFFLOAD
from onefold.deepspeed.config.reading import Reading
from onefold.recipe.options import SECTOR

#: DeepSpeed's default of sub_group_size, which is so large that nothing is divided.
_WHOLE = 1_000_000_000
_SMALLEST_CHUNK = 16 * SECTOR  # elements
_QUEUE_DEPTH, _PARALLELISM, _MOST_THREADS = 8, 1, 64
_STATES, _PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def read_tiers(read: Reading, zero: Mapping[str, Any], aio: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Recipe.zero` that say where state is stored. List in `read` what has
    no effect, and remarks.

    Args:
        zero: the checked values of "zero_optimization".
        aio: the section "aio", as given.

    Raises:
        ValueError: a misspelt key, a wrong value, sections that contradict each other, or NVMe
            without a folder.
    """
    states = _section(read, "offload_optimizer", zero, "cpu_offload")
    mark = len(read.without_effect)
    parameters = _section(read, "offload_param", zero, "cpu_offload_param")
    stage = zero.get("stage", 0)
    if states["device"] != "none" and states.get("ratio", 1.0) == 0:
        states["device"] = "none"
        read.without_effect.append(
            (f"{_STATES}.device", "a ratio of 0 leaves all states on the device")
        )
    if parameters["device"] != "none" and stage < 3:
        parameters["device"] = "none"
        del read.without_effect[mark:]
        read.without_effect.append(
            (
                _PARAMETERS,
                (
                    "parameters are divided at stage 3 only; below it every rank computes with all"
                    " of them"
                ),
            )
        )
    arguments: dict[str, Any] = {}
    if states["device"] != "none":
        ratio = states.get("ratio", 1.0)
        arguments["offload_optimizer"] = states["device"]
        if ratio != 1:
            arguments["offload_amount"] = ratio
    if parameters["device"] != "none":
        arguments["offload_param"] = parameters["device"]
    if parameters["device"] == "nvme" != states["device"]:
        raise ValueError(
            f'{_PARAMETERS}.device="nvme", and the optimizer\'s states, three times as many bytes,'
            f' are to stay in faster memory: write "nvme" as {_STATES}.device too.'
        )
    folders = _folders(read, {_STATES: states, _PARAMETERS: parameters})
    if folders:
        arguments["nvme"] = folders
        if stage in (1, 2):
            read.remarks.append(
                "states are stored on NVMe, as written; DeepSpeed 0.19.8 keeps them on the host at stage"
                f" {stage}"
            )
    return arguments | _chunk(read, zero, bool(folders)) | _threads(read, aio, bool(folders))


def _section(read: Reading, name: str, zero: Mapping[str, Any], old: str) -> dict[str, Any]:
    """Return the values of a section. If its device is "none", no key of it is listed as without
    effect.
    """
    path, mark = f"zero_optimization.{name}", len(read.without_effect)
    values = read.section(path, zero.get(name, {}), OFFLOAD[name], {})
    device = values.get("device", "none")
    if zero.get(old):
        if "device" in values and device != "cpu":
            raise ValueError(
                f'zero_optimization.{old}=true means {path}.device="cpu", and that is {device!r}:'
                f" remove {old}."
            )
        device = "cpu"
    if device == "none":
        del read.without_effect[mark:]
    return {**values, "device": device}


def _folders(read: Reading, sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the folders for what is stored on NVMe."""
    folders: list[str] = []
    asking = [path for path, values in sections.items() if values["device"] == "nvme"]
    for path, values in sections.items():
        folder = values.get("nvme_path")
        if folder is None or values["device"] == "none":
            continue
        if path not in asking:
            read.without_effect.append(
                (f"{path}.nvme_path", "only what is stored on NVMe needs a folder there")
            )
        elif folder not in folders:
            folders.append(folder)
    if asking and not folders:
        raise ValueError(
            f'{asking[0]}.device="nvme" has no folder: name one on the disk, as in "nvme_path":'
            ' "/local_nvme".'
        )
    if len(folders) > 1:
        read.remarks.append(
            f"everything on NVMe is striped over {' and '.join(folders)}, parameters and states"
            " alike"
        )
    return folders


def _chunk(read: Reading, zero: Mapping[str, Any], on_disk: bool) -> dict[str, int]:
    path, size = "zero_optimization.sub_group_size", zero.get("sub_group_size")
    if size is None:
        return {}
    if not on_disk:
        read.without_effect.append(
            (path, "states that are not on NVMe are stepped a unit of the model at a time")
        )
        return {}
    if size >= _WHOLE:
        why = (
            "at this size DeepSpeed divides nothing; states on NVMe are stepped in chunks of"
            " Onefold's own size"
        )
        read.without_effect.append((path, why))
        return {}
    chunk = max(_SMALLEST_CHUNK, size // SECTOR * SECTOR)
    if chunk != size:
        read.remarks.append(
            f"{path}={size} becomes {chunk} elements: a multiple of {SECTOR}, {_SMALLEST_CHUNK} or"
            " more, as direct reads and writes want"
        )
    return {"chunk": chunk}


def _threads(read: Reading, aio: Mapping[str, Any], on_disk: bool) -> dict[str, int]:
    mark = len(read.without_effect)
    if not on_disk:  # wrong keys still raise, but use_gds has nothing to ask for
        aio = {name: value for name, value in aio.items() if name != "use_gds"}
    values = read.section("aio", aio, AIO, AIO_ALIASES)
    if not on_disk:
        del read.without_effect[mark:]
        if values:
            read.without_effect.append(("aio", "nothing is stored on NVMe in this configuration"))
        return {}
    if "queue_depth" not in values and "intra_op_parallelism" not in values:
        return {}
    asked = values.get("queue_depth", _QUEUE_DEPTH) * values.get(
        "intra_op_parallelism", _PARALLELISM
    )
    if asked > _MOST_THREADS:
        read.remarks.append(
            f"aio asks for {asked} transfers at a time (queue_depth x intra_op_parallelism):"
            f" {_MOST_THREADS} are made"
        )
    return {"nvme_threads": min(asked, _MOST_THREADS)}
