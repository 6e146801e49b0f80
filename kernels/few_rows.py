"""The modules of a model that use few_rows.cpp: products of few rows, and the attention of a decode step, on a CPU.

Of a model on a GPU, only the attention.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from kernels import cpu, cxx
from kernels.int_linear import Int8Linear, Integers, IntEmbedding, IntLinear, scaled, unpack
from model import Attention, FeedForward

# rows of x up to which few_rows.cpp is the faster one (benchmarks/decode.md)
FEW = 7 if torch.cpu._is_amx_tile_supported() else 24  # than oneDNN
FEW_INT = 96  # than making floats of the integers first
FEW_POSITIONS = 16  # of a row that its attention takes; PyTorch's is for a prefill
PANELS = 64  # of 16 rows, packed at a time: the temporaries are some MB


def build():
    """Load the operators of few_rows.cpp. Raises InputError as cxx.load_operators does."""
    if hasattr(torch.ops.ladder, "few_rows"):
        return
    cxx.load_operators("few_rows.cpp", "--compile", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")
    torch.library.register_fake("ladder::few_rows", lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
    for name in ("ladder::few_rows_int", "ladder::many_rows_int"):
        torch.library.register_fake(name, lambda x, weight, N, *_: x.new_empty(*x.shape[:-1], N))
    torch.library.register_fake("ladder::feed_forward_int", lambda x, *_: x.new_empty(x.shape))
    torch.library.register_fake("ladder::decode_attention", lambda q, *_: q.new_empty(q.shape))


class FewRowsLinear(nn.Linear):
    """A linear that multiplies few rows with few_rows.cpp."""

    def forward(self, x):
        if x.numel() > FEW * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        y = torch.ops.ladder.few_rows(x, self.weight)
        return y if self.bias is None else y + self.bias


def packed_shape(weight, scales, zeros):
    """Return the shape (P, G, 1 + V, 64) of pack()'s result."""
    (N, columns), G = weight.shape, scales.shape[1]
    return -(-N // 16), G, 1 + (-(-columns // 8) * 2 if zeros is None else columns // G // 4), 64


@torch.no_grad()
def pack(weight, scales, zeros, room=None):
    """Return int_linear.py's integers in few_rows.cpp's layout: (P, G, 1 + V, 64) uint8, the last panel padded.

    Of a panel of 16 rows, each group is a vector with their scales and zeros (bfloat16), and V vectors with four bytes
    of every row: the next four columns, q + 128 (int8, whose columns are padded to a multiple of 8), or eight, the
    later four in the upper halves (int4). room: bytes to write them to, or None.
    """
    (N, columns), (P, G, vectors, _) = weight.shape, packed_shape(weight, scales, zeros)
    packed = cpu.empty((P, G, vectors, 64), torch.uint8) if room is None else room.view(P, G, vectors, 64)
    parts = packed.unflatten(-1, (16, 4))
    for i in range(0, P, PANELS):
        q = weight[16 * i : 16 * (i + PANELS)]
        q = F.pad(q, (0, -columns % 8 if zeros is None else 0, 0, -len(q) % 16))
        if zeros is None:
            q = q.view(torch.uint8) ^ 128
        else:
            low, high = unpack(q).unflatten(-1, (-1, 2, 4)).unbind(-2)
            q = low | high << 4
        parts[i : i + PANELS, :, 1:] = q.view(-1, 16, G, vectors - 1, 4).permute(0, 2, 3, 1, 4)
    pairs = torch.stack((scales, torch.zeros_like(scales) if zeros is None else zeros))  # (2, N, G)
    pairs = F.pad(pairs, (0, 0, 0, -N % 16)).unflatten(1, (P, 16)).permute(1, 3, 0, 2)  # (P, G, 2, 16)
    packed.view(torch.bfloat16)[:, :, 0] = pairs.flatten(2)
    return packed


class Packed(Integers):
    """Integers in a weight as pack() returns it."""

    def hold(self, weight, shape, bits):
        """shape: (N, K). bits: 8 or 4."""
        self.weight, self.shape, self.bits = weight, shape, bits
        self.scales = self.zeros = None

    out_features = property(lambda self: self.shape[0])
    in_features = property(lambda self: self.shape[1])

    def rows(self, index):
        panel, lane = index // 16, index % 16
        # indexed as bytes and then viewed as bfloat16: Inductor copies the whole of what it views as another dtype
        pairs = self.weight[:, :, 0].unflatten(-1, (2, 16, 2))[panel, :, :, lane]  # (..., G, 2, 2)
        scales, zeros = pairs.view(torch.bfloat16).squeeze(-1).unbind(-1)
        q = self.weight.unflatten(-1, (16, 4))[panel, :, 1:, lane]  # (..., G, V, 4)
        if self.bits == 8:
            return scaled((q.flatten(-3)[..., : self.in_features] ^ 128).view(torch.int8), scales, None)
        halves = torch.tensor([[0], [4]], dtype=torch.uint8)
        return scaled((q[..., None, :] >> halves & 15).flatten(-4), scales, zeros)


class PackedEmbedding(Packed, IntEmbedding):
    """An embedding whose table is the output head's too."""


class FewRowsIntLinear(Packed, IntLinear):
    """An IntLinear that multiplies with few_rows.cpp: few rows by the integers themselves, many by pieces of floats."""

    def forward(self, x):
        few = x.numel() <= FEW_INT * x.shape[-1]
        multiply = torch.ops.ladder.few_rows_int if few else torch.ops.ladder.many_rows_int
        y = multiply(x, self.weight, *self.shape, self.bits)
        return y if self.bias is None else y + self.bias


class FewRowsFeedForward(FeedForward):
    """A FeedForward of FewRowsIntLinears. For few rows they are one call, because no weight is read between calls."""

    def forward(self, x):
        if x.numel() > FEW_INT * x.shape[-1]:
            return super().forward(x)
        weights = self.w1.weight, self.w3.weight, self.w2.weight
        return torch.ops.ladder.feed_forward_int(x, *weights, *self.w1.shape, self.w1.bits)


class DecodeAttention(Attention):
    """An Attention that decodes with few_rows.cpp, a few positions of each row at a time."""

    def attend(self, q, k, v, metadata):
        if q.shape[3] > FEW_POSITIONS:
            return super().attend(q, k, v, metadata)
        window = metadata.window or k.shape[2]
        y = torch.ops.ladder.decode_attention(q.transpose(2, 3), k, v, metadata.positions, window)  # (B, K, S, G, H)
        return y.transpose(2, 3).flatten(2, 3)


class SplitAttention(Attention):
    """An Attention that, compiled for a GPU, cuts a head's keys between multiprocessors in a decode step.

    PyTorch's own kernels that take a mask give them all to one: of an H200's 132, 8 would work for a row of the 8b.
    """

    def attend(self, q, k, v, metadata):
        S, T, positions, window = q.shape[3], metadata.mask.shape[-1], metadata.positions, metadata.window
        if S > FEW_POSITIONS or not torch.compiler.is_compiling():
            return super().attend(q, k, v, metadata)

        def seen(score, row, head, query, key):
            position = positions[row, query % S]
            near = key <= position if window is None else (key <= position) & (key > position - window)
            return torch.where(near, score, -torch.inf)

        return flex_attention(q.flatten(2, 3), k[:, :, :T], v[:, :, :T], seen)


def use(model):
    """Let a model on a CPU, in bfloat16, decode and multiply few rows with few_rows.cpp, and one on a GPU split keys.

    Raises InputError when few_rows.cpp cannot be compiled.
    """
    for module in model.modules() if model.device.type == "cuda" else ():
        if type(module) is Attention and module.head_dim % 16 == 0:
            module.__class__ = SplitAttention
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return
    build()
    linears = []
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
        elif type(module) is Attention and module.head_dim % 64 == 0:
            module.__class__ = DecodeAttention
        elif type(module) in (IntLinear, Int8Linear) and (
            module.zeros is None or module.in_features // module.scales.shape[1] in (8, 16, 32, 64, 128)
        ):
            linears.append(module)
    embeddings = [m for m in model.modules() if type(m) is IntEmbedding]
    # side by side: alone, the end of each matrix, which fills no huge page, would lie in small ones
    sizes = [math.prod(packed_shape(m.weight, m.scales, m.zeros)) for m in linears]
    room = cpu.empty((sum(sizes),), torch.uint8)
    for module, part in zip(linears, room.split(sizes), strict=True):
        shape, bits = (module.out_features, module.in_features), 8 if module.zeros is None else 4
        packed = nn.Parameter(pack(module.weight, module.scales, module.zeros, part), requires_grad=False)
        place = module.weight.data_ptr()
        for table in embeddings:
            if (table.out_features, table.in_features) == shape and table.weight.data_ptr() == place:  # tied
                table.__class__ = PackedEmbedding
                table.hold(packed, shape, bits)
        module.__class__ = FewRowsIntLinear
        module.hold(packed, shape, bits)
    for module in [m for m in model.modules() if type(m) is FeedForward and m.w1.bias is None]:
        if {type(m) for m in module.children()} == {FewRowsIntLinear}:
            module.__class__ = FewRowsFeedForward
