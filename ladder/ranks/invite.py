"""Start a script on this machine and print the line that starts it on the others.

python -m ladder.ranks.invite generate.py --checkpoint checkpoints/smollm2 --prompt Hello      # on this machine and one
python -m ladder.ranks.invite --nnodes 3 --nproc_per_node 2 serve.py --checkpoint DIR

It picks this machine's address, says what has to be equal on all machines, and becomes torchrun, which waits for them.
The ranks compare themselves when they have met, and a run whose machines differ ends with a line that says in what.
"""

import argparse
import os
import shlex
import socket
import sys

import torch

from ladder.benchmarking import git_commit
from ladder.checkpoints.compare import digest
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.ranks import launch
from ladder.ranks.gloo import address_towards

ELSEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737): the way to it is the way out of this machine


def parse(argv):
    p = flags.Parser(__doc__)
    p.add_argument("--nnodes", type=flags.number(int, 2), default=2, metavar="N", help="machines, this one included")
    p.add_argument("--nproc_per_node", type=flags.count, default=1, metavar="N", help="ranks of each machine")
    p.add_argument("--address", metavar="IP", help="of this machine, for the others; default: that on the way out")
    p.add_argument("--port", type=flags.number(int, 1, 65535), default=29500, help="of this machine, for the others")
    p.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="e.g. generate.py, and its flags")
    args = p.parse_args(argv)
    if not args.script:
        raise InputError("give the script that all machines start, and its flags: e.g. generate.py --checkpoint demo")
    if args.script[0] != "-m" and not os.path.isfile(args.script[0]):
        raise InputError(f"no such script: {args.script[0]}")
    return args


def check_address(address, port):
    """Raise InputError if this machine cannot listen at the address and port."""
    try:
        socket.create_server((address, port)).close()
    except OSError as e:
        raise InputError(f"cannot listen at --address {address} --port {port}: {os.strerror(e.errno)}") from None


def requirements(script):
    """Return what has to be equal on all machines, in words. script: the name of a script, and its flags."""
    words = [f"torch {torch.__version__}"]
    commit = git_commit()
    if commit:
        words.append(f"commit {commit.removesuffix('+')} of this code" + " and the same edits" * commit.endswith("+"))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    folder = parser.parse_known_args(script[1:])[0].checkpoint
    if folder and os.path.isdir(folder):
        words.append(f"the files of {folder} (digest {digest(folder)})")
    return ", ".join(words)


def command(args, address, node):
    """Return torchrun's command line for a machine, as a list. node: its number, 0 for this one."""
    each = [f"--nnodes={args.nnodes}", f"--nproc_per_node={args.nproc_per_node}", f"--node_rank={node}"]
    return ["torchrun", *each, f"--master_addr={address}", f"--master_port={args.port}", *args.script]


def main(argv=None):
    args = parse(argv)
    address = args.address or address_towards(ELSEWHERE)
    if not address:
        raise InputError("this machine has no way out: give the address that the others reach it by as --address")
    check_address(address, args.port)
    others = args.nnodes - 1
    where = "the other machine" if others == 1 else f"the {others} other machines, a line for each"
    lines = [f"  {shlex.join(command(args, address, node))}" for node in range(1, args.nnodes)]
    text = f"on {where}, in a clone of this project with its .venv active:\n\n" + "\n".join(lines)
    text += f"\n\nequal on all has to be: {requirements(args.script)}"
    text += f"\nwaiting for {where.partition(',')[0]} at {address}, port {args.port} ..."
    print(text, file=sys.stderr, flush=True)
    here = command(args, address, 0)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *here[1:]])


if __name__ == "__main__":
    launch.run(main)
