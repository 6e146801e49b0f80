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
    to J. NAME-K reads the stream K sublayers stale. /L names the number of lanes (ladder/lanes/wirings.py). A wiring's
    `forms` say which of these it takes. find_wiring: model.find_wiring. Raises InputError.
    """
    match = re.fullmatch(r"([\w-]*[A-Za-z_])(?:-(\d{1,4}))?(?::([\d,-]+))?(?:/(\d{1,4}))?", text, re.ASCII)
    name, stale, parameter, lanes = match.groups() if match else (re.split("[:/]", text)[0], *3 * [None])
    wiring = find_wiring(name)
    written = {  # {a form: whether the text has it}
        ":N": parameter and parameter.isdecimal(),
        ":I,J,...": parameter and "," in parameter,
        ":I-J": parameter and "-" in parameter,
        "-K": stale,
        "/LANES": lanes,
    }
    unfit = [form for form, part in written.items() if part and form not in wiring.forms]
    misspelt = parameter and not re.fullmatch(r"\d{1,9}(,\d{1,9})*,?|\d{1,9}-\d{1,9}", parameter)
    positive = stale, lanes, None if wiring.takes_layers else parameter
    if text == name and not match:
        raise InputError(f"{text!r} is no name for a wiring: names end in a letter")
    if not match or unfit or misspelt or any(number and int(number) == 0 for number in positive):
        counts = "" if unfit or misspelt or not match else "; these numbers count from 1"
        known = ", ".join(name + form for form in ("", *wiring.forms))
        raise InputError(f"no such wiring: {text!r}; write {' or '.join(known.rsplit(', ', 1))}{counts}")
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
    parameter = parsed.parameter
    text = wiring_name(*parsed)
    chosen = parameter if isinstance(parameter, tuple | range) else range(n % wiring.layers_per_input, n)
    if isinstance(parameter, int) and wiring.takes_layers:
        chosen = range(max(-1, n - parameter), n)  # -1: too many, refused below
    if not 0 < len(chosen) <= n or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(n)):
        fit = f"NAME:N takes 1 to {n}, NAME:I,J and NAME:I-J distinct layers from 0 to {n - 1}"
        raise InputError(f"wiring {text} does not fit {n} layers: {fit}")
    if wiring.stale > 2 * n:
        raise InputError(f"wiring {text} is {wiring.stale} sublayers stale: {n} layers take up to {2 * n}")
    size = wiring.layers_per_input
    firsts = sorted(chosen)[::size]
    if sorted(chosen) != [i + j for i in firsts for j in range(size)]:
        raise InputError(f"wiring {text}: its layers are wired in groups of {size} neighbours, e.g. 0-{size - 1}")
    return chosen
