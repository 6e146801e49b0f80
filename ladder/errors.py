"""The errors that end a run."""

import difflib


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


class Verdict(Exception):
    """Why ranks that cannot go on are ended, in one line."""


class StoreLost(Verdict):
    """torchrun's store does not answer."""


class ProcessLost(Verdict):
    """A process that this one has started was ended from outside."""


def did_you_mean(given, known):
    """Return the end of a message that refuses a name: the known one that is closest to it, or "" if none is close."""
    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(given, known, 1))


def first_line(error):
    """Return the first line of a library's error message, or the error's name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
