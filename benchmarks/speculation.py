"""What speculation costs over links, in times of its parts and in whole generations: a line of JSON for each.

torchrun --standalone --nproc_per_node=2 -m benchmarks.speculation --links 0,1000,3000 --generate 64 \
    --json speculation.jsonl

The weights are random, those of a draft are the model's in another wiring, and no part takes another time because of
what is accepted. So the parts are timed as they are, all of them in turns: a plain step, a step of each draft, the
verification of each number of proposals, and a whole pass of each draft with the first of these numbers. In whole
generations, with this number, a proposal stands by a coin of known rate, the same on all ranks.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from unittest import mock

import torch

import generate
from benchmarks.lines import command
from benchmarks.overlap import links
from decoding import speculative
from decoding.sampling import Sampler
from formats.checkpoint import DTYPES, SIZES
from measure import link
from measure.report import environment
from measure.timing import in_turns, quartiles, timed
from model import InputError
from runtime import cli, launch, watch, writing
from runtime.cli import count, number

DRAFTS = ["wiring:upper-bound", "wiring:spd", "wiring:delayed", "wiring:ladder", "wiring:hybrid:8"]


def seconds_per_token(draft, verification, rate, count):
    """Where proposals stand with probability `rate` each; draft, verification: seconds of a step and of a pass."""
    return (count * draft + verification) / speculative.expected(rate, count)


def imposed(rate, seed):
    """Within it, each proposal stands with probability `rate`; Sampler.accept works as ever, to no effect."""
    accept, generator = Sampler.accept, torch.Generator().manual_seed(seed)

    def decide(sample, logits, proposed, q):
        ids, _ = accept(sample, logits, proposed, q)
        stands = torch.rand(proposed.shape, generator=generator) < rate
        return ids, stands.long().cumprod(-1).sum(-1).to(ids.device)

    return mock.patch.object(Sampler, "accept", decide)


class Bench:
    """A model of random weights and its drafts {name: Draft}, behind a prompt that is in their cache."""

    def __init__(self, args, configs, world):
        self.args, self.world, self.sample = args, world, Sampler(0, device=world.device)
        self.model = generate.load_model(args.config, None, args.dtype, world)
        length = args.prompt_length + max(args.generate or 0, 2) + max(args.counts) + 1
        cache = generate.make_cache(self.model, 1, length)
        self.runner = generate.Runner(self.model, cache, not args.eager)
        self.drafts = {}
        for name, config in configs.items():
            runner = generate.Runner(speculative.rewire(self.model, config), cache, not args.eager)
            self.drafts[name] = speculative.Rewired(speculative.Fixed(args.counts[0]), runner)
        self.prompt = [1 + i % 1000 for i in range(args.prompt_length)]
        self.runner.prefill(*generate.pad([self.prompt], world.device))

    def parts(self):
        """{(part, draft or None, number of proposals): what runs it once}."""
        texts, first = [self.prompt], self.args.counts[0]
        found = {("step", None, 0): functools.partial(self.runner.step, texts, self.sample)}
        for n in self.args.counts:
            ids = torch.zeros(1, n, dtype=torch.long, device=self.world.device)
            found["verification", None, n] = functools.partial(found["step", None, 0], proposed=(ids, None))
        for name, draft in self.drafts.items():
            found["draft step", name, 1] = functools.partial(draft.propose, 1, texts, [False], self.sample)
            found["pass", name, first] = functools.partial(self.run_pass, draft, texts, first)
        return found

    def run_pass(self, draft, texts, n):
        ids, q, _ = draft.propose(n, texts, [False], self.sample)
        self.runner.step(texts, self.sample, (ids, q))

    def over(self, name, run):
        """What run() returns, over a link; all ranks begin it together."""
        self.world.group.link = self.args.links[name]
        ops, one = torch.ops._c10d_functional, self.model.norm.weight.new_zeros(1)
        ops.wait_tensor(ops.all_reduce_(one, "sum", self.world.group.group_name))
        return run()

    def times(self):
        """{(name of a link, *part): [seconds of each round]}, all of them in turns."""
        keys = [*itertools.product(self.args.links, parts := self.parts())]
        for part, run in parts.items():  # compiles
            seconds = timed(self.world.device, run)
            run()
            if self.world.rank == 0:
                print(*part, f"{seconds:.1f} s at first", file=sys.stderr, flush=True)
        ways = {
            (name, *part): functools.partial(self.over, name, functools.partial(timed, self.world.device, parts[part]))
            for name, part in keys
        }
        with generate.without_guards(self.runner):
            start = time.perf_counter()
            in_turns(ways, 1)
            fitting = int(self.args.seconds / (time.perf_counter() - start))
            return in_turns(ways, min(self.world.gather(max(3, min(self.args.rounds, fitting)))))

    def generations(self):
        """(name of a link, draft or None, number of proposals, rate or None, Generation), all in turns, behind times().

        The seeds are those of the rounds: the coins of all links and drafts fall alike.
        """
        args = self.args
        drafted = [*itertools.product(self.drafts, args.counts[:1], args.rates)]
        with generate.without_guards(self.runner):
            for seed, name, way in itertools.product(range(args.repeats), args.links, [(None, 0, None), *drafted]):
                draft, _, rate = way
                chance = contextlib.nullcontext() if draft is None else imposed(rate, seed)
                with chance:
                    run = functools.partial(generate.generate, self.runner, [self.prompt], args.generate, self.sample)
                    yield name, *way, self.over(name, functools.partial(run, draft=self.drafts.get(draft)))


def several(kind):
    """An argparse type: things of that kind with commas between."""
    return lambda text: [kind(part) for part in text.split(",")]


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--model", choices=SIZES, default="1b")
    p.add_argument("--n-layers", type=number(int, 2), metavar="N", help="take only so many layers of it")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    cli.add_rank_flags(p)
    p.add_argument("--drafts", nargs="+", metavar="DRAFT", default=DRAFTS, help=f"default: {' '.join(DRAFTS)}")
    p.add_argument("--counts", type=several(count), default=[4, 1, 2, 8], metavar="K,...", help="of proposals")
    p.add_argument("--links", type=links, default="0", metavar="A,B,...", help="microseconds, or names")
    p.add_argument("--prompt-length", type=count, default=64, metavar="S")
    p.add_argument("--eager", action="store_true", help="do not compile")
    p.add_argument("--rounds", type=count, default=15, help="of all parts over all links")
    seconds = number(float, 0, 1e6, above=True)
    p.add_argument("--seconds", type=seconds, default=300, help="... or fewer, to end in about this time")
    p.add_argument("--generate", type=number(int, 2), metavar="N", help="then time generations of so many tokens")
    p.add_argument("--rates", type=several(number(float, 0, 1)), default=[0.8], metavar="A,...", help="... accepted so")
    p.add_argument("--repeats", type=count, default=2, help="... so often")
    cli.add_json_flag(p, "a line for each part and link, and for each generation")
    args = p.parse_args(argv)
    args.config = SIZES[args.model]
    if (args.n_layers or 2) > args.config.n_layers:
        raise InputError(f"--n-layers is {args.n_layers} but {args.model} has {args.config.n_layers}")
    args.config = dataclasses.replace(args.config, n_layers=args.n_layers or args.config.n_layers)
    return args


def describe(args, world):
    """{name: Config} of the drafts."""
    configs = {}
    for name in args.drafts:
        flags = argparse.Namespace(draft=name, speculate=max(args.counts), checkpoint=None)
        if not name.startswith("wiring:"):
            raise InputError(f"--drafts {name} is not of the model's own weights: give wiring:NAME")
        configs[name] = speculative.read(flags, args.config, None, world.tp_size).config
    return configs


@torch.inference_mode()
def main(argv=None):
    args = parse(argv)
    joined = launch.join(args.device, vars(args))
    with joined.together():
        configs = describe(args, joined)
        world = link.emulate(joined, link.FREE)
    bench = Bench(args, configs, world)
    watch.at("measurement", timed=False)
    base = {
        **environment(world), "model": args.model, "n_layers": args.config.n_layers, "dtype": args.dtype,
        "compiled": not args.eager, "prompt_tokens": args.prompt_length,
        "command": command("speculation", argv, world),
    }  # fmt: skip

    def keep(name, draft, n, **found):
        if world.rank == 0:
            over = dataclasses.asdict(args.links[name]) | {"name": name}
            line = base | {"link": over, "draft": draft, "speculate": n, **found}
            print(name, draft, n, *(f"{key} {value}" for key, value in found.items()), flush=True)
            if args.json:
                writing.append_line(args.json, line)

    for (name, part, draft, n), seconds in bench.times().items():
        low, middle, high = (1e3 * x for x in quartiles(seconds))
        keep(name, draft, n, part=part, ms=middle, quartiles_ms=[low, high], rounds=len(seconds))
    for name, draft, n, rate, done in bench.generations() if args.generate else ():
        ms = 1e3 * done.decode_s / (done.steps - 1)
        keep(name, draft, n, part="generation", rate=rate, tokens=done.steps, passes=done.passes, ms_per_token=ms)


if __name__ == "__main__":
    launch.run(main)
