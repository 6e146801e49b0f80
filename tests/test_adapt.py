"""Training: the loss falls, the best weights are written in their wiring, bad input leaves nothing."""

import pytest
import torch

import adapt
import checkpoint
import tp
from tokenizer import load_tokenizer

STORIES = ["Once upon a time there was a little dog.", "The dog ran to the park.", "A cat sat on the mat and slept."]
SMALL = "--vocab-size 300 --dim 32 --n-layers 2 --n-heads 4 --n-kv-heads 2 --intermediate-size 48 --seq-len 16"


@pytest.fixture
def flags(tmp_path):
    """The flags of a tiny training; texts repeat, so there is something to learn."""
    text = "\n<|endoftext|>\n".join(STORIES * 20)
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text(text)
    files = ["--text", tmp_path / "train.txt", "--valid", tmp_path / "valid.txt", "--out", tmp_path / "out"]
    return [*map(str, files), *SMALL.split(), "--steps", "40", "--warmup", "5", "--eval-every", "20", "--batch", "8"]


def test_a_ladder_is_trained_and_written(flags, tmp_path, capfd):
    adapt.main([*flags, "--ladder", "--dtype", "float32"])
    printed = capfd.readouterr().out
    config = checkpoint.read_config(tmp_path / "out")
    assert config.wiring == "ladder" and "ladder" in printed
    tokenizer = load_tokenizer(tmp_path / "out", config.vocab_size)
    ids = adapt.encode(tokenizer, STORIES * 20)
    assert ids[0] == 1 and (ids == 2).sum() == 60  # BOS text EOS, of each story
    net = tp.load_shard(config, checkpoint.Weights(tmp_path / "out"), torch.float32, "cpu")
    nats = adapt.validation_loss(net, ids, 16, 8)
    assert nats < 4  # a uniform guess is 5.7
    with torch.no_grad():  # each token given those before it in its window
        told = [net(ids[None, i : i + 16])[0].log_softmax(-1) for i in range(0, len(ids) - 16, 16)]
    told = [-row[range(16), ids[16 * i + 1 : 16 * i + 17]].mean().item() for i, row in enumerate(told)]
    assert nats == pytest.approx(sum(told) / len(told), rel=1e-4)
    assert f"best validation loss {nats:.4f}" in printed
