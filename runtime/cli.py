"""The command line: the flags that scripts share, and what they mean."""

import argparse
import math
import os
import sys
import textwrap

from model import WIRINGS, rewired
from runtime.errors import InputError
from tp import COLLECTIVES


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps line breaks and ends in the default, where there is one."""

    def _split_lines(self, text, width):
        return [line for part in text.splitlines() for line in textwrap.wrap(part, width)]

    def _get_help_string(self, action):
        plain = action.default is False or action.default in (None, "", argparse.SUPPRESS)
        return action.help if plain else f"{action.help or ''} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, so that run() prints one line, not one usage for each rank."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=Help)

    def error(self, message):
        raise InputError(message.removeprefix("argument "))


def number(kind, low, high=None, above=False):
    """Return an argparse type: an int or a float from `low` (or above it) to `high`; without one an int has 31 bits."""
    words = {int: "a whole number", float: "a number"}[kind] + f" {'above' if above else 'from'} {low:g}"
    words += f" to {high:g}" if high not in (None, math.inf) else ""
    high = high or {int: 2**31 - 1, float: sys.float_info.max}[kind]

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return value

    return parse


count = number(int, 1)


def appendable(path):
    """Return a path that lines can be appended to (an argparse type)."""
    folder = os.path.dirname(path) or "."
    existing = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def add_rank_flags(parser, sharded=False):
    """Add the flags that launch.join takes. sharded: the ranks share a model out."""
    if sharded:
        words, numbers = "what each rank gets of the heads, MLP and vocabulary, in proportion: e.g. 3,1", "N,N,..."
        parser.add_argument("--shares", type=lambda text: (*map(count, text.split(",")),), metavar=numbers, help=words)
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda if each rank finds a GPU, else cpu")


def add_json_flag(parser, what="the results as one line of JSON"):
    parser.add_argument("--json", type=appendable, metavar="FILE", help=f"append {what}, e.g. results.jsonl")


def add_wiring_flags(parser, default="the checkpoint's own"):
    """Add the flags that choose a wiring; with_wiring applies them."""
    known = "\n".join(f"{name}: {wiring.about}" for name, wiring in WIRINGS.items())
    g = parser.add_argument_group("wiring", f"how sublayers feed the residual stream; default: {default}")
    g.add_argument(
        "--wiring",
        metavar="NAME[-K][:N|:I,J,...|:I-J][/L]",
        help=f"{known}\nNAME:N wires the last N layers that way, NAME:I,J,... layers I, J (from 0), NAME:I-J I to J;\n"
        "others are standard; desync:N keeps every N-th all-reduce; NAME-K reads the stream K sublayers late, if\n"
        "NAME does at all; NAME/L has L lanes (default: as many as ranks), if their number matters",
    )
    g.add_argument("--ladder", action="store_true", help="the same as --wiring ladder")


def add_comm_flag(parser):
    """Add the flag that launch.join takes besides those of add_rank_flags."""
    known = "\n".join(f"{name}: {collective.about}" for name, collective in COLLECTIVES.items())
    words = f"how ranks sum\n{known}\nothers: extras/collectives/README.md"
    parser.add_argument("--comm", default="auto", metavar="NAME", help=words)


def asked_wiring(args):
    """Return the wiring that the flags ask for, or None."""
    if args.ladder and args.wiring not in (None, "ladder"):
        raise InputError(f"--wiring {args.wiring} contradicts --ladder, which means --wiring ladder")
    return "ladder" if args.ladder else args.wiring


def with_wiring(config, args):
    """Return the config with the wiring that the flags ask for."""
    try:
        return rewired(config, asked_wiring(args))
    except InputError as e:
        raise InputError(f"--wiring: {e}") from None


def warn_of_wiring(own, config, shares):
    """Say on stderr when a checkpoint runs in another wiring than its own."""
    if own.function == config.function:
        if own.named_wiring.laned and own.lanes is None:
            print(f"these weights name no lanes: {own.wiring} is another function on other ranks", file=sys.stderr)
        return
    loss = "another function than these weights were trained for: eval.py measures the loss"
    if own.wiring == "standard" and config.standard_in_one_lane and (config.lanes or len(shares)) == 1:
        loss = "which is the same in one lane"
    print(f"these weights are {own.wiring}'s, and run as {config.wiring}, {loss}", file=sys.stderr)
