"""Generate as generate.py does, over an emulated link if asked for, and say what communication costs.

torchrun --standalone --nproc_per_node=2 -m extras.measure --checkpoint demo --prompt "Once" --link pcie --exposed
python -m extras.measure --model 8b:8 --prompt-length 64 --simulate-tp 8 --link pcie --exposed
"""

import dataclasses
import sys

import generate
from decoding.sampling import pad
from extras.measure import exposed, link
from runtime import benchmarking, cli, launch, report, writing
from runtime.cli import number
from runtime.errors import InputError


def parse(argv):
    p = cli.Parser(__doc__)
    generate.add_flags(p)
    g = p.add_argument_group("measuring", "what communication costs, here or elsewhere: extras/measure/README.md")
    words = "emulate a link between the ranks: a name such as pcie, or its numbers, e.g. 100us+50gbps; tcp+ before it"
    g.add_argument("--link", type=link.parse, metavar="LINK", help=f"{words} lets several latencies run at once")
    g.add_argument("--simulate-tp", type=number(int, 2), metavar="N", help="run rank 0 of N alone, over such a link")
    g.add_argument("--exposed", action="store_true", help="report how much communication was not hidden")
    args = p.parse_args(argv)
    if args.draft or cli.is_chat(args):
        raise InputError("extras.measure measures plain decode steps: without --draft or a chat")
    return args


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args) | ({"shares": None} if args.simulate_tp else {}))
    if args.link or args.exposed or args.simulate_tp:
        world = link.emulate(world, args.link or link.FREE, args.simulate_tp, args.shares)
    setup = generate.set_up(args, world)
    done, texts = generate.run(setup, world)
    result = report.result(setup, world, done, texts) | {"link": args.link and dataclasses.asdict(args.link)}
    if args.exposed:
        world.say("measuring what communication costs ...")
        cases = exposed.make_cases(setup.runner, *pad(setup.prompts, world.device), world)
        result["exposed"] = {kind: exposed.measure(world, {kind: case})[kind] for kind, case in cases.items()}
    if world.rank == 0:
        head = "PREDICTED times of one rank alone, " if world.simulated else ""
        head += f"over link {args.link.name}: " if args.link else ""
        print(head + report.summary(result), file=sys.stderr)
        for kind, measured in result.get("exposed", {}).items():
            print(exposed.summary(kind, measured), file=sys.stderr)
        if args.json:
            writing.append_line(args.json, benchmarking.environment(world) | result)


if __name__ == "__main__":
    launch.run(main)
