"""How many of a draft's proposals are accepted on real text: a line of JSON for each draft and temperature.

torchrun --standalone --nproc_per_node=2 -m benchmarks.acceptance --checkpoint DIR --valid FILE \
    --drafts wiring:spd wiring:delayed:2,3 --json acceptance.jsonl
python -m benchmarks.acceptance --checkpoint DIR --valid FILE --drafts ngram --batch 1 --quote --json acceptance.jsonl
python -m benchmarks.acceptance --show acceptance.jsonl

A prompt is the first 16 tokens of a story. --quote: its first 72, and then those 16 again, so that there is something
to look up. A draft's acceptance does not depend on the link, nor on how fast anything is.
"""

import itertools
import time
from collections import Counter

import generate
from benchmarks.lines import about, add_show_flag, grouped
from decoding import speculative
from decoding.sampling import Sampler
from decoding.speculative import mean_accepted
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from measure.results import markdown
from model import WIRINGS, InputError
from runtime import cli, launch, writing
from runtime.cli import count, number
from training.data import SEPARATOR

BEGIN, QUOTED = 16, 72  # tokens
DTYPE = "float32"  # in which no proposal is refused by rounding
KEYS = "model", "wiring", "draft", "accepted", "temperature", "quote", "passes", "longest_rows", "tp"


def beginnings(path, tokenizer, stories, quote):
    """Prompts from the first stories that are long enough, as lists of ids."""
    text = checkpoint.read_text(path, flag="--valid ")  # or an InputError that names the flag
    rows = (tokenizer.encode(story.strip()) for story in text.split(SEPARATOR))
    rows = [*itertools.islice((ids for ids in rows if len(ids) > QUOTED), stories)]
    if len(rows) < stories:
        raise InputError(f"--valid {path} has {len(rows)} stories of more than {QUOTED} tokens, fewer than {stories}")
    return [ids[: QUOTED if quote else BEGIN] + ids[1:BEGIN] * quote for ids in rows]


def accepted(args, model, source, prompts, temperature):
    """What became of the draft's proposals in generations from all prompts: the numbers of the result's line."""
    length = max(map(len, prompts)) + args.max_new_tokens + 1 + args.speculate

    def new_runner(model, cache=None):
        return generate.Runner(model, cache or generate.make_cache(model, args.batch, length))

    def whole(config, folder):
        return generate.load_model(config, folder, DTYPE, launch.World(0, 1, model.norm.weight.device))

    runner = new_runner(model)
    draft = speculative.build(source, runner, new_runner, whole)
    counts, passes, tokens = Counter(), 0, 0
    for first in range(0, len(prompts), args.batch):
        rows = prompts[first : first + args.batch]
        sample = Sampler(temperature, seed=first, device=runner.device)
        done = generate.generate(runner, rows, args.max_new_tokens, sample, model.config.eos_ids, draft=draft)
        counts.update(draft.accepted)
        passes, tokens = passes + done.passes, tokens + done.steps - 1
    return {"accepted": [counts[n] for n in range(args.speculate + 1)], "passes": passes, "longest_rows": tokens}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def rate(counts):
    """The share of the tried proposals that was accepted: none after the first that was not has been tried."""
    most = len(counts) - 1
    tried = sum(min(n + 1, most) * count for n, count in enumerate(counts))
    return sum(n * count for n, count in enumerate(counts)) / tried if tried else 0.0


def ranks(line):
    """On how many ranks this draft of this model is the function that was measured, as a word."""
    names = [line["wiring"].partition(":")[0], *line["draft"].split(":")[1:2]]
    return str(line["tp"]) if any(name in WIRINGS and WIRINGS[name].tp_bound for name in names) else "any"


def tables(lines):
    """A row a draft of a model: the rate at each temperature, and what a pass yields in the mean."""
    rows, temperatures = [], sorted({line["temperature"] for line in lines})
    for (model, wiring, draft, quote, _), runs in grouped(lines, "model", "wiring", "draft", "quote", "tp").items():
        cells = dict.fromkeys(temperatures, "")
        for line in runs:
            counts = line["accepted"]
            passes = line["passes"] if draft == "ngram" else sum(counts)  # of a row; ngram proposes in some of them
            yielded = 1 + sum(n * count for n, count in enumerate(counts)) / passes
            cells[line["temperature"]] = f"{rate(counts):.2f}, {yielded:.2f}"
        called = draft.replace("hybrid", "ladder") + ", quoted story" * quote
        rows.append([model, wiring, called, ranks(runs[0]), *cells.values()])
    drawn = (f"temperature {t:g}" if t else "greedy" for t in temperatures)
    return markdown(["model", "wiring", "draft", "ranks", *drawn], rows)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="the model that verifies")
    p.add_argument("--valid", required=True, metavar="FILE", help="a text of stories")
    p.add_argument("--drafts", required=True, nargs="+", metavar="DRAFT", help="as generate.py --draft has them")
    p.add_argument("--speculate", type=count, default=4, metavar="K")
    p.add_argument("--temperatures", type=number(float, 0), nargs="+", default=[0.0, 0.8], metavar="T")
    p.add_argument("--quote", action="store_true", help="prompts that begin a story they have quoted")
    p.add_argument("--stories", type=count, default=30, metavar="N")
    p.add_argument("--max-new-tokens", type=count, default=150, metavar="N")
    p.add_argument("--batch", type=count, default=30, metavar="B", help="stories at a time, a divisor of --stories")
    cli.add_wiring_flags(p)
    cli.add_rank_flags(p)
    p.add_argument("--json", type=cli.appendable, required=True, metavar="FILE", help="append a line for each run")
    add_show_flag(p, tables, *KEYS)
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    world, sources = launch.join(args.device, vars(args)), []
    with world.together():
        config = cli.with_wiring(checkpoint.read_config(args.checkpoint), args)
        tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
        if tokenizer is None:
            raise InputError(f"--checkpoint {args.checkpoint} has no tokenizer")
        for name in args.drafts:
            draft = f"{name}@{args.speculate}"
            sources.append(speculative.read_draft(draft, config, args.checkpoint, world.tp_size))
        prompts = beginnings(args.valid, tokenizer, args.stories, args.quote)
        if (need := len(prompts[0]) + args.max_new_tokens) > config.max_seq_len:
            raise InputError(f"--max-new-tokens: {need} tokens do not fit in the context of {config.max_seq_len}")
    model, made = generate.load_model(config, args.checkpoint, DTYPE, world), about("acceptance", argv, world)
    for source in sources:
        for temperature in args.temperatures:
            start = time.perf_counter()
            line = {
                **made, "model": checkpoint.name(args.checkpoint), "wiring": config.wiring,
                "draft": source.name, "speculate": args.speculate,
                "temperature": temperature, "quote": args.quote, "stories": args.stories, "batch": args.batch,
                "prompt_tokens": len(prompts[0]), "max_new_tokens": args.max_new_tokens,
                **accepted(args, model, source, prompts, temperature), "seconds": time.perf_counter() - start,
            }  # fmt: skip
            if world.rank == 0:
                writing.append_line(args.json, line)
                mean = mean_accepted(line["accepted"])
                print(source.name, temperature, line["accepted"], mean, f"{line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    launch.run(main)
