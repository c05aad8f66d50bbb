"""The constants fitted to published systems are what their rows say, and docs/validation.md is what
the code says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
from benchmarks.validation import __main__ as page
from benchmarks.validation import fits, printed, runs, tables
from benchmarks.validation.claims import claims
from benchmarks.validation.systems import SYSTEMS, work

from onefold.plan.times import step_times


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_systems_constant_is_the_one_that_fits_its_rows(name: str) -> None:
    system = SYSTEMS[name]
    assert fits.refit(name) == pytest.approx(getattr(system.software, system.fitted), abs=0.015)


def test_the_shared_constants_fit_as_well_as_the_best_of_a_grid() -> None:
    azure, rows = SYSTEMS["azure"], runs.azure()
    best = fits.misfit(fits.with_constant(azure, **fits.shared()), rows)
    assert fits.misfit(fits.with_constant(azure, **fits.in_use()), rows) <= 1.03 * best


def test_no_case_of_the_planner_was_fitted() -> None:
    fitted = {name: {run.what for run in make() if run.fitted} for name, make in runs.RUNS.items()}
    for batch in (1, 16):
        for gpus in (128, 1024):
            assert f"175B, 1024 tokens × {batch}, {gpus} GPUs" not in fitted["azure"]
    assert not {what for what in fitted["megatron-zero3"] if "384" in what or "1536" in what}
    assert not {what for what in fitted["zero++"] if "138B, 1024 tokens, 100 Gbit/s" in what}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_rows_it_was_not_fitted_to(name: str) -> None:
    rows = runs.RUNS[name]()
    assert any(run.fitted for run in rows)
    assert any(not run.fitted for run in rows)


def test_zeropp_puts_a_quarter_of_the_bytes_between_nodes() -> None:
    machine = SYSTEMS["zero++"].machine(384)
    plain, better = (
        sum(t.between for t in work(1e9, 10, 0.0, machine, scheme).traffic)
        for scheme in ("zero-3", "zero++")
    )  # type: ignore[arg-type]
    assert better / plain == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("link", ["100g", "200g", "400g", "800g"])
def test_zeropp_helps_more_the_slower_the_link(link: str) -> None:
    system = SYSTEMS["zero++"]

    def speedup(bandwidth: str) -> float:
        machine = system.machine(384, bandwidth)
        plain, better = (
            step_times(
                work(1e11, 80, 1e15, machine, scheme, system.messages, "fp16"),
                machine,
                system.software,
            ).step  # type: ignore[arg-type]
            for scheme in ("zero-3", "zero++")
        )
        return plain / better

    assert 1 <= speedup(link) < speedup("50g")


def test_the_page_is_what_the_code_says() -> None:
    """Run `python -m benchmarks.validation` after a change of the plan."""
    assert (ROOT / "docs" / "validation.md").read_text(encoding="utf-8") == page.page()


def test_what_was_computed_by_both_sides_agrees() -> None:
    lines = [line for table in page.all_tables() if table.kind == "formula" for line in table.lines]
    off = [line for line in lines if abs(line.ratio - 1) > 0.05]
    assert len(lines) > 250
    assert len(off) <= 6, [(line.what, line.ratio) for line in off]


def test_every_claim_has_one_plan_line() -> None:
    assert len(claims()) == 9
    for claim in claims():
        assert claim.line.startswith("onefold plan ")
        assert claim.line.endswith("--json")
        assert claim.shows, claim.claim


def test_every_published_table_is_compared_or_said_not_to_be() -> None:
    text = page.page()
    used = {file for table in page.all_tables() for file in table.files}
    for path in tables.DATA.glob("*.csv"):
        assert path.stem in used or f"`{path.stem}`" in page.not_compared(), (
            f"{path.name} is in benchmarks/data and on no page"
        )
    assert all(f"`{file}.csv`" in text for file in used)


def test_a_formula_that_its_row_does_not_print_is_refused() -> None:
    assert printed.evaluate("2(P/G)(1-G/W)", {"P": 1.0, "G": 8.0, "W": 64.0}) == 2 / 8 * (
        1 - 8 / 64
    )
    assert printed.evaluate("24*hd*ci", {"hd": 10, "ci": 2}) == 480
    wrong = printed.Printed("ZeRO-3", "5P", lambda s: 5.0, column="assumption")
    with pytest.raises(ValueError, match="which has no '5P'"):
        list(printed.lines_of("comm_formulas_all", [wrong], {"P": 1.0}))
