"""What speculation costs over links, in times of its parts: a line of JSON for each.

torchrun --standalone --nproc_per_node=2 -m benchmarks.speculation --links 0,1000,3000 --json speculation.jsonl
python -m benchmarks.speculation --show speculation.jsonl

The weights are random, those of a draft are the model's in another wiring, and no part takes another time because of
what is accepted. So the parts are timed as they are, all of them in turns: a plain step, a step of each draft, the
verification of each number of proposals, and a whole pass of each draft with the first of these numbers.
"""

import dataclasses
import functools
import itertools
import time

import torch

import generate
from benchmarks.lines import about, add_show_flag, grouped
from benchmarks.overlap import links
from decoding import speculative
from decoding.sampling import Plain, Sampler
from formats.sizes import SIZES
from measure import link
from measure.results import markdown
from measure.timing import in_turns, quartiles, timed
from model import InputError, rewired
from runtime import cli, launch, watch, writing
from runtime.cli import count, number

DRAFTS = ["wiring:upper-bound", "wiring:spd", "wiring:delayed", "wiring:ladder", "wiring:ladder:8"]
KEYS = "link", "draft", "speculate", "part"
PROMPT = 64  # tokens in the cache
RATES = 0.7, 0.8, 0.9  # of acceptance, in the table


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


class Bench:
    """A model of random weights and its drafts {name: Draft}, after a prompt that is in their cache."""

    def __init__(self, args, config, configs, world):
        self.args, self.world, self.sample = args, world, Sampler(0, device=world.device)
        self.model = generate.load_model(config, None, "bfloat16", world)
        cache = generate.make_cache(self.model, 1, PROMPT + max(args.counts) + 3)
        self.runner = generate.Runner(self.model, cache, not args.eager)
        self.drafts = {}
        for name, config in configs.items():
            runner = generate.Runner(speculative.rewire(self.model, config), cache, not args.eager)
            self.drafts[name] = speculative.Rewired(speculative.Fixed(args.counts[0]), runner)
        self.prompt = [1 + i % 1000 for i in range(PROMPT)]
        self.runner.prefill(*generate.pad([self.prompt], world.device))

    def parts(self):
        """{(part, draft or None, number of proposals): what runs it once}."""
        texts, first = [self.prompt], self.args.counts[0]
        found = {("step", None, 0): functools.partial(Plain().step, self.runner, texts, [False], self.sample)}
        for n in self.args.counts:
            ids = torch.zeros(1, n, dtype=torch.long, device=self.world.device)
            verification = functools.partial(speculative.verify, self.runner, texts, ids, None, self.sample)
            found["verification", None, n] = verification
        for name, draft in self.drafts.items():
            found["draft step", name, 1] = functools.partial(draft.propose, 1, texts, [False], self.sample)
            found["pass", name, first] = functools.partial(self.run_pass, draft, texts, first)
        return found

    def run_pass(self, draft, texts, n):
        ids, q, _ = draft.propose(n, texts, [False], self.sample)
        speculative.verify(self.runner, texts, ids, q, self.sample)

    def timed_over(self, name, run):
        """Seconds of run() over a link; all ranks begin it together."""
        self.world.group.link = self.args.links[name]
        ops, one = torch.ops._c10d_functional, self.model.norm.weight.new_zeros(1)
        ops.wait_tensor(ops.all_reduce_(one, "sum", self.world.group.group_name))
        return timed(self.world.device, run)

    def times(self):
        """{(name of a link, *part): [seconds of each round]}, all of them in turns."""
        parts = self.parts()
        for run in parts.values():  # compiles
            run()
            run()
        ways = {
            (name, *part): functools.partial(self.timed_over, name, run)
            for name, (part, run) in itertools.product(self.args.links, parts.items())
        }
        with generate.without_guards(self.runner):
            start = time.perf_counter()
            in_turns(ways, 1)
            fitting = int(self.args.seconds / (time.perf_counter() - start))
            return in_turns(ways, min(self.world.gather(max(3, min(self.args.rounds, fitting)))))


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def seconds_per_token(draft, verification, a, n):
    """Where proposals are accepted with probability `a` each; draft, verification: seconds of a step and of a pass."""
    return (n * draft + verification) / speculative.expected(a, n)


