"""The text that names a wiring, such as ladder:16 or delayed-4/8."""

import re
from typing import NamedTuple

from ladder.errors import InputError


class Parsed(NamedTuple):
    """A wiring's text, NAME[-STALE][:PARAMETER][/LANES]."""

    name: str
    parameter: int | tuple | range | None = None
    stale: int | None = None
    lanes: int | None = None


def parse_wiring(text, find_wiring):
    """Return the Parsed of a text such as ladder, ladder:16, ladder:0,1, ladder:4-7, delayed-2/8 or desync:4.

    NAME:N wires the last N layers, NAME:I,J,... those layers, counted from 0 (one alone is "3,"), and NAME:I-J layers I
    to J; the others are standard or, with farskip, not stale. desync:N keeps every N-th all-reduce. NAME-K reads the
    stream K sublayers stale. /L names the number of lanes, by default that of the ranks. find_wiring:
    model.find_wiring. Raises InputError.
    """
    match = re.fullmatch(r"([\w-]*[A-Za-z_])(?:-(\d{1,4}))?(?::([\d,-]+))?(?:/(\d{1,4}))?", text, re.ASCII)
    name, stale, parameter, lanes = match.groups() if match else (re.split("[:/]", text)[0], *3 * [None])
    wiring, layers = find_wiring(name), r"\d{1,9}(,\d{1,9})*,?|\d{1,9}-\d{1,9}"
    form = {None: "", "period": "[1-9][0-9]{0,8}", "layers": layers}[wiring.n_means]
    fits = match and (parameter is None or re.fullmatch(form, parameter))
    wrong_stale = stale and (int(stale) == 0 or not wiring.stale)
    wrong_lanes = lanes and (int(lanes) == 0 or not wiring.depends_on_lanes)
    if text == name and not match:
        raise InputError(f"{text!r} is no name for a wiring: names end in a letter")
    if not fits or wrong_stale or wrong_lanes:
        forms = {None: [], "period": [":N"], "layers": [":N", ":I,J,...", ":I-J"]}[wiring.n_means]
        forms = ["", *forms, *["-K"] * bool(wiring.stale), *["/LANES"] * wiring.depends_on_lanes]
        known = ", ".join(name + form for form in forms)
        raise InputError(f"no such wiring: {text!r}; write {' or '.join(known.rsplit(', ', 1))}")
    if parameter and "-" in parameter:
        first, last = map(int, parameter.split("-"))
        parameter = range(first, last + 1)
    elif parameter and "," in parameter:
        parameter = tuple(map(int, parameter.removesuffix(",").split(",")))
    elif parameter:
        parameter = int(parameter)
    return Parsed(name, parameter, stale and int(stale), lanes and int(lanes))


def wiring_name(name, parameter=None, stale=None, lanes=None):
    """Return a wiring's text: the inverse of parse_wiring."""
    if isinstance(parameter, range):
        parameter = f"{parameter.start}-{parameter.stop - 1}"
    elif isinstance(parameter, tuple | list):
        parameter = ",".join(map(str, parameter)) + "," * (len(parameter) == 1)
    pairs = ("-", stale), (":", parameter), ("/", lanes)
    return name + "".join(f"{sign}{value}" for sign, value in pairs if value is not None)


def choose_layers(parsed, wiring, n):
    """Return the layers, of n, that a Parsed wires so. wiring: its model.Wiring. Raises InputError."""
    parameter, text = parsed.parameter, wiring_name(*parsed)
    chosen = parameter if isinstance(parameter, tuple | range) else range(n % wiring.blocks, n)
    if isinstance(parameter, int) and wiring.n_means == "layers":
        chosen = range(max(-1, n - parameter), n)  # -1: too many, refused below
    if not 0 < len(chosen) <= n or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(n)):
        fit = f"NAME:N takes 1 to {n}, NAME:I,J and NAME:I-J distinct layers from 0 to {n - 1}"
        raise InputError(f"wiring {text} does not fit {n} layers: {fit}")
    if wiring.stale > 2 * n:
        raise InputError(f"wiring {text} is {wiring.stale} sublayers late: {n} layers take up to {2 * n}")
    blocks, firsts = wiring.blocks, sorted(chosen)[:: wiring.blocks]
    if sorted(chosen) != [i + j for i in firsts for j in range(blocks)]:
        raise InputError(f"wiring {text}: its layers are wired in groups of {blocks} neighbours, e.g. 0-{blocks - 1}")
    return chosen
