"""README and docs keep their word: what is printed as Python runs, what is printed as a command
parses, what is linked is there.

A Python block runs as it is printed, by itself, in one process. What it uses without making it
(`model`, `loader`, `micro_batches`) is given to it under that name, as the text around it has it; a
name that the text cannot mean is a failure. docs/coming-from.md has other libraries' code beside
Onefold's: both sides run in test_coming_from.py, on two ranks. The tour's commands run in
test_tour.py.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from zoo import TinyGPT, tokens_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Blocks that cannot run here as printed, by a line of theirs, and why.
NOT_RUN: dict[str, str] = {
    "trainer = L.Trainer(": "Lightning joins ranks in this process: examples/lightning_gpt.py runs",
    "with trainer.init_module(empty_init=True):": "the same Trainer: test_lightning.py runs it",
    "torch.cuda.set_device(int(os.environ[": "it needs a GPU for each rank",
    'mesh_dim_names=("pp", "dp"))': "it needs eight GPUs: test_pipelines.py trains so on ranks",
    'AttentionInterface.register("over_cp"': "it needs ranks: test_context_parallel.py trains so",
    'counted = (batch["labels"] != -100).sum()': "the same",
    "class OverContext(": "the same",
    "scaler = onefold.GradScaler([module])": "the same: test_norms_over_stages.py scales and clips so",
    "onefold.checkpoint.join_stages(": "the same: test_pipelines.py saves and joins stages",
    "config = DistributedConfig(": "it needs ranks: tests/parallel/test_transformers_trainer.py runs the same",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and its title ("" if it has none), its lines."""

    page: Path
    line: int
    language: str
    text: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found, opened = [], None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = re.match(r'\s*```+\s*(\w*)(?: title="([^"]*)")?', line)
        if fence is None:
            continue
        if opened is None:
            opened = (number, fence[1], fence[2] or "")
        else:
            begin, language, title = opened
            text = "\n".join(lines[begin : number - 1])
            found.append(Block(page, begin, language, text, title))
            opened = None
    assert opened is None, f"{page.name}: the block of line {opened} does not end"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [
    block
    for block in BLOCKS
    if block.language in ("python", "py") and block.page.name != "coming-from.md"
]
COMMANDS = [
    (block, line)
    for block in BLOCKS
    if block.language in ("", "bash", "sh", "shell", "console")
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
]


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", page.read_text(encoding="utf-8"))


# -- Python blocks ---------------------------------------------------------------------------------


class Model(nn.Module):
    """What a transformers model looks like to a loop: `model(**batch).loss`, and to an engine:
    `engine(batch)`.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.gpt = TinyGPT()

    @property
    def layers(self) -> nn.ModuleList:
        return self.gpt.blocks

    def forward(
        self, batch: dict[str, torch.Tensor] | None = None, input_ids: torch.Tensor | None = None
    ) -> Any:
        if batch is not None:
            return self.gpt(batch["input_ids"])
        return SimpleNamespace(loss=self.gpt(input_ids))


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens_of(seed)} for seed in range(count)]


#: The engine of DeepSpeed's four-tuple reads this; the block names the file only.
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


def hugging_face_arguments() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments("runs/a", max_steps=1)


def hugging_face_folder(folder: Path) -> None:
    """What docs/hugging-face.md loads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, vocab_size=64)
    LlamaForCausalLM(config).save_pretrained(folder)


