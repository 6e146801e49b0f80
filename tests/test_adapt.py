"""Training: what is minimised, that ranks and interruptions change nothing, that the best weights are written."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import BASE, ROOT, random_model, run_ranks
from reference import Reference
from test_training import trainee_like

import adapt
import eval as evaluate
import model
import quantize
import tp
from extras.training import data, sharding
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from runtime import launch
from runtime.errors import InputError

STORIES = ["Once upon a time there was a little dog.", "The dog ran to the park.", "A cat sat on the mat and slept."]
SMALL = "--vocab-size 300 --dim 32 --n-layers 2 --n-heads 4 --n-kv-heads 2 --intermediate-size 48 --seq-len 16"


@pytest.fixture
def flags(tmp_path):
    """The flags of a tiny training; texts repeat, so there is something to learn."""
    for name, times in ("train.txt", 20), ("valid.txt", 2):
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(STORIES * times))
    files = ["--text", tmp_path / "train.txt", "--valid", tmp_path / "valid.txt", "--out", tmp_path / "out"]
    return [*map(str, files), "--batch", "8", "--warmup", "2"]


@pytest.fixture
def scratch(flags):
    return [*flags, *SMALL.split(), "--steps", "40", "--eval-every", "20", "--lr", "3e-3", "--dropout", "0.1"]


@pytest.fixture
def retrain(flags, tiny):
    """The flags of a retraining with a teacher."""
    how = "--seq-len 16 --steps 6 --eval-every 3 --lr 1e-3 --wiring ladder:1,2 --distill"
    return [*flags, "--checkpoint", str(tiny), *how.split(), "--dtype", "float32"]


def losses_of(out):
    """Returns the log of a run, without what depends on the machine."""
    lines = [json.loads(line) for line in (out.parent / f"{out.name}.run" / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def naive_stream(net, tokens):
    """Returns the stream after the last sublayer (S, D) of one row of tokens, in float64."""
    naive = Reference(net.config, net.state_dict())
    x = [naive.w["tok_embeddings.weight"][tokens]]
    for i, (h, stale) in enumerate(naive.sublayers(), start=1):
        x.append(x[i - 1] + h(x[max(i - 2, 0)] if stale else x[i - 1], naive.shards[0]))
    return x[-1]


@pytest.mark.parametrize("chunk, kept", [(4, 1 << 26), (4, 0), (1024, 0)])
def test_the_loss_is_the_naive_one(chunk, kept, monkeypatch):
    monkeypatch.setattr(adapt, "CHUNK", chunk)
    monkeypatch.setattr(adapt, "KEPT", kept)
    student = random_model(dataclasses.replace(BASE, wiring="ladder:2"), 1).double()
    teacher = random_model(BASE, 2).double()
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 131, (2, 2, 9), generator=generator)
    counts = torch.rand(2, 9, generator=generator) < 0.6
    batch = data.Batch(tokens, targets, counts, torch.arange(9).expand(2, 9), None)
    loss, nats = adapt.losses(trainee_like(student), batch, trainee_like(teacher))
    plain, _ = adapt.losses(trainee_like(student), batch)

    def told(net):
        with torch.no_grad():
            x = torch.stack([torch.from_numpy(naive_stream(net, row)) for row in tokens])
            return net.output(net.norm(x)).log_softmax(-1)

    ours, theirs = told(student), told(teacher)
    expected = cross = 0.0
    for b, s in counts.nonzero().tolist():
        ce = -ours[b, s, targets[b, s]].item()
        kl = (theirs[b, s].exp() * (theirs[b, s] - ours[b, s])).sum().item()
        expected, cross = expected + kl + 0.1 * ce, cross + ce
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert nats.item() == pytest.approx(cross, rel=1e-5) and plain.item() == pytest.approx(cross, rel=1e-5)


def test_a_batch_in_which_nothing_counts_has_gradients_of_zero():
    trainee = trainee_like(random_model(BASE)).train()
    nothing = torch.zeros(2, 7, dtype=torch.bool)
    batch = data.Batch(*torch.ones(2, 2, 7, dtype=torch.long), nothing, torch.arange(7).expand(2, 7), None)
    loss, nats = adapt.losses(trainee, batch)
    loss.backward()
    assert loss.item() == nats.item() == 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in trainee.parameters())


def halved_stream(x, sublayers, comm, config):
    """A newcomer's wiring: every sum counts half, and is waited for two sublayers later."""
    pending = []
    for h, _ in sublayers:
        pending.append(comm.start(h(x)))
        if len(pending) > 2:
            x = x + 0.5 * comm.wait(pending.pop(0))
    yield x + 0.5 * sum(map(comm.wait, pending))


