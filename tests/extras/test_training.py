"""Training: what is read and minimised; ranks and interruptions change nothing; the best weights are written."""

import contextlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import refused
from configs import BASE, change
from file_edits import write_json
from helpers import StateWeights, load_folder, random_model, shard, train_tokenizer, write_model
from running import check_kills, run_main, run_ranks
from training_runs import (
    Letters,
    check_resumption,
    check_same_run,
    plain_batch,
    random_batch,
    read_losses,
    train_on_rank,
    trainee_like,
)

import eval as evaluate
import quantize
from extras.training import adapt, data, sharding
from extras.training.data import TOKEN, Windows
from ladder.checkpoints import checkpoint, writing
from ladder.errors import InputError
from ladder.ranks import ending
from ladder.text import template
from ladder.text.tokenizer import load_tokenizer
from model import rewired

# Documents, tokens, windows


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_documents_of_text_and_of_lines_of_json(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo<|endoftext|>\n  three  <|endoftext|><|endoftext|> \n four")
    assert [d for d, _ in data.documents(tmp_path / "a.txt")] == ["one\n\ntwo", "three", "four"]
    path = tmp_path / "a.jsonl"
    records = [{"text": "x <|endoftext|> y"}, {"messages": CHAT}]
    path.write_text("".join(json.dumps(r) + "\n\n" for r in records))
    assert [*data.documents(path)] == [(records[0]["text"], f"{path} line 1"), (CHAT, f"{path} line 3")]
    for line, message in ('{"text": "\\ud800"}', "surrogates"), ('{"messages": [{"role": "user"}]}', '"content"'):
        path.write_text(line + "\n")
        refused(f"a.jsonl line 1.*{message}", list, data.documents(path))


@pytest.fixture
def tokens(tmp_path):
    """Returns the file of tokens of some texts and a chat, 45 tokens."""
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(["abcdefg", "hij", "k", "lmnopqrstuvwxyz"]))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    data.tokenize([tmp_path / "a.txt", tmp_path / "b.jsonl"], Letters(), [2], tmp_path / "x.tokens")
    ids = np.fromfile(tmp_path / "x.tokens", TOKEN)["id"]
    assert len(ids) == 9 + 5 + 3 + 17 + 11 and [*ids[9:14], *ids[34:]] == [1, *b"hij", 2, 1, *b"u:hi;a:ho;"]
    return tmp_path / "x.tokens"


