"""Retraining a real model: which layers are chosen, what is frozen and shared, and what alignment minimises."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import refused
from configs import BASE, GEMMA, change
from file_edits import read_json, write_lines
from helpers import greedy_tokens, p_value, random_model, write_model
from running import run_main, run_ranks
from training_runs import Letters, check_resumption, check_same_run, random_batch, train_on_rank, trainee_like

from extras.training import adapt, answers, choose, curves, data, own_text, partials
from ladder.checkpoints import checkpoint, writing
from ladder.layers.attention_inputs import attention_metadata
from ladder.text.tokenizer import load_tokenizer
from model import interleave, rewired

SIX = change(BASE, n_layers=6)


def faint(layers, config=SIX, factor=0.02):
    """A random model in which all sublayers, and far more those of these layers, change the stream little."""
    model = random_model(config)
    with torch.no_grad():
        for i, block in enumerate(model.layers):
            for weight in block.attention.wo.weight, block.feed_forward.w2.weight:
                weight.mul_(factor if i in layers else 0.5)
    return model


ROWS = [[1, *range(5, 20)], [1, *range(40, 47)]]


@pytest.mark.parametrize("name", ["ladder", "ladder-2", "parallel-ladder"])
def test_the_planted_layers_are_chosen_and_scores_are_the_naive_ones(name):
    model = faint({1, 4}).double()
    scorer = choose.Scorer(model, ROWS, name)
    chosen, alone = choose.choose(scorer, 3)
    assert set(chosen[:2]) == {1, 4} and min(alone, key=alone.get) == chosen[0]
    for layers in (), {3}, {0, 5}, {1, 4, 5}, set(chosen):  # whatever partials are kept
        config = rewired(SIX, scorer.wiring(layers))
        other = random_model(config).double()
        other.load_state_dict(model.state_dict(), strict=False)
        kl = nats = 0.0
        for row in ROWS:
            with torch.no_grad():
                p, q = (net(torch.tensor([row]))[0, :-1].log_softmax(-1) for net in (model, other))
            kl += (p.exp() * (p - q)).sum().item()
            nats -= q[range(len(row) - 1), row[1:]].sum().item()
        n = sum(map(len, ROWS)) - len(ROWS)
        assert scorer.score(layers) == pytest.approx((kl / n, nats / n), rel=1e-4, abs=1e-6)


def test_a_model_with_post_norms_is_replayed_too():
    config = change(BASE, **GEMMA)
    model = random_model(config).double()
    recorded = []
    x = model.embed(torch.arange(12).view(2, 6))
    metadata = attention_metadata(model, torch.arange(6).expand(2, 6))
    with torch.no_grad():
        (whole,) = interleave([model.loop(x, metadata)])
        (same,) = interleave([partials.loop(model, config, x, metadata, recorded=recorded)])
        (again,) = interleave([partials.loop(model, config, x, metadata, recorded[:3])])
    assert torch.equal(whole, same) and torch.equal(whole, again) and len(recorded) == 6


def test_choose_prints_a_wiring_and_writes_its_lines(tiny, tmp_path, capfd, monkeypatch):
    config = change(checkpoint.read_config(tiny), n_layers=6)
    write_model(tmp_path / "six", config, faint({2}, config).state_dict())
    writing.copy_tokenizer(tiny, tmp_path / "six")
    (tmp_path / "a.txt").write_text("Once upon a time there was a dog.<|endoftext|>The dog ran to the park.")
    flags = ["--checkpoint", str(tmp_path / "six"), "--text", str(tmp_path / "a.txt"), "--layers", "1"]
    how = ["--link", "pcie", "--tp", "5", "--json", str(tmp_path / "x.jsonl"), "--plot", str(tmp_path / "x.svg")]
    choose.main([*flags, *how])
    printed = capfd.readouterr().out
    line = read_json(tmp_path / "x.jsonl")
    assert printed.endswith("--wiring ladder:2,\n") and "times as fast over pcie: ladder:2,\n" in printed
    assert line["order"] == [2] and len(line["alone"]) == 6 and "<svg" in (tmp_path / "x.svg").read_text()
    for more, message in ("--layers 7", "has 6"), ("--wiring spd", "one by one"), ("--wiring ladder:2", "one by one"):
        refused(message, choose.main, [*flags, *more.split()])
    mixture = {"n_experts": 4, "experts_per_token": 2, "expert_size": 16, "shared_expert_size": 16}
    monkeypatch.setattr(writing, "read_original", lambda folder: change(config, mixture=mixture))
    refused("farskip of standard: layers are chosen one by one", choose.main, [*flags, "--wiring", "farskip"])


def batch_and_models(train):
    """A Batch, a Trainee of which ladder:3,5 is trained so, and its teacher, all in float64."""
    teacher = trainee_like(faint((), SIX).double())
    config = rewired(SIX, "ladder:3,5")
    student = adapt.Trainee(config).double()
    student.load_state_dict(teacher.state_dict())
    adapt.freeze(student, SIX, train)
    return random_batch(), student, teacher


def test_what_lies_below_is_shared_and_gradients_above_are_those_of_the_whole():
    batch, whole, teacher = batch_and_models("all")
    _, above, _ = batch_and_models("above")
    _, outputs, _ = batch_and_models("outputs")
    above.layers[0].attention.forward = None  # is not called
    for student in whole, above, outputs:
        loss, nats = adapt.losses(student, batch, teacher)
        loss.backward()
    expected = dict(whole.named_parameters())
    for student in above, outputs:
        trained = {name: p for name, p in student.named_parameters() if p.grad is not None}
        assert min(trained) == "layers.3.attention.wo.weight"
        assert all(torch.allclose(p.grad, expected[name].grad, rtol=1e-9, atol=1e-12) for name, p in trained.items())
    names = {
        name.split(".", 2)[-1] if "layers" in name else name
        for name, p in outputs.named_parameters()
        if p.grad is not None
    }
    norms = {"attention_norm.weight", "ffn_norm.weight", "norm.weight"}
    assert names == {"attention.wo.weight", "feed_forward.w2.weight"} | norms


def test_alignment_pulls_each_sublayer_to_the_teacher_s_given_what_it_would_read():
    batch, student, teacher = batch_and_models("above")
    with torch.no_grad():
        for p in student.layers[3].parameters():
            p.mul_(1.1)
    loss, _ = adapt.losses(student, batch, teacher, align=True)
    loss.backward()
    got = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    with torch.no_grad():  # the stream before each sublayer, and what it adds, of the teacher
        metadata = attention_metadata(teacher, batch.positions)
        streams = [teacher.embed(batch.tokens)]
        added = []
        for block in teacher.layers:
            added.append(block.attention(block.attention_norm(streams[-1]), metadata, None))
            streams.append(streams[-1] + added[-1])
            added.append(block.feed_forward(block.ffn_norm(streams[-1])))
            streams.append(streams[-1] + added[-1])
    naive = 0.0
    for i, block in list(enumerate(student.layers))[3:]:
        late = i in (3, 5)
        a = block.attention(block.attention_norm(streams[2 * i - late]), metadata, None)
        m = block.feed_forward(block.ffn_norm(streams[2 * i + 1 - late]))
        for mine, true in (a, added[2 * i]), (m, added[2 * i + 1]):
            for b, s in batch.counts.nonzero().tolist():
                naive = naive + (mine - true)[b, s].square().sum() / true[b, s].square().sum()
    naive.backward()
    assert loss.item() == pytest.approx(naive.item(), rel=1e-5) and loss > 0.1
    assert got and all(torch.allclose(g, student.get_parameter(n).grad, rtol=1e-4, atol=1e-6) for n, g in got.items())


def test_a_validation_has_the_divergence_from_the_teacher(lone):
    batch, student, teacher = batch_and_models("above")
    windows = SimpleNamespace(n=2, batches=lambda *_: [batch, batch])
    student.reshard = int
    teacher.reshard = int
    nats, kl = adapt.validation_loss(student, windows, 2, lone, teacher)
    with torch.no_grad():
        q, p = (model.logits(model(batch))[batch.counts].log_softmax(-1) for model in (student, teacher))
    assert kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4) and kl > 0.01
    assert nats == pytest.approx(F.nll_loss(q, batch.targets[batch.counts]).item(), rel=1e-4)
    assert adapt.validation_loss(teacher, windows, 2, lone)[1] == 0


HOW = ["--train", "above", "--align-steps", "3"]


def test_only_what_is_trained_changes(retraining_flags, tiny, tmp_path):
    adapt.main([*retraining_flags, *HOW, "--wiring", "ladder:1,"])
    before = checkpoint.Weights(tiny)
    after = checkpoint.Weights(tmp_path / "out")
    changed = {name for name in before.names() if not torch.equal(before.read(name), after.read(name))}
    assert {name.split(".")[1] for name in changed if "layers" in name} == {"1", "2"}
    assert {n for n in changed if "layers" not in n} == {"norm.weight", "output.weight"}
    for more, message in (
        ("--wiring standard --train above", "--train above takes a --wiring that changes"),
        ("--align-steps 6", "less than --steps 6"),
        ("--wiring pair:1,2 --align-steps 1", "--align-steps takes a wiring with the sublayers"),
    ):
        refused(message, run_main, adapt, *retraining_flags, *more.split(), "--out", tmp_path / "out2")


@pytest.mark.slow
def test_aligned_ranks_give_the_losses_of_one(retraining_flags, tmp_path):
    adapt.main([*retraining_flags, *HOW])
    run_ranks(
        2,
        train_on_rank,
        [*retraining_flags, *HOW, "--out", str(tmp_path / "out2"), "--recompute", "--micro-batch", "2"],
    )
    check_same_run(tmp_path / "out", tmp_path / "out2", 1e-5)


@pytest.mark.slow
def test_aligned_it_resumes_with_the_same_losses(retraining_flags, tmp_path, monkeypatch):
    check_resumption([*retraining_flags, *HOW], tmp_path, monkeypatch)


# Own text


def _write_own(world, path, folder, n):
    flags = ["--checkpoint", folder, "--valid", "x", "--out", "x", "--own-text", str(n), "--seq-len", "4"]
    args = adapt.parse([*flags, "--distill", folder, "--compute-dtype", "float32"])
    own_text.write(path, checkpoint.read_config(folder), args, world)


def own_ids(path):
    return np.fromfile(path, data.TOKEN)["id"].reshape(-1, 4)


@pytest.fixture
def lone(fake_world, monkeypatch):
    monkeypatch.setattr(own_text.sharding, "summed", lambda values, world: values)
    return fake_world(0, 1)


def test_own_text_has_the_teacher_s_distribution_and_goes_on_where_it_was_killed(tiny, tmp_path, lone):
    path = tmp_path / "own.tokens"
    rows = 1501
    write = functools.partial(_write_own, lone, path, str(tiny), 4 * (rows - 1))
    write()
    ids = own_ids(path)
    whole = path.read_bytes()
    assert len(ids) == rows and (ids[:, 0] == 1).all()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(own_text, "Sampler", None)  # nothing is written again
        write()
    path.write_bytes(whole[: len(whole) // 2 + 5])
    write()
    assert path.read_bytes() == whole
    model = random_model(checkpoint.read_config(tiny))
    with torch.no_grad():
        logp = model(torch.from_numpy(ids.astype(int)))[:, :3].double().log_softmax(-1)
    first = np.bincount(ids[:, 1], minlength=300)
    # of later tokens, each of which has a distribution of its own: the sums, each row's expected
    later = [(np.bincount(ids[:, i + 1], minlength=300), logp[:, i].exp().mean(0).tolist()) for i in (1, 2)]
    assert p_value([([*first], logp[0, 0].exp().tolist())], least=5) > 1e-3
    assert all(p_value([([*counts], p)], least=5) > 1e-3 for counts, p in later)


def test_a_chat_model_invents_the_question(tiny):
    assert own_text.opening(Letters(), BASE, "x") == [1, *b"u:"]
    tokenizer = load_tokenizer(tiny)
    assert own_text.opening(tokenizer, BASE, "x") == [1]
    refused("neither a chat template nor a BOS", own_text.opening, tokenizer, change(BASE, bos_id=None), "x")


@pytest.mark.slow
def test_two_ranks_write_and_train_alike(retraining_flags, tmp_path, monkeypatch):
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(adapt, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        adapt.main([*retraining_flags, "--own-text", "200"])
    with monkeypatch.context() as m:
        m.setattr(own_text, "Sampler", None)  # what was written is kept
        adapt.main([*retraining_flags, "--own-text", "200"])
    run_ranks(2, train_on_rank, [*retraining_flags, "--own-text", "200", "--out", str(tmp_path / "out2")])
    check_same_run(tmp_path / "out", tmp_path / "out2", 1e-5)
    for more, message in ("--plain", "takes a teacher"), ("--seq-len 1", "no longer than the 1 tokens"):
        refused(
            message, run_main, adapt, *retraining_flags, "--own-text", "9", *more.split(), "--out", tmp_path / "out3"
        )


# Answers


def test_answers_are_the_naive_greedy_ones_and_compared_word_for_word(tiny, tmp_path, capfd):
    config = checkpoint.read_config(tiny)
    tokenizer = load_tokenizer(tiny)
    write_model(tmp_path / "other", rewired(config, "ladder:1"))
    writing.copy_tokenizer(tiny, tmp_path / "other")
    flags = ["--compare", str(tiny), "--prompts", "7", "--tokens", "4", "--json", str(tmp_path / "x.jsonl")]
    run_main(answers, "--checkpoint", tmp_path / "other", *flags)
    line = read_json(tmp_path / "x.jsonl")
    mine, theirs = (
        [[*greedy_tokens(random_model(c), ids, 4, 2), 2][:4] for ids in answers.prompts(tokenizer, 7)]
        for c in (rewired(config, "ladder:1"), config)
    )
    first = [next((i for i in range(4) if a[i] != b[i]), 4) for a, b in zip(mine, theirs, strict=True)]
    assert line["alike"] == sum(n == 4 for n in first) < 7 and line["mean_same_tokens"] == sum(first) / 7 > 0
    run_main(answers, "--checkpoint", tiny, *flags)
    assert "7 of 7 answers (100.0%) are the same for 4 tokens" in capfd.readouterr().err
    assert len({*map(tuple, answers.prompts(tokenizer, 200))}) == 200


def test_curves_are_read_from_a_run_s_log_and_from_results_and_drawn(tmp_path):
    log = [
        {"step": i, "tokens": 100 * i, "train": 1.0} | ({"valid": 2.0, "kl": 1 / (i + 1)} if i % 2 else {})
        for i in range(12)
    ]
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "log.jsonl", log)
    lines = [{"what": "choose"}, {"name": "all", "log": log}, {"name": "short", "log": log[:9]}, {"log": log}]
    write_lines(tmp_path / "x.jsonl", lines)
    points = [(100, 1 / 2), (300, 1 / 4), (500, 1 / 6), (700, 1 / 8), (900, 1 / 10), (1100, 1 / 12)]
    assert curves.curves(tmp_path / "run" / "log.jsonl") == {str(tmp_path / "run"): points}
    assert curves.curves(tmp_path / "x.jsonl") == {"all": points}
    run_main(curves, tmp_path / "x.jsonl", "--plot", tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
    (tmp_path / "x.jsonl").write_text(json.dumps(lines[2]) + "\n")
    refused("no log has five validations", run_main, curves, tmp_path / "x.jsonl", "--plot", tmp_path / "y.svg")
