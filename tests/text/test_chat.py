"""ladder/text: templates that are refused, or that take too long or too much memory."""

import re
import signal
import subprocess

import pytest
from cases import refused

from ladder.errors import ProcessLost
from ladder.text import template as chat_template
from ladder.text.rendering import render, turn_end
from ladder.text.tokenizer import Tokenizer

TEMPLATES = {
    "{{ messages.__class__.__mro__ }}": "is unsafe",
    "{{ messages.append(1) }}": "is unsafe",
    "{{ raise_exception.__globals__['os'] }}": "is unsafe",
    "{% include '/etc/passwd' %}": "loader",
    "{{ raise_exception('no') }}": "refuses this conversation: no",
    "{% if %}": "Expected an expression",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{{ 'a' * 10**10 }}": "MemoryError",
    "{{ 'a' * 10**7 }}b": "its text has 10,000,001 characters",
    "{{ 10**(10**10) }}": "it takes more than 0.3 s or 512 MB",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more than 0.3 s",
}


def test_templates_that_are_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "renderer", chat_template.Renderer())
    monkeypatch.setattr(chat_template.Renderer, "seconds", 0.3)
    tokenizer = Tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    for tokenizer.template, message in TEMPLATES.items():
        refused(re.escape(message), render, tokenizer, messages)
        tokenizer.template = "{{ messages[0]['content'] }}"  # also after a process was ended
        assert render(tokenizer, messages) == "hi"


def test_a_process_that_others_end_is_started_again_and_the_conversation_is_not_blamed(monkeypatch):
    monkeypatch.setattr(chat_template, "renderer", renderer := chat_template.Renderer())
    tokenizer = Tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    tokenizer.template = "{{ messages[0]['content'] }}"
    for number in signal.SIGKILL, signal.SIGTERM:
        assert render(tokenizer, messages) == "hi"
        renderer.process.send_signal(number)
        renderer.process.wait()
    assert render(tokenizer, messages) == "hi"

    class Killed(subprocess.Popen):
        number = signal.SIGKILL

        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.send_signal(self.number)
            self.wait()

    renderer.process.kill()
    monkeypatch.setattr(subprocess, "Popen", Killed)
    words = "the process that renders chat templates was ended from outside, twice:"
    for call in (lambda: render(tokenizer, messages)), (lambda: turn_end(tokenizer)):
        with pytest.raises(ProcessLost, match=f"{words} SIGKILL$"):
            call()
    Killed.number = signal.SIGRTMIN + 3  # for which Python has no name
    with pytest.raises(ProcessLost, match=f"{words} signal {signal.SIGRTMIN + 3}$"):
        render(tokenizer, messages)
    monkeypatch.undo()
    assert renderer.render(tokenizer.template, {"messages": messages}) == ["hi", None]
