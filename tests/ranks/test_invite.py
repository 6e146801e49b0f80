"""The line that ladder/ranks/invite.py prints for the other machines."""

import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from cases import refused
from configs import BASE
from helpers import ROOT, write_model
from running import free_port

import generate
from ladder.ranks import invite


def test_the_printed_line_starts_the_other_machine(tmp_path):
    write_model(tmp_path, BASE)
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
        words = shlex.split(line)  # the folder's name may have a space
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
        (["--address", "::1", "generate.py"], "--address ::1 is no IPv4 address"),
        (["--adress", "10.0.0.1", "generate.py", "--checkpoint", "demo"], "did you mean --address?"),
        (["generate.py", "--checkpoint", "nowhere"], "--checkpoint nowhere is no folder here"),
        (["generate.py", "--checkpoint=nowhere"], "--checkpoint nowhere is no folder here"),
    ],
)
def test_refused_invitations(monkeypatch, words, message):
    monkeypatch.chdir(ROOT)
    refused(re.escape(message), invite.main, words)


def test_a_line_for_each_machine(monkeypatch):
    monkeypatch.chdir(ROOT)
    args = invite.parse(["--nnodes", "3", "--nproc_per_node", "2", "generate.py", "--chat", "a b"])
    assert [" ".join(invite.command(args, "10.0.0.1", node)) for node in (1, 2)] == [
        f"torchrun --nnodes=3 --nproc_per_node=2 --node_rank={node} --master_addr=10.0.0.1 --master_port=29500 "
        "generate.py --chat a b"
        for node in (1, 2)
    ]
    monkeypatch.setattr(invite, "address_towards", lambda host: "")
    refused("no way out: give the address", invite.main, ["generate.py"])
