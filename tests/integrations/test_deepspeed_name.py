"""The name deepspeed, as `python -m onefold.deepspeed` serves it."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onefold.integrations.deepspeed.names.table import REFUSED, SERVED, is_served, modules, refusal
from ranks import run_ranks


def run(text: str) -> tuple[str, str]:
    """What it prints, and what it raises."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            exec(text, {"__name__": "__main__"})
        except Exception as error:
            return said.getvalue(), f"{type(error).__name__}: {error}"
    return said.getvalue(), ""


def forked(text: str) -> tuple[str, str]:
    """In a process that has imported torch, and nothing of what looks for DeepSpeed."""
    return run_ranks(1, run, text, process_group=False)[0]


def python(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, *(["-c", text] if text else [])],
        capture_output=True,
        text=True,
        timeout=240,
    )


SERVE = "import onefold.deepspeed; onefold.deepspeed.serve(); "


def test_every_name_of_the_table_is_there() -> None:
    text = SERVE + (
        "import importlib\n"
        "from onefold.integrations.deepspeed.names.table import SERVED\n"
        "for module, names in SERVED.items():\n"
        "    here = importlib.import_module(module)\n"
        "    for name in names: getattr(here, name)\n"
        "    assert set(names) <= set(dir(here))\n"
        "import deepspeed\n"
        "assert deepspeed.zero.GatheredParameters is deepspeed.runtime.zero.GatheredParameters\n"
        "deepspeed.zero.mine = 3\n"
        "from deepspeed.zero import mine\n"
        "from deepspeed import comm as dist\n"
        "print(dist.get_rank(), mine)"
    )
    assert forked(text) == ("0 3\n", "")


def test_transformers_and_accelerate_find_it_and_its_version() -> None:
    text = SERVE + (
        "import importlib.metadata\n"
        "from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_available\n"
        "from accelerate import accelerator\n"
        "from accelerate.utils import compare_versions\n"
        "assert is_deepspeed_available() and HfDeepSpeedConfig.__mro__[1] is not object\n"
        "assert accelerator.DeepSpeedEngineWrapper\n"
        "assert compare_versions('deepspeed', '>=', '0.16.4')\n"
        # From 0.18.2 on accelerate imports sequence parallelism where a run asks for it
        "assert compare_versions('deepspeed', '>=', '0.18.2')\n"
        "try: from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF\n"
        "except ModuleNotFoundError as error: assert 'other parallel axes' in str(error)\n"
        "else: raise AssertionError('it is not served')\n"
        "print(importlib.metadata.version('deepspeed'))"
    )
    assert forked(text) == ("0.19.8+onefold\n", "")


def test_one_line_says_who_serves_and_other_processes_see_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, beside\nimport deepspeed\n"
        "print(deepspeed.__version__, sys.argv[1:], __name__, beside.here)\n"
    )
    (tmp_path / "beside.py").write_text("here = 'here'\n")
    done = python("", "-m", "onefold.deepspeed", str(script), "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.19.8+onefold ['--steps', '3'] __main__ here\n"
    said = [line for line in done.stderr.splitlines() if "deepspeed" in line]
    assert said == ["onefold serves the name deepspeed in this process (as version 0.19.8+onefold)"]
    assert importlib.util.find_spec("deepspeed") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("import accelerate", "accelerate looked for DeepSpeed when imported, and found none"),
        (
            "import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed')",
            "DeepSpeed itself is loaded in this process, from memory",
        ),
    ],
)
def test_what_comes_too_late_is_refused(before: str, said: str) -> None:
    assert said in forked(f"{before}; {SERVE}")[1]


def test_an_unknown_name_says_who_serves_and_a_refused_one_says_why() -> None:
    text = SERVE + (
        "import deepspeed\n"
        "for name in ('no_such_name', 'init_inference', 'pipe'):\n"
        "    try: getattr(deepspeed, name)\n"
        "    except AttributeError as error: print(error)"
    )
    lines = forked(text)[0].splitlines()
    assert lines[0].startswith("there is no deepspeed.no_such_name here: the name deepspeed is")
    assert "deepspeed.init_inference is not served here: generate under" in lines[1]
    assert "deepspeed.pipe is not served here: other parallel axes" in lines[2]


def test_the_command_tells_how_it_is_used(tmp_path: Path) -> None:
    assert "usage: python -m onefold.deepspeed" in python("", "-m", "onefold.deepspeed").stderr
    gone = python("", "-m", "onefold.deepspeed", str(tmp_path / "no.py"))
    assert gone.returncode == 1 and "there is no script" in gone.stderr


