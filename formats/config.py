"""The configuration of a checkpoint: its shape, and the text that names its wiring."""

import dataclasses
import functools
import math
import operator
import re
from typing import NamedTuple

import torch

from model import BLOCK, WIRINGS, laneformer_stream, residual_stream


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


# ---- The text that names a wiring ------------------------------------------------------------------------------------


class Parsed(NamedTuple):
    """A wiring's text, NAME[-STALE][:PARAMETER][/LANES]."""

    name: str
    parameter: int | tuple | None = None
    stale: int | None = None
    lanes: int | None = None


def parse_wiring(text):
    """Return the Parsed of NAME, NAME:N, NAME:I,J,... or NAME:I-J, each perhaps with -K after NAME and /L at the end.

    N is the number of last layers that are wired so, I, J, ... are such layers, from 0 (one alone is "3,"), I-J all of
    I to J; the others are standard. desync:N keeps every N-th all-reduce. K: how many sublayers stale it is. L: its
    lanes, as many as there are ranks where that is left out. Raises InputError.
    """
    found = re.fullmatch(r"([a-z-]*[a-z])(?:-(\d{1,4}))?(?::([\d,-]+))?(?:/(\d{1,4}))?", text, re.ASCII)
    name, stale, parameter, lanes = found.groups() if found else (re.split("[:/]", text)[0], *3 * [None])
    if name not in WIRINGS:
        raise InputError(f"unknown wiring {name!r}; known: {', '.join(WIRINGS)}")
    kind, number = WIRINGS[name], "[1-9][0-9]{0,8}"
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
    """Return a wiring's text: the inverse of parse_wiring."""
    if isinstance(parameter, tuple | list):
        parameter = ",".join(map(str, parameter)) + "," * (len(parameter) == 1)
    parts = ("-", stale), (":", parameter), ("/", lanes)
    return name + "".join(f"{sign}{value}" for sign, value in parts if value is not None)


