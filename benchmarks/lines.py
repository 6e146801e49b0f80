"""The lines of JSON that these scripts write: what each of them records, and how it is read again."""

import argparse
import json
import shlex
import sys

import torch

from formats.checkpoint import read_text
from model import InputError


def written_by(writer, *keys):
    """An argparse type: a file that such a script appended to, as its lines, which all have these keys."""

    def parse(path):
        try:
            lines = [json.loads(line) for line in read_text(path).splitlines()]
        except InputError as e:
            raise argparse.ArgumentTypeError(e) from None
        except ValueError:
            lines = []
        if not lines or not all(isinstance(line, dict) and line.keys() >= {*keys} for line in lines):
            raise argparse.ArgumentTypeError(f"{path} has lines that {writer} did not write")
        return lines

    return parse


def command(script, argv=None, world=None):
    """The command line of a script of this folder. argv: its flags, or None for this process's; world: its ranks."""
    threads = f"OMP_NUM_THREADS={torch.get_num_threads()}"
    alone = world is None or world.alone
    launcher = "python" if alone else f"torchrun --standalone --nproc_per_node={world.tp_size}"
    return shlex.join(
        [threads, *launcher.split(), "-m", f"benchmarks.{script}", *(sys.argv[1:] if argv is None else argv)]
    )
