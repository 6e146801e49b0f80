"""A chat on the terminal: generate.py --chat."""

import os
import re
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
STEPS_BETWEEN_CHECKS = 8  # for a line that stops an answer; among several ranks a check is a broadcast


def line_waits():
    """Return whether the user has typed a line, on a terminal, that was not read yet."""
    return sys.stdin.isatty() and select.select([0], [], [], 0)[0] != []


def read_line():
    """Return the user's next line, or /exit at the end of the input. On a terminal, a prompt is shown."""
    waited = line_waits()
    if sys.stdin.isatty() and not waited:
        print("> ", end="", flush=True)
    line = sys.stdin.buffer.readline().decode(errors="replace")
    if waited and line.strip():  # typed during an answer, so that its echo stood within the answer's text
        print(f"> {line.rstrip()}", flush=True)
    return line or "/exit"


def is_stopped(steps, world):
    """Return, equally on all ranks, whether the user typed a line meanwhile. steps: how many the answer has so far."""
    if world.alone:
        return line_waits()
    if steps % STEPS_BETWEEN_CHECKS:
        return False
    stopped = torch.tensor(world.rank == 0 and line_waits(), dtype=torch.int32, device=world.device)
    dist.broadcast(stopped, 0)
    return bool(stopped)


def chat_on_terminal(job, runner):
    """Read lines and answer each. With a chat template the lines are user messages; without one the text just goes on.

    job: a Job. runner: what generate.make_runner returns for it.
    """
    world = job.world
    tokenizer = job.tokenizer
    context = min(CHAT_CONTEXT, job.config.max_seq_len)
    beginning = job.args.chat  # perhaps a system message
    messages = beginning
    ids = []
    cached = []  # the ids of the tokens in the cache

    def extended(messages, ids, line):
        """Return the conversation, and its ids, with another line of the user at its end."""
        messages = [*messages, {"role": "user", "content": line}]
        if tokenizer.template is not None:
            return messages, tokenizer.chat(messages)
        return messages, ids + tokenizer.encode_plain(line) if ids else tokenizer.encode(line)

    if world.rank == 0 and sys.stdin.isatty():
        how = "the text just goes on" if tokenizer.template is None else "in the checkpoint's chat template"
        world.say(f"{how}; {HELP}")
    while True:
        progress.at("the wait for the user", timed=world.rank > 0)  # on other ranks it ends when rank 0 goes on
        line = world.gather(read_line() if world.rank == 0 else "")[0]
        command = line.strip()
        if command == "/exit":
            return
        if command == "/reset":
            messages = beginning
            ids = []
        if command in REPLIES:
            world.say(REPLIES[command])
        unknown = re.fullmatch(r"/[\w-]+", command) and command not in REPLIES
        if unknown:
            world.say(f"{command} is no command: {HELP}")
        if command in REPLIES or unknown or not command:
            continue
        line = line.rstrip("\r\n")
        restarted = extended(beginning, [], line)  # what this line alone would be
        if len(restarted[1]) >= context:
            world.say(f"a message of {len(restarted[1])} tokens leaves no room in the context of {context}: shorten it")
            continue
        messages, ids = extended(messages, ids, line)
        if len(ids) >= context:
            world.say(f"{len(ids)} tokens do not fit the context of {context}: starting anew with this message")
            messages, ids = restarted
        max_new_tokens, _ = fit(job.args.max_new_tokens, [ids], context)
        printer = Printer(world.rank, [ids], tokenizer, max_new_tokens, show_prompt=False)
        cached_tokens = len(os.path.commonprefix([cached, ids[:-1]]))
        answer = Generation(runner, [ids], max_new_tokens, job.sampler, job.config.eos_ids, cached_tokens)
        for steps, new in enumerate(answer, start=1):
            printer.push(new)
            if is_stopped(steps, world):
                break
        [row] = answer.rows
        printer.finish([row])
        if answer.finish_reasons == ["length"]:
            limit = "--max-new-tokens" if max_new_tokens == job.args.max_new_tokens else "the end of the context"
            world.say(f"(cut at {limit})")
        ids = ids + row
        cached = ids[:-1]
        messages.append({"role": "assistant", "content": tokenizer.decode(row)})
