"""Where a value comes from: defaults, then the file, then the command line; what is unknown is told
with a guess.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onefold.train.config import TrainConfig, read_config_file, resolve
from onefold.train.output import check_output, name_output, write_config
from onefold.wording import TrainError


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nmicro-batch: 8\nstage: 2\n")
    config = resolve({"micro_batch": 16, "lr": None}, file)
    assert (config.lr, config.micro_batch, config.stage, config.seq) == (
        1e-3,
        16,
        "2",
        TrainConfig().seq,
    )


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text('stage: auto\nsteps: 3\nunits: [h, "wte"]\njson: true\n')
    (tmp_path / "a.toml").write_text(
        'stage = "auto"\nsteps = 3\nunits = ["h", "wte"]\njson = true\n'
    )
    assert resolve({}, tmp_path / "a.yaml") == resolve({}, tmp_path / "a.toml")
    assert resolve({"units": "h, wte"}).units == ("h", "wte")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("micro-batsh: 4", "unknown key 'micro-batsh'. Did you mean 'micro_batch'"),
        ("micro_batch: 0", "--micro-batch 0"),
        ("precision: fp8", "--precision 'fp8'"),
        ("- 1", "found list"),
        ("a: [", "not valid YAML"),
        ("steps: 3\nepochs: 1", "both steps and epochs"),
        ("seed: yes", "--seed True: expected a value other than true or false."),
        ("lr: on", "--lr True: expected a value other"),
        ("tp: true", "--tp True: expected a value other"),
        ("micro_batch: true", "--micro-batch True: expected a value other"),
        ("compile: 1", "--compile 1: expected true or false."),
        ("optimizer_options: {eps: yes}", "eps=True: input should be a valid number"),
        ("output: ''", "--output '': string should have at least 1 character."),
        ("lr: .inf", "--lr inf: input should be a finite number."),
        ("lr: '1e400'", "--lr '1e400': input should be a finite number."),
        ("stall_timeout: 1e300", "--stall-timeout"),
        ("seed: " + "9" * 20, "input should be less than 9223372036854775808."),
        ("seed: " + "9" * 5000, "Exceeds the limit (4300 digits)"),
        ("lr: 0x" + "f" * 5000, "--lr with this number: "),
        ("a: " + "[" * 5000, "is not valid YAML: maximum recursion depth"),
        ("on_nonfinite: rollback", "input should be 'stop' or 'skip'."),
        ('output: "\\ud800"', "--output '\\ud800': input should be a valid string"),
    ],
)
def test_what_cannot_be_is_told_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(TrainError) as error:
        resolve({}, file)
    assert message in str(error.value)


def test_the_saved_configuration_reads_back_as_the_same_run(tmp_path: Path) -> None:
    config = resolve(
        {"epochs": 1.0, "lr": 3e-4, "units": "a,b", "json": True, "overwrite": True, "output": "x"}
    )
    write_config(config, tmp_path, {"stage": 1, "ranks": 2, "steps": 12, "global_batch": 8})
    again = resolve({}, tmp_path / "train.yaml")
    assert (again.lr, again.units, again.steps, again.epochs, again.global_batch) == (
        3e-4,
        ("a", "b"),
        12,
        None,
        8,
    )
    assert not again.json_lines and not again.overwrite


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(TrainError, match="holds an earlier run"):
        check_output(resolve({"output": str(tmp_path)}))
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "observed-rank1.json").touch()
    check_output(resolve({"output": str(tmp_path), "overwrite": True}))
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "figures of the earlier run"
    fresh = name_output(resolve({"model": "llama:tiny"})).output
    assert fresh is not None and fresh.startswith("runs/llama-tiny-")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("steps: [1, 2\nlr: 3\n", "line 2, column 3"),
        ("steps: 3\n\tlr: 1\n", "line 2, column 1"),
    ],
)
def test_a_file_that_is_no_yaml_is_told_in_one_line_with_its_place(
    text: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(TrainError) as error:
        read_config_file(tmp_path / "run.yaml")
    said = str(error.value)
    assert "is not valid YAML: " in said and where in said and "\n" not in said, said


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({}, "fp32"),
    ],
)
def test_the_precision_is_what_the_model_is_in_unless_another_is_asked_for(
    said: dict[str, object], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    folder = str(tmp_path)
    assert resolve({"model": folder}).precision == expected
    assert resolve({"model": folder, "precision": "fp32"}).precision == "fp32"
    assert resolve({"model": folder, "precision": "bf16"}).precision == "bf16"
    for model in ("smollm2", "llama:tiny", "module:factory"):
        assert resolve({"model": model}).precision == "fp32"
