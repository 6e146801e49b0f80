"""The command line: flags that scripts share; prompts in, text out; generate.py's flags, and the Job they ask for."""

import argparse
import math
import os
import sys
import textwrap
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

from decoding.batch import Sampler
from formats import checkpoint
from formats.tokenizer import TextStream, load_tokenizer
from model import WIRINGS, WIRINGS_IN_EXTRAS, residual_loop, rewired
from runtime import report
from runtime.errors import InputError, load_extra
from runtime.launch import rank_and_size

CHAT_CONTEXT = 4096  # tokens of a chat's cache, at most

# ---- Flags -----------------------------------------------------------------------------------------------------------


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps line breaks and ends in the default, where there is one."""

    def _split_lines(self, text, width):
        return [line for part in text.splitlines() for line in textwrap.wrap(part, width)]

    def _get_help_string(self, action):
        plain = action.default is False or action.default in (None, "", argparse.SUPPRESS)
        return action.help if plain else f"{action.help or ''} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, so that run() prints one line, not one usage for each rank."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=Help)

    def error(self, message):
        raise InputError(message.removeprefix("argument "))

    def print_help(self, file=None):
        if rank_and_size()[0] == 0:
            super().print_help(file)

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        for action in self._actions:
            if getattr(args, action.dest, None) == "" != action.default:
                name = action.option_strings[0] if action.option_strings else action.metavar
                self.error(f"{name} is empty: give a value" + ", or leave it out" * (not action.required))
        return args


def number(kind, low, high=None, above=False):
    """Return an argparse type: an int or a float from `low` (or above it) to `high`; without one an int has 31 bits."""
    words = {int: "a whole number", float: "a number"}[kind] + f" {'above' if above else 'from'} {low:g}"
    high = high or {int: 2**31 - 1, float: sys.float_info.max}[kind]
    words += f" to {high:,}" if kind is int else f" to {high:g}" if high < sys.float_info.max else ""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return value

    return parse


count = number(int, 1)


def appendable(path):
    """Return a path that lines can be appended to (an argparse type)."""
    folder = os.path.dirname(path) or "."
    existing = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def add_model_flags(parser, required=False):
    """Add the flags that name weights, or a size of random ones; read_config reads what they name."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--checkpoint", metavar="DIR", help="a folder of weights (docs/formats.md), e.g. demo")
    words = "random weights of a named size, such as 1b, 8b or 70b, or N layers of it, e.g. 8b:4, or 8b:4:int8"
    which.add_argument("--model", metavar="NAME[:N][:int8|:int4]", help=words)
    words = "of the weights (default: the checkpoint's, or bfloat16)"
    parser.add_argument("--dtype", choices=checkpoint.DTYPES, help=words)


def read_config(args):
    """Return (the name of the model that the flags ask for, its own Config)."""
    if args.checkpoint is not None:
        return Path(args.checkpoint).resolve().name, checkpoint.read_config(args.checkpoint)
    from formats.sizes import named_size

    return args.model.partition(":")[0], named_size(args.model)


def read_dtype(args):
    """Return the dtype of the weights that the flags ask for."""
    weights = checkpoint.Weights(args.checkpoint) if args.checkpoint and not args.dtype else None
    return checkpoint.chosen_dtype(args.dtype, weights)


def add_rank_flags(parser, sharded=False, comm=True):
    """Add the flags that launch.join takes. sharded: the ranks share a model out. comm: its sums have several ways."""
    if sharded:
        words, numbers = "what each rank gets of the heads, MLP and vocabulary, in proportion: e.g. 3,1", "N,N,..."
        parser.add_argument("--shares", type=lambda text: (*map(count, text.split(",")),), metavar=numbers, help=words)
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda if each rank finds a GPU, else cpu")
    if comm:
        words = "how ranks sum\nauto: shared memory on CPUs of one node, else library\nlibrary: gloo or NCCL\n"
        words += "others, such as one-shot: extras/collectives/README.md"
        parser.add_argument("--comm", default="auto", metavar="NAME", help=words)


