"""Files and command lines with changes drawn by chance; benchmarks/fuzz.py says which, and has more of them."""

import collections

import pytest

from benchmarks import fuzz

TARGETS = [
    "our config", "Hugging Face config", "index", "safetensors", "pickle", "old pickle", "llama2.c", "SentencePiece",
    "tokenizer.json", "tiktoken ranks", "tokenizer settings", "templates", "prompts", "command lines",
]  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return fuzz.targets(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_ends_well_or_in_one_line(name, known, tmp_path):
    _run(known[name], 150, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_more_cases(name, known, tmp_path):
    _run(known[name], 1500, 1, tmp_path)


def _run(target, cases, seed, folder):
    ends = fuzz.fuzz(target, cases, seed, folder)
    unclean = {case: end for case, end in enumerate(ends) if end not in (fuzz.WORKS, fuzz.REFUSED)}
    assert not unclean
    assert min(collections.Counter(ends).values()) > cases // 100 and len(set(ends)) == 2  # some work, and some do not


def test_no_target_is_left_out(known):
    assert list(known) == TARGETS


def _loop(folder):
    while True:
        pass


def _take_memory(folder):
    bytearray(2**30)


class Raw(fuzz.InputError):
    """One that prints what it quotes as it is."""

    def __str__(self):
        return self.args[0]


def _say(text, kind=fuzz.InputError):
    def say(folder):
        raise kind(text)

    return say


@pytest.mark.parametrize(
    "run, end",
    [
        (_loop, "it takes longer than 0.2 s"), (_take_memory, "MemoryError: "),
        (lambda folder: 1 / 0, "ZeroDivisionError"),
        (lambda folder: "a\x1b[31m", "it prints control"), (_say("a" * 499), fuzz.REFUSED),
        (_say("a\n", Raw), "a message of 2 characters, not printable"),
        (lambda folder: "", fuzz.WORKS),
    ],
)  # fmt: skip
def test_what_is_not_clean(run, end, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "HANGS", 0.2)
    with fuzz.limited():
        assert fuzz.outcome(run, tmp_path).startswith(end)
