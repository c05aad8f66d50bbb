"""What every test may use: the folder of helpers on the search path, the source when it is not
installed, the markers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

# Until all tests are collected: what their imports make stays
gc.disable()
from hypothesis import HealthCheck, settings

# Speed is judged in benchmarks: a busy machine must not fail a property.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TESTS = Path(__file__).parent
# For the workers, the ranks and the commands that tests start. Several tests share the cores; a rank
# that is woken by a message then waits for its turn rather than interrupting another one, which may
# hold what a third waits for, spinning (gloo does): a quarter to a third of the time is saved so.
with contextlib.suppress(AttributeError, OSError):  # not Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(TESTS))
if importlib.util.find_spec("onefold") is None:
    sys.path.insert(0, str(TESTS.parent / "src"))

import on_ranks
from on_ranks import folder, pytest_pyfunc_call

__all__ = ["folder", "pytest_pyfunc_call"]

import products_by_shape  # `make test-processors` sets what it looks at

products_by_shape.install()

# Files of many combinations of the same few properties: a run takes one in n cases of each test
# (`_sample`); `--all` takes all of them.
SAMPLED = {
    "pretrained/test_huggingface.py": 9,
    "checkpoint/test_offloaded_states.py": 3,
    "checkpoint/test_tiles_checkpoint.py": 6,
    "cli/test_doctor_check_whole.py": 16,
    "cli/test_plan_command.py": 8,
    "comm/test_group.py": 3,
    "comm/test_native.py": 9,
    "comm/test_native_divergence.py": 4,
    "comm/test_native_virtual.py": 18,
    "doctor/test_checks.py": 9,
    "doctor/test_checks_under_torchrun.py": 16,
    "integrations/test_deepspeed_name.py": 4,
    "integrations/test_deepspeed_offload.py": 4,
    "integrations/test_deepspeed_parameters.py": 4,
    "integrations/test_deepspeed_trainer.py": 9,
    "integrations/test_published_scripts.py": 8,
    "invariants/test_bytes_at_rest.py": 7,
    "invariants/test_bytes_of_groups.py": 3,
    "invariants/test_diverging_ranks.py": 12,
    "invariants/test_groups.py": 12,
    "invariants/test_no_synchronization.py": 6,
    "invariants/test_nothing_left_behind.py": 3,
    "invariants/test_same_numbers.py": 6,
    "invariants/test_two_nodes.py": 9,
    "invariants/test_waits.py": 13,
    "invariants/test_wire_bytes.py": 12,
    "observe/test_report_in_browser.py": 4,
    "observe/test_saved_for_backward.py": 4,
    "offload/test_activation_offload.py": 12,
    "offload/test_activations.py": 12,
    "offload/test_nvme_faults.py": 3,
    "offload/test_nvme_folder.py": 6,
    "offload/test_offload.py": 9,
    "optim/test_clipping_and_scaling.py": 9,
    "optim/test_elementwise_optimizers.py": 7,
    "optim/test_ema.py": 3,
    "optim/test_whole_states.py": 4,
    "optim/test_whole_step.py": 6,
    "plan/test_asked_and_answered.py": 9,
    "plan/test_code.py": 12,
    "plan/test_matrix.py": 8,
    "plan/test_owned.py": 2,
    "plan/test_peaks_of_axes.py": 3,
    "plan/test_replay.py": 13,
    "plan/test_tiers_planned.py": 3,
    "quant/test_kernels_compiled.py": 4,
    "recording/test_recording.py": 90,
    "runtime/test_as_in_plain_pytorch.py": 3,
    "runtime/test_differentiate.py": 4,
    "runtime/test_frozen_between_micro_batches.py": 3,
    "runtime/test_frozen_weights.py": 4,
    "runtime/test_gradient_hooks.py": 4,
    "runtime/test_meta_device.py": 4,
    "runtime/test_meta_first.py": 3,
    "runtime/test_micro_batches.py": 6,
    "runtime/test_odd_loops.py": 6,
    "runtime/test_odd_models.py": 9,
    "runtime/test_odd_parameters.py": 9,
    "runtime/test_operators.py": 8,
    "runtime/test_refusals.py": 3,
    "runtime/test_small_gradients.py": 4,
    "runtime/test_state_dicts.py": 9,
    "runtime/test_step_before_backward.py": 4,
    "runtime/test_transformers_architectures.py": 9,
    "runtime/test_last_units.py": 12,
    "runtime/test_wire_codecs.py": 9,
    "simulation/test_meshes.py": 3,
    "simulation/test_simulate.py": 18,
    "simulation/test_timeline.py": 18,
    "simulation/test_tiers_timed.py": 6,
    "simulation/test_disk_timed.py": 6,
    "plan/test_planned_for.py": 3,
    "tiling/test_tiles.py": 18,
    "tracing/test_trace.py": 12,
    "tracing/test_trace_shortcuts.py": 9,
    "train/test_a_step_late.py": 9,
    "models/test_folder.py": 9,
    "train/test_starts.py": 3,
    "cli/test_plan_simulate_command.py": 2,
    "cli/test_train_command.py": 2,
    "integrations/test_zero_to_fp32.py": 2,
    "runtime/test_weights_taken_by_others.py": 6,
    "optim/test_states_shown.py": 5,
    "integrations/test_hf_trl_large_heads.py": 5,
    "integrations/test_hf_whole_matrices.py": 2,
    "doctor/test_chapters_rehearsed.py": 4,
    "runtime/test_compiled.py": 4,
    "train/test_recipes.py": 2,
    "integrations/test_deepspeed_passes.py": 3,
    "integrations/test_deepspeed_precision.py": 3,
    "integrations/test_deepspeed_accumulation.py": 4,
    "integrations/test_deepspeed_init.py": 3,
    "pretrained/test_adapters_with_embeddings.py": 4,
    "integrations/test_adapters_by_trainers.py": 3,
    "plan/test_choice.py": 3,
    "runtime/test_autocast.py": 3,
    "runtime/test_pending_gradients.py": 3,
    "runtime/test_recomputed_adapters.py": 3,
    "comm/test_sums_beside.py": 5,
    "pretrained/test_adapters_beside_lora.py": 4,
    "integrations/test_deepspeed_fragments_of_tiers.py": 4,
    "runtime/test_broken_backward.py": 3,
    "runtime/test_missing_micro_batches.py": 3,
    "runtime/test_gathers_on_the_copy_stream.py": 3,
    "comm/test_run_ahead.py": 4,
    "checkpoint/test_asynchronous.py": 2,
    "train/test_early.py": 3,
    "virtual/test_virtual_device.py": 3,
    "checkpoint/test_round_trips.py": 2,
    "parallel/test_checkpoints_of_meshes.py": 3,
    "parallel/test_checkpoints_of_stages.py": 2,
    "parallel/test_codecs_beside_axes.py": 2,
    "parallel/test_context_parallel.py": 4,
    "parallel/test_dtensor_parameters.py": 4,
    "parallel/test_eight_ranks.py": 2,
    "parallel/test_experts.py": 3,
    "parallel/test_gradients_of_dtensors.py": 3,
    "parallel/test_hooks_beside_axes.py": 3,
    "parallel/test_published_compositions.py": 4,
    "parallel/test_published_transformers.py": 3,
    "parallel/test_ranks_that_die.py": 2,
    "parallel/test_recipes_beside_axes.py": 4,
    "parallel/test_marks.py": 4,
    "parallel/test_norms_over_stages.py": 2,
    "parallel/test_pipelines.py": 9,
    "parallel/test_pipelines_crossed.py": 2,
    "parallel/test_uneven_boxes.py": 2,
    "parallel/test_tensor_parallel.py": 8,
    "parallel/test_transformers_plans.py": 9,
    "parallel/test_transformers_trainer.py": 3,
}


# Files of which tests run with `--all`, or when a test is asked for by its name, and not else.
ONLY_WITH_ALL = {
    "test_tour.py",
    "test_wheel.py",
    "benchmarks/test_benchmarks.py",
    "benchmarks/test_wires.py::test_what_four_ranks_send_over_the_link_is_what_the_ledger_says_and_no_host_is_left",
    "cli/test_doctor_check_whole.py",
    "doctor/test_checks_under_torchrun.py",
    "cli/test_doctor_command.py::test_a_measurement_is_saved_printed_and_leaves_nothing_behind",
    "cli/test_train_command.py::test_smollm2_is_fine_tuned_and_opens_again_with_its_tokenizer",
    "cli/test_train_command.py::test_state_off_the_device_changes_no_loss_and_leaves_nothing_on_the_disk",
    "integrations/test_accelerate_launch.py::test_a_script_of_accelerate_has_the_losses_of_ddp",
    "integrations/test_deepspeed_lightning.py",
    "integrations/test_deepspeed_trainer.py::test_a_run_goes_on_from_its_checkpoint",
    "integrations/test_deepspeed_trainer.py::test_a_run_goes_on_on_another_number_of_ranks",
    "integrations/test_deepspeed_trainer.py::test_torchrun_starts_the_script_by_the_command",
    "integrations/test_deepspeed_trainer.py::test_bf16_with_optimizer_and_schedule_of_the_json",
    "integrations/test_deepspeed_transformers.py",
    "integrations/test_hf.py::test_a_frozen_base_is_held_quantized",
    "integrations/test_hf.py::test_evaluation_saving_figures_and_compiled_blocks",
    "integrations/test_hf_trainer.py::test_a_run_goes_on_on_another_number_of_ranks",
    "integrations/test_hf_trainer.py::test_runs_go_on_from_checkpoints",
    "integrations/test_lightning.py::test_checkpoints_go_on_at_other_stages_and_on_another_number_of_ranks",
    "integrations/test_lightning.py::test_the_example_runs_in_ranks_that_lightning_starts",
    "integrations/test_published_scripts.py::test_a_loop_of_accelerate_with_adapters_of_peft",
    "integrations/test_published_scripts.py::test_a_module_of_lightning",
    "integrations/test_published_scripts.py::test_scripts_of_trl",
    "integrations/test_published_scripts.py::test_torchrun_starts_a_script_of_trl_by_the_command",
    "integrations/test_tools_beside_ddp.py::test_every_cell_is_as_the_page_says",
    "simulation/test_meshes.py::test_llama_3_405b_on_4096_ranks_is_exact",
    "simulation/test_meshes.py::test_mixtral_on_1024_ranks_is_exact",
    "simulation/test_timeline.py::test_llama_3_8b_on_h100s_takes_what_the_plan_says_within_a_tenth",
    "simulation/test_timeline.py::test_all_of_a_recomputation_is_the_models",
    "runtime/test_compiled.py::test_other_modes_and_stages_are_not_refused",
    "runtime/test_odd_models.py::test_compiled_blocks_train_as_in_ddp",
    "parallel/test_published_compositions.py::test_compiled_stages_beside_tensor_parallelism_train_as_one_process",
    "parallel/test_published_compositions.py::test_three_axes_load_at_other_degrees",
    "train/test_drill.py",
    "train/test_examples.py::test_the_example_of_trainer_learns_and_saves_what_opens_again",
    "models/test_hub.py::test_a_model_of_the_hub_is_downloaded_once_and_then_read_from_the_cache",
    "train/test_machines.py::test_a_run_loses_a_machine_goes_on_alone_takes_it_back_and_lets_it_leave",
    "train/test_run.py::test_compiled_blocks_give_the_same_losses",
    "train/test_starts.py::test_commands_say_nothing_on_their_standard_error_when_all_is_well",
    "parallel/test_context_parallel.py::test_trainer_takes_a_model_that_was_sharded_over_context",
    "integrations/test_published_scripts.py::test_language_modeling_of_transformers",
    "integrations/test_deepspeed_trl.py::test_losses_are_those_of_ddp",
    "integrations/test_deepspeed_trainer.py::test_torchrun_starts_a_loop_of_ones_own_by_the_command",
    "integrations/test_hf_vllm.py::test_under_the_name_deepspeed_weights_are_streamed_too",
    "doctor/test_checks.py::test_ranks_on_nccl_get_more_time_because_they_make_communicators",
    "integrations/test_deepspeed_trainer_memory.py::test_losses_are_those_of_ddp_wherever_the_state_rests",
    "cli/test_plan_simulate_command.py::test_a_mesh_is_simulated_as_a_rank_of_each_stage_that_differs",
    "integrations/test_deepspeed_name.py::test_no_installed_library_looks_for_files_of_deepspeed_that_are_not_written",
    "parallel/test_checkpoints_of_meshes.py::test_exports_averages_streams_and_state_dicts_are_whole",
    "train/test_axes_of_a_run.py::test_runs_with_divided_experts_have_the_losses_of_data_parallel_ones",
    "train/test_pipeline_of_a_run.py::test_stages_of_mixtures_have_the_losses_of_whole_ones",
    "train/test_pipeline_of_a_run.py::test_a_stage_that_fails_to_save_or_was_damaged_concerns_all_of_them",
    "train/test_pipeline_of_a_run.py::test_numbers_that_are_not_finite_are_found_in_their_stage",
    "train/test_pipeline_of_a_run.py::test_stages_have_the_losses_of_whole_models_with_every_option",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="every case of the files in tests/conftest.py's SAMPLED"
    )


def _sample(cases: list[pytest.Function], n: int) -> set[pytest.Function]:
    """One in `n` of the cases of one test, and at least one: the same ones in each run.

    Next comes the case with the most values of parameters that no chosen case has, then the one of
    the lowest hash. So every value of every parameter is met, where `n` leaves enough cases.
    """
    values = {case: set(case.callspec.indices.items()) for case in cases}
    left = sorted(cases, key=lambda case: zlib.crc32(case.name.encode()))
    chosen: set[pytest.Function] = set()
    met: set[tuple[str, int]] = set()
    while len(chosen) < -(-len(cases) // n):
        best = max(left, key=lambda case: len(values[case] - met))
        left.remove(best)
        chosen.add(best)
        met |= values[best]
    return chosen


def _sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items that a run without `--all` leaves out."""
    every = {TESTS / name: n for name, n in SAMPLED.items()}
    whole = [i for i in items if i.get_closest_marker("slow") or ONLY_WITH_ALL & _names_of(i)]
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        # What is not parametrized is always run
        if item.path in every and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    taken = [_sample(cases, every[cases[0].path]) for cases in tests.values()]
    return whole + [
        case
        for cases, some in zip(tests.values(), taken, strict=True)
        for case in cases
        if case not in some
    ]