def add_json_flag(parser, what="the results as one line of JSON"):
    parser.add_argument("--json", type=appendable, metavar="FILE", help=f"append {what}, e.g. results.jsonl")


def add_wiring_flags(parser):
    """Add the flags that choose a wiring; with_wiring applies them."""
    words = [f"{name}: {wiring.about}" for name, wiring in WIRINGS.items()] + [
        *(f"{name}: extras/{extra}/README.md" for name, extra in WIRINGS_IN_EXTRAS.items() if name not in WIRINGS),
        "NAME:N wires the last N layers that way, NAME:I,J,... layers I, J (from 0), NAME:I-J I to J;",
        "others are standard; desync:N keeps every N-th all-reduce; NAME-K reads the stream K sublayers late, if",
        "NAME does at all; NAME/L has L lanes (default: as many as ranks), if their number matters",
    ]
    g = parser.add_argument_group("wiring", "how sublayers feed the residual stream; default: the checkpoint's own")
    g = g.add_mutually_exclusive_group()
    g.add_argument("--wiring", metavar="NAME[-K][:N|:I,J,...|:I-J][/L]", help="\n".join(words))
    g.add_argument("--ladder", dest="wiring", action="store_const", const="ladder", help="means --wiring ladder")


def with_wiring(config, args):
    """Return the config with the wiring that the flags ask for."""
    try:
        return rewired(config, args.wiring)
    except InputError as e:
        raise InputError(f"--wiring: {e}") from None


def is_standard_in_one_lane(w):
    """Return whether a Wiring computes with one lane what standard computes; with one norm, parallel's."""
    return w.depends_on_lanes and len(w.norms) > 1 and (w.loop is not residual_loop or not w.stale)


def warn_of_wiring(own, config, shares):
    """Say on stderr when a checkpoint runs in another wiring than its own."""
    if own.wiring_key == config.wiring_key:
        if own.named_wiring.depends_on_lanes and own.fixed_lanes is None:
            print(f"these weights name no lanes: {own.wiring} is another function on other ranks", file=sys.stderr)
        return
    loss = "a function that they were not trained for: " + "adapt.py retrains them; " * (config.wiring != "upper-bound")
    loss += f"eval.py --checkpoint DIR --wiring {config.wiring} --compare DIR --text FILE measures the loss"
    loss += f", where DIR has them as {own.wiring}"
    one_lane = (config.fixed_lanes or len(shares)) == 1
    if own.wiring == "standard" and one_lane and is_standard_in_one_lane(config.named_wiring):
        loss = "which is the same in one lane"
    print(f"these weights are {own.wiring}'s, and run as {config.wiring.removesuffix(',')}, {loss}", file=sys.stderr)


# ---- Prompts in, text out --------------------------------------------------------------------------------------------


def add_prompt_flags(parser):
    g = parser.add_argument_group("prompts", "each is a row of the batch")
    words = 'a text, e.g. "One day", in which special tokens are plain text (not with --chat);\n'
    words += "a file with one on each line, e.g. @prompts.txt; all of a file, e.g. file:story.txt; token ids, e.g.\n"
    words += "ids:1,403; may be repeated"
    one = g.add_mutually_exclusive_group()
    one.add_argument("--prompt", action="append", metavar="TEXT|@FILE|file:FILE|ids:I,J,...", help=words)
    one.add_argument("--prompt-length", type=count, metavar="N", help="N random tokens as a prompt, e.g. 1024")
    words = "repeat the prompts to B rows, e.g. 16 (synthetic ones differ)"
    g.add_argument("--batch", type=count, metavar="B", help=words)
    words = "put each prompt into the checkpoint's chat template, after a system message if given, and print only the\n"
    words += "answers; as in transformers, a special token's name in the prompt is then that token; without a prompt,\n"
    words += "chat on the terminal: /help lists its commands"
    system = {"type": lambda text: [{"role": "system", "content": text}], "metavar": "SYSTEM"}
    g.add_argument("--chat", nargs="?", const=[], **system, help=words)


