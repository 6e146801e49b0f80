"""The terminal: prompts in, text out."""

import torch
from tqdm import tqdm

from formats import checkpoint
from formats.tokenizer import TextStream
from runtime.cli import count
from runtime.errors import InputError

CHAT_CONTEXT = 4096  # tokens of a chat's cache, at most


def add_prompt_flags(parser):
    g = parser.add_argument_group("prompts", "each is a row of the batch")
    words = 'a text, e.g. "One day"; a file with one on each line, e.g. @prompts.txt; or token ids, e.g. ids:1,403;\n'
    g.add_argument("--prompt", action="append", metavar="TEXT|@FILE|ids:I,J,...", help=words + "may be repeated")
    g.add_argument("--prompt-length", type=count, metavar="N", help="a synthetic prompt of N random tokens, e.g. 1024")
    words = "repeat the prompts to B rows, e.g. 16 (synthetic ones differ)"
    g.add_argument("--batch", type=count, metavar="B", help=words)
    words = "put each prompt into the checkpoint's chat template; without a prompt, chat on the terminal"
    g.add_argument("--chat", action="store_true", help=f"{words}: Ctrl-C stops an answer, Ctrl-D ends")


def is_chat(args):
    """Return whether the flags ask for a chat on the terminal."""
    return args.chat and not args.prompt and args.prompt_length is None


def read_prompts(args, config, tokenizer):
    """Return the prompts that the flags give, as lists of token ids."""
    if is_chat(args):
        if args.batch or tokenizer is None:
            raise InputError("--chat without a prompt takes no --batch, and needs a checkpoint with a tokenizer")
        return [[0]]
    prompts = []
    for text in args.prompt or []:
        lines = read_lines(text[1:]) if text.startswith("@") else [text]
        if not any(line.strip() for line in lines):
            raise InputError(f"--prompt is empty ({text!r}): give some text, or token ids, such as ids:1")
        prompts += [encode(line, args, tokenizer) for line in lines if line.strip()]
    if args.prompt_length is not None:
        fit(1, [range(args.prompt_length)], config.max_seq_len)
        generator = torch.Generator().manual_seed(args.seed)
        shape = (args.batch or 1, args.prompt_length)
        prompts += torch.randint(config.vocab_size, shape, generator=generator).tolist()
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


def read_lines(path):
    """Return the lines of a file of prompts; a line ends at a newline only."""
    return checkpoint.read_text(path, "--prompt @").split("\n")


def encode(text, args, tokenizer):
    """Return the token ids of a --prompt."""
    if text.startswith("ids:"):
        try:
            return [int(i) for i in text[4:].replace(",", " ").split()]
        except ValueError:
            raise InputError(f"--prompt {text!r} is not a list of numbers such as ids:1,403,407") from None
    if tokenizer is None:
        raise InputError(f"{args.checkpoint or '--model'} has no tokenizer: use --prompt ids:... or --prompt-length")
    if any("\ud800" <= c <= "\udfff" for c in text):  # Python's substitutes for bytes that are no characters
        raise InputError(f"--prompt {text!r} is not valid UTF-8")
    return tokenizer.chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)


def fit(max_new_tokens, prompts, context):
    """Return max_new_tokens, cut to the room that the context leaves after the longest prompt."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens} but must be a whole number, at least 1")
    longest = max(map(len, prompts))
    if longest >= context:
        raise InputError(f"a prompt of {longest} tokens leaves no room in the context of {context}: shorten it")
    return min(max_new_tokens, context - longest)


class Printer:
    """Shows a generation as it goes: one row as text, more rows as a progress bar and then their texts."""

    def __init__(self, prompts, tokenizer, max_new_tokens, show_prompt=True):
        self.prompts, self.tokenizer, self.stream = prompts, tokenizer, None
        if tokenizer is not None and len(prompts) == 1:
            self.stream = TextStream(tokenizer)
            text = self.stream.push(prompts[0])
            print(text if show_prompt else "", end="", flush=True)
        else:
            self.bar = tqdm(total=max_new_tokens, desc="decoding", unit="token", delay=1, disable=None)

    def push(self, new):
        """Show the ids of a pass, new: a list for each row."""
        if self.stream:
            print(self.stream.push(new[0]), end="", flush=True)
        else:
            self.bar.update(max(map(len, new)))

    def finish(self, rows):
        """Print the rest; return the new text of each row, or None without a tokenizer."""
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
                print(f"--- {self.tokenizer.decode(prompt)}{text}")
        return texts
