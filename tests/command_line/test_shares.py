"""--shares auto: what is measured, and what follows from it."""

import argparse

import pytest
import torch
from cases import refused
from configs import BASE, change
from helpers import write_model
from running import call_main, main_on_ranks, run_ranks

import generate
from ladder.command_line import flags, shares


@pytest.mark.parametrize(
    "speeds, room, wanted",
    [
        ((24, 12), (9, 9), (2 / 3, 1 / 3)),
        ((24, 12), (0.5, 9), (0.5, 0.5)),  # the faster one has no room for more than a half
        ((10, 20, 10), (9, 0.25, 9), (0.375, 0.25, 0.375)),
        ((30, 20, 10), (0.3, 0.4, 9), (0.3, 0.4, 0.3)),  # what the first lacks room for overfills the second
        ((24, 12), (0.2, 0.6), (0.25, 0.75)),  # together too little: by room
    ],
)
def test_fractions(speeds, room, wanted):
    assert shares.fractions(speeds, room) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "wanted, numbers",
    [
        ((0.5, 0.5), (1, 1)),
        ((0.52, 0.48), (1, 1)),  # level but for noise
        ((2 / 3, 1 / 3), (2, 1)),
        ((0.745, 0.255), (3, 1)),
        ((0.6, 0.4), (3, 2)),
        ((0.5, 0.25, 0.25), (2, 1, 1)),
        ((0.97, 0.03), (7, 1)),  # one of 8 heads, which is more than the second is to have
    ],
)
def test_whole_numbers(wanted, numbers):
    config = change(BASE, n_heads=8, n_kv_heads=8)
    assert shares.whole_numbers(wanted, lambda numbers: shares.fits(config, numbers)) == numbers


class Measured:
    """A world whose ranks have so much room, in bytes, and read at these speeds, in bytes per second."""

    rank = 0

    def __init__(self, room, speeds, device="cpu"):
        self.tp_size = len(speeds)
        self.device = torch.device(device)
        self.devices = range(len(speeds))  # each rank has its own
        self.answers = [list(room), list(speeds)]
        self.given = []
        self.said = []

    def gather(self, value):
        self.given.append(value)
        return self.answers.pop(0)

    def say(self, text):
        self.said.append(text)


@pytest.fixture
def eight_heads(monkeypatch):
    """A function that returns the shares of a model of eight heads, and what is said. room: in parts of its weights."""
    monkeypatch.setattr(shares.benchmarking, "read_bandwidth", lambda device, world, size: 0)
    config = change(BASE, n_heads=8, n_kv_heads=8)
    whole = shares.slices_bytes(shares.shard_on_meta(config, torch.float32, 0, (1,))[1])

    def measured(room, speeds, **changes):
        world = Measured([part * whole for part in room], speeds)
        return shares.measured_shares(world, change(config, **changes), torch.float32), world.said

    return measured


def test_measured_shares(eight_heads):
    assert eight_heads((2, 2), (24e9, 8e9)) == ((3, 1), ["--shares 3,1, since the ranks read 24.0, 8.0 GB/s"])
    words = "the ranks read 24.0, 8.0 GB/s and have room for 0.5, 2 of the weights"
    assert eight_heads((0.5, 2), (24e9, 8e9)) == ((1, 1), [f"--shares 1,1, since {words}"])
    for wiring in "spd", "spd/2":  # whose function unequal shares would change
        words = f"--shares auto: equal ones, since with others wiring {wiring} is another function"
        assert eight_heads((2, 2), (24e9, 8e9), wiring=wiring) == ((1, 1), [words])


def test_room_is_shared_by_the_ranks_of_a_memory(monkeypatch, eight_heads):
    monkeypatch.setattr(shares, "free_bytes", lambda device: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for device, room in ("cpu", 400), ("cuda:0", 800):  # each rank has a GPU of its own
        world = Measured((1e9, 1e9), (1, 1), device)
        shares.measured_shares(world, BASE, torch.float32)
        assert world.given[0] == room
    monkeypatch.setattr(shares, "free_bytes", lambda device: 0)  # below a limit of the system, and nothing to read
    world = Measured((1e9, 1e9), (1, 1))
    shares.measured_shares(world, BASE, torch.float32)
    assert world.given == [0.4, 1]


def test_ranks_measure_themselves(tmp_path):
    """By measured shares the text is that of a rank alone."""
    config = change(BASE, n_kv_heads=3)
    write_model(tmp_path, config)
    words = ["--checkpoint", str(tmp_path), *RUN]
    [(alone, _)] = main_on_ranks(1, generate.main, *words)
    found = run_ranks(2, measured_texts, [words, words])
    assert found[0] == (alone, (2, 1))


def test_ranks_of_other_files_are_refused(tmp_path):
    """They would measure otherwise, or not at all: one of these wirings has no measured shares."""
    folders = [tmp_path / wiring for wiring in ("standard", "spd")]
    for folder in folders:
        write_model(folder, change(BASE, wiring=folder.name))
    message = "not started alike: rank 1 with contents of --checkpoint"
    words = [["--checkpoint", str(folder), *RUN] for folder in folders]
    assert all(message in error for error in run_ranks(2, measured_error, words))


RUN = "--prompt", "ids:1,2,3", "--max-new-tokens", "4", "--dtype", "float32"


def measured_texts(world, words):
    """Run generate.py with --shares auto where the first rank's memory is twice as fast. words: of each rank."""
    given = shares.benchmarking.read_bandwidth
    shares.benchmarking.read_bandwidth = lambda device, world, size: 2e10 / (1 + world.rank)
    before = world.shares
    try:
        out, _ = call_main(world, generate.main, [*words[world.rank], "--shares", "auto"])
        return out, world.shares
    finally:
        world.shares = before
        shares.benchmarking.read_bandwidth = given


def measured_error(world, words):
    return refused("not started alike", measured_texts, world, words)


def test_shares_flag():
    assert flags.parse_shares("auto") == "auto" and flags.parse_shares("3,1") == (3, 1)
    for text, words in ("Auto", "neither auto nor numbers"), ("3,", "is not a whole number from 1"), ("0,1", "from 1"):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            flags.parse_shares(text)