def test_importing_onefold_imports_none_of_it() -> None:
    text = "import onefold, sys; print([m for m in sys.modules if 'deepspeed' in m])"
    assert python(text).stdout == "[]\n"


def test_a_name_is_served_or_refused_and_not_both() -> None:
    served = {f"{module}.{name}" for module, names in SERVED.items() for name in names}
    assert not [name for name in served | modules() if refusal(name)]
    assert all(reason and not reason.endswith(".") for reason in REFUSED.values())


# -- what the installed libraries ask for ------------------------------------------------------------

#: Words of those packages that look like names of DeepSpeed and are none.
NO_NAMES = {
    "deepspeed.ai",  # an address
    "deepspeed._zero",  # Trainer's own attribute `deepspeed`, which is the engine
    "deepspeed.config",
    "deepspeed.config.get",
    "deepspeed.save_checkpoint",
}
HOSTS = ("transformers", "accelerate", "peft", "trl", "lightning")


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
    return found


def known(name: str) -> bool:
    """Whether it is served, refused, or an attribute of something that is."""
    parts = name.split(".")
    return (
        bool(refusal(name))
        or any(
            is_served(".".join(parts[:n])) and ".".join(parts[:n]) not in modules()
            for n in range(2, len(parts) + 1)
        )
        or name in modules()
    )


@pytest.mark.parametrize("host", HOSTS)
def test_every_name_that_an_installed_library_asks_for_is_served_or_listed(host: str) -> None:
    spec = importlib.util.find_spec(host)
    if spec is None or spec.origin is None:
        pytest.skip(f"{host} is not installed")
    left: dict[str, str] = {}
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "deepspeed" not in text:
            continue
        for name in names_in(text) - NO_NAMES:
            if not known(name):
                left[name] = str(path)
    assert not left, f"serve them in names/table.py, or list them there with a reason: {left}"


#: What libraries look for in a folder of `engine.save_checkpoint`, and find there.
LOOKED_FOR = {"global_step*", "latest", "zero_to_fp32.py"}
#: Names of files of DeepSpeed's engine, whole or as a part of a pattern.
_FILES = re.compile(
    r"global_step\*|^latest$|zero_to_fp32\.py|\w*mp_rank\w*|\w*_states\.pt|model_states\w*"
    r"|optim_states\w*"
)


def strings(text: str) -> list[str]:
    """Those of a source, without those that stand alone (its documentation)."""
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    ]


def test_no_installed_library_looks_for_files_of_deepspeed_that_are_not_written() -> None:
    """`mp_rank_00_model_states.pt` and `*_optim_states.pt` are not: who reads such a folder asks for
    the names in `LOOKED_FOR`, or by functions of deepspeed that are served.
    """
    found: dict[str, str] = {}
    for host in HOSTS:
        spec = importlib.util.find_spec(host)
        if spec is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "deepspeed" in text:
                found |= {n: str(path) for said in strings(text) for n in _FILES.findall(said)}
    assert LOOKED_FOR & found.keys(), found
    assert not (new := {n: p for n, p in found.items() if n not in LOOKED_FOR}), new


def test_a_name_that_is_new_is_found() -> None:
    assert names_in("x = deepspeed.zero.NewThing()\nfrom deepspeed.utils import (\n  a,  # b\n  c as d,\n)") == {
        "deepspeed.zero.NewThing", "deepspeed.utils.a", "deepspeed.utils.c",
    }  # fmt: skip
    assert not known("deepspeed.zero.NewThing") and known("deepspeed.zero.Init")


def test_the_page_names_what_is_served() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    part = page.partition("## Scripts that import DeepSpeed")[2].partition("## See what")[0]
    named = set(re.findall(r"\w+", part))
    last = {name for names in SERVED.values() for name in names}
    assert {"initialize", "Init", "GatheredParameters", "register_external_parameter"} <= named
    words = {n for n in named & last if n[0].isupper() or "_" in n}
    assert len(words) >= 10, words


def test_what_optimizers_cannot_do_is_refused() -> None:
    from onefold.integrations.deepspeed.names import optimizers

    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(NotImplementedError, match="amsgrad=True: Adagrad has no such form"):
        optimizers.DeepSpeedCPUAdagrad([param], amsgrad=True)
    group = {"params": [param], "lr": 0.5, "betas": (0.9, 0.99), "foreach": None}
    lion = optimizers.DeepSpeedCPULion([group])
    param.grad = torch.tensor([2.0, -1.0, 0.5])
    lion.step()
    assert torch.equal(param.detach(), torch.tensor([0.5, 1.5, 0.5]))
    assert "foreach" not in lion.param_groups[0]
