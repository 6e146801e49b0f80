"""Files with changes drawn by chance; fuzz.py says which. FUZZ_CASES=10000 in the environment draws more of them."""

import os

import fuzz
import pytest

CASES = int(os.environ.get("FUZZ_CASES", 80))
TARGETS = [
    "our config", "Hugging Face config", "index", "safetensors", "pickle", "llama2.c", "SentencePiece",
    "tokenizer.json", "tiktoken ranks", "tokenizer settings", "results", "prompts",
]  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return fuzz.targets(tmp_path_factory.mktemp("good"))


def test_no_target_is_left_out(known):
    assert list(known) == TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_cases_work_or_are_refused(name, known, tmp_path):
    ends = fuzz.fuzz(name, *known[name], CASES, 0, tmp_path)
    assert set(ends) <= {fuzz.WORKS, fuzz.REFUSED, fuzz.RAISED}
    assert ends.count(fuzz.WORKS) > 1 and ends.count(fuzz.REFUSED) > 1 and ends.count(fuzz.RAISED) < CASES / 4


def test_a_loop_without_end_is_unclean(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    assert fuzz.outcome(lambda folder: all(iter(lambda: True, False)), tmp_path) == "takes longer than 0.2 s"
    assert fuzz.outcome(lambda folder: 1 / 0, tmp_path) == fuzz.RAISED
