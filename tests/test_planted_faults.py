"""The list of planted faults (`make test-faults`) fits the source and the tests."""

from __future__ import annotations

from faults import FAULTS, ROOT, SOURCE


def test_each_fault_can_be_planted_and_its_tests_are_there() -> None:
    wrong = []
    for fault in FAULTS:
        if (SOURCE / fault.file).read_text(encoding="utf-8").count(fault.old) != 1:
            wrong.append(f"{fault.name}: {fault.old!r} does not stand in {fault.file} once")
        for test in fault.see:
            file, _, name = test.partition("::")
            path, function = ROOT / file, f"def {name.partition('[')[0]}"
            if not path.exists() or (name and function not in path.read_text(encoding="utf-8")):
                wrong.append(f"{fault.name}: there is no {test}")
    assert not wrong, "\n".join(wrong)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
