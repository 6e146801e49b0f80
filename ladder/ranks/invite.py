"""Start a script on this machine, and print the line that starts it on the others.

python -m ladder.ranks.invite generate.py --checkpoint checkpoints/smollm2 --prompt Hello    # on two machines
python -m ladder.ranks.invite --nnodes 3 --nproc_per_node 2 serve.py --checkpoint DIR        # on three, two ranks each

Its own flags stand before the script. It picks this machine's address, says what has to be equal on all machines, and
becomes torchrun, which waits for them. When they have met, the ranks compare themselves; a run whose machines differ
ends with a line that says in what.
"""

import ipaddress
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
    """Return the flags, with the script and its own flags as a list in `script`. Raises InputError."""
    first = next((i for i, word in enumerate(argv) if word.endswith(".py")), len(argv))
    p = flags.Parser(__doc__)
    p.add_argument("--nnodes", type=flags.number(int, 2), default=2, metavar="N", help="machines, this one included")
    p.add_argument("--nproc_per_node", type=flags.count, default=1, metavar="N", help="ranks of each machine")
    p.add_argument("--address", metavar="IP", help="of this machine, for the others; default: that on the way out")
    p.add_argument("--port", type=flags.number(int, 1, 65535), default=29500, help="of this machine, for the others")
    args = p.parse_args(argv[:first])
    args.script = argv[first:]
    if not args.script:
        raise InputError("give the script that all machines start, and its flags: e.g. generate.py --checkpoint demo")
    if not os.path.isfile(args.script[0]):
        raise InputError(f"no such script: {args.script[0]}")
    return args


def check_address(address, port):
    """Raise InputError if this machine cannot listen at the address and port."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise InputError(f"--address {address} is no IPv4 address, such as 10.0.0.1") from None
    try:
        socket.create_server((address, port)).close()
    except OSError as e:
        raise InputError(
            f"cannot listen at --address {address} --port {port}: {os.strerror(e.errno)}; give others"
        ) from None


def named_checkpoint(script):
    """Return the folder that --checkpoint names among a script's flags, or None. Raises InputError if there is none."""
    for word, after in zip(script, [*script[1:], None], strict=True):
        flag, equals, value = word.partition("=")
        folder = value if equals else after
        if flag == "--checkpoint" and folder is not None:
            if not os.path.isdir(folder):
                raise InputError(f"--checkpoint {folder} is no folder here")
            return folder
    return None


def requirements(script):
    """Return what has to be equal on all machines, in words. script: the name of a script, and its flags."""
    words = [f"torch {torch.__version__}"]
    commit = git_commit()
    if commit:
        words.append(f"commit {commit.removesuffix('+')} of this code" + " and the same edits" * commit.endswith("+"))
    folder = named_checkpoint(script)
    if folder:
        words.append(f"the files of {folder} (digest {digest(folder)})")
    return ", ".join(words)


def command(args, address, node):
    """Return torchrun's command line for a machine, as a list. node: its number, 0 for this one."""
    each = [f"--nnodes={args.nnodes}", f"--nproc_per_node={args.nproc_per_node}", f"--node_rank={node}"]
    return ["torchrun", *each, f"--master_addr={address}", f"--master_port={args.port}", *args.script]


def main(argv=None):
    args = parse(sys.argv[1:] if argv is None else argv)
    address = args.address or address_towards(ELSEWHERE)
    if not address:
        raise InputError(
            "this machine has no way out: give the address by which the others reach it as --address, before the script"
        )
    check_address(address, args.port)
    others = args.nnodes - 1
    where = "the other machine" if others == 1 else f"the {others} other machines, a line for each"
    needed = requirements(args.script)
    lines = [f"  {shlex.join(command(args, address, node))}" for node in range(1, args.nnodes)]
    text = f"on {where}, in a clone of this project with its .venv active:\n\n" + "\n".join(lines)
    text += f"\n\nequal on all has to be: {needed}"
    text += f"\nwaiting for {where.partition(',')[0]} at {address}, port {args.port}, for 15 minutes at most ..."
    print(text, file=sys.stderr, flush=True)
    here = command(args, address, 0)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *here[1:]])


if __name__ == "__main__":
    launch.run(main)