class Given(dict[str, Any]):
    """The names of a block while it runs. What it reads and has not made is made when it is read,
    if the text has such a thing.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shards = re.search(r"onefold\.(shard|initialize)\(", text) is not None
        self.precision = "fp16" if "GradScaler" in text else "fp32"

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        makers: dict[str, Callable[[], Any]] = {
            "onefold": lambda: onefold,
            "Recipe": lambda: onefold.Recipe,
            "torch": lambda: torch,
            "nn": lambda: nn,
            "contextlib": lambda: contextlib,
            "model": self.model,
            "MyModel": lambda: Model,
            "config": SimpleNamespace,
            "recipe": lambda: onefold.Recipe.zero(3),
            "state": lambda: Model().state_dict(),
            "batch": lambda: batches(1)[0],
            "loader": lambda: batches(3),
            "micro_batches": lambda: batches(3),
            "optim": lambda: torch.optim.AdamW(self["model"].parameters(), lr=1e-3),
            "data": lambda: [{"input_ids": row, "labels": row} for row in tokens_of(0)],
            "args": hugging_face_arguments,
            "loss": lambda: self["model"](**batches(1)[0]).loss,
        }
        assert name in makers, (
            f"the block uses {name}, which neither it nor the text around it makes"
        )
        self[name] = makers[name]()
        return self[name]

    def model(self) -> nn.Module:
        """Sharded, unless the block does that itself."""
        model = Model()
        return (
            model
            if self.shards
            else onefold.shard(model, onefold.Recipe.zero(3, precision=self.precision))
        )


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_runs_as_it_is_printed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = next((why for line, why in NOT_RUN.items() if line in block.text), None)
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    if 'from_pretrained("./' in block.text:
        hugging_face_folder(tmp_path / "llama-8b")
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), Given(block.text))


@pytest.mark.parametrize("block", [b for b in PYTHON if "optim.step()" in b.text], ids=str)
def test_a_loop_that_is_printed_trains(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only without an error: afterwards the weights are others."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    given = Given(block.text)
    before = {name: tensor.clone() for name, tensor in given["model"].state_dict().items()}
    exec(compile(block.text, str(block), "exec"), given)
    after = onefold.full_state_dict(given["model"])
    assert before.keys() == after.keys() and not all(
        torch.equal(before[name], after[name]) for name in before
    )


def test_each_system_of_the_concepts_is_a_recipe() -> None:
    """The last column of the table of systems: arguments of `Recipe.zero`."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    cells = re.findall(r"(?m)^\| .* \| `(stage=\d[^`]*)` \|$", page)
    assert len(cells) >= 9
    for cell in cells:
        arguments = eval(f"dict({cell.replace('nvme=...', 'nvme=folder')})", {"folder": str(ROOT)})
        assert onefold.Recipe.zero(**arguments).stage == arguments["stage"]


def test_every_block_that_is_not_run_is_still_printed() -> None:
    for line, why in NOT_RUN.items():
        assert why and any(line in block.text for block in PYTHON), (
            f"no block has the line {line!r} any more"
        )


def test_the_pages_have_python_and_commands_to_check() -> None:
    assert len(PYTHON) >= 6 and sum("onefold train" in line for _, line in COMMANDS) >= 4


# -- commands --------------------------------------------------------------------------------------


def arguments_of(line: str) -> list[str] | None:
    """What is handed to `onefold` by a line such as `torchrun ... -m onefold train ...`; None if it
    is no such line.
    """
    # What the shell does with it is the shell's
    line = re.split(r"\s(?:>|2>|&|\||\|\|)\s?", line.strip().removeprefix("$ "))[0]
    line = re.sub(r"\$\([^()]*\)?", "a b", re.sub(r"\$\(\(.*?\)\)", "1", line))
    words = (
        shlex.split(line, comments=True)
        if re.match(r"(onefold|torchrun|python3?|srun|\w+=\S+ onefold) ", line)
        else []
    )
    if "onefold" not in words:
        return None
    return [word for word in words[words.index("onefold") + 1 :] if word != "..."]


CALLS = [
    pytest.param(arguments, id=f"{block} {' '.join(arguments)[:60]}")
    for block, line in COMMANDS
    if (arguments := arguments_of(line)) is not None
]


@pytest.mark.parametrize("arguments", CALLS)
def test_a_command_that_is_printed_has_a_command_and_options_that_exist(
    arguments: list[str],
) -> None:
    main: Any = pytest.importorskip("typer.main")
    from onefold.cli.app import app

    part: Any = main.get_command(app)
    said = f"`onefold {' '.join(arguments)}`"
    while hasattr(part, "commands"):  # onefold, then such as `onefold checkpoint`
        assert arguments and arguments[0] in part.commands, (
            f"{said}: the commands are {sorted(part.commands)}"
        )
        name, *arguments = arguments
        part = part.commands[name]
    # Parses as the command line does, and runs nothing
    context = part.make_context(name, arguments)
    written = {word.split("=")[0] for word in arguments if word.startswith("--")}
    taken = [p for p in part.params if written & {*p.opts, *p.secondary_opts}]
    assert len(taken) == len(written) and all(context.params[p.name] is not None for p in taken), (
        context.params
    )


def test_a_command_with_an_option_that_does_not_exist_would_be_found() -> None:
    main: Any = pytest.importorskip("typer.main")
    from onefold.cli.app import app

    with pytest.raises(Exception, match=r"(?i)no such option"):
        main.get_command(app).commands["train"].make_context("train", ["--no-such-option", "1"])


MAKE = sorted(
    {
        target
        for page in PAGES
        for target in re.findall(
            r"(?m)(?:^|`)make (\w[\w-]*)",
            re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8")),
        )
    }
)


@pytest.mark.parametrize("target", MAKE)
def test_a_make_target_that_is_printed_is_in_the_makefile(target: str) -> None:
    assert re.search(
        rf"(?m)^{re.escape(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8")
    ), f"`make {target}` has no rule"


# -- names and links -------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_called_onefolds_is_exported(page: Path) -> None:
    code = " ".join(
        [*re.findall(r"`([^`\n]+)`", prose_of(page)), *(b.text for b in BLOCKS if b.page == page)]
    )
    named = set(re.findall(r"(?<![\w.-])onefold\.([a-zA-Z_]\w*)", code))
    missing = sorted(
        name
        for name in named
        if name not in onefold.__all__
        and not (ROOT / "src" / "onefold" / name).exists()
        and not (ROOT / "src" / "onefold" / f"{name}.py").exists()
    )
    assert not missing, (
        f"{page.name} speaks of {', '.join(f'onefold.{name}' for name in missing)}, which does not"
        " exist"
    )


LINKS = [
    pytest.param(page, target, id=f"{page.name} {target}")
    for page in PAGES
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)", prose_of(page))
    if not re.match(r"[a-z]+:", target)
]


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+\s+(.+?)\s*$", prose_of(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_a_relative_link_leads_to_a_file_of_the_project(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.is_relative_to(ROOT) and file.exists(), (
        f"{page.name} links to {target}, which is not there"
    )
    if anchor and file.suffix == ".md":  # lines of code are checked in test_architecture.py
        assert anchor in anchors_of(file), (
            f"{file.name} has no heading for #{anchor}; it has {sorted(anchors_of(file))}"
        )
