"""Does anything grow, slow down or compile again? Many requests to the same ranks, as a server would have, or a chat.

torchrun --standalone --nproc_per_node=2 -m benchmarks.soak --checkpoint demo --json results/soak.jsonl
torchrun --standalone --nproc_per_node=2 -m benchmarks.soak --seed 1 --json results/soak.jsonl      # random shapes
yes "One day" | head -1000 | torchrun --standalone --nproc_per_node=2 -m benchmarks.soak --chat --checkpoint demo \
    --json results/soak.jsonl

Requests are batches of 1 to 4 rows with prompts and answers of random lengths, decoded by compiled code: a Runner for
each batch size, kept. A chat goes through generate.py --interactive. Each line has what a stretch of them took.
"""

import os
import random
import statistics
import time
from pathlib import Path

import torch

import generate
from benchmarks.lines import command
from formats import checkpoint
from measure import report
from model import Config, InputError
from runtime import cli, launch, terminal, writing
from runtime.cli import count, number

BATCHES = 1, 2, 3, 4
LONGEST = 32  # tokens of a prompt, and of an answer
TURN = 4  # new tokens in a turn of the chat


def resident(process="self"):
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usage():
    """What this process has by now, where only a growth says something."""
    return {
        "resident": resident(),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class Record:
    """Collects seconds per token, and makes a line of each stretch of `every` requests."""

    def __init__(self, world, every, about, path=None):
        self.world, self.every, self.about, self.path = world, every, about, path
        self.done, self.times, self.lines = 0, {}, []

    def add(self, batch, seconds):
        """A request is done; seconds: of each token but the first, or None where there was none."""
        self.done += 1
        if seconds is not None:
            self.times.setdefault(batch, []).append(seconds)
        if self.done % self.every:
            return
        line = {
            "done": self.done,
            "ms_per_token": {b: 1e3 * statistics.median(times) for b, times in sorted(self.times.items())},
            "ranks": self.world.gather(usage()), "launcher_resident": resident(os.getppid()),
        }  # fmt: skip
        self.times = {}
        self.lines.append(line)
        if self.world.rank == 0 and self.path:
            writing.append_line(self.path, {**line, **self.about})


def requests(number, vocab_size, seed):
    """So many requests, as (prompts, new tokens)."""
    draw = random.Random(seed)
    for _ in range(number):
        lengths = [draw.randint(1, LONGEST) for _ in range(draw.choice(BATCHES))]
        yield [[draw.randrange(3, vocab_size) for _ in range(n)] for n in lengths], draw.randint(1, LONGEST)


def serve(model, number, seed, record, compile=True):
    """Answer so many requests, greedily, each by the Runner of its batch size; returns the new ids of each.

    The first request comes again after each stretch of the record, and must have the same answer.
    """
    runners, rows = {}, []

    def answer(prompts, new):
        batch = len(prompts)
        if batch not in runners:
            runners[batch] = generate.Runner(model, generate.make_cache(model, batch, 2 * LONGEST), compile)
            if compile:
                generate.warm_up(runners[batch], prompts, new)
        sample = generate.Sampler(0)
        found, steps, _, rest, *_ = generate.generate(runners[batch], prompts, new, sample)
        return found, rest / (steps - 1) if steps > 1 else None

    for prompts, new in requests(number, model.config.vocab_size, seed):
        found, seconds = answer(prompts, new)
        rows.append(found)
        if len(rows) == 1:
            first = prompts, new
        record.add(len(prompts), seconds)
        if record.done % record.every == 0 and answer(*first)[0] != rows[0]:
            raise RuntimeError(f"after {record.done} requests the first has another answer")
    return rows


def chat(flags, every, path, about):
    """The chat of generate.py with these flags, recorded."""
    chatting = terminal.chat

    def recorded(answer, tokenizer, world, *args):
        record = Record(world, every, about(world), path)

        def timed(*request):
            start = time.perf_counter()
            row = answer(*request)
            record.add(1, (time.perf_counter() - start) / max(1, len(row)))
            return row

        return chatting(timed, tokenizer, world, *args)

    terminal.chat = recorded
    try:
        generate.main(["--interactive", "--max-new-tokens", str(TURN), *flags])
    finally:
        terminal.chat = chatting


def shapes(seed):
    """The Config of a small model of random shapes."""
    draw = random.Random(seed)
    n_kv_heads, head_dim = draw.randint(1, 3), 2 * draw.randint(4, 12)
    n_heads, dim = n_kv_heads * draw.randint(2, 3), 8 * draw.randint(4, 12)
    sizes = draw.randint(50, 200), draw.randint(100, 400)
    return Config(draw.randint(2, 4), n_heads, n_kv_heads, head_dim, dim, *sizes, 2 * LONGEST, wiring="ladder")


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--checkpoint", metavar="DIR", help="a folder of weights; without it a model of random shapes")
    p.add_argument("--chat", action="store_true", help="a chat, whose user's lines come through standard input")
    p.add_argument("--count", type=count, default=1000, metavar="N", help="requests")
    p.add_argument("--every", type=count, default=50, metavar="N", help="of them in a line")
    p.add_argument("--seed", type=number(int, 0), default=0, metavar="S", help="of the shapes and the requests")
    p.add_argument("--eager", action="store_true", help="without compilation")
    p.add_argument("--dtype", choices=checkpoint.DTYPES, help="of the weights; without it bfloat16")
    cli.add_rank_flags(p)
    cli.add_json_flag(p, "the lines")
    args = p.parse_args(argv)
    if args.chat and not args.checkpoint:
        raise InputError("--chat needs --checkpoint, for its tokenizer")
    return args


def main(argv=None):
    args = parse(argv)
    name = checkpoint.name(args.checkpoint) if args.checkpoint else f"random shapes {args.seed}"
    args.dtype = args.dtype or "bfloat16"

    def about(world):
        kind = {
            "kind": "chat" if args.chat else "requests",
            "model": name,
            "dtype": args.dtype,
            "compiled": not args.eager,
        }
        return {**kind, "command": command("soak", argv, world), **report.environment(world)}

    if args.chat:
        flags = ["--checkpoint", args.checkpoint, "--timeout", str(args.timeout)]
        flags += ["--compile"] * (not args.eager) + ["--dtype", args.dtype]
        return chat(flags, args.every, args.json, about)
    world = launch.join(args.device, vars(args))
    with world.together():
        config = checkpoint.read_config(args.checkpoint) if args.checkpoint else shapes(args.seed)
    model = generate.load_model(config, args.checkpoint, args.dtype, world)
    with torch.inference_mode():
        serve(model, args.count, args.seed, Record(world, args.every, about(world), args.json), not args.eager)


if __name__ == "__main__":
    launch.run(main)
