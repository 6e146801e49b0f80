"""Training: what is minimised, that ranks and interruptions change nothing, that the best weights are written."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from helpers import BASE, random_model, run_ranks, write_model
from reference import Reference
from test_training import trainee_like
from test_writers import check_kills, names

import eval as evaluate
import quantize
import tp
from extras.training import adapt, data, runs, sharding
from formats import checkpoint
from runtime import launch, writing
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


@pytest.mark.parametrize("chunk, kept", [(4, 1 << 26), (4, 0)])
def test_the_loss_is_the_naive_one(chunk, kept, monkeypatch):
    monkeypatch.setattr(adapt, "CHUNK", chunk)
    monkeypatch.setattr(adapt, "KEPT_LOGITS", kept)
    student = random_model(dataclasses.replace(BASE, wiring="ladder:2"), 1).double()
    teacher = random_model(BASE, 2).double()
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 131, (2, 2, 9), generator=generator)
    counts = torch.rand(2, 9, generator=generator) < 0.6
    batch = data.Batch(tokens, targets, counts, torch.arange(9).expand(2, 9), None)
    loss, nats = adapt.losses(trainee_like(student), batch, trainee_like(teacher))
    plain, _ = adapt.losses(trainee_like(student), batch)

    def log_p(net):
        with torch.no_grad():
            x = torch.stack([torch.from_numpy(naive_stream(net, row)) for row in tokens])
            return net.output(net.norm(x)).log_softmax(-1)

    q, p = log_p(student), log_p(teacher)
    expected = cross = 0.0
    for b, s in counts.nonzero().tolist():
        ce = -q[b, s, targets[b, s]].item()
        expected += (p[b, s].exp() * (p[b, s] - q[b, s])).sum().item() + 0.1 * ce
        cross += ce
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert nats.item() == pytest.approx(cross, rel=1e-5) and plain.item() == pytest.approx(cross, rel=1e-5)


def test_a_ladder_is_trained_and_the_weights_of_the_lowest_loss_are_written(scratch, tmp_path, monkeypatch, capfd):
    weights, measure = [], adapt.validation_loss

    def validation_loss(model, *args):
        weights.append(model.norm.weight.full_tensor().clone())
        return measure(model, *args) + 9 * (len(weights) == 3)  # so the second one is the lowest

    monkeypatch.setattr(adapt, "validation_loss", validation_loss)
    adapt.main([*scratch, "--ladder", "--dtype", "float32"])
    printed, losses = capfd.readouterr().out, losses_of(tmp_path / "out")
    assert checkpoint.read_config(tmp_path / "out").wiring == "ladder" and "wiring ladder" in printed
    assert sorted(p.name for p in (tmp_path / "out.run").iterdir()) == ["log.jsonl", "settings.json", "tokenizer.model"]
    assert [line["step"] for line in losses] == list(range(41))
    valid = {line["step"]: line["valid"] for line in losses if "valid" in line}
    assert list(valid) == [0, 20, 40] and valid[0] > np.log(300) and valid[20] < 4.5
    assert f"{valid[20]:.4f} nats per token at step 20\n" in printed
    evaluate.main(["--checkpoint", str(tmp_path / "out"), "--text", str(tmp_path / "valid.txt"), "--window", "16"])
    assert json.loads(capfd.readouterr().out)["nats_per_token"] < 5
    written = checkpoint.Weights(tmp_path / "out").read("norm.weight")
    assert torch.equal(written, weights[1]) and not torch.equal(written, weights[2])


def test_the_rate_warms_up_and_falls_to_a_tenth():
    given = ["--text", "x", "--valid", "x", "--out", "x"]
    args = adapt.parse([*given, "--steps", "100", "--warmup", "10", "--lr", "0.5"])
    rates = [adapt.learning_rate(step, args) for step in range(101)]
    assert rates[5] == pytest.approx(0.25) and rates[100] == pytest.approx(0.05)
    assert max(rates) <= 0.5 and rates[10:] == sorted(rates[10:], reverse=True)
    for more, rate in ([], 3e-3), (["--checkpoint", "c"], 5e-6), (["--checkpoint", "c", "--distill"], 5e-5):
        assert adapt.parse([*given, *more]).lr == rate


def test_ranks_give_the_losses_of_one(retrain, tmp_path):
    """Of eight windows a step, three ranks get three, three and two."""
    adapt.main(retrain)
    more = ["--out", str(tmp_path / "out2"), "--recompute", "--micro-batch", "2"]
    seeds = run_ranks(3, _train, [*retrain, *more])
    assert len(set(seeds)) == 3  # of dropout
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
def test_compiled_the_losses_are_the_same(retrain, tmp_path):
    adapt.main(retrain)
    adapt.main([*retrain, "--out", str(tmp_path / "out2"), "--compile"])
    one, two = ([line["train"] for line in losses_of(tmp_path / name)[1:]] for name in ("out", "out2"))
    assert one == pytest.approx(two, rel=1e-4)


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
    out, whole = (tmp_path / name / "model.safetensors" for name in ("out", "whole"))
    assert out.read_bytes() == whole.read_bytes()
    shutil.rmtree(tmp_path / "out")  # a finished run whose output is gone starts anew
    adapt.main(scratch)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_killed_before_any_change_it_resumes_and_its_output_is_complete_or_absent(flags, tmp_path):
    how = f"{SMALL} --batch 2 --steps 2 --warmup 1 --eval-every 1 --save-every 1 --valid-tokens 64".split()
    (tmp_path / "kills").mkdir()
    check_kills(lambda out: adapt.main([*flags, *how, "--out", str(out)]), tmp_path / "kills", step=18)


def test_killed_in_its_last_moment_a_run_keeps_what_it_needs_or_nothing(tmp_path):
    out, run = tmp_path / "out", tmp_path / "out.run"
    for part in "state-3", "best-3", "best-2", "train.tokens.tmp":
        (run / part).mkdir(parents=True)
    for part in "train.tokens", "log.jsonl", "settings.json":
        (run / part).write_text("")
    (run / "best.json").write_text('{"step": 3}')
    before = names(run)
    with runs.reserved(out, run):  # killed before the rename
        assert names(run) == before
    (run / "best-3").rename(out)
    (out / "config.json").write_text("")
    with pytest.raises(InputError, match="already exists"), runs.reserved(out, run):
        pass
    assert names(run) == ["log.jsonl", "settings.json"]


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
    with pytest.raises(InputError, match="holds a run with --lr 0.003, not 0.0001"):
        adapt.main([*scratch, "--lr", "1e-4"])
    adapt.main(scratch)
    assert [line["step"] for line in losses_of(tmp_path / "out")] == list(range(13))


def test_a_loss_that_is_not_finite_ends_it_and_the_best_weights_stay(scratch, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="smaller --lr than 1e\\+09 and another --out; .*/best-\\* holds"):
        adapt.main([*scratch, "--lr", "1e9"])
    folder = tmp_path / "out.run" / "best-0"
    tp.load_shard(checkpoint.read_config(folder), checkpoint.Weights(folder), torch.float32, "cpu")  # and are finite
    monkeypatch.setattr(adapt, "losses", lambda *_: (torch.tensor(torch.nan), torch.tensor(torch.nan)))
    with pytest.raises(InputError, match="the loss on --valid is nan nats per token"):
        adapt.main([*scratch, "--out", str(tmp_path / "nan")])
    assert not (tmp_path / "out").exists() and not (tmp_path / "nan").exists()


def test_a_full_disk_is_one_clear_line(scratch, monkeypatch):
    monkeypatch.setattr(sharding.dcp, "save", lambda *_, **__: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(InputError, match="cannot write .*state-3.*: .*No space left"):
        adapt.main([*scratch, "--save-every", "3"])


def test_bad_flags_leave_nothing(scratch, retrain, tiny, tmp_path):
    (tmp_path / "empty").write_text("")
    quantize.main(["--checkpoint", str(tiny), "--mode", "int8", "--out", str(tmp_path / "int8")])
    for name, changes in {"desync": {"wiring": "desync"}, "same": {}, "stale": {"wiring": "ladder"}}.items():
        (tmp_path / name).mkdir()
        config = dataclasses.replace(checkpoint.read_config(tiny), **changes)
        write_model(tmp_path / name, config, random_model(config).state_dict(), torch.float32)
        writing.copy_tokenizer(tiny, tmp_path / name)
    texts = ["tick tock says the clock on the wall of the old house by the sea"] * 40 + list(STORIES)
    data.train_tokenizer(texts, 300, tmp_path / "same" / "tokenizer.model")
    for flags, more, message in (
        (scratch, "--steps 0", "--steps: '0'"),
        (scratch, "--dim 30", "--dim 30 .* --n-heads 4"),
        (scratch, "--vocab-size 100000", "--vocab-size 100000"),
        (scratch, "--seq-len 5000", "5001: see --seq-len"),
        (scratch, "--text DIR/empty", "--text: no text"),
        (scratch, "--text /bin/true", "/bin/true is not valid UTF-8"),
        (scratch, "--distill", "--distill needs --checkpoint"),
        (scratch, "--out DIR", "already exists"),
        (scratch, "--checkpoint /nowhere", "--vocab-size .* --checkpoint"),
        (retrain, "--distill DIR/int8", "int8 is quantized"),
        (retrain, "--distill DIR/desync", "desync .* e.g. desync/8"),
        (retrain, "--distill DIR/same", "same has another vocabulary"),
        (retrain, "--checkpoint DIR/stale --wiring ladder --distill", "is ladder already"),
        (retrain, "--wiring upper-bound", "upper-bound cannot be trained"),
        (retrain, "--seq-len 4096", "--seq-len 4096 .* 64"),
        (retrain, "--seq-len 16 --valid-tokens 10", "--valid holds 11 tokens; a window takes 17"),
    ):
        with pytest.raises(InputError, match=message) as error:
            adapt.main([*flags, *more.replace("DIR", str(tmp_path)).split()])
        assert "\n" not in str(error.value) and not list(tmp_path.glob("out*"))
