"""README and docs keep their word: code that is printed runs, commands parse, links and names lead
somewhere, messages are the source's.

Code beside another library's runs in test_coming_from.py, on two ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import DS_CONFIG, PAGES, ROOT, Block, Given, blocks_of, prose_of

import onefold
from needed import skip_without
from on_ranks import slow

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}

#: Blocks that cannot run as printed, by a line of theirs, and why.
NOT_RUN = {
    "trainer = L.Trainer(": "Lightning joins ranks in this process",
    "with trainer.init_module(empty_init=True):": "the same Trainer",
    "torch.cuda.set_device(int(os.environ[": "it needs a GPU for each rank",
    'mesh_dim_names=("pp", "dp"))': "it needs eight ranks",
    'AttentionInterface.register("over_cp"': "it needs ranks",
    'counted = (batch["labels"] != -100).sum()': "it needs ranks",
    "class OverContext(": "it needs ranks",
    "scaler = onefold.GradScaler([module])": "it needs ranks",
    "config = DistributedConfig(": "it needs ranks",
}
#: Packages of other trainers: blocks that import them are run where they are installed.
NOT_INSTALLED = {"axolotl", "llamafactory"}


def run(block: Block) -> None:
    """The block as it is printed. If it steps an optimizer, the weights are others afterwards."""
    torch.manual_seed(0)
    given = Given(block.text)
    steps = "optim.step()" in block.text
    before = {n: t.clone() for n, t in given["model"].state_dict().items()} if steps else {}
    exec(compile(block.text.replace("9400", "0"), str(block), "exec"), given)  # any free port
    if steps:
        after = onefold.full_state_dict(given["model"])
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_python_that_is_printed_runs_and_trains(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    python = [b for b in BLOCKS if b.language == "python" and b.page.name != "coming-from.md"]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    llama = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, vocab_size=64)
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama-8b")
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    wrong, left_out = [], set()
    for block in python:
        if line := next((line for line in NOT_RUN if line in block.text), None):
            left_out.add(line)
            continue
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        try:
            with contextlib.chdir(tmp_path):
                run(block)
        except Exception as error:
            name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
            if str(name).partition(".")[0] in NOT_INSTALLED:
                continue
            wrong.append(f"{block}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert left_out == NOT_RUN.keys(), "a block that is not run is printed no more"
    systems = re.findall(r"(?m)^\| .* \| `(stage=\d[^`]*)` \|$", TEXTS["concepts.md"])
    for cell in systems:
        eval(f"Recipe.zero({cell.replace('...', repr(str(tmp_path)))})", vars(onefold))
    assert len(python) > 20 and len(systems) >= 9


# -- commands --------------------------------------------------------------------------------------


def arguments_of(line: str) -> list[str] | None:
    """What a line such as `torchrun ... -m onefold train ...` hands to `onefold`; None if it is no
    such line.
    """
    line = re.split(r"\s(?:>|2>|&|\||\|\|)\s?", line.strip().removeprefix("$ "))[0]
    line = re.sub(r"\$\([^()]*\)?", "a b", re.sub(r"\$\(\(.*?\)\)", "1", line))
    if not re.match(r"(onefold|torchrun|python3?|srun|\w+=\S+ onefold) ", line):
        return None
    words = shlex.split(line, comments=True)
    return (
        [w for w in words[words.index("onefold") + 1 :] if w != "..."]
        if "onefold" in words
        else None
    )


def refused(arguments: list[str]) -> str:
    """Why the command line would refuse these arguments; "" if it takes them. Nothing runs."""
    import typer.main

    from onefold.cli.app import app

    part: Any = typer.main.get_command(app)
    try:
        name = "onefold"
        while hasattr(part, "commands"):
            name, *arguments = arguments
            part = part.commands[name]
        part.make_context(name, list(arguments))
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'message', error)}"
    return ""


def test_commands_that_are_printed_parse() -> None:
    skip_without("typer")
    lines = [
        (block, line)
        for block in BLOCKS
        if block.language in ("", "bash", "sh", "shell", "console")
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
    ]
    found = [(b, arguments) for b, line in lines if (arguments := arguments_of(line)) is not None]
    wrong = [
        f"{block}: onefold {' '.join(arguments)}: {why}"
        for block, arguments in found
        if (why := refused(arguments))
    ]
    rules = set(re.findall(r"(?m)^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    for name, text in TEXTS.items():
        asked = re.findall(r"(?m)(?:^|`)make (\w[\w-]*)", re.sub(r"(?s)<!--.*?-->", "", text))
        wrong += [f"{name}: make {rule} has no rule" for rule in sorted({*asked} - rules)]
    assert not wrong, "\n".join(wrong)
    assert len(found) > 20 and "no such option" in refused(["train", "--no-such", "1"]).lower()


# -- links, names, messages ---------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+\s+(.+?)\s*$", prose_of(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings_and_names_are_exported() -> None:
    source, wrong, seen = ROOT / "src" / "onefold", [], 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)", prose_of(page)):
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            there = file.is_relative_to(ROOT) and (file.exists() or file.name == "messages.md")
            if not there or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
                wrong.append(f"{page.name} links to {target}, which is not there")
        code = re.findall(r"`([^`\n]+)`", prose_of(page)) + [b.text for b in blocks_of(page)]
        for name in set(re.findall(r"(?<![\w.-])onefold\.([a-zA-Z_]\w*)", " ".join(code))):
            module = (source / name).exists() or (source / f"{name}.py").exists()
            gone = page.name == "CHANGELOG.md"  # it names what there was
            if name not in onefold.__all__ and not (module or gone):
                wrong.append(f"{page.name} speaks of onefold.{name}, which does not exist")
    assert not wrong, "\n".join(wrong)
    assert seen > 200


def test_messages_on_the_page_of_errors_are_the_sources() -> None:
    sys.path.append(str(ROOT / "docs"))
    from messages import expressions, text_of

    texts = "\n".join({text for _, node in expressions() if (text := text_of(node))})
    rows = re.findall(r"(?m)^\| (`.+?`) \| ", TEXTS["troubleshooting.md"])
    quotes = [a or b for row in rows for a, b in re.findall(r"`` (.+?) ``|`([^`]+)`", row)]
    sentences = [quote for quote in quotes if " " in quote]
    wrong = []
    for quote in sentences:
        parts = [re.escape(part.strip()) for part in quote.split("…")]
        if not re.search("[^\n]*".join(parts), texts):
            wrong.append(quote)
    assert not wrong, "no message of the source reads\n" + "\n".join(wrong)
    assert len(sentences) > 50


# -- what takes longer -----------------------------------------------------------------------------


def command(*words: str | Path, cwd: Path, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@slow
def test_the_site_builds_without_a_warning_and_opens_without_a_server(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        skip_without(module)
    build = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    said = command(*build, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    assert not re.findall(r"(?m)^(?:WARNING|ERROR).*", said), said
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)', text)
        assert not [url for url in fetched if "canonical" not in url], f"{page.name} {fetched[0]}"
    sys.path.append(str(ROOT / "docs"))
    import messages

    listed = messages.page()
    told = [" ".join(m.text.split()).replace("|", "\\|") for m in messages.messages()]
    assert all(text in listed for text in told), "give the room a part in docs/messages.py"
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    rooms = {"checkpoint", "deepspeed", "ema", "observe", "parallel", "plan"}
    missing = [n for n in onefold.__all__ if n not in rooms and f"{n}</" not in api]
    assert set(missing) <= {"Engine", "ShardedParameter"}, f"docs/api.md lacks {missing}"


@slow
def test_the_tour_runs_as_printed(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "tour.md")
    [script] = [block.text for block in blocks if block.title == "train.py"]
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    lines = [line for b in blocks if b.language == "bash" for line in b.text.splitlines()]
    said = [command("bash", "-ec", line, cwd=tmp_path, **places) for line in lines]
    steps = [re.findall(r"step (\d+): loss (\S+), ([\d,]+) bytes", text) for text in said]
    alone, stage_3, stage_0, saved, _, resumed = steps[:6]
    assert [s for s, *_ in alone] == ["10", "20"] and [s for s, *_ in resumed] == ["30", "40"]
    losses = [[loss for _, loss, _ in run] for run in (stage_3, stage_0, saved)]
    assert losses[0] == losses[1] == losses[2], said
    held = [int(run[0][2].replace(",", "")) for run in (stage_3, stage_0, alone)]
    assert 0.5 <= held[0] / held[1] < 0.51 and held[1] < 1.01 * held[2]
    assert re.search(r"path +runs/tour\nwhole +True", said[4])
    assert said[6:] and all("onefold plan" in line for line in lines[6:])


STEP = """
import torch, onefold
from torch import nn

