"""How many of a draft's proposals stand on real text: a line of JSON for each draft and temperature.

torchrun --standalone --nproc_per_node=2 -m benchmarks.acceptance --checkpoint DIR --valid FILE \
    --drafts wiring:spd wiring:delayed:2,3 --json acceptance.jsonl
python -m benchmarks.acceptance --checkpoint DIR --valid FILE --drafts ngram --batch 1 --quote --json acceptance.jsonl

A prompt is the first 16 tokens of a story. --quote: its first 72, and then those 16 again, so that there is something
to look up. A draft's acceptance does not depend on the link, nor on how fast anything is.
"""

import argparse
import itertools
import time
from collections import Counter

import generate
from benchmarks.lines import command
from decoding import speculative
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from measure import report
from model import InputError
from runtime import cli, launch, writing
from runtime.cli import count, number
from training.data import SEPARATOR

BEGIN, QUOTED = 16, 72  # tokens


def beginnings(path, tokenizer, stories, quote):
    """Prompts from the first stories that are long enough, as lists of ids."""
    text = checkpoint.read_text(path, flag="--valid ")  # or an InputError that names the flag
    rows = (tokenizer.encode(story.strip()) for story in text.split(SEPARATOR))
    rows = [*itertools.islice((ids for ids in rows if len(ids) > QUOTED), stories)]
    if len(rows) < stories:
        raise InputError(f"--valid {path} has {len(rows)} stories of more than {QUOTED} tokens, fewer than {stories}")
    return [ids[: QUOTED if quote else BEGIN] + ids[1:BEGIN] * quote for ids in rows]


def accepted(args, model, draft, prompts, temperature):
    """What came of the draft in generations from all prompts, so many at a time: the numbers of the result's line."""
    length = max(map(len, prompts)) + args.max_new_tokens
    runner, draft = generate.make_runners(model, draft, speculative.Fixed(args.speculate), args.batch, length)
    stood, passes, tokens = Counter(), 0, 0
    for first in range(0, len(prompts), args.batch):
        rows = prompts[first : first + args.batch]
        sample = generate.Sampler(temperature, seed=first, device=runner.device)
        done = generate.generate(runner, rows, args.max_new_tokens, sample, model.config.eos_ids, draft=draft)
        stood.update(draft.accepted)
        passes, tokens = passes + done.passes, tokens + done.steps - 1
    return {"accepted": [stood[n] for n in range(args.speculate + 1)], "passes": passes, "longest_rows": tokens}


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
    p.add_argument("--batch", type=count, default=30, metavar="B", help="stories at a time")
    cli.add_wiring_flags(p)
    cli.add_rank_flags(p)
    p.add_argument("--json", type=cli.appendable, required=True, metavar="FILE", help="append a line for each run")
    args = p.parse_args(argv)
    if args.stories % args.batch:
        raise InputError(f"--stories {args.stories} is no multiple of --batch {args.batch}")
    return args


def main(argv=None):
    args = parse(argv)
    world, sources = launch.join(args.device, vars(args)), []
    with world.together():
        config = cli.with_wiring(checkpoint.read_config(args.checkpoint), args)
        tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
        if tokenizer is None:
            raise InputError(f"--checkpoint {args.checkpoint} has no tokenizer")
        for name in args.drafts:
            flags = argparse.Namespace(draft=name, speculate=args.speculate, checkpoint=args.checkpoint)
            sources.append(speculative.read(flags, config, tokenizer, world.tp_size))
        prompts = beginnings(args.valid, tokenizer, args.stories, args.quote)
        if (need := len(prompts[0]) + args.max_new_tokens) > config.max_seq_len:
            raise InputError(f"--max-new-tokens: {need} tokens do not fit in the context of {config.max_seq_len}")
    args.dtype = "float32"  # of which no proposal falls by rounding
    model, environment = generate.load_model(config, args.checkpoint, args.dtype, world), report.environment(world)
    for source in sources:
        draft = generate.load_draft_model(source, model, args, world)
        for temperature in args.temperatures:
            start = time.perf_counter()
            line = {
                **environment, "model": checkpoint.name(args.checkpoint), "wiring": config.wiring,
                "layers": config.wired_layers, "draft": source.name, "speculate": args.speculate,
                "temperature": temperature, "quote": args.quote, "stories": args.stories, "batch": args.batch,
                "prompt_tokens": len(prompts[0]), "max_new_tokens": args.max_new_tokens,
                **accepted(args, model, draft, prompts, temperature),
            }  # fmt: skip
            line |= {"command": command("acceptance", argv, world), "seconds": time.perf_counter() - start}
            if world.rank == 0:
                writing.append_line(args.json, line)
                mean = report.mean_accepted(line["accepted"])
                print(source.name, temperature, line["accepted"], mean, f"{line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    launch.run(main)
