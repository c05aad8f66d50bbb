"""GPUs, links and machines by name, and a user's file over the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibrations import calibration as made_up
from onefold.plan.hardware import builtin, calibrated, catalogue, machine


def test_an_unknown_gpu_or_link_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'h100'.*'h100-80'"):
        builtin().gpu("h100")
    with pytest.raises(ValueError, match=r"'ib-hrd'.*'ib-hdr'"):
        machine(16, 8, "a100-80", "ib-hrd")


@pytest.mark.parametrize(
    ("link", "bandwidth"),
    [
        ("100g", 12.5e9),
        ("8x200g", 200e9),
        ("25GB/s", 25e9),
        ("4x12.5GB/s", 50e9),
        ("ib-ndr", 400e9),
        ("10Gbps", 1.25e9),
    ],
)
def test_a_link_is_a_name_or_a_rate(link: str, bandwidth: float) -> None:
    between = machine(16, 8, "a100-80", link).between
    assert between is not None
    assert between.bandwidth == pytest.approx(bandwidth)


def test_ranks_that_do_not_fill_nodes_are_refused_with_counts_that_do() -> None:
    with pytest.raises(ValueError, match=r"12 GPUs.*use 8 or 16"):
        machine(12, 8)
    with pytest.raises(ValueError, match="1 or more"):
        machine(0, 8)


def test_a_users_file_adds_and_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[gpu.mine]\ncapacity = 48e9\nbf16 = 150e12\nmemory_bandwidth = 1e12\n[gpu.h100-80]\nlink ="
        " 900e9\n[host.default]\nmemory = 1e11\n"
    )
    read = catalogue(file)
    assert read.gpu("mine").capacity == 48_000_000_000
    assert read.gpu("h100-80").link == 900e9
    assert read.gpu("h100-80").capacity == builtin().gpu("h100-80").capacity
    assert machine(8, 8, "mine", file=file).host.memory == 1e11
    assert machine(8, 8, "h100-80").host.memory != 1e11


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gpu.mine]\ncapacty = 1", "'capacty': 1}: Field required"),
        ("[gpu.mine]\ncapacity = 1e9", "gpu.mine.memory_bandwidth is"),
        ("[gpu.h100-80]\ncapacty = 1", "gpu.h100-80.capacty is 1: Extra inputs"),
        ("[gpu.mine]\ncapacity = 1e9\nmemory_bandwidth = 1e9", "a matrix rate"),
        (
            "[gpu.h100-80]\ncapacity = -1",
            "gpu.h100-80.capacity is -1: Input should be greater than 0",
        ),
        (
            "[gpu.h100-80]\nattainable = 80",
            "gpu.h100-80.attainable is 80: Input should be less than or equal to 1",
        ),
        ("[link.mine]\ntitle = 'x'", "link.mine.bandwidth is"),
        ("[gpus.mine]", "gpus is"),
        ("[host.mine]\nmemory = 1e11", "host.mine"),
        ("not toml", "line 1"),
        ("a = " + "[" * 5000, "recursion"),
        (
            "[gpu.h100-80]\ncapacity = inf",
            "gpu.h100-80.capacity is inf: Input should be a finite number",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_what_was_expected(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        catalogue(file)
    assert says in str(error.value)
    assert "wrong.toml" in str(error.value)


def test_a_row_of_a_file_is_a_gpu_of_a_table_whatever_its_name(tmp_path: Path) -> None:
    made_up().save(tmp_path / "machine.toml")
    assert not machine(2, gpu="here", file=tmp_path / "machine.toml").is_here


def test_a_calibrated_machine_has_the_measured_figures() -> None:
    here = calibrated(made_up())
    assert (here.ranks, here.nodes, here.between) == (2, 1, None)
    assert here.shared and here.is_here and here.is_timed
    assert here.capacity == 1 << 33 and here.host.memory == 1 << 34
    assert here.peak("fp32") == here.matrix_rate("fp32") == 9e10
    assert (here.contention, here.software.kernel_share, here.disk) == (0.5, 0.5, "/data")
