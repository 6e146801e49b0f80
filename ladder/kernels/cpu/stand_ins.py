"""The functions of skinny_gemm.cpp that stand in for plain ones on a CPU. Shape letters: model.py.

Each returns None where it meets anything that it does not know: see ladder/kernels/registry.py. Parameters are
read from _parameters, at each call, since module.weight takes ten times as long.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.cpu.skinny_gemm import bits_of
from ladder.kernels.quant_linear import DEQUANTIZED_AT_ONCE, PLAIN_FORWARD, PLAIN_STORED, QuantLinear, add_bias
from ladder.kernels.registry import Kernel, say_once
from model import Linear

FEW_POSITIONS = 16  # of a row in a pass; with more, as in a prefill, PyTorch's attention is faster
FEW_FLOATS = 8  # up to so many rows, PyTorch's own bfloat16 is as fast as its float32, even without oneDNN
BF16 = torch.bfloat16
TENSORS = nn.Parameter, torch.Tensor  # and not a subclass, whose functions may be others


def is_bf16(x):
    return x.dtype is BF16 and x.is_cpu


def is_changed(module):
    """Return whether a call of a module is more than its class's forward: it has hooks, or a forward of its own."""
    return module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__


def matrix_of(module, name):
    """Return (weight, bits, bias, N, K) of the linear `name` of a module as skinny_gemm.cpp takes it, or None.

    bits: 16 of bfloat16, of which N and K are those of the weight; of a packed QuantLinear what bits_of returns.
    """
    linear = module._modules[name]
    kind = type(linear)
    if not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__):  # is_changed, faster
        if kind is QuantLinear:
            if (bits := bits_of(linear)) is not None:
                parameters = linear._parameters
                return parameters["packed"], bits, parameters["bias"], linear.out_features, linear.in_features
            return None
        if kind is Linear:
            parameters = linear._parameters
            weight = parameters["weight"]
            if type(weight) in TENSORS:
                return weight, 16, parameters["bias"], *weight.shape
            return None
    tell_change(module, name)
    return None


def tell_change(module, name):
    """Say that a part of a module is none that its kernel knows."""
    part = module._modules[name]
    kind = type(module).__name__
    what = "has a hook or a forward of its own" if is_changed(part) else f"is a {type(part).__name__}"
    say_once(f"{name} of a {kind} {what}: {kind}.forward runs as written there, slower")


# ---- Linears and norms -----------------------------------------------------------------------------------------------


def own_weight(module):
    """Return the parameter `weight` of a module, or None, as where its class has a property of that name."""
    return None if hasattr(type(module), "weight") else module._parameters.get("weight")


def linear(self, x):
    """Multiply up to SKINNY_ROWS rows."""
    parameters = self._parameters
    weight = own_weight(self)
    if not is_bf16(x) or x.numel() > skinny_gemm.SKINNY_ROWS * x.shape[-1] or weight is None:
        return None
    if weight.dtype is not BF16 or type(weight) not in TENSORS or weight.dim() != 2 or "bias" not in parameters:
        return None
    y = torch.ops.ladder.skinny_gemm(x, weight)
    bias = parameters["bias"]
    return y if bias is None else y + bias