def is_chat(args):
    """Return whether the flags ask for a chat on the terminal."""
    return args.chat is not None and not args.prompt and args.prompt_length is None


def read_prompts(args, config, tokenizer):
    """Return the prompts that the flags give, as lists of token ids."""
    if is_chat(args):
        if args.batch or tokenizer is None:
            raise InputError("--chat without a prompt takes no --batch, and needs a checkpoint with a tokenizer")
        if args.chat:
            encode("Hi", args, tokenizer)  # a template may refuse a system message
        return [[0]]
    prompts = [encode(text, args, tokenizer) for given in args.prompt or [] for text in read_prompt(given)]
    if args.prompt_length is not None:
        fit(1, [range(args.prompt_length)], config.max_seq_len)
        seeded, shape = torch.Generator().manual_seed(args.seed), (args.batch or 1, args.prompt_length)
        prompts = torch.randint(config.vocab_size, shape, generator=seeded).tolist()
    if not prompts:
        raise InputError("no prompt: give --prompt or --prompt-length, or --chat alone to chat")
    if args.batch and args.batch % len(prompts):
        raise InputError(f"--batch {args.batch} is not a multiple of the {len(prompts)} prompts given")
    for prompt in prompts:
        if not prompt:
            raise InputError("a prompt has no tokens: give some text")
        if wrong := [i for i in prompt if not 0 <= i < config.vocab_size]:
            raise InputError(f"token id {wrong[0]} is outside the vocabulary of {config.vocab_size}")
    return prompts * ((args.batch or len(prompts)) // len(prompts))


def read_prompt(given):
    """Return the texts that a --prompt gives."""
    if given.startswith("file:"):
        texts = [checkpoint.read_text(given[5:], "--prompt file:")]
    elif given.startswith("@"):
        texts = checkpoint.read_text(given[1:], "--prompt @").split("\n")
    else:
        texts = [given]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise InputError(f"--prompt is empty ({given!r}): give some text, or token ids, such as ids:1")
    return texts


def encode(text, args, tokenizer):
    """Return the token ids of a text, or of numbers ids:..."""
    if text.startswith("ids:"):
        try:
            return [int(i) for i in text[4:].replace(",", " ").split()]
        except ValueError:
            raise InputError(f"--prompt {text!r} is not a list of numbers such as ids:1,403,407") from None
    if tokenizer is None:
        raise InputError(f"{args.checkpoint or '--model'} has no tokenizer: use --prompt ids:... or --prompt-length")
    messages = [*(args.chat or []), {"role": "user", "content": text}]
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError:
        raise InputError(f"--prompt {text!r} or the text of --chat is not valid UTF-8") from None
    return tokenizer.encode(text) if args.chat is None else tokenizer.chat(messages)


def fit(max_new_tokens, prompts, context):
    """Return (max_new_tokens, cut to the room after the shortest prompt; the slots of a cache for all rows).

    Each row ends at the end of the context. Raises InputError if a prompt leaves no room there.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens} but must be a whole number, at least 1")
    lengths = [len(prompt) for prompt in prompts]
    longest, shortest = max(lengths), min(lengths)
    if longest >= context:
        raise InputError(f"a prompt of {longest} tokens leaves no room in the context of {context}: shorten it")
    return min(max_new_tokens, context - shortest), min(longest + max_new_tokens, context)


class Printer:
    """Shows a generation as it goes, on rank 0: one row as text, more rows as a progress bar and then their texts."""

    def __init__(self, rank, prompts, tokenizer, max_new_tokens, show_prompt=True):
        self.shows, self.prompts, self.tokenizer, self.stream = rank == 0, prompts, tokenizer, None
        self.shows_prompt = show_prompt
        if self.shows and tokenizer is not None and len(prompts) == 1:
            self.stream = TextStream(tokenizer, [] if show_prompt else prompts[0])
            print(self.stream.push(prompts[0]) if show_prompt else "", end="", flush=True)
        elif self.shows:
            self.bar = tqdm(total=max_new_tokens, desc="decoding", unit="token", delay=1, disable=None)

    def push(self, new):
        """Show the ids of a step, new: a list for each row."""
        if self.stream:
            print(self.stream.push(new[0]), end="", flush=True)
        elif self.shows:
            self.bar.update(max(map(len, new)))

    def finish(self, rows):
        """Print the rest; return the new text of each row, or None without a tokenizer and on other ranks."""
        if not self.shows:
            return None
        if self.stream:
            print(self.stream.flush(), flush=True)
        else:
            self.bar.close()
        if self.tokenizer is None:
            print("\n".join(f"--- {' '.join(map(str, row))}" for row in rows))
            return None
        texts = [self.tokenizer.continuation(prompt, row) for prompt, row in zip(self.prompts, rows, strict=True)]
        if not self.stream:
            for prompt, text in zip(self.prompts, texts, strict=True):
                print(f"--- {self.tokenizer.decode(prompt) if self.shows_prompt else ''}{text}")
        return texts


# ---- generate.py's flags ---------------------------------------------------------------------------------------------


def parse_generation_flags(description, argv=None):
    """Return the values of generate.py's flags."""
    p = Parser(description)
    g = p.add_argument_group("model")
    add_model_flags(g, required=True)
    words = 'torch.compile the decode step, with "all" the prefill too; needs a C++ compiler'
    g.add_argument("--compile", nargs="?", const="decode", choices=("decode", "all"), help=words)
    add_rank_flags(g, sharded=True)
    add_wiring_flags(p)
    add_prompt_flags(p)
    g = p.add_argument_group("generation")
    g.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="each row stops at its own end")
    g.add_argument("--temperature", type=number(float, 0), default=0.8, metavar="T", help="0: greedy, 1: the model's")
    g.add_argument("--top-k", type=count, metavar="K", help="sample among the K likeliest tokens, e.g. 50")
    words = "... among the likeliest of mass P, e.g. 0.95"
    g.add_argument("--top-p", type=number(float, 0, 1, above=True), default=1.0, metavar="P", help=words)
    g.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="S", help="of sampling and prompts")
    words = "speculative decoding: a smaller checkpoint, or the text's own n-grams, propose K (3) tokens at a time, "
    words += "e.g. ngram@4"
    g.add_argument("--draft", metavar="(DIR|ngram)[@K]", help=words)
    add_json_flag(g)
    return p.parse_args(argv)


