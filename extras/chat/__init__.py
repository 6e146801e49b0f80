"""Chat templates, which generate.py --chat renders, and a chat on the terminal."""

from extras.chat import template
from extras.chat.chat import chat_on_terminal

__all__ = ["chat_on_terminal", "template"]