def test_a_new_wiring_is_trained_as_it_is_evaluated(flags, tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(model.WIRINGS, "halved", model.Wiring("half of a sum", stream=halved_stream, stale=True))
    (tmp_path / "valid.txt").write_text(STORIES[0])
    one_window = len(load_tokenizer(tiny).encode(STORIES[0])) - 1
    how = ["--checkpoint", str(tiny), "--wiring", "halved", "--seq-len", str(one_window), "--dtype", "float32"]
    adapt.main([*flags, *how, "--steps", "4", "--lr", "1e-3"])
    trained = [line["valid"] for line in losses_of(tmp_path / "out") if "valid" in line]
    assert checkpoint.read_config(tmp_path / "out").wiring == "halved" and trained[-1] < trained[0]
    capfd.readouterr()
    evaluate.main(["--checkpoint", str(tmp_path / "out"), "--text", str(tmp_path / "valid.txt")])
    assert json.loads(capfd.readouterr().out)["nats_per_token"] == pytest.approx(trained[-1], rel=1e-5)


def test_a_ladder_is_trained_and_written(scratch, tmp_path, capfd):
    adapt.main([*scratch, "--ladder", "--dtype", "float32"])
    printed, out = capfd.readouterr().out, tmp_path / "out"
    config = checkpoint.read_config(out)
    assert config.wiring == "ladder" and "wiring ladder" in printed
    assert sorted(p.name for p in (tmp_path / "out.run").iterdir()) == ["log.jsonl", "settings.json", "tokenizer.model"]
    losses = losses_of(out)
    assert [line["step"] for line in losses] == list(range(41))
    valid = {line["step"]: line["valid"] for line in losses if "valid" in line}
    assert list(valid) == [0, 20, 40] and valid[0] > np.log(300) and min(valid.values()) < 4
    assert f"{min(valid.values()):.4f} nats per token" in printed


@pytest.mark.slow
def test_a_compiled_training_runs_where_torch_lies_in_a_folder_with_a_space(flags):
    """In CI it does."""
    command = [sys.executable, ROOT / "adapt.py", *flags, *SMALL.split(), "--steps", "2", "--compile"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_weights_of_the_lowest_validation_loss_are_written(scratch, tmp_path, monkeypatch, capfd):
    seen = []

    def validation_loss(model, *args):
        seen.append(model.norm.weight.full_tensor().clone())
        return [3.0, 1.0, 2.0][len(seen) - 1]

    monkeypatch.setattr(adapt, "validation_loss", validation_loss)
    adapt.main([*scratch, "--steps", "4", "--eval-every", "2", "--dtype", "float32"])
    written = checkpoint.Weights(tmp_path / "out").read("norm.weight")
    assert torch.equal(written, seen[1]) and not torch.equal(written, seen[2])
    assert "1.0000 nats per token at step 2\n" in capfd.readouterr().out


@pytest.mark.parametrize("dropout, different", [("0", 1), ("0.5", 3)])
def test_each_step_drops_other_outputs(dropout, different, flags, tiny, tmp_path):
    """Three steps on the only window, at a rate that changes nothing."""
    (tmp_path / "one.txt").write_text(STORIES[0])
    how = ["--checkpoint", str(tiny), "--text", str(tmp_path / "one.txt"), "--seq-len", "16", "--batch", "1"]
    adapt.main([*flags, *how, "--steps", "3", "--lr", "1e-12", "--dropout", dropout])
    assert len({line["train"] for line in losses_of(tmp_path / "out")[1:]}) == different


def test_the_rate_warms_up_and_falls_to_a_tenth():
    given = ["--text", "x", "--valid", "x", "--out", "x"]
    args = adapt.parse([*given, *shlex.split("--steps 100 --warmup 10 --lr 0.5")])
    rates = [adapt.learning_rate(step, args) for step in range(101)]
    assert rates[5] == pytest.approx(0.25, rel=0.02) and rates[100] == pytest.approx(0.05)
    assert max(rates) <= 0.5 and rates[10:] == sorted(rates[10:], reverse=True)
    for more, rate in ([], 3e-3), (["--checkpoint", "c"], 5e-6), (["--checkpoint", "c", "--distill"], 5e-5):
        assert adapt.parse([*given, *more]).lr == rate


def test_what_comes_out_has_the_wiring_the_tokenizer_and_a_lower_loss(retrain, tmp_path, tiny):
    adapt.main([*retrain, "--steps", "30", "--eval-every", "10"])
    assert checkpoint.read_config(tmp_path / "out").wiring == "ladder:1,2"
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (tiny / "tokenizer.model").read_bytes()
    lines = losses_of(tmp_path / "out")
    assert lines[-1]["valid"] < lines[0]["valid"] - 0.1
    adapt.main([*retrain[: retrain.index("--wiring")], "--seq-len", "16", "--steps", "2", "--out", f"{tmp_path}/same"])
    assert losses_of(tmp_path / "same")[0]["valid"] == pytest.approx(lines[0]["original"], rel=1e-6)


@pytest.mark.slow
def test_auto_takes_the_layers_that_alone_raise_the_loss_least(flags, tiny, tmp_path, capfd):
    how = ["--checkpoint", str(tiny), "--seq-len", "16", "--steps", "2", "--wiring", "ladder:auto2"]
    adapt.main([*flags, *how])
    alone = []
    for layer in range(3):
        adapt.main([*flags, *how[:-1], f"ladder:{layer},", "--out", str(tmp_path / f"only{layer}")])
        alone.append(losses_of(tmp_path / f"only{layer}")[0]["valid"])
    i, j = sorted(np.argsort(alone)[:2])
    assert checkpoint.read_config(tmp_path / "out").wiring == f"ladder:{i},{j}"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_losses_of_one(ranks, retrain, tmp_path):
    adapt.main(retrain)
    more = ["--out", str(tmp_path / "out2"), "--recompute", "--micro-batch", "2"]
    seeds = run_ranks(ranks, _train, [*retrain, *more])
    assert len(set(seeds)) == ranks  # of dropout
    one, several = (losses_of(tmp_path / name) for name in ("out", "out2"))
    assert len(one) == len(several) == 7
    for a, b in zip(one, several, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    a, b = (checkpoint.Weights(tmp_path / name) for name in ("out", "out2"))
    for name in a.names():
        assert (a.read(name) - b.read(name)).abs().max() < 1e-5


def _train(world, argv):
    """Run adapt.main as one of the pool's ranks, which tell one another by a collective."""

    world.tell = lambda value: world.gather(value)[0]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(launch, "join", lambda device, flags: world)
        adapt.main(argv)
    return torch.initial_seed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, rel",
    [
        (["--recompute", "--micro-batch", "3"], 1e-6),
        (["--compile"], 1e-4),
        (["--compute-dtype", "bfloat16"], 0.02),
    ],
    ids=str,
)
def test_how_it_is_computed_changes_no_loss(more, rel, retrain, tmp_path):
    adapt.main(retrain)
    adapt.main([*retrain, "--out", str(tmp_path / "out2"), *more])
    one, two = ([line["train"] for line in losses_of(tmp_path / name)[1:]] for name in ("out", "out2"))
    assert one == pytest.approx(two, rel=rel) and (one == two) <= (rel < 0.02)


def test_killed_at_any_step_it_resumes_with_the_same_losses(scratch, tmp_path, monkeypatch):
    scratch += ["--steps", "12", "--eval-every", "4", "--save-every", "3"]
    adapt.main([*scratch, "--out", str(tmp_path / "whole")])
    step, save = adapt.optimizer_step, sharding.save
    for at, where in (2, "step"), (5, "step"), (9, "save"), (9, "save"), (11, "step"):

        def killed(n, *args, at=at, where=where):
            if n == at and where == "step":
                raise KeyboardInterrupt
            return step(n, *args)

        def killed_saving(run, n, *args, at=at):
            if n == at:
                (run / "state.tmp").mkdir(exist_ok=True)
                raise KeyboardInterrupt
            save(run, n, *args)

        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(adapt, "optimizer_step", killed)
            m.setattr(sharding, "save", killed_saving if where == "save" else save)
            adapt.main(scratch)
    assert sorted(p.name for p in (tmp_path / "out.run").glob("[bs]*-*")) == ["best-8", "state-9"]
    adapt.main(scratch)
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")
    names = [tmp_path / name / "model.safetensors" for name in ("out", "whole")]
    assert names[0].read_bytes() == names[1].read_bytes()
    shutil.rmtree(tmp_path / "out")  # a finished run whose output is gone starts anew
    adapt.main(scratch)
    assert names[0].read_bytes() == names[1].read_bytes()


def test_asked_to_stop_it_saves_first(scratch, tmp_path, monkeypatch):
    scratch += ["--steps", "12"]
    step = adapt.optimizer_step

    def asked(at, *args):
        if at == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(at, *args)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt, match="step 7 is saved in .*out.run"):
        m.setattr(adapt, "optimizer_step", asked)
        adapt.main(scratch)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not (tmp_path / "out").exists()
    adapt.main(scratch)
    assert [line["step"] for line in losses_of(tmp_path / "out")] == list(range(13))


def test_another_configuration_is_refused_and_nothing_is_lost(scratch, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(sharding, "save", killed)
        adapt.main([*scratch, "--save-every", "5"])
    before = {p: p.read_bytes() for p in (tmp_path / "out.run").rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="holds a run with --lr 0.003, not 0.0001"):
        adapt.main([*scratch, "--lr", "1e-4"])
    with open(tmp_path / "train.txt", "a") as f:
        f.write("more")
    with pytest.raises(InputError, match="holds a run with bytes of --text and --valid"):
        adapt.main(scratch)
    assert before == {p: p.read_bytes() for p in (tmp_path / "out.run").rglob("*") if p.is_file()}


def test_a_loss_that_is_not_finite_ends_it_and_the_best_weights_stay(scratch, tmp_path):
    with pytest.raises(InputError, match="smaller --lr than 1e\\+09 and another --out; .*/best-\\* holds"):
        adapt.main([*scratch, "--lr", "1e9"])
    assert not (tmp_path / "out").exists()
    folder = tmp_path / "out.run" / "best-0"
    config = checkpoint.read_config(folder)
    tp.load_shard(config, checkpoint.Weights(folder), torch.float32, "cpu")  # which are finite


def test_a_full_disk_is_one_clear_line(retrain, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(InputError, match="cannot write .*state-3.*: .*No space left"):
        m.setattr(sharding.dcp, "save", full)
        adapt.main([*retrain, "--save-every", "3"])
    adapt.main([*retrain, "--save-every", "3"])
    assert len(losses_of(tmp_path / "out")) == 7


def copy_of(folder, out, seed=0, **changes):
    """Returns a folder with other fields in its config.json, random weights, and the tokenizer of `folder`."""
    out.mkdir()
    config = dataclasses.replace(checkpoint.read_config(folder), **changes)
    checkpoint.write_model(out, config, random_model(config, seed).state_dict(), torch.float32)
    checkpoint.copy_tokenizer(folder, out)
    return str(out)


def test_what_cannot_be_trained_or_teach_is_one_clear_line(retrain, tiny, tmp_path):
    quantize.main(["--checkpoint", str(tiny), "--mode", "int8", "--out", str(tmp_path / "int8")])
    others = {"desync": {"wiring": "desync"}, "wide": {"vocab_size": 301}, "same": {}}
    for name, changes in (others | {"stale": {"wiring": "ladder"}}).items():
        copy_of(tiny, tmp_path / name, **changes)
    texts = ["tick tock says the clock on the wall of the old house by the sea"] * 40 + list(STORIES)
    data.train_tokenizer(texts, 300, tmp_path / "same" / "tokenizer.model")
    for more, message in {
        "--distill int8": r"int8 is quantized \(int8\): give the original",
        "--distill desync": "desync is another function in another number of lanes: name them, e.g. desync/8",
        "--distill wide": "wide has another vocabulary, of 301 tokens, and the model's 300",
        "--distill same": "same has another vocabulary: token",
        "--checkpoint stale --wiring ladder --distill": "is ladder already",
        "--checkpoint stale --wiring ladder:auto2": "--wiring ladder:auto2 needs a standard --checkpoint",
    }.items():
        words = [str(tmp_path / w) if (tmp_path / w).is_dir() else w for w in more.split()]
        with pytest.raises(InputError, match=message):
            adapt.main([*retrain, *words])
    assert not (tmp_path / "out.run").exists()


def test_a_validation_that_is_not_finite_ends_a_training(tiny, tmp_path, monkeypatch):
    for name in ("text", "valid"):
        (tmp_path / name).write_text("Once upon a time there was a little dog. " * 40)
    monkeypatch.setattr(adapt, "losses", lambda *_: (torch.tensor(torch.nan), torch.tensor(torch.nan)))
    flags = "--checkpoint", tiny, "--text", tmp_path / "text", "--valid", tmp_path / "valid", "--steps", 1
    with pytest.raises(InputError, match="the loss on --valid is nan nats per token"):
        adapt.main([str(flag) for flag in (*flags, "--seq-len", 16, "--batch", 2, "--out", tmp_path / "out")])
