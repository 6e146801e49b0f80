"""Training: what is minimised, that ranks and interruptions change nothing, that the best weights are written."""

import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from helpers import ANY_TP, BASE, command, random_model, run_ranks, script, wired_id
from reference import Reference
from safetensors import SafetensorError
from test_training import trainee_like

import adapt
import quantize
import tp
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from model import InputError
from runtime import launch
from training import data, sharding

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
def no_figure(monkeypatch):
    """matplotlib takes longer than such a training."""
    monkeypatch.setattr(adapt.curves, "draw", lambda *args: None)


@pytest.fixture
def scratch(flags):
    return [*flags, *SMALL.split(), "--steps", "40", "--eval-every", "20", "--lr", "3e-3", "--dropout", "0.1"]


@pytest.fixture
def retrain(flags, tiny, no_figure):
    """Distilled and blended: all that a retraining has."""
    how = "--seq-len 16 --steps 6 --eval-every 3 --lr 1e-3 --ladder-layers 1,2 --distill --blend-steps 4"
    return [*flags, "--checkpoint", str(tiny), *how.split(), "--match-streams", "0.5", "--dtype", "float32"]


def losses_of(out):
    """The log of a run, without what depends on the machine."""
    lines = [json.loads(line) for line in (out.parent / f"{out.name}.run" / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


# What is minimised


@pytest.mark.parametrize("changes", ANY_TP, ids=wired_id)
def test_at_alpha_0_the_blend_is_the_wiring_and_at_1_the_standard_model(changes):
    net = random_model(dataclasses.replace(BASE, **changes)).double()
    tokens = torch.arange(14).view(2, 7)
    place = torch.arange(7).expand(2, 7)
    with torch.no_grad():
        streams = functools.partial(
            adapt.blended_stream, net.tok_embeddings(tokens), net.sublayers(net.metadata(place))
        )
        assert torch.equal(net.output(net.norm(streams(0.0)[-1])), net(tokens))
        if net.state_dict().keys() == random_model(BASE).state_dict().keys():
            standard = random_model(BASE).double()
            assert torch.equal(net.output(net.norm(streams(1.0)[-1])), standard(tokens))
            if net.config.stale_layers:
                half = net.output(net.norm(streams(0.5)[-1]))
                assert (half - net(tokens)).abs().max() > 0.01 < (half - standard(tokens)).abs().max()


def test_the_blend_between_is_the_naive_one():
    config = dataclasses.replace(BASE, wiring="hybrid", ladder_layers=(1, 2))
    net, tokens, alpha = random_model(config).double(), torch.arange(3, 10)[None], 0.3
    naive = Reference(config, net.state_dict())
    x = [naive.w["tok_embeddings.weight"][tokens[0]]]
    for i, (h, stale) in enumerate(naive.sublayers(), start=1):
        seen = (1 - alpha) * x[max(i - 2, 0)] + alpha * x[i - 1] if stale else x[i - 1]
        x.append(x[i - 1] + h(seen, naive.shards[0]))
    with torch.no_grad():
        sublayers = net.sublayers(net.metadata(torch.arange(7)[None]))
        streams = adapt.blended_stream(net.tok_embeddings(tokens), sublayers, alpha)
    assert len(streams) == 6
    for ours, expected in zip(streams, x[1:], strict=True):
        assert np.abs(ours[0].numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("chunk", [4, 1024])
@pytest.mark.parametrize("match", [0.0, 0.7])
def test_the_loss_is_the_naive_one(match, chunk, monkeypatch):
    monkeypatch.setattr(sharding, "CHUNK", chunk)
    config = dataclasses.replace(BASE, wiring="hybrid", ladder_layers=2)
    student, teacher = random_model(config, 1).double(), random_model(BASE, 2).double()
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 131, (2, 2, 9), generator=generator)
    counts = torch.rand(2, 9, generator=generator) < 0.6
    place = torch.arange(9).expand(2, 9)
    batch = data.Batch(tokens, targets, counts, place, None)
    loss, nats = adapt.losses(trainee_like(student), batch, 0.25, trainee_like(teacher), match)
    plain, _ = adapt.losses(trainee_like(student), batch, 0.25)

    def streams(net, alpha):
        x = adapt.blended_stream(net.tok_embeddings(tokens), net.sublayers(net.metadata(place)), alpha)
        return x, net.output(net.norm(x[-1])).log_softmax(-1)

    with torch.no_grad():
        (x, told), (y, wanted) = streams(student, 0.25), streams(teacher, 0.0)
    expected = cross = 0.0
    for b, s in counts.nonzero().tolist():
        ce = -told[b, s, targets[b, s]].item()
        kl = (wanted[b, s].exp() * (wanted[b, s] - told[b, s])).sum().item()
        expected, cross = expected + kl + 0.1 * ce, cross + ce
        for layer in (1, 2):
            ours, theirs = x[2 * layer + 1][b, s], y[2 * layer + 1][b, s]
            expected += match * ((ours - theirs).norm() / theirs.norm()).item() ** 2
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


# From scratch


def test_a_ladder_is_trained_and_written(scratch, tmp_path, capfd):
    adapt.main([*scratch, "--ladder", "--dtype", "float32"])
    printed, out = capfd.readouterr().out, tmp_path / "out"
    config = checkpoint.read_config(out)
    assert config.wiring == "ladder" and "wiring ladder" in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.run", "train.txt", "valid.txt"]
    kept = ["log.jsonl", "loss.png", "settings.json", "tokenizer.model"]
    assert sorted(p.name for p in (tmp_path / "out.run").iterdir()) == kept
    tokenizer = load_tokenizer(out, config.vocab_size)
    ids = [i for story in STORIES * 2 for i in [*tokenizer.encode(story), 2]]  # BOS text EOS, of each story
    net = tp.load_shard(config, checkpoint.Weights(out), torch.float32, "cpu")
    nats, n = 0.0, 0
    starts = [i for i, token in enumerate(ids) if token == 1]
    with torch.no_grad():  # by hand: 16 tokens and their successors, document by document
        for window in range((len(ids) - 1) // 16):
            a, b = 16 * window, 16 * window + 17
            cuts = [a, *[s for s in starts if a < s < b], b]
            for first, last in zip(cuts, cuts[1:], strict=False):
                part = torch.tensor(ids[first:last])
                told = net(part[None])[0].log_softmax(-1)
                nats -= told[range(len(part) - 1), part[1:]].sum().item()
                n += len(part) - 1
    losses = losses_of(out)
    assert [line["step"] for line in losses] == list(range(41))
    valid = {line["step"]: line["valid"] for line in losses if "valid" in line}
    assert list(valid) == [0, 20, 40] and valid[0] == pytest.approx(np.log(300), rel=0.02)
    assert nats / n == pytest.approx(min(valid.values()), rel=1e-4) and min(valid.values()) < 4
    assert f"{min(valid.values()):.4f} nats per token" in printed


@pytest.mark.usefixtures("no_figure")
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


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize("dropout, different", [("0", 1), ("0.5", 3)])
def test_each_step_drops_other_outputs(dropout, different, scratch, tmp_path):
    """Three steps on the only window, at a rate that changes nothing."""
    scratch += ["--text", str(tmp_path / "valid.txt"), "--seq-len", "100", "--batch", "1"]
    adapt.main([*scratch, "--steps", "3", "--lr", "1e-12", "--dropout", dropout])
    assert len({line["train"] for line in losses_of(tmp_path / "out")[1:]}) == different


def test_the_rate_warms_up_and_falls_to_a_tenth():
    args = adapt.parse(shlex.split("--text x --valid x --out x --steps 100 --warmup 10 --lr 0.5"))
    rates = [adapt.learning_rate(step, args) for step in range(101)]
    assert rates[5] == pytest.approx(0.25, rel=0.02) and rates[100] == pytest.approx(0.05)
    assert max(rates) <= 0.5 and rates[10:] == sorted(rates[10:], reverse=True)


# Retraining


def test_the_defaults_are_the_recipes(tiny):
    given = ["--text", "x", "--valid", "x", "--out", "x"]
    assert adapt.parse(given).lr == 3e-3
    assert adapt.parse([*given, "--checkpoint", str(tiny)]).lr == 5e-6
    assert adapt.parse([*given, "--checkpoint", str(tiny), "--distill"]).lr == 5e-5


@pytest.mark.slow
def test_what_comes_out_has_the_wiring_the_tokenizer_and_a_lower_loss(retrain, tmp_path, tiny):
    adapt.main([*retrain, "--steps", "30", "--eval-every", "10"])
    config = checkpoint.read_config(tmp_path / "out")
    assert (config.wiring, config.ladder_layers) == ("hybrid", (1, 2))
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (tiny / "tokenizer.model").read_bytes()
    lines = losses_of(tmp_path / "out")
    assert lines[-1]["valid"] < lines[0]["valid"] - 0.1
    adapt.main(
        [*retrain[: retrain.index("--ladder-layers")], "--seq-len", "16", "--steps", "2", "--out", f"{tmp_path}/same"]
    )
    assert losses_of(tmp_path / "same")[0]["valid"] == pytest.approx(lines[0]["original"], rel=1e-6)
    assert [line["alpha"] for line in lines[1:7]] == [1, 0.75, 0.5, 0.25, 0, 0]


@pytest.mark.slow
def test_auto_takes_the_layers_that_alone_raise_the_loss_least(flags, tiny, tmp_path, capfd):
    how = ["--checkpoint", str(tiny), "--seq-len", "16", "--steps", "2", "--ladder-layers", "auto:2"]
    adapt.main([*flags, *how])
    config = checkpoint.read_config(tmp_path / "out")
    alone = []
    for layer in range(3):
        adapt.main([*flags, *how[:-1], f"{layer},", "--out", str(tmp_path / f"only{layer}")])
        alone.append(losses_of(tmp_path / f"only{layer}")[0]["valid"])
    assert config.ladder_layers == tuple(sorted(np.argsort(alone)[:2]))


@pytest.mark.slow
def test_a_teacher_of_its_own_is_used(retrain, tiny, tmp_path):
    other = tmp_path / "teacher"
    other.mkdir()
    config = checkpoint.read_config(tiny)
    checkpoint.write_model(other, config, random_model(config, seed=9).state_dict(), torch.float32)
    adapt.main(retrain)
    adapt.main([*retrain, "--distill", str(other), "--out", str(tmp_path / "out2")])
    assert losses_of(tmp_path / "out")[3]["train"] != losses_of(tmp_path / "out2")[3]["train"]


# Ranks


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
    """adapt.main as one of the pool's ranks, which tell one another by a collective."""

    world.tell = lambda value: world.gather(value)[0]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(launch, "join", lambda device, flags: world)
        m.setattr(adapt.curves, "draw", lambda *args: None)
        adapt.main(argv)
    return torch.initial_seed()


@pytest.mark.slow
def test_two_ranks_under_torchrun(retrain, tmp_path):
    adapt.main(retrain)
    done = script("adapt.py", *retrain, "--out", tmp_path / "out2", ranks=2)
    assert done.returncode == 0, done.stderr
    for a, b in zip(losses_of(tmp_path / "out"), losses_of(tmp_path / "out2"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.slow
def test_computing_again_and_several_windows_at_a_time_change_nothing(retrain, tmp_path):
    adapt.main(retrain)
    adapt.main([*retrain, "--out", str(tmp_path / "out2"), "--recompute", "--micro-batch", "3"])
    for a, b in zip(losses_of(tmp_path / "out"), losses_of(tmp_path / "out2"), strict=True):
        assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.slow
def test_bfloat16_is_near(retrain, tmp_path):
    adapt.main(retrain)
    adapt.main([*retrain, "--out", str(tmp_path / "out2"), "--compute-dtype", "bfloat16"])
    one, two = ([line["train"] for line in losses_of(tmp_path / name)[1:]] for name in ("out", "out2"))
    assert one == pytest.approx(two, rel=0.02) and one != two


@pytest.mark.slow
def test_compiled_losses_are_the_same(retrain, tmp_path):
    adapt.main(retrain)
    adapt.main([*retrain, "--out", str(tmp_path / "out2"), "--compile"])
    for a, b in zip(losses_of(tmp_path / "out"), losses_of(tmp_path / "out2"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


# Runs that do not end at once


@pytest.mark.usefixtures("no_figure")
def test_killed_at_any_step_it_goes_on_with_the_same_losses(scratch, tmp_path, monkeypatch):
    scratch += ["--steps", "12", "--eval-every", "4", "--save-every", "3"]
    adapt.main([*scratch, "--out", str(tmp_path / "whole")])
    step, save = adapt.optimizer_step, sharding.save
    for at, where in (2, "step"), (5, "step"), (9, "save"), (9, "save"), (11, "step"):

        def killed(number, *args, at=at, where=where):
            if number == at and where == "step":
                raise KeyboardInterrupt
            return step(number, *args)

        def killed_saving(run, number, *args, at=at):
            if number == at:
                (run / "state.tmp").mkdir(exist_ok=True)
                raise KeyboardInterrupt
            save(run, number, *args)

        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(adapt, "optimizer_step", killed)
            m.setattr(sharding, "save", killed_saving if where == "save" else save)
            adapt.main(scratch)
    adapt.main(scratch)
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")
    names = [tmp_path / name / "model.safetensors" for name in ("out", "whole")]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_first(number, scratch, tmp_path, monkeypatch):
    scratch += ["--steps", "12"]
    step = adapt.optimizer_step

    def asked(at, *args):
        if at == 7:
            os.kill(os.getpid(), number)
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
    for more, message in {
        "--lr 1e-4": "holds a run with --lr 0.003, not 0.0001",
        "--ladder": "holds a run with --ladder False, not True",
        "--seq-len 8": "holds a run with --seq-len 16, not 8",
    }.items():
        with pytest.raises(InputError, match=message):
            adapt.main([*scratch, *more.split()])
    with open(tmp_path / "train.txt", "a") as f:
        f.write("more")
    with pytest.raises(InputError, match="other contents of --text or --valid"):
        adapt.main(scratch)
    assert before == {p: p.read_bytes() for p in (tmp_path / "out.run").rglob("*") if p.is_file()}


def test_a_loss_that_is_not_finite_ends_it_and_the_best_weights_stay(scratch, tmp_path):
    with pytest.raises(InputError, match="smaller --lr than 1e\\+09 with another --out; .*/best-0 holds") as error:
        adapt.main([*scratch, "--lr", "1e9"])
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    folder = re.search(r"\S+/best-0", str(error.value))[0]
    config = checkpoint.read_config(folder)
    tp.load_shard(config, checkpoint.Weights(folder), torch.float32, "cpu")  # which are finite


@pytest.mark.slow
def test_killed_for_good_and_started_again(scratch, tmp_path):
    """SIGKILL: in loading, while a state is written, and in a step."""
    scratch += ["--save-every", "2"]
    adapt.main([*scratch, "--out", str(tmp_path / "whole")])
    for file in ("train.tokens", "state.tmp", "state-20"):
        with subprocess.Popen(command("adapt.py", *scratch), stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (tmp_path / "out.run" / file).exists():
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL, f"{file} was not seen"
    done = script("adapt.py", *scratch)
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line(retrain, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(sharding.dcp, "save", full)
        with pytest.raises(InputError, match="cannot write .*state-3: .*No space left"):
            adapt.main([*retrain, "--save-every", "3"])
    adapt.main([*retrain, "--save-every", "3"])
    assert len(losses_of(tmp_path / "out")) == 7


# Teachers


def copy_of(folder, out, **changes):
    """A folder with other fields in its config.json, and the tokenizer."""
    out.mkdir()
    config = dataclasses.replace(checkpoint.read_config(folder), **changes)
    checkpoint.write_model(out, config, random_model(config).state_dict(), torch.float32)
    checkpoint.copy_tokenizer(folder, out)
    return str(out)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"wiring": "desync"}, "desync is another function on another number of ranks"),
        ({"max_seq_len": 8}, "has a context of 8, less than --seq-len"),
        ({"n_layers": 2}, "--match-streams needs a teacher of 3 layers of width 48"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_teachers_are_one_clear_line(changes, message, retrain, tiny, tmp_path):
    with pytest.raises(InputError, match=message):
        adapt.main([*retrain, "--distill", copy_of(tiny, tmp_path / "teacher", **changes)])
    assert not (tmp_path / "out.run").exists()


def test_quantized_models_and_other_tokenizers_do_not_teach(retrain, tiny, tmp_path, monkeypatch):
    quantize.main(["--checkpoint", str(tiny), "--mode", "int8", "--out", str(tmp_path / "int8")])
    for flag in "--distill", "--checkpoint":
        with pytest.raises(InputError, match=r"int8 is quantized \(int8\): give the original"):
            adapt.main([*retrain, flag, str(tmp_path / "int8")])
    other = copy_of(tiny, tmp_path / "other")
    texts = ["tick tock says the clock on the wall of the old house by the sea"] * 40 + list(STORIES)
    data.train_tokenizer(texts, 300, tmp_path / "other" / "tokenizer.model")
    with pytest.raises(InputError, match="the tokenizers of .* and --distill .*other cut text differently"):
        adapt.main([*retrain, "--distill", other])


def test_a_ladder_does_not_teach_itself_nor_become_one_softly(flags, tiny, tmp_path):
    ladder = copy_of(tiny, tmp_path / "ladder", wiring="ladder")
    with pytest.raises(InputError, match="is ladder already and would be its own teacher: --distill DIR"):
        adapt.main([*flags, "--checkpoint", ladder, "--distill", "--seq-len", "16"])
    with pytest.raises(InputError, match="--blend-steps goes from a standard model, but .*ladder is ladder"):
        adapt.main([*flags, "--checkpoint", ladder, "--blend-steps", "3", "--seq-len", "16"])


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("taught", [{}, {"wiring": "parallel", "ladder_layers": (0,)}], ids=wired_id)
def test_streams_behind_layers_of_unequal_numbers_of_sublayers(taught, layers):
    config = dataclasses.replace(BASE, wiring="parallel-ladder", ladder_layers=layers)
    student, teacher = random_model(config, 1), random_model(dataclasses.replace(BASE, **taught), 2)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 131, (2, 2, 7), generator=generator)
    place = torch.arange(7).expand(2, 7)
    batch = data.Batch(tokens, targets, torch.ones(2, 7, dtype=torch.bool), place, None)
    plain, _ = adapt.losses(trainee_like(student), batch, 0.0, trainee_like(teacher), 0.0)
    matched, _ = adapt.losses(trainee_like(student), batch, 0.0, trainee_like(teacher), 1.0)

    def behind_layers(net, one_sublayer):
        with torch.no_grad():
            found = adapt.blended_stream(net.tok_embeddings(tokens), net.sublayers(net.metadata(place)), 0.0)
        streams = []
        for layer in range(3):
            streams.append(found.pop(0) if layer in one_sublayer else [found.pop(0), found.pop(0)][1])
        assert not found
        return streams

    ours, theirs = behind_layers(student, layers), behind_layers(teacher, taught.get("ladder_layers", ()))
    expected = sum(((ours[i] - theirs[i]).square().sum(-1) / theirs[i].square().sum(-1)).sum().item() for i in layers)
    assert (matched - plain).item() == pytest.approx(expected, rel=1e-4)


def test_streams_of_a_teacher_with_other_sublayers():
    student, teacher = (random_model(dataclasses.replace(BASE, wiring=w)) for w in ("ladder", "parallel"))
    place = torch.arange(7).expand(2, 7)
    batch = data.Batch(*torch.ones(2, 2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.bool), place, None)
    plain, _ = adapt.losses(trainee_like(student), batch, 0.0, trainee_like(teacher), 0.0)
    matched, _ = adapt.losses(trainee_like(student), batch, 0.0, trainee_like(teacher), 1.0)
    with torch.no_grad():
        x, y = (
            adapt.blended_stream(m.tok_embeddings(batch.tokens), m.sublayers(m.metadata(place)), 0.0)
            for m in (student, teacher)
        )
    expected = sum(((x[2 * i + 1] - y[i]).square().sum(-1) / y[i].square().sum(-1)).sum() for i in range(3))
    assert (matched - plain).item() == pytest.approx(expected.item(), rel=1e-4)


# What a run leaves and finds


@pytest.mark.slow
def test_an_output_with_a_slash_and_best_weights_that_a_state_names(scratch, tmp_path, monkeypatch):
    scratch[scratch.index("--out") + 1] = f"{tmp_path}/out/"
    scratch += ["--steps", "8", "--eval-every", "2", "--save-every", "3"]
    step, loss = adapt.optimizer_step, adapt.validation_loss

    def killed(number, *args):
        if number == 6:
            raise KeyboardInterrupt
        return step(number, *args)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(adapt, "optimizer_step", killed)
        adapt.main(scratch)
    assert sorted(p.name for p in (tmp_path / "out.run").glob("[bs]*-*")) == ["best-2", "best-4", "state-3"]
    monkeypatch.setattr(adapt, "validation_loss", lambda *args: loss(*args) + 1)  # say, on other machines
    adapt.main(scratch)
    assert checkpoint.read_config(tmp_path / "out").n_layers == 2
    assert not list((tmp_path / "out.run").glob("best-*"))


def test_a_validation_in_which_nothing_counts_is_refused(flags, tiny, tmp_path):
    for name in "tokenizer.model", "config.json", "model.safetensors":
        shutil.copy(tiny / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (tmp_path / "valid.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a dog"}] * 40}) + "\n")
    how = ["--checkpoint", str(tmp_path), "--seq-len", "16", "--valid", str(tmp_path / "valid.jsonl")]
    with pytest.raises(InputError, match="valid.jsonl: no text"):
        adapt.main([*flags, *how])
    answered = [{"role": "user", "content": "a dog " * 40}, {"role": "assistant", "content": "ran"}]
    (tmp_path / "valid.jsonl").write_text(json.dumps({"messages": answered}) + "\n")
    with pytest.raises(InputError, match="--valid: in none of its windows a token counts|--valid has no token that"):
        adapt.main([*flags, *how, "--valid-tokens", "20"])


def test_a_vocabulary_that_was_killed_in_the_making_is_made_again(scratch, tmp_path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr("sentencepiece.SentencePieceTrainer.train", killed)
        adapt.main(scratch)
    adapt.main(scratch)
    assert checkpoint.read_config(tmp_path / "out").vocab_size == 300


def test_best_weights_on_a_full_disk_are_one_clear_line(retrain, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(InputError, match="cannot write .*No space left"):
        adapt.main(retrain)
