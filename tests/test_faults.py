"""Ranks that die, stall, or were not started alike: how the run ends; and what faults.py finds wrong with an end."""

import faults
import pytest

CASES = faults.CASES
FAST = "decode, SIGKILL, rank 1 of 2", "decode, SIGSTOP, rank 0 of 2", "unlike --seed"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return faults.write_files(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES])
def test_a_fault_ends_all_soon_with_one_line_that_names_it(name, files):
    line = faults.run(CASES[name], files)
    assert line["wrong"] == [], line


GOOD = CASES["decode, SIGKILL, rank 1 of 2"] | {
    "happened": True, "seconds": 1.0, "code": 1, "codes": [-9], "tracebacks": 0, "printed": "Once",
    "lines": ["generate.py: rank 1 of 2 has died in decode step 7"],
}  # fmt: skip


@pytest.mark.parametrize("change, wrong", [
    ({}, []), ({"seconds": 5.1}, ["not gone in 5 s"]), ({"code": 0}, ["exit code 0"]),
    ({"tracebacks": 1}, ["1 tracebacks"]), ({"happened": False}, ["the fault did not happen"]),
    ({"lines": 2 * GOOD["lines"]}, ["2 lines"]), ({"kind": "SIGTERM"}, ["the cause is not named"]),
    ({"lines": ["generate.py: rank 1 of 2 has died in decode step 71"]}, ["the phase is not named"]),
])  # fmt: skip
def test_what_is_wrong_with_the_end_of_a_run(change, wrong):
    assert faults.wrong({**GOOD, **change}) == wrong
