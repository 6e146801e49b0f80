"""QuantLinear, a linear whose weights are integers of 8 or 4 bits or floats of 8.

Its plain function makes floats of the integers, in any dtype and on any device. quant_kernels.py lists the kernels.

W[n, k] = scales[n, g] q[n, k] + zeros[n, g], where q are the integers and g is the group of column k.

int8: q from -127 to 127, one group per row, no zeros.
int8 in groups: q from -128 to 127, groups of 16, 32, 64 or 128 columns, with zeros; scales and zeros as for int4.
fp8: the same with q in e4m3, whose largest is 448. What is multiplied by it becomes e4m3 too, with a scale per token.
int4: q from 0 to 15, two in a byte, the even column in the lower half. Scales and zeros are float16, or bfloat16 where
float16 would not hold them (nearest), and in older checkpoints.

Shape letters: N rows and K columns of W, G groups in a row.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.errors import InputError
from ladder.kernels.registry import plain, say_once

DEQUANTIZED_AT_ONCE = 2**19  # elements of W that become floats at a time: they are still in the cache when multiplied
FP8_MAX = 448.0  # of e4m3
INT8_KERNEL_ROWS = 16  # up to so many rows of x PyTorch's int8 kernel for CPUs is used


def dequantize(weight, scales, zeros=None, dtype=None):
    """Return W (N, K), by default in the dtype of the scales; for another dtype it is computed in float32."""
    if dtype not in (None, scales.dtype):
        return dequantize(weight, scales.float(), None if zeros is None else zeros.float()).to(dtype)
    if zeros is None:
        return weight.to(scales.dtype) * scales
    q = unpack(weight) if weight.dtype == torch.uint8 else weight
    q = q.unflatten(-1, (scales.shape[-1], -1)).to(scales.dtype)  # (N, G, K / G)
    return torch.addcmul(zeros[..., None], q, scales[..., None]).flatten(-2)


def nearest(*tensors):
    """Return float16 or bfloat16, whichever rounds the float32 tensors with less error.

    float16 has three bits more, but overflows from 65,520 on and loses bits below 6e-5.
    """

    def error(dtype):
        return sum((tensor.to(dtype).float() - tensor).square().sum() for tensor in tensors)

    return torch.bfloat16 if error(torch.bfloat16) < error(torch.float16) else torch.float16


def unpack(weight):
    """Return int4 (N, K / 2) as bytes (N, K)."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def pack_pairs(q):
    """Return int4 (..., K / 2) of bytes or int8 (..., K) from 0 to 15: the inverse of unpack."""
    q = q.view(torch.uint8)
    return q[..., ::2] | q[..., 1::2] << 4


class Layout(NamedTuple):
    """How a kernel stores the integers of a QuantLinear, in its parameter `packed` instead of the checkpoint's."""

    name: str  # of the kernel
    multiply: Callable  # (x, linear) -> y, or None where it stands back
    unpack: Callable  # linear -> (weight, scales, zeros) as the checkpoint stores them
    form: tuple | None = None  # what multiply and unpack know of the order, where a kernel has several
    code: int = 0  # of the form

    def __deepcopy__(self, memo):
        return self  # a kernel knows its Layout by identity


# the plain functions for which kernels of integers stand in
PLAIN_FORWARD, PLAIN_STORED = (f"ladder.kernels.quant_linear.QuantLinear.{name}" for name in ("forward", "stored"))
STORED = "weight", "scales", "zeros"  # the parameters of a QuantLinear that is not packed


