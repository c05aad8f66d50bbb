"""How many ranks a node has, by what launchers put into the environment."""

from __future__ import annotations

import pytest

from onefold.comm.communicators import ranks_of_a_node

TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
SLURM = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_TASKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, 4),
        (SLURM, 4),
        (OPEN_MPI, 2),
        ({"MPI_LOCALNRANKS": "1", "PMI_SIZE": "8"}, 1),
        (TORCHRUN | OPEN_MPI | SLURM, 4),  # torchrun inside a job of another
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, None),  # uneven
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, None),
        (SLURM | {"SLURM_DISTRIBUTION": "cyclic"}, None),  # no neighbours
        (SLURM | {"SLURM_DISTRIBUTION": "block:cyclic"}, 4),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, None),
        (TORCHRUN | {"WORLD_SIZE": "16"}, None),  # of a run around this one
        ({"LOCAL_WORLD_SIZE": "4"}, None),
    ],
)
def test_every_launcher_says_how_many_ranks_a_node_has(
    environment: dict[str, str], expected: int | None
) -> None:
    assert ranks_of_a_node(environment, 8) == expected


@pytest.mark.parametrize("said", ["many", "", "0", "-1", "4.0"])
def test_what_is_no_number_is_told_by_its_name(said: str) -> None:
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE='.*': expected a number of ranks"):
        ranks_of_a_node(TORCHRUN | {"LOCAL_WORLD_SIZE": said}, 8)


def test_more_ranks_on_a_node_than_there_are() -> None:
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=9 for a run of 8 ranks"):
        ranks_of_a_node(TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, 8)
