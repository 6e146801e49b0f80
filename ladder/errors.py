"""The errors that end a run."""

import contextlib
import difflib
import reprlib
from typing import NamedTuple


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


class NamedValue(NamedTuple):
    """A field as a message shows it; both are texts."""

    name: str
    value: str

    def __str__(self):
        return f"{self.name} {self.value}"


class FieldError(InputError):
    """Fields of a Config or an Architecture that make no model.

    The message has them in braces, as NamedValues, since other file formats have other names for them: "{n_heads}" is
    "n_heads 12" here and "num_attention_heads 12" in Hugging Face's words, and "{n_heads.name}" is the name alone.
    """

    def __init__(self, message, owner, values=None):
        """owner: the Config or Architecture; or its class, if there is none yet, and {field: value} in `values`."""
        super().__init__(message, owner, values)
        self.owner = owner

    def with_names(self, names):
        """Return the message with other names. names: {our name of a field: the other one}, where they differ."""
        message, owner, values = self.args
        values = vars(owner) if values is None else values
        return message.format_map({f: NamedValue(names.get(f, f), as_json(v)) for f, v in values.items()})

    def __str__(self):
        return self.with_names({})


class Verdict(Exception):
    """Why ranks that cannot go on are ended, in one line."""


class StoreLost(Verdict):
    """torchrun's store does not answer."""


class ProcessLost(Verdict):
    """A process that this one has started was ended from outside."""


@contextlib.contextmanager
def naming(source):
    """Let the InputErrors of a block begin with their source: a file, or a flag."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{source}: {e}") from None


class JsonRepr(reprlib.Repr):
    """Shortens the values of a JSON file for a message. None, in them too, is JSON's null."""

    def repr_NoneType(self, value, level):
        return "null"


as_json = JsonRepr().repr


def did_you_mean(given, known):
    """Return the end of a message that refuses a name: the known one that is closest to it, or "" if none is close."""
    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(given, known, 1))


def first_line(error):
    """Return the first line of a library's error message, or the error's name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
