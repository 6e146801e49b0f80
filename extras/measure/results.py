"""Reads the lines of JSON that the measuring scripts have written."""

import contextlib
import json

from ladder.checkpoints.checkpoint import read_text
from ladder.errors import InputError


def read(path, *keys):
    """Return, as dicts, the lines of a file that have a value for each of these keys. Raises InputError if none has.

    Lines of other scripts, and those that were cut off, are skipped.
    """
    lines = []
    for text in read_text(path).splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    lines = [line for line in lines if isinstance(line, dict) and all(line.get(key) is not None for key in keys)]
    if not lines:
        raise InputError(f"{path} has no line of this script's, with {', '.join(map(repr, keys))}")
    return lines
