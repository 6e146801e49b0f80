"""Prompts in, text out: the flags that give prompts, and the Printer of what a generation says."""

import torch
from tqdm import tqdm

from ladder.checkpoints import checkpoint
from ladder.command_line.flags import count
from ladder.errors import InputError
from ladder.seeds import generator
from ladder.text.tokenizer import TextStream


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
        seeded = generator(args.seed % 2**64)
        shape = (args.batch or 1, args.prompt_length)
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
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r} but must be a whole number, at least 1")
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    shortest = min(lengths)
    if longest >= context:
        raise InputError(f"a prompt of {longest} tokens leaves no room in the context of {context}: shorten it")
    return min(max_new_tokens, context - shortest), min(longest + max_new_tokens, context)


class Printer:
    """Shows a generation as it goes, on rank 0: one row as text, more rows as a progress bar and then their texts."""

    def __init__(self, rank, prompts, tokenizer, max_new_tokens, show_prompt=True):
        self.shows = rank == 0
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.stream = None
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
