"""A chat on the terminal: generate.py --chat without a prompt."""

from extras.chat.chat import run

__all__ = ["run"]