class Times:
    """Milliseconds over one link: step, draft {name: a step's}, verification {K: ...}, whole {(name, K): a pass's}."""

    def __init__(self, lines):
        of = grouped(sorted(lines, key=lambda x: x["speculate"]), "part")
        self.step = of[("step",)][0]["ms"]
        self.draft = {x["draft"].replace("hybrid", "ladder"): x["ms"] for x in of[("draft step",)]}
        self.verification = {x["speculate"]: x["ms"] for x in of[("verification",)]}
        self.whole = {(x["draft"].replace("hybrid", "ladder"), x["speculate"]): x["ms"] for x in of[("pass",)]}

    def best(self, draft, a):
        """(times standard's speed by the formula, K) of the best K; draft: a name, or None: it takes no time."""
        d = self.draft.get(draft, 0.0)
        return max((self.step / seconds_per_token(d, v, a, n), n) for n, v in self.verification.items())


def by_link(lines):
    """{name of a link: Times}, the fastest link first."""
    found = grouped([{**x, "name": x["link"]["name"]} for x in lines], "name")
    ordered = sorted(found.items(), key=lambda item: item[1][0]["link"]["latency_us"])
    return {name: Times(same) for (name,), same in ordered}


def tables(lines):
    """The parts over each link; times standard's speed at each rate with the best K; how exact the formula is."""
    links, gains, off = by_link([line for line in lines if line["part"] != "generation"]), [], []
    for name, times in links.items():
        for draft in (*times.draft, None):
            cells = (f"{gain:.2f} ({n})" for gain, n in (times.best(draft, a) for a in RATES))
            gains.append([name, draft or "one that takes no time", *cells])
        off += [ms / (n * times.draft[d] + times.verification[n]) - 1 for (d, n), ms in times.whole.items()]
    first = next(iter(links.values()))
    head = ["link, us", "step", *first.draft, *(f"K = {n}" for n in first.verification)]
    rows = [
        [name, *(f"{ms:.1f}" for ms in (times.step, *times.draft.values(), *times.verification.values()))]
        for name, times in links.items()
    ]
    exact = f"Whole passes are {100 * min(off):+.1f} to {100 * max(off):+.1f} % from K d + v."
    return f"{markdown(head, rows)}\n\n{exact}\n\n" + markdown(
        ["link, us", "draft", *(f"a = {a:g}" for a in RATES)], gains
    )


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--model", choices=SIZES, default="1b")
    cli.add_rank_flags(p)
    p.add_argument("--drafts", nargs="+", metavar="DRAFT", default=DRAFTS, help=f"default: {' '.join(DRAFTS)}")
    counts = {"type": lambda text: [count(n) for n in text.split(",")], "default": [4, 1, 2, 8], "metavar": "K,..."}
    p.add_argument("--counts", **counts, help="numbers of proposals")
    p.add_argument("--links", type=links, default="0", metavar="A,B,...", help="microseconds, or names")
    p.add_argument("--eager", action="store_true", help="do not compile")
    p.add_argument("--rounds", type=count, default=15, help="of all parts over all links")
    seconds = number(float, 0, 1e6, above=True)
    p.add_argument("--seconds", type=seconds, default=300, help="... or fewer, to end in about this time")
    cli.add_json_flag(p, "a line for each part and link")
    add_show_flag(p, tables, *KEYS)
    return p.parse_args(argv)


@torch.inference_mode()
def main(argv=None):
    args = parse(argv)
    joined = launch.join(args.device, vars(args))
    config, configs = SIZES[args.model], {}
    with joined.together():
        for name in args.drafts:
            kind, _, wiring = name.partition(":")
            if kind != "wiring":
                raise InputError(f"--drafts {name} does not have the model's own weights: give wiring:NAME")
            configs[name] = rewired(config, wiring)
        world = link.emulate(joined, link.FREE)
    bench = Bench(args, config, configs, world)
    watch.at("measurement", timed=False)
    base = {
        **about("speculation", argv, world), "model": args.model, "n_layers": config.n_layers, "dtype": "bfloat16",
        "compiled": not args.eager, "prompt_tokens": PROMPT,
    }  # fmt: skip
    for (name, part, draft, n), seconds in bench.times().items():
        low, middle, high = (1e3 * x for x in quartiles(seconds))
        found = {"part": part, "ms": middle, "quartiles_ms": [low, high], "rounds": len(seconds)}
        if world.rank == 0:
            print(name, draft, n, *(f"{key} {value}" for key, value in found.items()), flush=True)
            if args.json:
                over = dataclasses.asdict(args.links[name]) | {"name": name}
                writing.append_line(args.json, base | {"link": over, "draft": draft, "speculate": n, **found})


if __name__ == "__main__":
    launch.run(main)
