"""A chat on the terminal: generate.py --chat."""

import functools
import os
import select
import sys
import termios

import torch
import torch.distributed as dist

from runtime import launch, place
from runtime.cli import CHAT_CONTEXT, Printer, fit

CTRL_C = b"\3"
PASSES_BETWEEN_CHECKS = 8  # of several ranks, for a Ctrl-C: each check is a broadcast


class Keyboard:
    """The user's lines, on rank 0; at a terminal Ctrl-C ends a line: at its signal torchrun would end all ranks."""

    def __init__(self, world):
        self.world, self.passes, self.stopped = world, 0, False
        self.early = []  # lines typed during an answer
        self.is_terminal = world.rank == 0 and sys.stdin.isatty()
        if self.is_terminal:
            launch.at_end.append(functools.partial(termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0)))
            changed = termios.tcgetattr(0)
            changed[6][termios.VINTR], changed[6][termios.VEOL] = b"\0", CTRL_C
            termios.tcsetattr(0, termios.TCSANOW, changed)

    def line(self):
        """Return the next line, or None at the end or a Ctrl-C."""
        if not self.is_terminal:
            typed = sys.stdin.buffer.readline()
            return typed.decode(errors="replace") if typed else None
        self.stopped = False
        print("> ", end="", flush=True)
        typed = self.early.pop(0) if self.early else os.read(0, 2**16)
        if typed and not typed.endswith(CTRL_C):
            return typed.decode(errors="replace")
        print()
        return None

    def stops(self):
        """Return, after each pass of an answer and on all ranks alike, whether the user typed Ctrl-C meanwhile."""
        while self.is_terminal and not self.stopped and select.select([0], [], [], 0)[0]:
            typed = os.read(0, 2**16)
            self.stopped = not typed or typed.endswith(CTRL_C)
            self.early = [] if self.stopped else [*self.early, typed]
        self.passes += 1
        if self.world.alone or self.passes % PASSES_BETWEEN_CHECKS:
            return self.world.alone and self.stopped
        stopped = torch.tensor(self.stopped, dtype=torch.int32, device=self.world.device)
        dist.broadcast(stopped, 0)
        return bool(stopped)


def run(request, loaded, world, Generation):
    """Read a line, answer, repeat. With a chat template the lines are user messages, else the text just goes on.

    request, loaded: as generate.read and generate.load make them. Generation: the class of generate.py.
    """
    tokenizer, context = request.tokenizer, min(CHAT_CONTEXT, request.config.max_seq_len)
    beginning = request.args.chat  # perhaps a system message
    keyboard, messages, ids, cached = Keyboard(world), beginning, [], []  # cached: the tokens that are in the cache

    def extended(messages, ids, line):
        """Return a conversation and its ids with one more line of the user."""
        messages = [*messages, {"role": "user", "content": line}]
        if tokenizer.template is not None:
            return messages, tokenizer.chat(messages)
        return messages, ids + tokenizer.encode_plain(line) if ids else tokenizer.encode(line)

    if keyboard.is_terminal:
        how = "the text just goes on" if tokenizer.template is None else "in the checkpoint's chat template"
        world.say(f"{how}; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        place.at("the wait for the user", timed=world.rank > 0)  # of the others only until rank 0 goes on
        line = world.tell(keyboard.line() if world.rank == 0 else None)
        if line is None:
            return
        if not line.strip():
            continue
        line = line.rstrip("\r\n")
        anew = extended(beginning, [], line)
        if len(anew[1]) >= context:
            world.say(f"a message of {len(anew[1])} tokens leaves no room in the context of {context}: shorten it")
            continue
        messages, ids = extended(messages, ids, line)
        if len(ids) >= context:
            world.say(f"{len(ids)} tokens do not fit the context of {context}: starting anew with this message")
            messages, ids = anew
        new = fit(request.args.max_new_tokens, [ids], context)
        printer = Printer([ids], tokenizer, new, show_prompt=False) if world.rank == 0 else None
        known = len(os.path.commonprefix([cached, ids[:-1]]))
        ends = request.config.eos_ids
        answer = Generation(loaded.runner, [ids], new, request.sample, ends, loaded.draft, cached_tokens=known)
        for fresh in answer:
            if printer:
                printer.push(fresh)
            if keyboard.stops():
                break
        [row] = answer.rows
        if printer:
            printer.finish([row])
        if answer.finish == ["length"]:
            limit = "--max-new-tokens" if new == request.args.max_new_tokens else "the end of the context"
            world.say(f"(cut at {limit})")
        ids = ids + row
        cached = ids[:-1]
        messages.append({"role": "assistant", "content": tokenizer.decode(row)})
