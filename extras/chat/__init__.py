"""Chat templates, which generate.py --chat renders, and a chat on the terminal."""

from extras.chat import template
from extras.chat.chat import run

__all__ = ["run", "template"]