class Job:
    """What generate.py's flags ask for, checked on all ranks before one of them loads weights. Raises InputError."""

    def __init__(self, args, world):
        self.args, self.world = args, world
        with world.together():
            if args.compile:
                from runtime import compiling

                compiling.prepare(world.device)
            self.sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
            self.name, stored = read_config(args)
            self.config = config = with_wiring(stored, args)
            self.tokenizer = args.checkpoint and load_tokenizer(args.checkpoint, config.vocab_size)
            if args.checkpoint and world.rank == 0:
                warn_of_wiring(stored, config, world.shares)
            chats, self.prompts = is_chat(args), read_prompts(args, config, self.tokenizer)
            context = min(CHAT_CONTEXT, config.max_seq_len) if chats else config.max_seq_len
            self.max_new_tokens, self.slots = fit(args.max_new_tokens, self.prompts, context)
            longest = max(map(len, self.prompts))
            if chats:
                self.slots = context
            elif longest + args.max_new_tokens > context:
                room = f"the context of {context} has room for {context - longest} after a prompt of {longest} tokens"
                world.say(f"--max-new-tokens {args.max_new_tokens}: {room}")
            drafts = args.draft and load_extra("drafts", f"--draft {args.draft}")
            self.draft_source = drafts and drafts.read_draft(args.draft, config, args.checkpoint)
            report.warn_of_memory(world, config, read_dtype(args), len(self.prompts), self.slots)
        source = self.draft_source
        contents = {"tokens of the prompts": zlib.crc32(str(self.prompts).encode())}
        contents["--draft"] = source and (source.name, source.count)
        world.agree(contents, checkpoint=args.checkpoint, draft=source and source.folder)  # raises where ranks differ