def test_many_chats_are_rendered_in_their_order_and_not_all_at_once(tmp_path, monkeypatch):
    texts = [str(n) for n in range(400)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": t}]}) + "\n" for t in texts))
    monkeypatch.setattr(template, "renderer", template.Renderer())  # which no thread has started
    data.tokenize([path], Letters(), [2], tmp_path / "x.tokens")
    tokens = np.fromfile(tmp_path / "x.tokens", TOKEN)
    for n, text in enumerate(texts):
        assert bytes(tokens["id"][tokens["document"] == n].tolist()) == f"\x01u:{text};".encode()
    read = []
    documents = data.documents
    monkeypatch.setattr(data, "documents", lambda path: (read.append(1) or record for record in documents(path)))
    monkeypatch.setattr(Letters, "template", "{{ raise_exception('no') }}")
    words = "chats.jsonl line 1: .*refuses this conversation: no"
    refused(words, data.tokenize, [path], Letters(), [2], tmp_path / "x.tokens")
    assert len(read) == data.DOCUMENTS_AT_ONCE < 400


def test_windows_hold_every_token_and_no_document_sees_another(tokens):
    windows = Windows([tokens], 5, "")
    all_tokens = np.fromfile(tokens, TOKEN)
    batch = windows.batch(range(windows.n))
    assert windows.n == 8 and torch.equal(batch.tokens.flatten(), torch.from_numpy(all_tokens["id"][:40].astype(int)))
    assert torch.equal(batch.targets.flatten(), torch.from_numpy(all_tokens["id"][1:41].astype(int)))
    for row in range(windows.n):
        for i in range(5):
            at = 5 * row + i
            document = all_tokens["document"][at]
            before = [j for j in range(5 * row, at + 1) if all_tokens["document"][j] == document]
            assert batch.positions[row, i] == at - before[0]
            assert [5 * row + j for j in range(5) if batch.mask[row, i, j]] == before
            assert batch.counts[row, i] == (all_tokens["document"][at + 1] == document)
    assert windows.batch([0]).mask is None and windows.batch([None, 0]).counts.sum(1).tolist() == [0, 5]


def test_each_epoch_takes_each_window_once_in_an_order_of_its_own(tokens):
    windows = Windows([tokens], 4, "", seed=3)
    n = windows.n
    epochs = [windows.indices(n * e, n) for e in range(3)]
    assert all(sorted(e) == list(range(n)) for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert windows.indices(n - 2, 4) == epochs[0][-2:] + epochs[1][:2]  # wherever one begins
    assert Windows([tokens], 4, "", seed=4).indices(0, n) != epochs[0]
    assert Windows([tokens], 4, "", at_most=9).n == 2


# What is minimised


def test_packed_documents_give_the_losses_of_each_alone(tmp_path, tiny):
    texts = ["Once upon a time there was a dog.", "The dog ran to the park.", "a dog"]
    (tmp_path / "a.txt").write_text(data.SEPARATOR.join(texts))
    tokenizer = load_tokenizer(tiny)
    data.tokenize([tmp_path / "a.txt"], tokenizer, [2], tmp_path / "x.tokens")
    config = rewired(checkpoint.read_config(tiny), "ladder")
    model = random_model(change(config, heads={"sliding_window": 4, "window_layers": (1,)})).double()
    n = (tmp_path / "x.tokens").stat().st_size // TOKEN.itemsize
    batch = Windows([tmp_path / "x.tokens"], n - 1, "").batch([0])
    trainee = trainee_like(model)
    expected = 0.0
    for text in texts:
        ids = torch.tensor([[*tokenizer.encode(text), 2]])
        log_p = model(ids)[0].log_softmax(-1)
        expected -= sum(log_p[i, ids[0, i + 1]].item() for i in range(ids.shape[1] - 1))
    assert batch.mask is not None and adapt.losses(trainee, batch)[1].item() == pytest.approx(expected, rel=1e-7)


def test_the_loss_is_the_naive_one(monkeypatch):
    monkeypatch.setattr(adapt, "LOSS_TOKENS", 4)
    student = random_model(change(BASE, wiring="ladder:2"), 1).double()
    teacher = random_model(BASE, 2).double()
    batch = random_batch()
    loss, nats = adapt.losses(trainee_like(student), batch, trainee_like(teacher), text_weight=0.3)
    plain, _ = adapt.losses(trainee_like(student), batch)
    with torch.no_grad():
        q, p = (net(batch.tokens).log_softmax(-1) for net in (student, teacher))
    expected = cross = 0.0
    for b, s in batch.counts.nonzero().tolist():
        ce = -q[b, s, batch.targets[b, s]].item()
        expected += (p[b, s].exp() * (p[b, s] - q[b, s])).sum().item() + 0.3 * ce
        cross += ce
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert nats.item() == pytest.approx(cross, rel=1e-5) and plain.item() == pytest.approx(cross, rel=1e-5)


NO_FILES = ["--checkpoint", "x", "--text", "x", "--valid", "x", "--out", "x", "--compute-dtype", "float32"]


def run_each(world, configs, dtype):
    """Returns the normed stream that each config's model computes in training."""
    args = adapt.parse([*NO_FILES, "--compute-dtype", dtype])
    xs = []
    for config in configs:
        model = adapt.build(config, StateWeights(random_model(config).state_dict()), world, args)
        with torch.no_grad():
            xs.append(model(plain_batch()))
        model.reshard()
    return xs


BIASED = {"qkv_bias": True, "wo_bias": True, "mlp_bias": True}  # of lanes one adds those of wo and w2
LANED = ["spd/4", "spd-ladder:0,2/3", "delayed-3/2", "desync:4/4", "ladder-2"]  # and more lanes than KV heads
CONFIGS = [{"wiring": wiring, "heads": {"qk_norm": True}, **BIASED} for wiring in LANED]
EXPERTS = {"n_experts": 5, "experts_per_token": 2, "expert_size": 36, "dense_layers": (1,)}
SHARED = {"mixture": {**EXPERTS, "shared_expert_size": 28, "shared_expert_gate": True}}
GPT_OSS = {
    "qkv_bias": True, "wo_bias": True, "heads": {"sinks": True}, "wiring": "ladder",
    "mixture": {**EXPERTS, "dense_layers": (), "clamped_swiglu": True},
}  # fmt: skip
OTHERS = [
    {"wiring": "ladder", "tie_embeddings": True},
    {"wiring": "pair", "mixture": EXPERTS},
    {"wiring": "farskip", **SHARED},
    GPT_OSS,
]


@pytest.mark.parametrize("tp_size, changes, dtype", [
    (2, CONFIGS, "float32"), (3, OTHERS, "float32"), (4, OTHERS, "float32"), (2, CONFIGS + OTHERS, "bfloat16"),
])  # fmt: skip
def test_ranks_compute_in_training_what_the_model_does_afterwards(tp_size, changes, dtype):
    configs = [change(BASE, **each) for each in changes]
    for rank in run_ranks(tp_size, run_each, configs, dtype):
        for config, x in zip(configs, rank, strict=True):
            net = shard(config, None, checkpoint.DTYPES[dtype])
            for lane in net.lanes if config.named_wiring.fixed_shards else [net]:
                lane.output = torch.nn.Identity()
            with torch.no_grad():
                expected = net(torch.arange(12).view(2, 6))[..., : BASE.dim]
            assert (x - expected).abs().max() < (1e-5 if dtype == "float32" else 1e-9), config


def test_recompute_keeps_only_the_inputs_of_attentions_and_mlps(fake_world):
    args = adapt.parse([*NO_FILES, "--recompute"])
    kept = set()
    model = adapt.build(change(BASE, **SHARED), None, fake_world(0, 1), args)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.add(tensor.shape[-1]), lambda _: None):
        model(plain_batch())
    assert BASE.dim in kept and not {5, 36, 28, 100, 96, 80} & kept  # experts, neurons, heads with their keys


# Runs


@pytest.fixture
def mixture(retraining_flags, tiny, tmp_path):
    """The flags of a retraining of a mixture with a shared expert."""
    config = change(checkpoint.read_config(tiny), **SHARED)
    write_model(tmp_path / "mixture", config)
    writing.copy_tokenizer(tiny, tmp_path / "mixture")
    return [*retraining_flags, "--checkpoint", str(tmp_path / "mixture"), "--wiring", "farskip"]


@pytest.mark.parametrize(
    "changes", [{"mixture": {**SHARED["mixture"], "router": "sigmoid", "expert_scale": 2.5}}, GPT_OSS]
)
def test_a_rewired_mixture_keeps_its_routers_and_their_biases(changes, retraining_flags, tiny, tmp_path):
    """An expert_bias decides alone which experts are chosen; it is written in float32, as the loader wants it."""
    config = change(checkpoint.read_config(tiny), **{**changes, "wiring": "standard"})
    write_model(tmp_path / "own", config)
    writing.copy_tokenizer(tiny, tmp_path / "own")
    run_main(adapt, *retraining_flags, "--checkpoint", tmp_path / "own", "--wiring", "ladder", "--dtype", "bfloat16")
    own = checkpoint.Weights(tmp_path / "own")
    trained = checkpoint.Weights(tmp_path / "out")
    for name in own.names():
        before = own.read(name)
        after = trained.read(name)
        chooses = ".router." in name or name.endswith("expert_bias")
        is_sigmoid = "router" in changes["mixture"]
        assert after.dtype == (torch.float32 if chooses and is_sigmoid else torch.bfloat16)
        if chooses or name.endswith("w2.weight"):
            assert torch.equal(before.to(after.dtype), after) == chooses, name
    with pytest.raises(InputError, match="--fresh trains no router") if is_sigmoid else contextlib.nullcontext():
        run_main(adapt, *retraining_flags, "--checkpoint", tmp_path / "own", "--fresh", "--out", tmp_path / "new")


@pytest.mark.parametrize("flags", ["--align-steps 2", "--train above"])
def test_farskip_is_neither_aligned_nor_trained_in_part(flags, mixture):
    words = f"{flags} takes a wiring with.*of standard, .*not farskip".replace(" 2", "")
    refused(words, adapt.main, [*mixture, *flags.split()])


def test_a_ladder_is_trained_and_the_weights_of_the_lowest_loss_are_written(
    training_flags, tmp_path, monkeypatch, capfd
):
    weights = []
    measure = adapt.validation_loss

    def validation_loss(model, *args):
        weights.append({name: p.full_tensor().clone() for name, p in model.named_parameters()})
        nats, kl = measure(model, *args)
        return nats + 9 * (len(weights) == 3), kl  # so the second one is the lowest

    monkeypatch.setattr(adapt, "validation_loss", validation_loss)
    adapt.main([*training_flags, "--ladder"])
    out = tmp_path / "out"
    printed = capfd.readouterr().out
    losses = read_losses(tmp_path / "out")
    assert checkpoint.read_config(out).wiring == "ladder" and "wiring ladder" in printed
    assert [line["step"] for line in losses] == list(range(41)) and not (tmp_path / "out.run").exists()
    rates = [line["lr"] for line in losses[1:]]  # four steps of warm-up, then down to a tenth
    assert rates[1] == pytest.approx(1.5e-3) and rates[3] == 3e-3 and rates[-1] == pytest.approx(3e-4)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    valid = {line["step"]: line["valid"] for line in losses if "valid" in line}
    assert list(valid) == [0, 20, 40] and valid[0] > np.log(300) and valid[20] < 4.5
    assert f"{valid[20]:.4f} nats per token at step 20\n" in printed
    run_main(evaluate, "--checkpoint", out, "--text", tmp_path / "valid.txt", "--window", "16")
    assert json.loads(capfd.readouterr().out)["nats_per_token"] < 5
    written = checkpoint.Weights(out)
    assert all(torch.equal(written.read(name), weight) for name, weight in weights[1].items())
    assert weights[0]["layers.0.feed_forward.w1.weight"].std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert sharding.fresh("experts.w1.weight", (4, 101, 48), 0).std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert not weights[0]["layers.0.feed_forward.w2.weight"].any() and (weights[0]["norm.weight"] == 1).all()


def test_a_teacher_s_own_loss_is_the_first_that_is_printed(retraining_flags, tmp_path, capfd):
    flags = [*retraining_flags, "--steps", "1"]
    adapt.main(flags)
    run_main(adapt, *flags, "--wiring", "standard", "--out", tmp_path / "out2")
    first = read_losses(tmp_path / "out")[0]
    own = read_losses(tmp_path / "out2")[0]
    assert first["teacher"] == pytest.approx(own["valid"]) and first["valid"] != own["valid"] and "teacher" not in own
    words = ", ".join(f"{name} {first[name]:.4f}" for name in ("teacher", "valid", "kl"))
    assert f"step 0: {words} nats" in capfd.readouterr().out and "kl" not in own


def test_updates_smaller_than_a_step_of_bfloat16_count_on_average():
    x = torch.cat([torch.randn(100_000).bfloat16().float(), torch.tensor([0.0, 0.5, -0.25, 1.0])])
    moved = sharding.dithered(x, 3)
    assert torch.equal(moved.bfloat16().float(), x) and (moved != x).float().mean() > 0.98
    assert torch.equal(sharding.dithered(x, 3), moved) and not torch.equal(sharding.dithered(x, 4), moved)
    update = 1e-4 * x.abs()  # a fortieth to an eightieth of a step
    assert torch.equal((x + update).bfloat16().float(), x)
    change = ((moved + update).bfloat16().float() - x).double()
    assert change.sum().item() == pytest.approx(update.double().sum().item(), rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:FSDP2")
@pytest.mark.parametrize("how", ["distilled", "fresh", "plain", "mixture"])
def test_ranks_give_the_losses_of_one(how, retraining_flags, mixture, tmp_path):
    """Of eight windows a step, three ranks get three, three and two."""
    flags = mixture if how == "mixture" else [*retraining_flags, *[f"--{how}"] * (how != "distilled")]
    adapt.main(flags)
    run_ranks(3, train_on_rank, [*flags, "--out", str(tmp_path / "out2"), "--recompute", "--micro-batch", "2"])
    check_same_run(tmp_path / "out", tmp_path / "out2", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wiring", ["spd:1,2/2", "farskip"])
def test_compiled_the_losses_are_the_same(wiring, retraining_flags, mixture, tmp_path):
    flags = [*(mixture if wiring == "farskip" else retraining_flags), "--wiring", wiring]
    adapt.main(flags)
    run_main(adapt, *flags, "--out", tmp_path / "out2", "--compile", "--recompute")
    one, two = ([line["train"] for line in read_losses(tmp_path / name)[1:]] for name in ("out", "out2"))
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.slow
def test_killed_at_any_step_it_resumes_with_the_same_losses(mixture, tmp_path, monkeypatch):
    check_resumption([*mixture, "--fresh"], tmp_path, monkeypatch)


@pytest.mark.slow
def test_killed_before_any_change_it_resumes_and_its_output_is_complete_or_absent(training_flags, tmp_path):
    how = "--batch 2 --steps 2 --eval-every 1 --valid-tokens 64 --out"
    (tmp_path / "kills").mkdir()  # in a new process: one that has run a backward pass cannot fork
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(_check_kills, [*training_flags, *how.split()], tmp_path / "kills").result()


def _check_kills(flags, folder):
    check_kills(lambda out: run_main(adapt, *flags, out), folder, step=17)


def test_a_loss_that_is_not_finite_ends_it_and_the_best_weights_stay(training_flags, tmp_path):
    words = "smaller --lr than 1e\\+09 and another --out; .*/best-\\* holds"
    refused(words, adapt.main, [*training_flags, "--lr", "1e9"])
    load_folder(tmp_path / "out.run" / "best-0")  # whose weights are finite
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_clear_line(training_flags, monkeypatch):
    monkeypatch.setattr(sharding.dcp, "save", lambda *_, **__: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    refused("cannot write .*state-0.*: .*No space left", adapt.main, training_flags)


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), ending.Terminated("SIGTERM")])
def test_a_signal_while_it_saves_is_no_write_error(signal, training_flags, monkeypatch):
    def save(*args, **kwargs):
        raise sharding.dcp.api.CheckpointException("", {0: (signal, None)})

    monkeypatch.setattr(sharding.dcp, "save", save)
    with pytest.raises(type(signal)) as error:
        adapt.main(training_flags)
    assert error.value is signal


def test_bad_flags_leave_nothing(training_flags, retraining_flags, tiny, tmp_path):
    (tmp_path / "empty").write_text("")
    write_json(tmp_path / "chat.jsonl", {"messages": CHAT})
    run_main(quantize, "--checkpoint", tiny, "--mode", "int8", "--out", tmp_path / "int8")
    for name, wiring in ("desync", "desync"), ("other", None):
        write_model(tmp_path / name, rewired(checkpoint.read_config(tiny), wiring))
        writing.copy_tokenizer(tiny, tmp_path / name)
    texts = ["tick tock says the clock on the wall of the old house by the sea"] * 40
    train_tokenizer(texts, 300, tmp_path / "other" / "tokenizer.model")
    for flags, more, message in (
        (training_flags, "--seq-len 64 --valid-tokens 10", "--valid holds 11 tokens; a window takes 65"),
        (training_flags, "--text DIR/empty", "--text holds 0 tokens"),
        (training_flags, "--text DIR/chat.jsonl", "chat.jsonl line 1: no chat template"),
        (training_flags, "--out DIR", "already exists"),
        (retraining_flags, "--distill DIR/int8", "int8 is quantized"),
        (retraining_flags, "--distill DIR/desync", "desync .* e.g. desync/8"),
        (retraining_flags, "--distill DIR/other", "other has another vocabulary"),
        (retraining_flags, "--plain --distill DIR/int8", "--distill: not allowed with argument --plain"),
        (retraining_flags, "--wiring upper-bound", "upper-bound cannot be trained"),
        (retraining_flags, "--seq-len 4096", "--seq-len 4096 .* 64"),
    ):
        refused(message, adapt.main, [*flags, *more.replace("DIR", str(tmp_path)).split()])
        assert not dist.is_initialized() and not list(tmp_path.glob("out*"))