class QuantLinear(nn.Module):
    """x (..., K) -> x W^T + bias (..., N).

    weight (N, K) int8 or e4m3 or (N, K / 2) uint8, scales and zeros (N, G) are as the checkpoint stores them. A weight
    in float32, float16 or bfloat16 that is put in their place is W itself. If it holds the matrices of E experts, these
    shapes, and the bias's, begin with E; then it is not called, but read by Experts.

    A kernel may want the integers in another order: then they are in `packed`, in its Layout. Whoever reads or sets
    weight, scales or zeros unpacks them, so that what is done to them takes effect; the kernel is off from then on, up
    to the next quant_kernels.pack.
    """

    def __init__(self, shape, quant, group_size, bias=False):
        super().__init__()
        *rows, K = shape
        self.out_features = rows[-1]
        self.in_features = K
        self.bits = 4 if quant == "int4" else 8
        self.quant = quant
        self.is_stack = len(rows) > 1  # of the matrices of experts
        self.layout = None  # of `packed`, a Layout
        dtype = {"int4": torch.uint8, "fp8": torch.float8_e4m3fn}.get(quant, torch.int8)
        shape = (*rows, K // 2) if self.bits == 4 else shape
        shape_of_scales = (*rows, K // group_size if group_size else 1)
        groups = torch.empty(shape_of_scales, dtype=torch.float16 if group_size else torch.bfloat16)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.scales = nn.Parameter(groups, requires_grad=False)
        self.zeros = nn.Parameter(groups.clone(), requires_grad=False) if group_size else None
        self.register_parameter("bias", nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.quant}"

    @plain
    def forward(self, x):
        multiply = multiply_fp8 if self.quant == "fp8" else multiply_floats
        return multiply(x, self)

    def stored(self):
        """Return (weight, scales, zeros or None) as the checkpoint stores them; new tensors if they are packed."""
        if self.layout:
            return self.layout.unpack(self)
        return self._parameters["weight"], self._parameters["scales"], self._parameters.get("zeros")

    def register_forward_hook(self, *args, **kwargs):
        self._refuse_hooks()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args, **kwargs):
        self._refuse_hooks()
        return super().register_forward_pre_hook(*args, **kwargs)

    def _refuse_hooks(self):
        if self.is_stack:
            raise InputError("the matrices of experts are never called: hook the Experts that hold them")

    def rows(self, index, dtype=None):
        """Return the rows of W at `index` as floats, by default in the scales' dtype."""
        return floats(self.stored(), index, dtype)

    def pack(self, layout, **packed):
        """Replace weight, scales and zeros by other parameters, in the Layout of a kernel."""
        for name in STORED:
            self._parameters.pop(name, None)
        for name, tensor in packed.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.layout = layout

    def unpack(self):
        """Turn the integers back into weight, scales and zeros; those of a tied output head are its table's again."""
        stored = self.layout.unpack(self)
        if (table := self.__dict__.get("table")) is not None:
            start, stop = self.table_rows
            shared = [tensor for tensor in table.stored() if tensor is not None]
            whole = stop - start == len(shared[0])
            stored = [tensor if whole else tensor[start:stop] for tensor in shared] + [None] * (3 - len(shared))
        for name in [name for name in self._parameters if name.startswith("packed")]:
            del self._parameters[name]
        self.layout = None
        for name, tensor in zip(STORED, stored, strict=True):
            is_ready = tensor is None or isinstance(tensor, nn.Parameter)
            setattr(self, name, tensor if is_ready else nn.Parameter(tensor, requires_grad=False))

    def _unpack_for(self, name):
        head = self.__dict__.get("head")
        if name in STORED and head is not None and head.layout is not None:  # this is its table
            head._unpack_for(name)
        if name in STORED and self.__dict__.get("layout") is not None:
            kernel = self.layout.name
            say_once(f"{name} of a QuantLinear was asked for: it is unpacked and runs as written, without {kernel}")
            self.unpack()

    def __getattr__(self, name):
        self._unpack_for(name)
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        self._unpack_for(name)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state, prefix, *args):
        for name in STORED:
            if prefix + name in state:
                self._unpack_for(name)
        super()._load_from_state_dict(state, prefix, *args)


class QuantEmbedding(QuantLinear):
    """Token ids (...) -> their rows of W (..., K), in float32."""

    def forward(self, tokens):
        return self.rows(tokens, torch.float32)


