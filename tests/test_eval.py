"""eval.py: nats and bits of a text, and two models compared."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from cases import refused
from configs import BASE
from file_edits import read_lines
from helpers import ROOT, random_model, shard, train_tokenizer, unequal_rows
from reference import Reference
from running import main_on_ranks, run_main, run_ranks

import eval as evaluate
from complete import load
from ladder import scoring
from ladder.checkpoints import checkpoint, writing
from ladder.text.tokenizer import load_tokenizer

TEXT = "Once upon a time there was a little girl. She went out to play. Her dog ran to the park. " * 6


def naive(net, ids, size, stride):
    """(log p over the vocabulary (n, V), tokens (n,)) of all tokens of ids but the first, a window at a time."""
    reference = Reference(net.config, net.state_dict())
    rows = []
    tokens = []
    for start, stop, first in scoring.windows(len(ids), size, stride):
        logits = torch.from_numpy(reference.logits(ids[start:stop])).log_softmax(-1).numpy()
        rows += [logits[i - 1 - start] for i in range(first, stop)]
        tokens += ids[first:stop]
    return np.stack(rows), np.array(tokens)


def picked(logp, tokens):
    return np.take_along_axis(logp, tokens[:, None], -1)[:, 0]


def nats_on_ranks(world, config, documents, max_logits):
    """total_nats on each of several ranks, a few rows of the logits at a time."""
    scoring.MAX_LOGITS = max_logits
    return scoring.total_nats(shard(config, world), documents, 40, 20, 2)


@pytest.mark.parametrize("ranks, vocab_size", [(2, 17), (3, 131), ((2, 9, 1, 2), 200)])  # of 17 one rank holds nothing
def test_ranks_score_alike_however_few_logits_they_take_at_a_time(vocab_size, ranks):
    config = dataclasses.replace(BASE, vocab_size=vocab_size)
    documents = [np.random.default_rng(i).integers(vocab_size, size=n).tolist() for i, n in enumerate((90, 7, 33))]
    alone = scoring.total_nats(random_model(config), documents, 40, 20, 2)
    for max_logits in (1, 5 * 64, scoring.MAX_LOGITS):
        nats = run_ranks(ranks, nats_on_ranks, config, documents, max_logits)
        assert nats == pytest.approx([alone] * len(nats), rel=1e-5)


def test_windows_score_each_token_once():
    for n, size, stride in (2, 2, 1), (10, 4, 2), (11, 4, 3), (9, 16, 8), (100, 7, 1):
        windows = scoring.windows(n, size, stride)
        assert [i for start, stop, first in windows for i in range(first, stop)] == list(range(1, n))
        for i, (start, stop, first) in enumerate(windows):
            assert 0 <= start < first < stop <= n and stop - start <= size
            assert i == 0 or first - start >= min(size - stride, first)


@pytest.mark.parametrize("max_logits", [3 * BASE.vocab_size, scoring.MAX_LOGITS])
def test_nats_and_divergence_against_the_reference(max_logits, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_LOGITS", max_logits)
    net = random_model(BASE)
    other = random_model(dataclasses.replace(BASE, wiring="ladder:2,"))
    ids = unequal_rows(BASE, 1, 40)[0][0].tolist()
    for size, stride, batch in ((40, 20, 1), (16, 5, 2)):
        q, tokens = naive(net, ids, size, stride)
        p, _ = naive(other, ids, size, stride)
        nats = -picked(q, tokens)
        theirs = -picked(p, tokens)
        assert math.isclose(scoring.total_nats(net, [ids], size, stride, batch), nats.sum(), rel_tol=1e-5)
        result = scoring.divergence(net, other, [ids], size, stride, batch)
        np.testing.assert_allclose(result[0], (np.exp(p) * (p - q)).sum(-1), rtol=1e-4)
        np.testing.assert_array_equal(result[1], p.argmax(-1) == q.argmax(-1))
        np.testing.assert_allclose(result[2], nats, rtol=1e-4)
        np.testing.assert_allclose(result[3], theirs, rtol=1e-4)
    assert 0 < result[1].sum() < len(ids) - 1  # some agree, some do not


def test_bytes_are_those_of_the_tokens_scored(tmp_path):
    """With a tokenizer that cuts characters into bytes, at any number of tokens, with a BOS and without."""
    tokenizer = load_tokenizer(ROOT / "demo")
    text = "A dog: d\u00f6g \u2603\U0001f415. The end\n"
    (tmp_path / "text").write_text(text)
    for bos in (1, None):
        tokenizer.prefix = [bos] if bos else []
        for n in range(3, 40):
            args = evaluate.parse(["--checkpoint", "x", "--text", str(tmp_path / "text"), "--max-tokens", str(n)])
            [ids], n_bytes = evaluate.read_documents(args, tokenizer)
            pieces = [tokenizer.model.id_to_piece(i) for i in ids if i != bos]
            size = sum(1 if p.startswith("<0x") else len(p.replace("\u2581", " ").encode()) for p in pieces) - 1
            assert n - 3 <= len(ids) <= n or size == len(text.encode())  # -1: SentencePiece's own space comes first
            assert text.encode()[:size].decode() and n_bytes == size - (0 if bos else len(pieces[0]) - 1)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def evaluated(capsys, *flags, ranks=1):
    """(the line, what was said) of eval.py; of several ranks only the first prints."""
    if ranks == 1:
        run_main(evaluate, *flags)
        out, err = capsys.readouterr()
    else:
        (out, err), *others = main_on_ranks(ranks, evaluate.main, *flags)
        assert [printed for printed, _ in others] == [""] * (ranks - 1)
    return json.loads(out), err


def test_documents_are_scored_each_alone_with_any_tp(tiny, tmp_path, capsys):
    texts = [TEXT.strip(), "The dog ran.", "a dog"]
    (tmp_path / "all.txt").write_text("\n<|endoftext|>\n".join(texts) + "<|endoftext|>")
    flags = ["--checkpoint", tiny, "--window", "32", "--json", tmp_path / "out"]
    lines = []
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
        lines.append(evaluated(capsys, *flags, "--text", tmp_path / f"{i}.txt")[0])
    nats = sum(line["tokens"] * line["nats_per_token"] for line in lines)
    n_tokens = sum(line["tokens"] for line in lines)
    for ranks in 1, 3:
        lines.append(evaluated(capsys, *flags, "--text", tmp_path / "all.txt", "--batch", "3", ranks=ranks)[0])
        together = lines[-1]
        assert (together["documents"], together["tokens"], together["tp"]) == (3, n_tokens, ranks)
        assert together["nats_per_token"] * n_tokens == pytest.approx(nats, rel=1e-5)
        assert together["bytes"] == sum(map(len, texts))
        assert together["bits_per_byte"] == pytest.approx(nats / math.log(2) / together["bytes"], rel=1e-5)
    assert read_lines(tmp_path / "out") == lines


def test_compare_two_wirings_with_any_tp(tiny, text, capsys):
    flags = ["--checkpoint", tiny, "--text", text, "--compare", tiny, "--window", "32"]
    one, stderr = evaluated(capsys, *flags, "--ladder")
    three, _ = evaluated(capsys, *flags, "--ladder", ranks=3)
    for name in ("nats_per_token", "kl_mean", "kl_p99", "top1_agreement"):
        assert math.isclose(one[name], three[name], rel_tol=1e-4), name
    ids = load_tokenizer(tiny).encode(TEXT)
    nets = [load(tiny, "cpu", wiring=wiring)[0] for wiring in ("ladder", None)]
    kl, agree, nats, base = (column.double() for column in scoring.divergence(*nets, [ids], 32, 16, 4))
    assert (one["kl_mean"], one["kl_max"]) == pytest.approx((kl.mean().item(), kl.max().item()), rel=1e-4)
    assert one["kl_p99"] == pytest.approx(np.quantile(kl, 0.99, method="inverted_cdf"), rel=1e-4)
    assert one["top1_agreement"] == pytest.approx(agree.mean().item(), rel=1e-9)
    assert one["nats_difference"] == pytest.approx((nats - base).mean().item(), rel=1e-3)
    assert (one["wiring"], one["reference_wiring"]) == ("ladder", "standard")
    assert f"against {tiny} (standard)" in stderr
    assert "99 % of them below" in stderr
    same, stderr = evaluated(capsys, *flags, "--max-tokens", "100")  # of which the first one is not scored
    assert (same["kl_max"], same["top1_agreement"], same["nats_difference"]) == (0, 1, 0)
    assert same["tokens"] < 100 and same["kl_p99"] is None and "99 %" not in stderr  # it would be the maximum


def test_what_cannot_be_compared_is_refused(tiny, text, tmp_path):
    writing.write_config(tmp_path, checkpoint.read_config(tiny))
    train_tokenizer(["The cat sat on the mat, and a mouse ran over it. "] * 30, 300, tmp_path / "tokenizer.model")
    for model, difference in (ROOT / "demo", "of 300 tokens, and the model's 1,024"), (tmp_path, "token"):
        words = rf"--compare \S+ has another vocabulary.* {difference}"
        refused(words, run_main, evaluate, "--checkpoint", model, "--text", text, "--compare", tiny)