def _makes_once(item: pytest.Item) -> bool:
    """Whether the test uses a fixture that its file makes once."""
    known = getattr(item, "_fixtureinfo", None)
    return known is not None and any(
        found[-1].scope == "module" for found in known.name2fixturedefs.values()
    )


def _takes_all(config: pytest.Config) -> bool:
    """Whether every case is run: with `--all`, and where a test was asked for by its name."""
    return config.getoption("--all") or any("::" in argument for argument in config.args)


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Callable[[Iterable[Any], int], list[Any]]:
    """`sample(cases, n)` is one in n of the cases that a test goes through by itself, in their
    order, and all of them with `--all`. Which ones depends on the name of the test.
    """
    first = zlib.crc32(request.node.name.encode())

    def chosen(cases: Iterable[Any], n: int) -> list[Any]:
        every = list(cases)
        return every if _takes_all(request.config) else every[first % min(n, len(every)) :: n]

    return chosen


@pytest.fixture
def every(request: pytest.FixtureRequest) -> bool:
    """Whether a test goes through all of what it does by itself: with `--all`."""
    return _takes_all(request.config)


def _names_of(item: pytest.Item) -> set[str]:
    """What ONLY_WITH_ALL may call it: its file, or its file and its function."""
    file = item.path.relative_to(TESTS).as_posix()
    return {file, f"{file}::{item.name.partition('[')[0]}"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _takes_all(config) and (left_out := _sampled(items)):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if _makes_once(item):  # by one worker
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    on_ranks.form_groups(items)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: a collection in a test (a simulation ends with one) need not go
    over all of torch, some 0.5 s.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    from examples import ALL, SAMPLE

    count = ALL if _takes_all(config) else SAMPLE
    settings.register_profile("onefold", _ANY_SPEED, max_examples=count)
    settings.load_profile("onefold")


def pytest_unconfigure(config: pytest.Config) -> None:
    if "ranks" in sys.modules:
        sys.modules["ranks"].stop_fork_servers()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Where workers run everything, they share the fork servers that this process starts; they take
    as long as the workers' collection.
    """
    config = session.config
    everything = list(config.args) == [str(TESTS)] or list(config.args) == config.getini(
        "testpaths"
    )
    if not everything or not getattr(config.option, "numprocesses", None):
        return
    import ranks

    folder = tempfile.mkdtemp(prefix="onefold-tests-")
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    ranks.start_shared(ranks.SERVERS, folder)
    os.environ[ranks.SHARED] = folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "ranks" in sys.modules:
        server = getattr(getattr(item, "module", None), "SERVER", "core")
        sys.modules["ranks"].server_of_test = server
