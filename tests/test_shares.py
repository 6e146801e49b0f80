"""--shares auto, and the line that ladder/ranks/invite.py prints for the other machines."""

import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from configs import BASE, change
from helpers import ROOT, random_model, write_model
from running import call_main, free_port, main_on_ranks, run_ranks

import generate
from ladder.command_line import flags
from ladder.ranks import invite, shares


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
    """A world whose ranks read `speeds`, in bytes per second, and have as much memory as this one."""

    alone, rank, device = False, 0, torch.device("cpu")

    def __init__(self, *speeds):
        self.tp_size, self.answers, self.said = len(speeds), [list(speeds)], []

    def gather(self, value):
        return self.answers.pop() if self.answers else [value] * self.tp_size

    def say(self, text):
        self.said.append(text)


def test_measured_shares(monkeypatch):
    monkeypatch.setattr(shares.benchmarking, "read_bandwidth", lambda device, world: 1e9)
    config = change(BASE, n_heads=8, n_kv_heads=4)
    world = Measured(24e9, 8e9)
    numbers = shares.measured_shares(world, config, torch.float32)
    assert numbers == (3, 1) and world.said == ["--shares 3,1, since the ranks read 24.0, 8.0 GB/s"]
    whole = shares.slices_bytes(shares.shard_on_meta(config, torch.float32, 0, (1,))[1])
    monkeypatch.setattr(shares, "free_bytes", lambda device: 2 * whole / 0.8 / 2)
    assert shares.measured_shares(Measured(24e9, 8e9), config, torch.float32) == (1, 1)  # half the weights fit
    for wiring in "spd", "spd/2":  # whose function unequal shares would change
        world = Measured(24e9, 8e9)
        assert shares.measured_shares(world, change(config, wiring=wiring), torch.float32) == (1, 1)
        assert not world.said
    assert shares.measured_shares(SimpleNamespace(alone=True, tp_size=1), config, torch.float32) == (1,)


def test_ranks_measure_themselves(tmp_path):
    """By measured shares the text is that of a rank alone."""
    config = change(BASE, n_kv_heads=3)
    write_model(tmp_path, config, random_model(config).state_dict())
    flags = "--checkpoint", tmp_path, "--prompt", "ids:1,2,3", "--max-new-tokens", 4, "--dtype", "float32"
    [(alone, _)] = main_on_ranks(1, generate.main, *flags)
    found = run_ranks(2, measured_texts, [str(flag) for flag in flags])
    assert found[0] == (alone, (2, 1))


def measured_texts(world, words):
    """Run generate.py with --shares auto where the first rank's memory is twice as fast."""
    given = shares.benchmarking.read_bandwidth
    shares.benchmarking.read_bandwidth = lambda device, world: 2e10 / (1 + world.rank)
    before = world.shares
    try:
        out, _ = call_main(world, generate.main, [*words, "--shares", "auto"])
        return out, world.shares
    finally:
        world.shares, shares.benchmarking.read_bandwidth = before, given


def test_shares_flag():
    assert flags.shares("auto") == "auto" and flags.shares("3,1") == (3, 1)
    for text in "automatic", "3,", "0,1":
        with pytest.raises(Exception, match="is not a whole number from 1"):
            flags.shares(text)


# ---- The line for other machines -------------------------------------------------------------------------------------


def test_the_printed_line_starts_the_other_machine(tmp_path):
    write_model(tmp_path, BASE, random_model(BASE).state_dict())
    port = free_port()
    run = [generate.__file__, "--checkpoint", str(tmp_path), "--prompt", "ids:1,2,3", "--max-new-tokens", "4"]
    here = ["-m", "ladder.ranks.invite", "--address", "127.0.0.1", "--port", str(port), *run]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    first = subprocess.Popen([sys.executable, *here], **pipes)
    said = []
    try:
        while not (said and "waiting for" in said[-1]):
            line = first.stderr.readline()
            assert line, said
            said.append(line)
        [line] = [line for line in said if line.startswith("  torchrun ")]
        assert f"torch {torch.__version__}" in "".join(said)
        assert re.search(rf"the files of {tmp_path} \(digest [0-9a-f]{{8}}\)", "".join(said))
        words = line.split()
        second = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words[1:]], timeout=120, **pipes)
        out, error = first.communicate(timeout=60)
    finally:
        first.send_signal(signal.SIGKILL)
    assert (first.returncode, second.returncode) == (0, 0), error + second.stderr
    assert out and not second.stdout  # the first machine prints the text


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "give the script that all machines start, and its flags"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["--nnodes", "1", "generate.py"], "'1' is not a whole number from 2"),
        (["--address", "192.0.2.7", "generate.py"], "cannot listen at --address 192.0.2.7 --port 29500: Cannot assign"),
    ],
)
def test_refused_invitations(monkeypatch, words, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(invite.InputError, match=re.escape(message)):
        invite.main(words)


def test_a_line_for_each_machine(monkeypatch):
    monkeypatch.chdir(ROOT)
    args = invite.parse(["--nnodes", "3", "--nproc_per_node", "2", "generate.py", "--chat", "a b"])
    assert [" ".join(invite.command(args, "10.0.0.1", node)) for node in (1, 2)] == [
        f"torchrun --nnodes=3 --nproc_per_node=2 --node_rank={node} --master_addr=10.0.0.1 --master_port=29500 "
        "generate.py --chat a b"
        for node in (1, 2)
    ]
    monkeypatch.setattr(invite, "address_towards", lambda host: "")
    with pytest.raises(invite.InputError, match="no way out: give the address"):
        invite.main(["generate.py"])
