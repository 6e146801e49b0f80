"""The command line: the flags that scripts share, and what they mean."""

import argparse
import dataclasses
import math
import sys

from model import WIRINGS, InputError
from runtime import writing


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that ends in the default, where there is one."""

    def _get_help_string(self, action):
        plain = action.default is False or action.default in (None, "", argparse.SUPPRESS)
        return action.help if plain else f"{action.help or ''} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, so that run() prints one line, not one usage for each rank."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=Help)

    def error(self, message):
        raise InputError(message.removeprefix("argument "))

    def _get_values(self, action, arg_strings):
        if arg_strings == ["--"] and action.option_strings:  # of --flag=--: argparse takes it for no value, and fails
            raise argparse.ArgumentError(action, "'--' is no value")
        return super()._get_values(action, arg_strings)


def number(kind, low, high=None, above=False):
    """An argparse type: an int or a float from `low` (or above it) to `high`; without one an int has 31 bits."""
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
    """An argparse type: a file that writing.check_appendable finds good."""
    try:
        writing.check_appendable(path)
    except InputError as e:
        raise argparse.ArgumentTypeError(e) from None
    return path


def add_rank_flags(parser):
    """The flags that join() takes."""
    parser.add_argument("--device", help="cpu, cuda or cuda:1; without it cuda where each rank finds a GPU, else cpu")
    parser.add_argument(
        "--timeout",
        type=number(float, 0),
        default=60,
        metavar="S",
        help="end the run when a rank comes no further for S seconds longer than it took so far; 0 to wait for ever",
    )


def add_preflight_flag(parser):
    parser.add_argument("--skip-preflight", action="store_true", help="start even if the memory seems too small")


def add_json_flag(parser, what="the results as one line of JSON"):
    parser.add_argument("--json", type=appendable, metavar="FILE", help=f"append {what}, e.g. results.jsonl")


def add_wiring_flags(parser, otherwise="the checkpoint's own"):
    """The flags that choose a wiring; with_wiring applies them."""
    known = "; ".join(f"{name}: {wiring.about}" for name, wiring in WIRINGS.items())
    g = parser.add_argument_group("wiring", f"how sublayers feed the residual stream; without these {otherwise}")
    g.add_argument("--wiring", metavar="NAME", help=known)
    g.add_argument("--ladder", action="store_true", help="the same as --wiring ladder")
    g.add_argument(
        "--layers",
        "--ladder-layers",
        dest="ladder_layers",
        metavar="N|I,J,...",
        help="the last N layers, or layers I, J (from 0), are wired so, the others standard, e.g. 16, or 3,5,7; "
        "without --wiring they are ladder: a hybrid",
    )
    g.add_argument("--desync-period", type=count, metavar="N", help="desync: keep every N-th all-reduce, e.g. 4")


def read_layers(text):
    """What --layers says, as Config.ladder_layers takes it."""
    try:
        numbers = tuple(int(i) for i in text.removesuffix(",").split(","))
    except ValueError:
        raise InputError(f"--layers {text!r} is neither a number nor a list such as 3,5,7") from None
    return numbers if "," in text else numbers[0]


def asked_wiring(args):
    """The name that --wiring or --ladder give, or None."""
    wiring = args.wiring or ("ladder" if args.ladder else None)
    if args.ladder and wiring != "ladder":
        raise InputError(f"--ladder and --wiring {wiring} contradict each other")
    return wiring


def with_wiring(config, args):
    """The config with the wiring that the flags ask for."""
    wiring = asked_wiring(args)
    layers = None if args.ladder_layers is None else read_layers(args.ladder_layers)
    if layers is not None and wiring is None and config.wiring in ("standard", "ladder"):
        wiring = "hybrid"
    return rewired(config, wiring, "--", ladder_layers=layers, desync_period=args.desync_period)


def rewired(config, wiring=None, flag="", **parameters):
    """The config in another wiring, or in its own where that is None, with the parameters that are not None.

    flag: what stands before a name in an InputError.
    """
    wiring = config.wiring if wiring is None else wiring
    if wiring == "ladder" and parameters.get("ladder_layers") is not None:
        wiring = "hybrid"  # its name
    if wiring not in WIRINGS:
        raise InputError(f"unknown {flag}wiring {wiring!r}; known: {', '.join(WIRINGS)}")
    known = WIRINGS[wiring]
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in parameters.items() if v is not None}
    for name in changes:
        if name != known.parameter:
            called = name if not flag else "--layers" if name == "ladder_layers" else flag + name.replace("_", "-")
            takes = ", ".join(w for w in WIRINGS if WIRINGS[w].parameter == name)
            raise InputError(f"{called} is for {flag}wiring {takes or 'none'}: it does not go with {wiring}")
    if known.parameter != "ladder_layers" or (known.optional and wiring != config.wiring):
        changes.setdefault("ladder_layers", None)
    elif not known.optional and changes.get("ladder_layers", config.ladder_layers) is None:
        raise InputError(f"{flag}wiring {wiring} needs {'--layers' if flag else 'ladder_layers'}")
    if wiring != config.wiring:
        changes["made_for_tp"] = None
    try:
        return dataclasses.replace(config, wiring=wiring, **changes)
    except InputError as e:
        raise InputError(str(e).replace("ladder_layers", "--layers") if flag else str(e)) from None


def warn_of_wiring(own, config, tp_size):
    """Say on stderr when a checkpoint runs in another wiring than its own, or on other ranks than it was made for."""

    def described(c):
        parameter = WIRINGS[c.wiring].parameter
        value = None if parameter is None else getattr(c, parameter)
        return c.wiring + (f" ({parameter} {value})" if value is not None else "")

    wiring, meant = WIRINGS[config.wiring], f"these weights are {described(own)}'s, and run as {described(config)}"
    if own.function == config.function:
        if config.made_for_tp not in (None, tp_size):
            text = f"these weights were made for {config.wiring} on {config.made_for_tp} ranks, and run on {tp_size}"
            print(f"{text}: expect a loss", file=sys.stderr)
    elif own.wiring == "standard" and wiring.standard_alone and tp_size == 1:
        print(f"{meant}, which is the same on one device", file=sys.stderr)
    elif own.wiring == "standard" and wiring.runs_standard:
        print(f"{meant} on {tp_size} ranks: expect a loss (eval.py measures it)", file=sys.stderr)
    else:
        text = "another function than these weights were trained for: eval.py measures the loss"
        print(f"{meant}, {text}", file=sys.stderr)
