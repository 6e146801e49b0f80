"""The lines of JSON that the scripts of measuring write: how each was made, how they are read again, and tables."""

import argparse
import contextlib
import json
import re
import shlex
import sys

import torch

from bench import markdown
from formats.checkpoint import read_text
from formats.wiring_text import wiring_name
from model import WIRINGS
from runtime.benchmarking import environment
from runtime.errors import InputError
from runtime.launch import World

LEGEND = {
    "~": "`~`: within noise, its quartiles and standard's overlap",
    "^": "`^`: above the upper bound, which no wiring can be: noise",
}
# what a line of extras.measure.sweep has at least
STEP_KEYS = ["model", "n_layers", "dtype", "device", "threads", "tp", "simulated", "batch", "tokens", "kind"]
STEP_KEYS += ["compiled", "link", "wiring", "step_ms", "quartiles_ms", "all_reduce_ms", "limit_ms"]


def about(script, argv=None, world=None):
    """Return what says how a line was made: the machine, the versions, the commit and the command.

    script: a module, e.g. benchmarks.decode. argv: its flags, by default this process's. world: None if it runs alone.
    """
    world = world or World(0, 1, torch.device("cpu"))
    launcher = "python" if world.alone else f"torchrun --standalone --nproc_per_node={world.tp_size}"
    words = [f"OMP_NUM_THREADS={torch.get_num_threads()}", *launcher.split(), "-m", script]
    made = environment(world)
    return made | {"command": shlex.join([*words, *(sys.argv[1:] if argv is None else argv)])}


def read(path, *keys):
    """Return a file's lines as dicts, without those that were cut off. Raises InputError unless all have these keys.

    Wirings get their present names.
    """
    lines = []
    for text in read_text(path).splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            if text.strip() and not text.startswith("{"):
                lines.append(None)
    if not all(isinstance(line, dict) and line.keys() >= {*keys} for line in lines):
        raise InputError(f"{path} has lines that this script did not write")
    with well_formed(path):
        return [line | {"wiring": wired(line)} if "wiring" in line else line for line in lines]


def lines_of(*keys):
    """Return an argparse type: from the name of a file to its lines, at least one, all with these keys."""

    def parse(path):
        try:
            lines = read(path, *keys)
        except InputError as e:
            raise argparse.ArgumentTypeError(e) from None
        if not lines:
            raise argparse.ArgumentTypeError(f"{path} has no complete line")
        return lines

    return parse


def add_show_flag(parser, *keys):
    words = "measure nothing: print the tables of such files"
    parser.add_argument("--show", type=lines_of(*keys), nargs="+", metavar="FILE", help=words)


@contextlib.contextmanager
def well_formed(what):
    """Turn the errors that values of a wrong type cause in this block into one InputError, which names the lines."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise InputError(f"{what}: a line is not as its script writes it ({type(e).__name__}: {e})") from None


def wired(line):
    """Return the present name of a line's wiring; older lines have hybrid, desync and desync-2."""
    if line["wiring"] == "hybrid":
        return wiring_name("ladder", line.get("ladder_layers") or line.get("layers") or line["n_layers"] // 2)
    if line["wiring"] == "desync":
        return wiring_name("desync", line.get("desync_period"))
    return re.sub(r"^desync-(\d+)$", r"desync:\1", line["wiring"])


def base(wiring):
    """Return the name of a wiring without its numbers."""
    return re.sub(r"(-\d+)?([:/].*)?$", "", wiring)


def wiring_order(wiring):
    """Return the key that sorts wirings as in model.WIRINGS, then by their parameters."""
    names = list(WIRINGS)
    return (names.index(base(wiring)) if base(wiring) in names else len(names)), len(wiring), wiring


def explained(table, marks="~^"):
    """Return a table (head, rows) as Markdown and, below it, the meaning of the marks that it has."""
    used = [LEGEND[mark] for mark in marks if any(mark in cell for row in table[1] for cell in row)]
    return markdown(*table) + f"\n\n{'; '.join(used)}." * bool(used)