def linear_in_float32(self, x):
    """Multiply in float32, since PyTorch's many rows in bfloat16 are slow where oneDNN has no bfloat16."""
    weight = own_weight(self)
    if not is_bf16(x) or x.numel() <= FEW_FLOATS * x.shape[-1] or weight is None or weight.dtype is not BF16:
        return None
    rows = x.float()
    pieces = weight.split(max(1, DEQUANTIZED_AT_ONCE // weight.shape[1]))
    return add_bias(torch.cat([F.linear(rows, piece.float()) for piece in pieces], -1).type_as(x), self)


def norm(self, x):
    """Compute an RMSNorm in one operator. The compiler makes one, too."""
    weight = own_weight(self)
    if weight is None or x.dtype is not BF16 or weight.dtype is not BF16 or self.eps is None or not x.is_cpu:
        return None
    return torch.ops.ladder.rms_norm(x, weight, self.eps)


# ---- The layers ------------------------------------------------------------------------------------------------------


def most_rows(bits):
    """Return of how many rows skinny_gemm.cpp multiplies weights of these bits faster than other kernels do."""
    return skinny_gemm.SKINNY_ROWS if bits == 16 else skinny_gemm.SKINNY_INT_ROWS


def feed_forward(self, x):
    """Compute the MLP of a few rows in one call, so that no time is lost between its products."""
    if x.dtype is not BF16 or not x.is_cpu or self.activation is not F.silu:
        return None
    if len(self._modules) != 3 or self._parameters:
        return None
    gate = matrix_of(self, "w1")
    up = matrix_of(self, "w3")
    down = matrix_of(self, "w2")
    if gate is None or up is None or down is None:
        return None
    weight, _, bias, N, K = gate
    bits = [gate[1], up[1], down[1]]
    if bias is not None or up[2] is not None or up[3] != N:
        return None
    if x.numel() > K and x.numel() > min(map(most_rows, bits)) * K:
        return None
    y = torch.ops.ladder.feed_forward(x, weight, up[0], down[0], N, K, bits)
    return y if down[2] is None else y + down[2]


def attend(q, k, v, mask=None, sinks=None):
    """Attend from up to FEW_POSITIONS positions, with a mask."""
    H = q.shape[-1]
    if mask is None or q.shape[3] > FEW_POSITIONS or H % 64 or not is_bf16(q):
        return None
    q = q.transpose(2, 3)
    k = k.contiguous()  # without a cache k and v are views of wqkv's output
    v = v.contiguous()
    y = torch.ops.ladder.decode_attention(q, k, v, mask, H**-0.5, sinks)
    return y.transpose(2, 3)


def rotate_into_cache(q, k, v, rope, metadata, cache):
    """Rotate, and write to the cache, in one operator. The compiler makes one, too."""
    if not rope or rope[0].dtype is not torch.float32 or not is_bf16(q):
        return None
    B, K, _, S, H = k.shape
    v = v.squeeze(2)
    if cache is None:
        rows = torch.arange(B)
        positions = torch.arange(S).expand(B, -1)
        keys, values = k.new_empty(2, B, K, S, H)
        return torch.ops.ladder.rotate_into_cache(q, k.squeeze(2), v, *rope, rows, positions, keys, values), keys, v
    rows = metadata.rows
    positions = metadata.positions
    keys, values = cache
    q = torch.ops.ladder.rotate_into_cache(q, k.squeeze(2), v, *rope, rows, positions, keys, values)
    return q, keys[rows, :, positions].transpose(1, 2), v


def attention(self, x, metadata, cache):
    """Compute the attention of a few new positions in one call, in layers that the operator knows.

    Compiled code, which needs no Python between its calls, has `attend` alone.
    """
    if self._parameters or len(self._modules) != 2:
        return None
    return attention_step(self, x, metadata, cache, metadata.rope, metadata.mask)


def attention_step(self, x, metadata, cache, rope, mask, norms=((), 0.0)):
    """Compute an attention by one operator, or return None. norms: (weights of q_norm and k_norm or none, eps)."""
    if cache is None or self.head_dim % 64 or x.dtype is not BF16 or not x.is_cpu:
        return None
    if rope[0].dtype is not torch.float32:
        return None
    inputs = matrix_of(self, "wqkv")
    outputs = matrix_of(self, "wo")
    if inputs is None or outputs is None:
        return None
    rows = x.shape[0] * x.shape[1]
    if rows > FEW_POSITIONS or rows > most_rows(inputs[1]) or rows > most_rows(outputs[1]):
        return None
    weight, bits, bias, _, columns = outputs
    heads = columns // self.head_dim
    y = torch.ops.ladder.attention_step(
        x, inputs[0], weight, (inputs[1], bits), heads, inputs[2], *norms, *rope, metadata.rows, metadata.positions,
        *cache, mask,
    )  # fmt: skip
    return y if bias is None else y + bias


# ---- Which stand in for which ----------------------------------------------------------------------------------------

LINEAR = "model.Linear.forward"
NORM = "ladder.layers.norms.RMSNorm.forward"
QUANT = PLAIN_FORWARD, PLAIN_STORED
KERNELS = [
    Kernel(LINEAR, linear, "few rows are up to twice as fast"),
    Kernel(NORM, norm, "a norm is one call", compiles=False),
    Kernel("model.FeedForward.forward", feed_forward, "an MLP of few rows is one call", (LINEAR, *QUANT)),
    Kernel("model.attend", attend, "few positions are about twice as fast"),
    Kernel("model.rotate_into_cache", rotate_into_cache, "a rotation is one call", compiles=False),
    Kernel("model.Attention.forward", attention, "few positions are one call", (LINEAR, *QUANT), compiles=False),
]
WITHOUT_CPP = [Kernel(LINEAR, linear_in_float32, "many rows are multiplied in float32")]
