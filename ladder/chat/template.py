"""Renders chat templates in a process of its own: a Renderer runs this file as that process.

Jinja's sandbox keeps a stranger's template from the system, but not from running for ever or making a text of any size,
in one expression such as 10**(10**10). Hence a timer of CPU time, which ends the process, and a limit of its memory. A
request is a line of JSON, [template, variables]; its answer is another, [text, error].
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

MEGABYTES, CHARACTERS = 512, 10**7  # what a template may take, besides a Renderer's seconds


@functools.cache
def compiled(template):
    """Return a template compiled as in transformers (huggingface.co/docs/transformers/chat_templating_writing)."""

    def raise_exception(message):
        raise ValueError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": time.strftime}
    # {% generation %} marks the text that training learns from; here it is a scope like any other.
    return sandbox.from_string(re.sub(r"(\{%[-+]?\s*(?:end)?)generation\b", r"\1with", template))


def render(template, variables):
    try:
        text = compiled(template).render(variables)
    except Exception as e:  # whatever the template's code raises
        return None, str(e) or type(e).__name__
    return (text, None) if len(text) <= CHARACTERS else (None, f"its text has {len(text):,} characters")


def main(seconds):
    with contextlib.suppress(ValueError):  # systems without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES * 2**20, MEGABYTES * 2**20))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time; its signal ends the process
        print(json.dumps(render(*json.loads(line))), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


class Renderer:
    """The process that renders, started when the first template is rendered and again after it was ended.

    Threads share it: each waits for the answers of those before it.
    """

    seconds, process = 10, None

    def __init__(self):
        self.lock = threading.Lock()

    def render(self, template, variables):
        """Return (text, None), or (None, what went wrong)."""
        with self.lock:
            if self.process is None:
                command = [sys.executable, "-P", __file__, str(self.seconds)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                self.process = subprocess.Popen(command, **pipes, start_new_session=True)  # a Ctrl-C does not reach it
            try:
                self.process.stdin.write(json.dumps([template, variables]).encode() + b"\n")
                self.process.stdin.flush()
                return json.loads(self.process.stdout.readline())
            except (BrokenPipeError, ValueError):  # it was ended
                self.process.communicate()
                self.process = None
                return None, f"it takes more than {self.seconds} s or {MEGABYTES} MB"


renderer = Renderer()


if __name__ == "__main__":
    main(float(sys.argv[1]))
