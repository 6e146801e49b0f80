"""Files and command lines with changes drawn by chance; benchmarks/fuzz.py says which, and has more of them."""

import pytest

from benchmarks import fuzz

TARGETS = [
    "our config", "Hugging Face config", "index", "safetensors", "pickle", "llama2.c", "SentencePiece",
    "tokenizer.json", "tiktoken ranks", "tokenizer settings", "results", "prompts", "command lines",
]  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return fuzz.targets(tmp_path_factory.mktemp("good"))


def test_no_target_is_left_out(known):
    assert list(known) == TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_cases_work_or_are_refused(name, known, tmp_path):
    ends = fuzz.fuzz(name, known[name], 60, 0, tmp_path)
    assert set(ends) <= {fuzz.WORKS, fuzz.REFUSED, fuzz.RAISED}
    assert ends.count(fuzz.WORKS) > 1 and ends.count(fuzz.REFUSED) > 1 and ends.count(fuzz.RAISED) < 20


@pytest.mark.parametrize(
    "run, end",
    [
        (lambda folder: [None for _ in iter(int, 1)], "takes longer than 0.2 s"), (lambda folder: 1 / 0, fuzz.RAISED),
        (lambda folder: bytearray(2**30), "takes more than 524,288,000 bytes"),
    ],
    ids=["a loop", "an error", "memory"],
)  # fmt: skip
def test_ends_are_told_apart(run, end, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    with fuzz.limited():
        assert fuzz.outcome(run, tmp_path) == end
