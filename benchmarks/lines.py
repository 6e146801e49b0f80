"""The lines of JSON that these scripts write: what each of them records, and how it is read again."""

import argparse
import itertools
import json
import shlex
import sys

import torch

from extras.measure.results import wired
from formats.checkpoint import read_text
from runtime.errors import InputError
from runtime.launch import World
from runtime.report import environment


def read_lines(path, *keys):
    """Return a file's lines as dicts, without those that were cut off; raise InputError unless all have these keys."""
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


def lines_with(*keys):
    """Return a file's lines, which all have these keys (an argparse type); their wirings get the names of today."""

    def parse(path):
        try:
            lines = read_lines(path, *keys)
        except InputError as e:
            raise argparse.ArgumentTypeError(e) from None
        if not lines:
            raise argparse.ArgumentTypeError(f"{path} has no complete line")
        return [line | {"wiring": wired(line)} if "wiring" in line else line for line in lines]

    return parse


class _Show(argparse.Action):
    """Prints tables of the files' lines and ends, as --help does: no other flag is needed then."""

    def __init__(self, *args, tables, only, **kwargs):
        super().__init__(*args, **kwargs)
        self.tables, self.only = tables, only

    def __call__(self, parser, args, files, option=None):
        some = getattr(args, f"{self.only}s", None)
        print(self.tables([x for x in itertools.chain(*files) if not some or x[self.only] in some]))
        parser.exit()


def add_show_flag(parser, tables, *keys, only=""):
    """only: a key of the lines, such as wiring: where --wirings stands before --show, it names those to show."""
    flags = {"action": _Show, "tables": tables, "only": only, "type": lines_with(*keys), "nargs": "+"}
    about = "print the tables of such files, and end" + f" (of what --{only}s before it names)" * bool(only)
    parser.add_argument("--show", **flags, metavar="FILE", help=about)


def about(script, argv=None, world=None):
    """Return how a line of a script of this folder was made: machine, version of torch, commit and command.

    argv: its flags, or None for this process's; world: None for this process alone.
    """
    world = world or World(0, 1, torch.device("cpu"))
    launcher = "python" if world.alone else f"torchrun --standalone --nproc_per_node={world.tp_size}"
    words = [f"OMP_NUM_THREADS={torch.get_num_threads()}", *launcher.split(), "-m", f"benchmarks.{script}"]
    return {**environment(world), "command": shlex.join([*words, *(sys.argv[1:] if argv is None else argv)])}
