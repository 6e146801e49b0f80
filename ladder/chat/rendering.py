"""Renders conversations by a checkpoint's chat template, a stranger's program, which template.py runs apart."""

from ladder.chat import template
from ladder.errors import InputError, first_line


def render(tokenizer, messages, answer=True, variables=None):
    """Return a conversation as the chat template writes it, followed by the start of an answer if asked for.

    variables: {name: value} of more that the template reads, such as enable_thinking.
    """
    if tokenizer.template is None:
        where = "in the checkpoint's tokenizer_config.json, nor a chat_template.jinja or .json"
        raise InputError(f"no chat template {where}: give it plain texts, not chats")
    known = {**tokenizer.template_variables, "messages": messages, "add_generation_prompt": answer}
    variables = {"tools": None, "documents": None, **(variables or {}), **known}
    text, error = template.renderer.render(tokenizer.template, variables)
    if error is not None:
        raise InputError(f"the checkpoint's chat template refuses this conversation: {first_line(error)}")
    return text
