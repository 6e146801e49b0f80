"""What a matrix of a source is, how it becomes another form, and how tensors are read by names.

Floats are a plain tensor (N, K). Integers and Fp8 are what our checkpoints store, but for the last rounding: here
scales are float32, and integers of 4 bits are not packed. The matrices of experts have a dimension E in front.
"""

import functools
from typing import NamedTuple

import torch

from ladder.kernels.quant_linear import dequantize


class Form(NamedTuple):
    """What a matrix can stay."""

    bits: int  # of its integers
    columns: int | None  # of a group; None: it is no integers but e4m3, with a scale for each row


E4M3 = Form(8, None)


class Integers(NamedTuple):
    """W = scales weight + zeros, group by group."""

    weight: torch.Tensor  # (N, K) int8; those of 4 bits are from 0 to 15
    scales: torch.Tensor  # (N, G) float32
    zeros: torch.Tensor  # (N, G) float32


class Fp8(NamedTuple):
    """W = scales weight in e4m3; or W = weight in floats, which become e4m3 with these scales."""

    weight: torch.Tensor  # (N, K)
    scales: torch.Tensor  # (N, 1) float32


def to_floats(matrix):
    """Return a matrix as floats (N, K)."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    return matrix.weight if matrix.weight.itemsize > 1 else dequantize(*matrix)


def in_groups(integers, G):
    """Return Integers in G groups, of those in fewer and larger groups."""
    scales, zeros = (each.repeat_interleave(G // each.shape[-1], -1) for each in integers[1:])
    return Integers(integers.weight, scales, zeros)


def multiply(matrix, factor):
    """Return a matrix times a number: integers and e4m3 stay, and their scales change."""
    if isinstance(matrix, torch.Tensor):
        return matrix.float() * factor
    return type(matrix)(*(tensor if tensor.itemsize == 1 else tensor.float() * factor for tensor in matrix))


def are_equal(a, b):
    """Return whether two matrices have the same form and numbers: torch.equal compares no e4m3."""
    pairs = [(a, b)] if isinstance(a, torch.Tensor) else [*zip(a, b, strict=False)]
    return type(a) is type(b) and all(x.shape == y.shape and not x.ne(y).any() for x, y in pairs)


def by_rows(function, *matrices):
    """Return function(*matrices), of a function that splits, joins or reorders rows: scales and zeros go with them.

    Matrices of several forms are joined as floats.
    """
    kinds = {type(matrix) for matrix in matrices}
    if len(kinds) > 1 or kinds == {torch.Tensor}:
        return function(*map(to_floats, matrices))
    [kind] = kinds
    if len({matrix.weight.dtype for matrix in matrices}) > 1:  # Fp8, some of which is e4m3 already
        matrices = [matrix._replace(weight=to_floats(matrix)) for matrix in matrices]
    return kind(*(function(*tensors) for tensors in zip(*matrices, strict=True)))


class Tensors:
    """Tensors with names, which are read one at a time."""

    floats = {}  # {a quantized format: how many matrices become floats in any case}

    def names(self):
        """Return the list of names."""

    def read(self, name):
        """Return a tensor or, of a matrix that can stay quantized, Integers or Fp8. Raises InputError."""

    def form(self, name):
        """Return the Form in which a matrix can stay quantized, without reading it, or None."""


class Renamed(Tensors):
    """The tensors of a source under other names: a subclass says which, and how rows change on the way."""

    def __init__(self, source, places=None):
        """places: {name: [the source's names]}, of which several make one tensor; by default names stay."""
        self.source = source
        self.places = places or {name: [name] for name in source.names()}
        self.floats = source.floats

    def names(self):
        return list(self.places)

    def form(self, name):
        forms = {self.source.form(each) for each in self.places.get(name, ())}
        return forms.pop() if len(forms) == 1 else None

    def read(self, name):
        return by_rows(functools.partial(self.join, name), *map(self.source.read, self.places[name]))

    def join(self, name, tensor):
        """Return the rows that `name` has, of the source's tensors. They are weights, or scales and zeros by rows."""
        return tensor
