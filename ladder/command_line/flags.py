"""Flags that several scripts share."""

import argparse
import math
import os
import sys
import textwrap
from pathlib import Path

from ladder.checkpoints import checkpoint
from ladder.errors import InputError, did_you_mean, naming
from ladder.ranks.world import rank_and_size
from model import all_wirings, rewired


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
        """Raise InputError. The message ends in the first misspelt flag, which may be why another one is missing."""
        known = self._option_string_actions
        names = [text.partition("=")[0] for text in self.given if text.startswith("-")]
        flags = [name for name in names if name.replace("-", "").isidentifier()]  # the others are numbers or texts
        wrong = [name for name in flags if not any(own.startswith(name) for own in known)]
        hint = f"; {wrong[0]} is no flag{did_you_mean(wrong[0], known)}" if wrong else ""
        raise InputError(message.removeprefix("argument ") + hint)

    def print_help(self, file=None):
        if rank_and_size()[0] == 0:
            super().print_help(file)

    def parse_args(self, argv=None):
        self.given = sys.argv[1:] if argv is None else argv
        args = super().parse_args(argv)
        for action in self._actions:
            if getattr(args, action.dest, None) == "" != action.default:
                name = action.option_strings[0] if action.option_strings else action.metavar
                self.error(f"{name} is empty: give a value" + ", or leave it out" * (not action.required))
        return args


def number(kind, low, high=None, above=False):
    """Return an argparse type: an int or a float from `low` (or above it) to `high`; without one an int has 31 bits."""
    words = {int: "a whole number", float: "a number"}[kind] + f" {'above' if above else 'from'} {low:g}"
    high = high or {int: 2**31 - 1, float: sys.float_info.max}[kind]
    words += f" to {high:,}" if kind is int else f" to {high:g}" if high < sys.float_info.max else ""

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


def parse_shares(text):
    """Return the numbers of --shares as a tuple, or "auto" (an argparse type)."""
    if text[:1].isalpha() and text != "auto":
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor numbers such as 3,1")
    return text if text == "auto" else tuple(map(count, text.split(",")))


def one_of(names):
    """Return the type and the metavar of a flag that takes one of these names: argparse's choices, with a hint."""

    def parse(text):
        if text not in names:
            hint = did_you_mean(text, names)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}{hint}")
        return text

    return {"type": parse, "metavar": f"{{{','.join(names)}}}"}


def appendable(path):
    """Return a path that lines can be appended to (an argparse type)."""
    folder = os.path.dirname(path) or "."
    existing = path if os.path.exists(path) else folder
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def add_model_flags(parser, required=False):
    """Add the flags that name weights, or a size of random ones; read_config reads what they name."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--checkpoint", metavar="DIR", help="a folder of weights (docs/formats.md), e.g. demo")
    words = "random weights of a named size, such as 1b, 8b or 70b, or of a Hugging Face config.json\n"
    words += "or N layers of it, e.g. 8b:4, or 8b:4:int8"
    which.add_argument("--model", metavar="NAME[:N][:int8|:int4|:fp8]", help=words)
    words = "of the weights (default: the checkpoint's, or bfloat16)"
    parser.add_argument("--dtype", **one_of(checkpoint.DTYPES), help=words)


def read_config(args):
    """Return (the name of the model that the flags ask for, its own Config)."""
    if args.checkpoint is not None:
        return Path(args.checkpoint).resolve().name, checkpoint.read_config(args.checkpoint)
    from ladder.sources.sizes import named_size

    return args.model.partition(":")[0], named_size(args.model)


def read_dtype(args):
    """Return the dtype of the weights that the flags ask for."""
    weights = checkpoint.Weights(args.checkpoint) if args.checkpoint and not args.dtype else None
    return checkpoint.chosen_dtype(args.dtype, weights)


def add_rank_flags(parser, sharded=False, comm=True):
    """Add the flags that launch.join takes. sharded: the ranks share a model out. comm: its sums have several ways."""
    if sharded:
        words = "what each rank gets of the heads, MLP and vocabulary, in proportion: e.g. 3,1\n"
        words += "auto: by the bandwidth and the free memory of each, which are measured"
        parser.add_argument("--shares", type=parse_shares, metavar="N,N,...|auto", help=words)
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:0, which ranks share; default: cuda if each finds a GPU, else cpu"
    )
    if comm:
        words = "how ranks sum\nauto: shared memory on CPUs of one node, else library\nlibrary: gloo or NCCL\n"
        words += "int8: partials travel in 8 bits, rounded\nshared-memory, one-shot: docs/collectives.md"
        parser.add_argument("--comm", default="auto", metavar="NAME", help=words)


def add_output_flags(parser, example):
    """Add the flags of a script that writes a folder in another format."""
    parser.add_argument("--out", metavar="DIR", required=True, help=f"the folder to write, e.g. {example}")
    parser.add_argument("--dtype", **one_of(checkpoint.DTYPES), help="of the written weights; default: their own")
    size = number(float, 0, above=True)
    words = "GB of the largest file, about the memory needed"
    parser.add_argument("--shard-gb", type=size, default=5.0, metavar="N", help=words)


def add_json_flag(parser, what="the results as one line of JSON"):
    parser.add_argument("--json", type=appendable, metavar="FILE", help=f"append {what}, e.g. results.jsonl")


def add_wiring_flags(parser):
    """Add the flags that choose a wiring; with_wiring applies them."""
    words = [f"{name}: {wiring.about}" for name, wiring in all_wirings().items()] + [
        "NAME:N wires the last N layers that way, NAME:I,J,... layers I, J (from 0), NAME:I-J I to J;",
        "others are standard; desync:N keeps every N-th all-reduce; NAME-K reads the stream K sublayers stale, if",
        "NAME does at all; NAME/L has L lanes (default: as many as ranks), if their number matters",
    ]
    g = parser.add_argument_group("wiring", "how sublayers feed the residual stream; default: the checkpoint's own")
    g = g.add_mutually_exclusive_group()
    g.add_argument("--wiring", metavar="NAME[-K][:N|:I,J,...|:I-J][/L]", help="\n".join(words).replace("%", "%%"))
    g.add_argument("--ladder", dest="wiring", action="store_const", const="ladder", help="means --wiring ladder")


def with_wiring(config, args):
    """Return the config with the wiring that the flags ask for."""
    with naming("--wiring"):
        return rewired(config, args.wiring)


def is_standard_in_one_lane(w):
    """Return whether a Wiring computes with one lane what standard computes; with one norm, parallel's."""
    return w.reads_partials and len(w.norms) > 1 and (w.loop is not w.usual_loop or not w.stale)


def warn_of_wiring(own, config, shares):
    """Say on stderr when a checkpoint runs in another wiring than its own."""
    if own.layer_wirings == config.layer_wirings:
        if own.named_wiring.varies_with_ranks:
            print(f"these weights name no lanes: {own.wiring} is another function on other ranks", file=sys.stderr)
        return
    loss = "a function that they were not trained for: " + "adapt.py retrains them; " * (config.wiring != "upper-bound")
    loss += f"eval.py --checkpoint DIR --wiring {config.wiring} --compare DIR --text FILE measures the loss"
    loss += f", where DIR has them as {own.wiring}"
    one_lane = len(config.named_wiring.shards(shares)) == 1
    if own.wiring == "standard" and one_lane and is_standard_in_one_lane(config.named_wiring):
        loss = "which is the same in one lane"
    print(f"these weights are {own.wiring}'s, and run as {config.wiring.removesuffix(',')}, {loss}", file=sys.stderr)
