"""The lines of JSON that the scripts of measuring write, read again."""

import argparse
import json
import re

from formats.checkpoint import read_text
from model import WIRINGS
from runtime.benchmarking import markdown  # noqa: F401
from runtime.errors import InputError

# what a line of extras.measure.sweep has at least
STEP_KEYS = ["model", "n_layers", "dtype", "device", "threads", "tp", "simulated", "batch", "tokens", "kind"]
STEP_KEYS += ["compiled", "link", "wiring", "step_ms", "quartiles_ms", "all_reduce_ms", "limit_ms"]


def read(path, *keys):
    """Return a file's lines as dicts, without those that were cut off. Raises InputError unless all have these keys."""
    lines = []
    for text in read_text(path).splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            if text.strip() and not text.startswith("{"):
                lines.append(None)
    if not all(isinstance(line, dict) and line.keys() >= {*keys} for line in lines):
        raise InputError(f"{path} has lines that this script did not write")
    return lines


def lines_of(*keys):
    """Return an argparse type: from the name of a file to its lines, at least one, all with these keys."""

    def parse(path):
        try:
            if lines := read(path, *keys):
                return lines
        except InputError as e:
            raise argparse.ArgumentTypeError(e) from None
        raise argparse.ArgumentTypeError(f"{path} has no complete line")

    return parse


def add_show_flag(parser, *keys):
    words = "measure nothing: print the tables of such files"
    parser.add_argument("--show", type=lines_of(*keys), nargs="+", metavar="FILE", help=words)


def base(wiring):
    """Return the name of a wiring without its numbers."""
    return re.sub(r"(-\d+)?([:/].*)?$", "", wiring)


def wiring_order(wiring):
    """Return the key that sorts wirings as in model.WIRINGS, then by their parameters."""
    names = list(WIRINGS)
    return (names.index(base(wiring)) if base(wiring) in names else len(names)), len(wiring), wiring