assert "site-packages" in onefold.__file__, onefold.__file__
model = onefold.shard(nn.Linear(16, 4), onefold.Recipe.zero(stage=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
before = onefold.full_state_dict(model)
model(torch.randn(8, 16)).square().mean().backward()
optimizer.step()
assert not torch.equal(before["weight"], onefold.full_state_dict(model)["weight"])
onefold.save("step-1", model=model, optimizer=optimizer, step=1)
assert onefold.load("step-1", model=model, optimizer=optimizer).step == 1
assert onefold.plan(6e8, gpus=8, gpu="h100-80", seq=1024, micro_batch=1).recommended is not None
"""


@slow
@pytest.mark.timeout(3600)
def test_a_wheel_beside_torch_safetensors_numpy_and_pydantic_trains_saves_and_plans(
    tmp_path: Path,
) -> None:
    """In a fresh environment; torch is installed once more, which takes minutes."""
    source, pins = tmp_path / "source", ROOT / "constraints.txt"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path)
    command(*pip, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("onefold-*.whl")
    command(sys.executable, "-m", "venv", tmp_path / "fresh", cwd=tmp_path)
    programs = tmp_path / "fresh" / "bin"
    install = (programs / "python", "-m", "pip", "install", "--quiet")
    needed = re.findall(r"(?m)^(?:torch|safetensors|numpy|pydantic)==\S+", pins.read_text())
    command(*install, *needed, "-c", pins, cwd=tmp_path)
    command(*install, "--no-deps", wheel, cwd=tmp_path)
    command(programs / "python", "-m", "pip", "check", cwd=tmp_path)  # it asks for nothing else
    command(programs / "python", "-c", STEP, cwd=tmp_path)
    command(*install, f"{wheel}[cli]", "-c", pins, cwd=tmp_path)
    plan = ("plan", "--params", "8e9", "--gpus", "8", "--gpu", "h100-80", "--seq", "4096")
    assert "stage" in command(programs / "onefold", *plan, cwd=tmp_path)
