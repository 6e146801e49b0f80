"""A chat on the terminal: generate.py --chat."""

import os
import select
import sys

import torch
import torch.distributed as dist

from generate import Generation
from ladder.command_line.job import CHAT_CONTEXT
from ladder.command_line.prompts import Printer, fit
from ladder.progress import progress

HELP = "/reset begins a new conversation, /exit or Ctrl-D ends, Enter stops an answer"
REPLIES = {"/help": HELP, "/reset": "(a new conversation)"}
STEPS_BETWEEN_CHECKS = 8  # of several ranks, for a line that stops an answer: each check is a broadcast


def line_waits():
    """Return whether the user of a terminal has typed a line that was not read yet."""
    return sys.stdin.isatty() and select.select([0], [], [], 0)[0] != []


def read_line():
    """Return the user's next line, or /exit at the end. On a terminal it stands after a prompt."""
    waited = line_waits()
    if sys.stdin.isatty() and not waited:
        print("> ", end="", flush=True)
    line = sys.stdin.buffer.readline().decode(errors="replace")
    if waited and line.strip():  # typed during an answer, whose text is all around its echo
        print(f"> {line.rstrip()}", flush=True)
    return line or "/exit"


def is_stopped(steps, world):
    """Return, after so many steps of an answer and on all ranks alike, whether the user typed a line meanwhile."""
    if world.alone:
        return line_waits()
    if steps % STEPS_BETWEEN_CHECKS:
        return False
    stopped = torch.tensor(world.rank == 0 and line_waits(), dtype=torch.int32, device=world.device)
    dist.broadcast(stopped, 0)
    return bool(stopped)


def chat_on_terminal(job, runner):
    """Read a line, answer, repeat. With a chat template the lines are user messages, else the text just goes on.

    job: a Job. runner: generate.load's for it.
    """
    world, tokenizer, context = job.world, job.tokenizer, min(CHAT_CONTEXT, job.config.max_seq_len)
    beginning = job.args.chat  # perhaps a system message
    messages, ids, cached = beginning, [], []  # cached: the tokens that are in the cache

    def extended(messages, ids, line):
        """Return a conversation and its ids with one more line of the user."""
        messages = [*messages, {"role": "user", "content": line}]
        if tokenizer.template is not None:
            return messages, tokenizer.chat(messages)
        return messages, ids + tokenizer.encode_plain(line) if ids else tokenizer.encode(line)

    if world.rank == 0 and sys.stdin.isatty():
        how = "the text just goes on" if tokenizer.template is None else "in the checkpoint's chat template"
        world.say(f"{how}; {HELP}")
    while True:
        progress.at("the wait for the user", timed=world.rank > 0)  # of the others only until rank 0 goes on
        line = world.gather(read_line() if world.rank == 0 else "")[0]
        command = line.strip()
        if command == "/exit":
            return
        if command == "/reset":
            messages, ids = beginning, []
        if command in REPLIES:
            world.say(REPLIES[command])
        if command in REPLIES or not command:
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
        new, _ = fit(job.args.max_new_tokens, [ids], context)
        printer = Printer(world.rank, [ids], tokenizer, new, show_prompt=False)
        known = len(os.path.commonprefix([cached, ids[:-1]]))
        ends = job.config.eos_ids
        answer = Generation(runner, [ids], new, job.sample, ends, cached_tokens=known)
        for steps, fresh in enumerate(answer, start=1):
            printer.push(fresh)
            if is_stopped(steps, world):
                break
        [row] = answer.rows
        printer.finish([row])
        if answer.finish_reasons == ["length"]:
            limit = "--max-new-tokens" if new == job.args.max_new_tokens else "the end of the context"
            world.say(f"(cut at {limit})")
        ids = ids + row
        cached = ids[:-1]
        messages.append({"role": "assistant", "content": tokenizer.decode(row)})