def rewired(config, wiring):
    """Return the config in another wiring, or the same config where that is None. Raises InputError."""
    return config if wiring in (None, config.wiring) else dataclasses.replace(config, wiring=wiring)


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape and settings of a checkpoint, as in its config.json. Never mutated. Raises InputError."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dim: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # as rope_frequencies reads it
    tie_embeddings: bool = False
    qkv_bias: bool = False
    wo_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    nope_layers: tuple = ()  # layers without rotary embeddings
    sliding_window: int | None = None  # the tokens that a position sees, itself included
    window_layers: tuple = ()  # in these layers
    bos_id: int | None = None
    eos_ids: tuple = ()
    wiring: str = "standard"  # as parse_wiring reads it
    early_comm: bool = True  # of a Laneformer: see laneformer_stream
    attention_comm: bool = True
    mlp_comm: bool = True
    # what the output head reads: the mean of the normed lanes, the norm of their "sum", or, in "vocab_parallel", each
    # part of it one lane's normed stream
    lane_head: str = "replicate"
    lane_norms: bool = False  # each lane has norms of its own, stored one after another
    quant: str | None = None  # "int8", "int4" or None
    group_size: int | None = None  # of int4, in columns
    kept: tuple = ()  # names of matrices that the quantization leaves as they were

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if not {*self.window_layers} <= {*range(self.n_layers if (self.sliding_window or 0) > 0 else 0)}:
            raise InputError(f"window_layers takes 0 to {self.n_layers - 1}, with a sliding_window of 1 or more tokens")
        if self.lane_head not in (heads := ("replicate", "sum", "vocab_parallel")):
            raise InputError(f"lane_head {self.lane_head!r} is none of {', '.join(heads)}")
        if self.lane_head == "vocab_parallel" and self.vocab_size % (BLOCK * (self.lanes or 1)):
            raise InputError(f"vocab_size {self.vocab_size} is no multiple of {BLOCK} for each of {self.lanes} lanes")
        if self.lane_norms and self.lanes is None:
            raise InputError(f"lane_norms: each lane has norms of its own, but wiring {self.wiring} names no lanes")
        _ = self.kind, self.spans, self.period, self.lanes  # once, now: the compiler does not trace how text is parsed

    @functools.cached_property
    def named(self):
        """Return the Parsed wiring."""
        return parse_wiring(self.wiring)

    @functools.cached_property
    def kind(self):
        """Return the named Wiring."""
        stale, wiring = self.named.stale, WIRINGS[self.named.name]
        return dataclasses.replace(wiring, stale=stale) if stale else wiring

    @functools.cached_property
    def lanes(self):
        """Return the number of lanes, or None for as many as there are ranks, or for a wiring without any."""
        return self.named.lanes

    @functools.cached_property
    def wirings(self):
        """Return the Wiring of each layer, as a tuple."""
        parameter, n, size = self.named.parameter, self.n_layers, self.kind.blocks
        chosen = parameter if isinstance(parameter, tuple) else range(n % size, n)
        if isinstance(parameter, int) and self.kind.parameter == "layers":
            chosen = range(max(-1, n - parameter), n)  # -1: too many, refused below
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(n)):
            fit = f"NAME:N takes 1 to {n}, NAME:I,J and NAME:I-J distinct layers from 0 to {n - 1}"
            raise InputError(f"wiring {self.wiring} does not fit {n} layers: {fit}")
        if self.kind.stale > 2 * n:
            raise InputError(
                f"wiring {self.wiring} is {self.kind.stale} sublayers stale: {n} layers take up to {2 * n}"
            )
        if self.kind.stream is laneformer_stream and self.kind.stale % 2:
            raise InputError(f"wiring {self.wiring}: a Laneformer's delay is of whole layers, of two sublayers each")
        return tuple(self.kind if i in chosen else WIRINGS["standard"] for i in range(n))

    @functools.cached_property
    def spans(self):
        """Return [(Wiring, layers)], in order: the neighbouring layers whose sublayers read one input, mostly one."""
        found, i = [], 0
        while i < self.n_layers:
            wiring, layers = self.wirings[i], range(i, i + self.wirings[i].blocks)
            if self.wirings[i : layers.stop] != (wiring,) * len(layers):
                text = f"layer {i} has no neighbour for a pair, as in pair:4 or pair:2-5"
                raise InputError(f"wiring {self.wiring}: {text}")
            found.append((wiring, layers))
            i = layers.stop
        return found

    @functools.cached_property
    def period(self):
        """Return n if desync keeps every n-th all-reduce, else None."""
        return self.named.parameter or 2 if self.kind.parameter == "period" else None

    @property
    def standard_alone(self):
        """Return whether standard weights are in one lane of this wiring what they are in the standard one."""
        return self.kind.laned and (self.kind.stream is not residual_stream or not self.kind.stale)

    @property
    def sums_lanes(self):
        """Return whether the output head reads a sum over the lanes: one more all-reduce."""
        return self.kind.stream is laneformer_stream and self.lane_head != "vocab_parallel"

    @property
    def function(self):
        """Return what decides whether two wirings compute the same: ladder:8 of 8 layers is ladder."""
        return self.wirings, self.period, self.lanes

    def sublayers(self, split):
        """Return [(h, stale)], as a stream takes them. split(wiring, i): the sublayers of layer i."""
        found = []
        for wiring, layers in self.spans:
            for hs in zip(*(split(wiring, i) for i in layers), strict=True):
                found.append((hs[0] if len(hs) == 1 else functools.partial(_added, hs), wiring.stale))
        return found

    def rope_frequencies(self):
        """Return the radians per position of each pair of dimensions, (H/2,) float32; scaled where configured.

        Linear scaling stretches every wavelength by `factor`. Llama 3.1 leaves those alone that are short against the
        original context and blends a band in between; so does YaRN (arXiv 2309.00071), over whole pairs of dimensions.
        """
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / self.rope_theta ** (pairs / self.head_dim)
        if self.rope_scaling is None:
            return frequencies
        s, H, keep = self.rope_scaling, self.head_dim, torch.zeros(1, device="cpu")
        if "low_freq_factor" in s:
            turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
            keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        elif "beta_fast" in s:
            turns = s["original_max_position_embeddings"] / (2 * math.pi)  # of the first pair
            first, last = (math.log(turns / s[beta], self.rope_theta) for beta in ("beta_fast", "beta_slow"))
            first, last = max(math.floor(first * H / 2), 0), min(math.ceil(last * H / 2), H - 1)
            keep = 1 - (pairs / 2 - first) / ((last - first) or 0.001)
        keep = keep.clamp(0, 1)
        return frequencies * (keep + (1 - keep) / s["factor"])


def _added(hs, x):
    return functools.reduce(operator.add, [h(x) for h in hs])
