"""The name deepspeed, as `python -m onefold.deepspeed` serves it: what can be imported, what is
refused and why, and the names beside the engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds.engines import served, warnings_of
from on_ranks import on_ranks, slow
from reference import built
from zoo import TinyMLP

#: Modules that scripts import from; `dir` of each lists what is served there.
MODULES = [
    "deepspeed", "deepspeed.accelerator", "deepspeed.checkpoint.utils", "deepspeed.checkpointing", "deepspeed.comm",
    "deepspeed.ops.adam", "deepspeed.ops.lion", "deepspeed.ops.op_builder", "deepspeed.runtime.config",
    "deepspeed.runtime.engine", "deepspeed.runtime.lr_schedules", "deepspeed.runtime.utils", "deepspeed.runtime.zero.config",
    "deepspeed.runtime.zero.partition_parameters", "deepspeed.utils", "deepspeed.utils.zero_to_fp32", "deepspeed.zero",
]  # fmt: skip
HOSTS = ("transformers", "accelerate", "peft", "trl", "lightning")


def outcome(name: str) -> str:
    """ "" if the full name is there, else what its import or its attribute raises."""
    parts = name.split(".")
    try:
        found = served()
        for at, part in enumerate(parts[1:], 2):
            try:
                found = getattr(found, part)
            except AttributeError:
                if at == len(parts) and importlib.util.find_spec(".".join(parts[:-1])) is None:
                    raise
                found = importlib.import_module(".".join(parts[:at]))
    except (AttributeError, ImportError) as error:
        return str(error)
    return ""


# -- imports ---------------------------------------------------------------------------------------


@on_ranks(1)
def test_every_name_that_a_module_lists_is_there() -> None:
    ds = served()
    for module in MODULES:
        here = importlib.import_module(module)
        names = [name for name in dir(here) if not name.startswith("__")]
        assert names and not [name for name in names if not hasattr(here, name)], module
    assert ds.zero.GatheredParameters is ds.runtime.zero.GatheredParameters
    ds.zero.mine = 3
    from deepspeed.zero import mine  # type: ignore[import-not-found]

    assert mine == 3 and ds.comm.get_rank() == 0
    from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
    from deepspeed.runtime.activation_checkpointing import (  # type: ignore[import-not-found]
        checkpointing,
    )

    assert DeepSpeedCPUAdam is ds.ops.adam.DeepSpeedCPUAdam
    assert checkpointing.checkpoint is ds.checkpointing.checkpoint
    everything: dict[str, Any] = {}
    exec("from deepspeed.utils import *", everything)
    assert {"safe_get_full_grad", "RepeatingLoader"} <= everything.keys()


@on_ranks(1)
def test_functions_take_deepspeeds_arguments() -> None:
    ds, model = served(), built(TinyMLP)
    utils, adam = ds.utils, ds.ops.adam
    assert utils.set_z3_leaf_modules_by_name(model, module_names=["leave"]) == ([model.leave], [])
    assert utils.z3_leaf_module(model.leave) and not utils.z3_leaf_module(model)
    ups = utils.set_z3_leaf_modules_by_suffix(model, module_name_suffixes=[".up"])[0]
    assert ups == [block.up for block in model.blocks]
    for made, kind in (
        (adam.FusedAdam(model.parameters(), 0.1, True, (0.8, 0.9), 1e-6, False, 0.2), "Adam"),
        (adam.DeepSpeedCPUAdam(model.parameters(), 0.1, True, (0.8, 0.9), 1e-6, 0.2), "AdamW"),
    ):
        found = [made.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")]
        assert type(made).__name__ == kind and found == [0.1, (0.8, 0.9), 1e-6, 0.2]


@on_ranks(1)
def test_what_is_not_served_says_who_serves_and_why() -> None:
    ds = served()
    for name, words in (
        ("no_such_name", "there is no deepspeed.no_such_name here: the name deepspeed is"),
        ("init_inference", "deepspeed.init_inference is not served here: generate under"),
        ("pipe", "deepspeed.pipe is not served here: other axes than data"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(ds, name)
    for statement, words in (
        ("from deepspeed.moe.layer import MoE", "deepspeed.moe is not served here: other axes"),
        ("from deepspeed import PipelineModule", "deepspeed.PipelineModule is not served here"),
        ("import deepspeed.runtime.no_such_file", "there is no deepspeed.runtime.no_such_file here: the name"),
    ):  # fmt: skip
        with pytest.raises(ModuleNotFoundError, match=words):
            exec(statement, {})


@on_ranks(1, fresh=True)
def test_transformers_and_accelerate_find_it_and_its_version() -> None:
    ds = served()
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    from accelerate import accelerator
    from accelerate.utils import compare_versions

    assert accelerator.DeepSpeedEngineWrapper and compare_versions("deepspeed", ">=", "0.18.2")
    # From 0.18.2 on accelerate imports sequence parallelism where a run asks for it
    with pytest.raises(ModuleNotFoundError, match="other axes than data"):
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found]
            UlyssesSPAttentionHF,  # noqa: F401
        )
    assert importlib.metadata.version("deepspeed") == ds.__version__ == "0.19.8+onefold"


@on_ranks(1, fresh=True)
@pytest.mark.parametrize("before", ["accelerate", "deepspeed"])
def test_what_comes_too_late_is_refused(before: str) -> None:
    if before == "accelerate":
        pytest.importorskip("accelerate")
        words = "accelerate looked for DeepSpeed when imported, and found none"
    else:
        sys.modules["deepspeed"] = type(sys)("deepspeed")
        words = "DeepSpeed itself is loaded in this process, from memory"
    with pytest.raises(Exception, match=words):
        served()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240)


@slow
def test_the_command_says_who_serves_and_other_processes_see_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, beside\nimport deepspeed\n"
        "print(deepspeed.__version__, sys.argv[1:], __name__, beside.here)\n"
    )
    (tmp_path / "beside.py").write_text("here = 'here'\n")
    done = python("-m", "onefold.deepspeed", str(script), "--steps", "3")
    assert done.stdout == "0.19.8+onefold ['--steps', '3'] __main__ here\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "deepspeed" in line]
    assert said == ["onefold serves the name deepspeed in this process (as version 0.19.8+onefold)"]
    assert importlib.util.find_spec("deepspeed") is None
    assert "usage: python -m onefold.deepspeed" in python("-m", "onefold.deepspeed").stderr
    gone = python("-m", "onefold.deepspeed", str(tmp_path / "no.py"))
    assert gone.returncode == 1 and "there is no script" in gone.stderr
    imported = "import onefold, sys; print([m for m in sys.modules if 'deepspeed' in m])"
    assert python("-c", imported).stdout == "[]\n"


# -- what the installed libraries ask for ----------------------------------------------------------

#: Words of those packages that look like names of DeepSpeed and are none.
NO_NAMES = {
    "deepspeed.ai",  # an address
    "deepspeed._zero",  # Trainer's own attribute `deepspeed`, which is the engine
    "deepspeed.config",
    "deepspeed.config.get",
    "deepspeed.save_checkpoint",
}


def names_in(text: str) -> set[str]:
    """The full names under `deepspeed` that a source mentions."""
    found = {
        m.group(0)
        for m in re.finditer(r"(?<![\w./-])deepspeed(?:\.[A-Za-z_]\w*)+", text)
        if not text.startswith(("(", "/"), m.end()) or "." in m.group(0)
    }
    for m in re.finditer(r"(?m)^\s*from (deepspeed[\w.]*) import (\([^)]*\)|[^\n]*)", text):
        listed = re.sub(r"#.*", "", m.group(2)).strip("()\n ")
        imported = [part.split(" as ")[0].strip() for part in listed.split(",")]
        found |= {f"{m.group(1)}.{name}" for name in imported if name.isidentifier()}
        found.discard(m.group(1))
    return found - NO_NAMES


def sources(host: str) -> list[str]:
    """The text of each file of an installed library that mentions the name."""
    spec = importlib.util.find_spec(host)
    if spec is None or spec.origin is None:
        return []
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return [text for text in texts if "deepspeed" in text]


@on_ranks(1)
def test_every_name_that_an_installed_library_asks_for_is_served_or_refused_with_a_reason() -> None:
    sample = "deepspeed.zero.NewThing()\nfrom deepspeed.utils import (\n  a,  # b\n  c as d,\n)"
    assert names_in(sample) == {"deepspeed.zero.NewThing", "deepspeed.utils.a", "deepspeed.utils.c"}
    assert "there is no" in outcome("deepspeed.zero.NewThing") and not outcome(
        "deepspeed.zero.Init"
    )
    for host in HOSTS:
        asked = {name for text in sources(host) for name in names_in(text)}
        left = {
            name: said
            for name in asked
            if (said := outcome(name)) and "not served here" not in said
        }
        assert not left, f"{host} asks for them: serve them, or refuse them with a reason: {left}"


# -- names beside the engine -----------------------------------------------------------------------


@on_ranks(1)
def test_the_accelerator_answers_and_what_has_no_effect_is_said() -> None:
    ds = served()
    here = ds.get_accelerator()
    assert here.total_memory() >= here.available_memory() > 0
    state = here.get_rng_state()
    drawn = torch.rand(2, device=here.current_device_name())
    here.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=here.current_device_name()), drawn)
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'graph_pool' here"):
        _ = here.graph_pool
    with warnings_of() as said:
        ds.comm.log_summary()
        ds.checkpointing.configure(None, partition_activations=True, profile=False)
    text = "\n".join(said)
    assert "log_summary: collectives are" in text and "partition_act" in text
    assert "profile" not in text
