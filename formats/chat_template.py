"""Renders chat templates in a process of its own, because a template is a program, and may be a stranger's.

python chat_template.py     # as tokenizer.py starts it: a line of JSON in, a line of JSON out, until the input ends

In: {"template": Jinja source, "variables": {...}}. Out: {"text": ...} or {"error": ...}. Jinja's sandbox keeps a
template from the system. Loops and texts without end are bounded by what the system grants this process: MEMORY and,
for each rendering, SECONDS of the processor, after which a signal ends it, whatever it is in.
"""

import contextlib
import functools
import json
import resource
import signal
import sys
from datetime import datetime

SECONDS, MEMORY, LONGEST = 1, 2**29, 2**24  # of the processor; bytes; characters of a conversation


@functools.cache
def compiled(template):
    """A chat template, with what transformers gives it: https://huggingface.co/docs/transformers/chat_templating_writing."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what training learns to say: its text is part of the conversation like any other."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False, indent=k.get("indent"))
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def answer(line):
    """The line that answers a line of the input."""
    try:
        request = json.loads(line)
        text = compiled(request["template"]).render(**request["variables"])
        text.encode()  # half of a surrogate pair, which JSON may hold, is no character
        if len(text) > LONGEST:
            return json.dumps({"error": f"it writes more than {LONGEST:,} characters"})
        return json.dumps({"text": text})
    except MemoryError:
        return json.dumps({"error": f"it takes more than {MEMORY / 1e6:,.0f} MB"})
    except Exception as e:  # whatever a template may do
        return json.dumps({"error": str(e)[:1000] or type(e).__name__})


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C stops an answer of the model, not this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal, unhandled, ends a process
        said = answer(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(said, flush=True)


if __name__ == "__main__":
    main()
