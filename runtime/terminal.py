"""The terminal: prompts in, text out, a chat."""

import io
import os
import select
import signal
import sys
import termios

import torch
import torch.distributed as dist
from tqdm import tqdm

from formats import checkpoint
from formats.tokenizer import TextStream
from model import InputError
from runtime import watch
from runtime.cli import count, number

MOST_ROWS, MOST_TOKENS = 2**16, 2**25  # prompts; tokens of synthetic ones
TOKENS_BETWEEN_CHECKS = 8  # of several ranks, for a Ctrl-C: each check is a broadcast


def add_prompt_flags(parser):
    g = parser.add_argument_group("prompts", "each is a row of the batch")
    g.add_argument("--prompt", action="append", metavar="TEXT", help='a text; may be repeated, e.g. "One day"')
    g.add_argument("--prompts-file", metavar="FILE", help="one prompt a line, blank ones are skipped, e.g. prompts.txt")
    g.add_argument(
        "--prompt-ids", action="append", metavar="I,J,...", help="token ids; may be repeated, e.g. 1,403,407"
    )
    g.add_argument("--prompt-length", type=count, metavar="N", help="a synthetic prompt of N random tokens, e.g. 1024")
    g.add_argument(
        "--batch",
        type=number(int, 1, MOST_ROWS),
        metavar="B",
        help="repeat the prompts to B rows, e.g. 16 (synthetic ones differ)",
    )
    g.add_argument("--chat", action="store_true", help="put each prompt into the checkpoint's chat template")
    g.add_argument(
        "--interactive", action="store_true", help="chat on the terminal; Ctrl-C stops an answer, Ctrl-D ends"
    )
    g.add_argument(
        "--context",
        type=count,
        metavar="T",
        help="length of a chat in tokens, e.g. 8192; without it 4096 or the model's",
    )


