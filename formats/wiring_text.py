"""The text that names a wiring, such as ladder:16 or delayed-4/8."""

import re
from typing import NamedTuple

from runtime.errors import InputError


class Parsed(NamedTuple):
    """A wiring's text, NAME[-STALE][:PARAMETER][/LANES]."""

    name: str
    parameter: int | tuple | None = None
    stale: int | None = None
    lanes: int | None = None


def parse(text, wirings):
    """Return the Parsed of NAME, NAME:N, NAME:I,J,... or NAME:I-J, each perhaps with -K after NAME and /L at the end.

    N is the number of last layers that are wired so, I, J, ... are such layers, from 0 (one alone is "3,"), I-J all of
    I to J; the others are standard. desync:N keeps every N-th all-reduce. K: how many sublayers stale it is. L: its
    lanes, as many as there are ranks where that is left out. wirings: model.WIRINGS. Raises InputError.
    """
    found = re.fullmatch(r"([a-z-]*[a-z])(?:-(\d{1,4}))?(?::([\d,-]+))?(?:/(\d{1,4}))?", text, re.ASCII)
    name, stale, parameter, lanes = found.groups() if found else (re.split("[:/]", text)[0], *3 * [None])
    if name not in wirings:
        raise InputError(f"unknown wiring {name!r}; known: {', '.join(wirings)}")
    kind, number = wirings[name], "[1-9][0-9]{0,8}"
    form = {None: "", "period": number, "layers": r"\d{1,9}(,\d{1,9})*,?|\d{1,9}-\d{1,9}"}[kind.parameter]
    fits = found and (parameter is None or re.fullmatch(form, parameter))
    if not fits or (stale and not (kind.stale and int(stale))) or (lanes and not (kind.laned and int(lanes))):
        written = {None: [], "period": [f"{name}:N"], "layers": [f"{name}:N", f"{name}:I,J,...", f"{name}:I-J"]}
        forms = [name, *written[kind.parameter], *[f"{name}-K"] * bool(kind.stale), *[f"{name}/LANES"] * kind.laned]
        raise InputError(f"no such wiring: {text!r}; write {' or '.join(', '.join(forms).rsplit(', ', 1))}")
    if parameter and "-" in parameter:
        first, last = map(int, parameter.split("-"))
        parameter = tuple(range(first, min(last, first + 10**4) + 1))
    elif parameter and "," in parameter:
        parameter = tuple(map(int, parameter.removesuffix(",").split(",")))
    elif parameter:
        parameter = int(parameter)
    return Parsed(name, parameter, stale and int(stale), lanes and int(lanes))


def wiring_name(name, parameter=None, stale=None, lanes=None):
    """Return a wiring's text: the inverse of parse."""
    if isinstance(parameter, tuple | list):
        parameter = ",".join(map(str, parameter)) + "," * (len(parameter) == 1)
    parts = ("-", stale), (":", parameter), ("/", lanes)
    return name + "".join(f"{sign}{value}" for sign, value in parts if value is not None)


def choose_layers(parsed, wiring, n):
    """Return the layers, of n, that a Parsed wires so. wiring: its model.Wiring. Raises InputError."""
    parameter, text = parsed.parameter, wiring_name(*parsed)
    chosen = parameter if isinstance(parameter, tuple) else range(n % wiring.blocks, n)
    if isinstance(parameter, int) and wiring.parameter == "layers":
        chosen = range(max(-1, n - parameter), n)  # -1: too many, refused below
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(n)):
        fit = f"NAME:N takes 1 to {n}, NAME:I,J and NAME:I-J distinct layers from 0 to {n - 1}"
        raise InputError(f"wiring {text} does not fit {n} layers: {fit}")
    if wiring.stale > 2 * n:
        raise InputError(f"wiring {text} is {wiring.stale} sublayers late: {n} layers take up to {2 * n}")
    firsts = sorted(chosen)[:: wiring.blocks]
    if sorted(chosen) != [i + j for i in firsts for j in range(wiring.blocks)]:
        raise InputError(f"wiring {text}: each layer needs a neighbour for a pair, as in pair:4 or pair:2-5")
    return chosen
