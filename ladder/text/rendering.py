"""Renders conversations by a checkpoint's chat template, an untrusted program that template.py runs in isolation."""

from ladder.errors import InputError, ProcessLost, first_line
from ladder.text import template

ANSWER = "4.7.2"  # a text that no template contains


def render(tokenizer, messages, answer=True, variables=None):
    """Return the text that the chat template makes of a conversation, followed by the start of an answer if `answer`.

    variables: {name: value} of further variables that the template reads, such as enable_thinking. Raises InputError if
    there is no template, or if it fails, and ProcessLost if others end the process that renders: nobody's bad input.
    """
    if tokenizer.template is None:
        where = "in the checkpoint's tokenizer_config.json, nor a chat_template.jinja or .json"
        raise InputError(f"no chat template {where}: give it plain texts, not chats")
    standard = {**tokenizer.template_variables, "messages": messages, "add_generation_prompt": answer}
    variables = {"tools": None, "documents": None, **(variables or {}), **standard}
    try:
        text, error = template.renderer.render(tokenizer.template, variables)
    except ChildProcessError as e:
        raise ProcessLost(str(e)) from None
    if error is not None:
        raise InputError(f"the checkpoint's chat template refuses this conversation: {first_line(error)}")
    return text


def turn_end(tokenizer):
    """Return {text: id} of the special token that the chat template writes after an answer, {} if there is none.

    The answer must begin where the template's prompt ends: gpt-oss's prompt does not end so, since a turn may have
    several messages there, each with a header.
    """
    question = {"role": "user", "content": "Hi"}
    try:
        asked, prompt = (render(tokenizer, [question], answer) for answer in (False, True))
        whole = render(tokenizer, [question, {"role": "assistant", "content": ANSWER}], answer=False)
    except InputError:
        return {}
    before, _, after = whole.rpartition(ANSWER)
    if prompt != asked and before.rstrip() != prompt.rstrip():
        return {}
    names = [name for name in tokenizer.special if after.lstrip().startswith(name)]
    return {name: tokenizer.special[name] for name in sorted(names, key=len)[-1:]}