def is_utf8(text):
    """Whether text came from valid UTF-8: Python turns other bytes into lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def read_prompts(args, config, tokenizer):
    """The prompts that the flags give, as lists of token ids."""
    texts = list(args.prompt or [])
    if args.prompts_file:
        lines = checkpoint.read_text(args.prompts_file, "--prompts-file ").splitlines()
        texts += [line for line in lines if line.strip()]
        if not texts:
            raise InputError(f"--prompts-file {args.prompts_file} is empty: it takes one prompt a line")
    if texts and tokenizer is None:
        owner = args.checkpoint or "--model"
        raise InputError(f"{owner} has no tokenizer: use --prompt-ids or --prompt-length")
    if len(texts) > MOST_ROWS:
        raise InputError(
            f"--prompts-file {args.prompts_file} has {len(texts):,} prompts: at most {MOST_ROWS:,} are taken"
        )
    prompts = []
    for text in texts:
        if not text.strip():
            raise InputError("--prompt is empty: give some text, or the ids themselves with --prompt-ids")
        if not is_utf8(text):
            raise InputError(f"--prompt {text!r} is not valid UTF-8")
        if len(text) > config.max_seq_len * tokenizer.longest:  # encoding it could take minutes
            raise InputError(f"a prompt of {len(text):,} characters does not fit the context of {config.max_seq_len}")
        prompts.append(tokenizer.chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text))
    for ids in args.prompt_ids or []:
        try:
            prompts.append([int(i) for i in ids.replace(",", " ").split()])
        except ValueError:
            raise InputError(f"--prompt-ids {ids!r} is not a list of numbers such as 1,403,407") from None
    if args.prompt_length is not None:
        if args.prompt_length >= config.max_seq_len:
            raise InputError(
                f"--prompt-length {args.prompt_length} leaves no room in the context of {config.max_seq_len}"
            )
        if args.prompt_length * (args.batch or 1) > MOST_TOKENS:
            raise InputError(f"--prompt-length times --batch is more than {MOST_TOKENS:,} tokens")
        generator = torch.Generator().manual_seed(args.seed)
        shape = (args.batch or 1, args.prompt_length)
        prompts += torch.randint(config.vocab_size, shape, generator=generator).tolist()
    if not prompts:
        raise InputError("no prompt: give --prompt, --prompts-file, --prompt-ids, --prompt-length or --interactive")
    if args.batch and args.batch % len(prompts):
        raise InputError(f"--batch {args.batch} is not a multiple of the {len(prompts)} prompts given")
    prompts *= (args.batch or len(prompts)) // len(prompts)
    for prompt in prompts:
        if not prompt:
            raise InputError("a prompt has no tokens: give some text")
        bad = [i for i in prompt if not 0 <= i < config.vocab_size]
        if bad:
            raise InputError(
                f"token id {bad[0]} is outside the vocabulary of {config.vocab_size} (0 to {config.vocab_size - 1})"
            )
    return prompts


def fit(max_new_tokens, prompts, context):
    """max_new_tokens, cut to what the context leaves after the longest prompt."""
    longest = max(map(len, prompts))
    if longest >= context:
        raise InputError(f"a prompt of {longest} tokens leaves no room in the context of {context}: shorten it")
    return min(max_new_tokens, context - longest)


class Printer:
    """Shows a generation as it goes: one row as text, more rows as a progress bar and then their texts."""

    def __init__(self, prompts, tokenizer, max_new_tokens, show_prompt=True):
        self.prompts, self.tokenizer = prompts, tokenizer
        self.stream = self.bar = None
        if tokenizer is not None and len(prompts) == 1:
            self.stream = TextStream(tokenizer)
            text = self.stream.push(prompts[0])
            self.write(text if show_prompt else "")
        else:
            self.bar = tqdm(total=max_new_tokens, desc="decoding", unit="token", delay=1)
            self.lengths = [0] * len(prompts)

    def write(self, text):
        print(text, end="", flush=True)

    def push(self, new):
        """new: the ids of a pass, a list for each row."""
        if self.stream:
            self.write(self.stream.push(new[0]))
        else:
            self.lengths = [n + len(ids) for n, ids in zip(self.lengths, new, strict=True)]
            self.bar.update(max(self.lengths) - self.bar.n)

    def finish(self, rows):
        """Print what is not printed yet; returns the new text of each row, or None without a tokenizer."""
        if self.stream:
            self.write(self.stream.flush() + "\n")
        if self.bar:
            self.bar.close()
        if self.tokenizer is None:
            for row in rows:
                print("---", *row)
            return None
        texts = [self.tokenizer.continuation(prompt, row) for prompt, row in zip(self.prompts, rows, strict=True)]
        if not self.stream:
            for prompt, text in zip(self.prompts, texts, strict=True):
                print(f"--- {self.tokenizer.decode(prompt)}{text}")
        return texts


class Interrupt:
    """Ctrl-C stops an answer instead of the program: asked() says whether it came, on all ranks alike.

    torchrun would end all ranks at the signal, so where there are several, a terminal's Ctrl-C is read as a character.
    A second Ctrl-C in one answer ends the program.
    """

    def __init__(self, world):
        self.world, self.came, self.calls = world, 0, 0
        self.reads = world.rank == 0 and not world.alone and sys.stdin.isatty()

    def __enter__(self):
        self.came = self.calls = 0
        if self.world.alone:
            self.before = signal.signal(signal.SIGINT, self._count)
        if self.reads:
            self.terminal = termios.tcgetattr(0)
            raw = termios.tcgetattr(0)
            raw[3] &= ~(termios.ISIG | termios.ICANON)
            termios.tcsetattr(0, termios.TCSANOW, raw)
        return self

    def __exit__(self, *_):
        if self.world.alone:
            signal.signal(signal.SIGINT, self.before)
        if self.reads:
            termios.tcsetattr(0, termios.TCSANOW, self.terminal)

    def _count(self, *_):
        self.came += 1
        if self.came > 1:
            raise KeyboardInterrupt

    def asked(self):
        self.calls += 1
        while self.reads and select.select([0], [], [], 0)[0]:
            if os.read(0, 1) == b"\x03":
                self._count()
        if self.world.alone:
            return self.came > 0
        if self.calls % TOKENS_BETWEEN_CHECKS:
            return False
        came = torch.tensor(self.came, dtype=torch.int32, device=self.world.device)
        dist.broadcast(came, 0)
        return bool(came)


def chat(answer, tokenizer, world, context, max_new_tokens):
    """Read a line, answer, repeat. With a chat template the lines are user messages, else the text just goes on.

    answer(ids, max_new_tokens, on_tokens) -> new ids; on_tokens as in generate.generate.
    """
    messages, ids = [], []
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # for is_utf8 to tell
    prompt = "> " if world.rank == 0 and sys.stdin.isatty() else ""
    interrupt = Interrupt(world)
    if prompt:
        how = "the text just goes on" if tokenizer.template is None else "in the checkpoint's chat template"
        print(f"{how}; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    while True:
        watch.at("the wait for the user", timed=world.rank > 0)  # of the others only until rank 0 goes on
        try:
            line = world.tell(input(prompt) if world.rank == 0 else None)
        except EOFError:
            line = world.tell(None)
        if line is None:
            print("\n" if prompt else "", end="")
            return
        if not line.strip() or not is_utf8(line):
            continue
        if tokenizer.template is not None:
            messages.append({"role": "user", "content": line})
            ids = tokenizer.chat(messages)
        else:
            ids = ids + tokenizer.encode_plain(line) if ids else tokenizer.encode(line)
        if len(ids) >= context:
            if world.rank == 0:
                print(f"{len(ids)} tokens do not fit the context of {context}: starting anew", file=sys.stderr)
            messages, ids = [], []
            continue
        new = fit(max_new_tokens, [ids], context)
        printer = Printer([ids], tokenizer, new, show_prompt=False) if world.rank == 0 else None

        def on_tokens(fresh, printer=printer):
            if printer is not None:
                printer.push(fresh)
            return interrupt.asked()

        with interrupt:
            row = answer(ids, new, on_tokens)
        if printer is not None:
            printer.finish([row])
        ids = ids + row
        messages.append({"role": "assistant", "content": tokenizer.decode(row)})
