"""Reads the lines of JSON that the measuring scripts have written."""

import contextlib
import json

from ladder.checkpoints.checkpoint import read_text
from ladder.errors import InputError


def read(paths, *keys):
    """Return, as dicts, the lines of files that have a value for each of these keys.

    Lines of other scripts, and those that were cut off, are skipped. Raises InputError for a file that has no others.
    """
    lines = []
    for path in paths:
        before = len(lines)
        for text in read_text(path).splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                lines += [line] * (isinstance(line, dict) and all(line.get(key) is not None for key in keys))
        if len(lines) == before:
            raise InputError(f"{path} has no line of this script's, with {', '.join(map(repr, keys))}")
    return lines