# ---- What the plain function does ------------------------------------------------------------------------------------


def floats(stored, index=slice(None), dtype=None):
    """Return rows of W as floats, by default in the scales' dtype. stored: (weight, scales, zeros or None) of a linear.

    A weight in floats of 16 or 32 bits, which somebody put there, is W itself.
    """
    weight, scales, zeros = stored
    if weight.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return weight[index].to(dtype or weight.dtype)
    return dequantize(weight[index], scales[index], None if zeros is None else zeros[index], dtype)


def add_bias(y, linear):
    return y if linear.bias is None else y + linear.bias


def multiply_floats(x, linear):
    """Turn the integers into floats and multiply by those, on any device and in any dtype."""
    stored = linear.stored()
    y = torch.cat([F.linear(x, floats(stored, rows, x.dtype)) for rows in pieces(linear, x)], dim=-1)
    return add_bias(y, linear)


def pieces(linear, x):
    """Return slices of the rows of W that become floats at a time."""
    N = max(1, linear.out_features)  # a rank may have no rows of the output head
    K = linear.in_features
    # the compiler makes one loop of it anyway; on a GPU each piece would take two more launches
    step = N if torch.compiler.is_compiling() or x.is_cuda else max(1, DEQUANTIZED_AT_ONCE // K)
    return [slice(i, i + step) for i in range(0, N, step)]


def to_fp8(x):
    """Return e4m3 (..., K) and scales (..., 1) float32 for x (..., K): the largest of each row becomes 448."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / FP8_MAX
    return round_to_fp8(x, scales), scales


def round_to_fp8(x, scales):
    """Return e4m3 (..., K), which times the scales (..., 1) are about x (..., K). A scale of 0 is of zeros."""
    return (x / scales.where(scales != 0, 1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def multiply_fp8(x, linear):
    """Multiply rows of x in e4m3, each with a scale, on any device and in any dtype: slowly, but products are exact."""
    weight, scales, _ = linear.stored()
    if weight.dtype != torch.float8_e4m3fn:
        return multiply_floats(x, linear)
    q, scales_of_x = to_fp8(x)
    products = [F.linear(q.float(), weight[rows].float()) for rows in pieces(linear, x)]
    return add_bias((torch.cat(products, dim=-1) * scales_of_x * scales[:, 0].float()).type_as(x), linear)


# ---- Kernels that stand in for QuantLinear.forward -------------------------------------------------------------------


def multiply_packed(linear, x):
    """Multiply by the kernel in whose Layout the integers are."""
    return linear.layout and linear.layout.multiply(x, linear)


def matrix_by_rows(linear, dtype):
    """Return (weight, scales) of a QuantLinear that has a matrix of this dtype with a scale for each row, or None."""
    parameters = linear._parameters
    weight = parameters.get("weight")
    if type(linear) is not QuantLinear or weight is None or weight.dtype != dtype or weight.dim() != 2:
        return None
    return (weight, parameters["scales"]) if len(weight) and parameters.get("zeros") is None else None


def multiply_int8(linear, x):
    """Multiply up to INT8_KERNEL_ROWS rows in bfloat16 by PyTorch's kernel for CPUs."""
    K = linear.in_features
    stored = matrix_by_rows(linear, torch.int8)
    if stored is None or x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.numel() > INT8_KERNEL_ROWS * K:
        return None
    if K % 16:  # PyTorch's kernel (2.13) would read out of bounds
        return None
    y = torch._weight_int8pack_mm(x.reshape(-1, K), stored[0], stored[1][:, 0])
    return add_bias(y.view(*x.shape[:-1], -1).type_as(x), linear)


# ---- Quantizing a model ----------------------------------------------------------------------------------------------


def swap(model, make):
    """Replace each submodule by make(path, submodule), or keep it if that is None. path: "layers.0.attention.wo"."""
    for path, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            if (new := make(f"{path}.{name}" if path else name, module)) is not None:
                setattr(parent, name, new)


def eight_bits(config):
    """Return {name or path of the matrices that config.int8 lists: columns of a group, or None for one per row}.

    An entry is NAME or NAME:COLUMNS, where NAME is that of a matrix in all layers, "w2", or the path of one of them,
    "layers.3.feed_forward.w2".
    """
    entries = (entry.partition(":") for entry in config.int8)
    return {name: int(columns) if colon else None for name, colon, columns in entries}


def replace_matrices(model):
    """Replace the linears, the embeddings and the matrices of experts of a Transformer by integer ones.

    Those that config.not_quantized or an Architecture names stay floats, such as the matrices that choose experts, and
    so does any other module, also a linear with a forward of its own: an integer one would not compute the same.
    """
    config = model.config
    listed = eight_bits(model.config)
    unknown = {name for name in listed if "." in name}
    kept = [*config.not_quantized, *(name for each in config.architecture for name in each.not_quantized)]

    def make(path, module):
        name = path.rpartition(".")[2]
        table = "tok_embeddings" if name == "output" and config.tie_embeddings else name
        weight = getattr(module, "weight", None)
        if weight is None or table in kept:
            return None
        computes = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        is_linear = computes is nn.Linear or (computes.__module__, computes.__name__) == ("model", "Linear")
        is_stack = computes is nn.Module and weight.dim() == 3  # the matrices of experts, which are never called
        if not is_linear and not is_stack and computes is not nn.Embedding:
            return None
        kind = QuantEmbedding if computes is nn.Embedding else QuantLinear
        quant = config.quant
        group_size = config.group_size
        entry = path if path in listed else table
        if entry in listed:
            quant = "int8"
            group_size = listed[entry]
            unknown.discard(entry)
        return kind(weight.shape, quant, group_size, getattr(module, "bias", None) is not None)

    swap(model, make)
    if unknown:
        raise InputError(f"int8 lists {min(unknown)}, which is no matrix of this model that is quantized")


def neuron_unit(config, neurons, shares):
    """Return how many neurons stay together on a rank, the unit in which ranks share out an MLP, by the form of w2:

    floats, or int8 by rows      1; what an architecture asks for (experts: 8), if that divides the neurons
    fp8                          16, as its kernel wants, if that divides them and the smallest share gets a unit
    int4, or int8 in groups      128 columns, as PyTorch's kernel on a GPU wants, if that divides them and each rank
                                 gets 8 units or more; else a group of columns, which share a scale, halved until the
                                 smallest share gets a unit, down to 8, the least that the kernels for CPUs take
    groups, in fixed shards      8, of which the bounds of shards are multiples; fp8 in fixed shards: 1
    """
    fixed = config.named_wiring.fixed_shards
    least_ranks = sum(shares) / min(shares)  # as many as if each had the smallest share
    in_groups = config.group_size and "w2" not in (*config.not_quantized, *config.int8)
    if in_groups and fixed:
        return 8
    if in_groups:
        if neurons % 128 == 0 and neurons >= 8 * 128 * least_ranks and not config.named_wiring.reads_partials:
            return 128
        unit = config.group_size
        while unit > 8 and neurons // unit < least_ranks:
            unit //= 2
        return unit
    if config.quant == "fp8" and neurons % 16 == 0 and neurons // 16 >= least_ranks:
        return 1 if fixed else 16
    unit = max((each.neuron_unit for each in config.architecture), default=1)
    return 1 if neurons % unit else unit


def regroup(numbers, start, stop, size):
    """Return the scales or zeros of columns start to stop, given those of all groups that contain them (..., G).

    size: columns of such a group. If start or stop lies inside a group, all groups become smaller, so that both are
    multiples of the new size. Example: groups of 64 that are cut at column 96 become groups of 32.
    """
    smaller = math.gcd(size, start, stop)
    first = start % size // smaller
    numbers = numbers.repeat_interleave(size // smaller, dim=-1)
    return numbers[..., first : first + (stop - start) // smaller].contiguous()
