"""Renders chat templates in a process of its own: a Renderer runs this file as that process.

Jinja's sandbox keeps an untrusted template away from the system, but it does not stop one that runs for ever or makes a
text of any size, as in the expression 10**(10**10). Hence a timer of CPU time ends the process, and its memory is
limited. A request is a line of JSON, [template, variables], and its answer is another line, [text, error].
"""

import contextlib
import functools
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Limits for a template, besides a Renderer's seconds:
MEGABYTES = 512
CHARACTERS = 10**7
LIMITS = 1, -signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT  # how a process ends that exceeds them


def readable(template):
    """Return a template without {% generation %}, which marks what training learns from: it becomes a mere scope."""
    return re.sub(r"(\{%[-+]?\s*(?:end)?)generation\b", r"\1with", template)


@functools.cache
def compiled(template):
    """Compile a template as transformers does (huggingface.co/docs/transformers/chat_templating_writing)."""

    def raise_exception(message):
        raise ValueError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": time.strftime}
    return sandbox.from_string(readable(template))


def render(template, variables):
    try:
        text = compiled(template).render(variables)
    except Exception as e:  # the template's code may raise anything
        return None, str(e) or type(e).__name__
    return (text, None) if len(text) <= CHARACTERS else (None, f"its text has {len(text):,} characters")


def signal_name(number):
    """Return a signal's name; Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(seconds):
    with contextlib.suppress(ValueError):  # systems without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES * 2**20, MEGABYTES * 2**20))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # counts CPU time, and its signal ends the process
        print(json.dumps(render(*json.loads(line))), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


class Renderer:
    """The process that renders. It is started with the first request, and again after it was ended.

    Threads share it, and each waits until the requests before its own are answered.
    """

    seconds = 10
    process = None

    def __init__(self):
        self.lock = threading.Lock()

    def render(self, template, variables):
        """Return (text, None), or (None, what went wrong). Raises ChildProcessError if others end the process."""
        with self.lock:
            for _ in range(2):  # perhaps somebody has ended the process meanwhile
                if self.process is None:
                    command = [sys.executable, "-P", __file__, str(self.seconds)]
                    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                    self.process = subprocess.Popen(command, **pipes, start_new_session=True)  # without Ctrl-C
                try:
                    self.process.stdin.write(json.dumps([template, variables]).encode() + b"\n")
                    self.process.stdin.flush()
                    return json.loads(self.process.stdout.readline())
                except (BrokenPipeError, ValueError):  # the process was ended
                    self.process.communicate()
                    code = self.process.returncode
                    self.process = None
                if code in LIMITS:
                    return None, f"it takes more than {self.seconds} s or {MEGABYTES} MB"
        name = signal_name(-code) if code < 0 else f"exit code {code}"
        raise ChildProcessError(f"the process that renders chat templates was ended from outside, twice: {name}")


renderer = Renderer()


if __name__ == "__main__":
    main(float(sys.argv[1]))
