"""Generate as generate.py does, over an emulated link, and say what communication costs.

torchrun --standalone --nproc_per_node=2 -m extras.measure --checkpoint demo --prompt "Once" --link pcie --exposed
python -m extras.measure --model 8b:8 --prompt-length 64 --simulate-tp 8 --link pcie --exposed
"""

import generate
from extras.measure import link
from runtime import cli
from runtime.cli import number
from runtime.errors import InputError


def parse(argv):
    p = cli.Parser(__doc__)
    generate.add_flags(p)
    g = p.add_argument_group("measuring", "extras/measure/README.md")
    words = "emulate a link between the ranks: a name such as pcie, or its numbers, e.g. 100us+50gbps; tcp+ before it"
    g.add_argument("--link", type=link.parse, metavar="LINK", help=f"{words} lets several latencies run at once")
    g.add_argument("--simulate-tp", type=number(int, 2), metavar="N", help="run rank 0 of N alone, over such a link")
    g.add_argument("--exposed", action="store_true", help="report how much communication was not hidden")
    g.add_argument("--profile", metavar="DIR", help="write a trace of a prefill and a decode step for each rank")
    args = p.parse_args(argv)
    if args.draft or args.interactive:
        raise InputError("extras.measure measures plain decode steps: without --draft or a chat")
    return args
