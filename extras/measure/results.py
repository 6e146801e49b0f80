"""The lines of JSON that the scripts of measuring write, read again."""

import contextlib
import json
import re

from formats.checkpoint import read_text
from model import WIRINGS
from runtime.errors import InputError


def read(path, key):
    """Return the lines of a file that have this key, as dicts. Raises InputError if none has.

    Without other scripts' lines, and those that were cut off.
    """
    lines = []
    for text in read_text(path).splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    lines = [line for line in lines if isinstance(line, dict) and key in line]
    if not lines:
        raise InputError(f"{path} has no line of this script's, with {key!r}")
    return lines


def wiring_order(wiring):
    """Return the key that sorts wirings as in model.WIRINGS, those of older lines last, then by their parameters."""
    names, base = [*WIRINGS], re.sub(r"(-\d+)?([:/ ].*)?$", "", wiring)  # of "ladder in 2 chunks", too
    return names.index(base) if base in names else len(names), len(wiring), wiring
