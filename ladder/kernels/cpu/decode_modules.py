"""The parts of a model that skinny_gemm.cpp computes on a CPU. Shape letters: model.py."""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.errors import InputError
from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.quant_kernels import use_kernels
from ladder.kernels.quant_linear import swap
from ladder.layers.latent_attention import LatentAttention
from ladder.ranks.world import say
from model import Attention, FeedForward, attend, rotate_into_cache

FEW_POSITIONS = 16  # of a row in a pass; with more, as in a prefill, PyTorch's attention is faster


def decode_attend(q, k, v, mask, positions, window, score_cap, sinks=None):
    """Compute what model.attend does, for up to FEW_POSITIONS positions and no score_cap by skinny_gemm.cpp."""
    if q.shape[3] > FEW_POSITIONS:
        return attend(q, k, v, mask, positions, window, score_cap, sinks)
    q, k, v = q.transpose(2, 3), k.contiguous(), v.contiguous()  # without a cache they are views of wqkv's output
    y = torch.ops.ladder.decode_attention(q, k, v, positions, window or k.shape[2], q.shape[-1] ** -0.5, sinks)
    return y.transpose(2, 3).flatten(2, 3)


def fused_rotate(q, k, v, rope, metadata, cache):
    """Compute what model.rotate_into_cache does in one operator, unless the compiler makes one."""
    if rope is None or rope[0].dtype != torch.float32 or torch.compiler.is_compiling():
        return rotate_into_cache(q, k, v, rope, metadata, cache)
    (B, K, _, S, H), positions = k.shape, metadata.positions
    if cache is None:
        cache, positions = k.new_empty(2, B, K, S, H), torch.arange(S).expand(B, -1)
    keys, values = cache
    q = torch.ops.ladder.rotate_into_cache(q, k.squeeze(2), v.squeeze(2), *rope, positions, keys, values)
    return q, keys[:, :, :S], values[:, :, :S]  # read only where a pass begins at position 0


class SkinnyNorm(nn.RMSNorm):
    """An RMSNorm in one operator, unless the compiler makes one."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight

    def forward(self, x):
        if torch.compiler.is_compiling():
            return super().forward(x)
        return torch.ops.ladder.rms_norm(x, self.weight, self.eps)


def multiply_experts(x, chosen, w1, w3, w2):
    """Compute what layers/experts.py does. skinny_gemm.cpp reads the weights of each chosen expert once.

    w1, w3, w2: ExpertMatrices in bfloat16, or packed QuantLinears.
    """
    weights, bits = [w.weight for w in (w1, w3, w2)], [getattr(w, "bits", 16) for w in (w1, w3, w2)]
    biases = [w.bias for w in (w1, w3, w2) if w.bias is not None]
    if bits == [16] * 3 and chosen.numel() > skinny_gemm.SKINNY_ROWS * len(w1.weight):
        return torch.ops.ladder.experts(x, chosen, *([weight] for weight in weights), biases)
    return torch.ops.ladder.skinny_gemm_experts(x, chosen, *weights, w2.in_features, x.shape[1], bits, biases)


def bits_in_skinny_gemm(linear):
    """Return the bits of a linear's weights as skinny_gemm.cpp takes them: 16 or, packed, 8 or 4. Else None."""
    packed = getattr(linear, "kernel", None) is skinny_gemm.multiply
    return 16 if type(linear) is nn.Linear else linear.bits if packed else None


def most_rows(bits):
    """Return of how many rows skinny_gemm.cpp multiplies weights of these bits faster than other kernels do."""
    return skinny_gemm.SKINNY_ROWS if 16 in bits else skinny_gemm.SKINNY_INT_ROWS


class SkinnyFeedForward(FeedForward):
    """A FeedForward whose few rows take one call, so that no time is lost between its products."""

    def __init__(self, feed_forward, bits):
        self.__dict__ = feed_forward.__dict__  # the same linears
        w1, w3, w2 = self.w1, self.w3, self.w2
        self.most = most_rows([bits]) * w1.in_features  # numbers of x
        # looked up once: of the time that a small model's layer takes, each look-up is a percent
        self.arguments = w1.weight, w3.weight, w2.weight, w1.out_features, w1.in_features, bits

    def forward(self, x):
        return super().forward(x) if x.numel() > self.most else torch.ops.ladder.feed_forward(x, *self.arguments)


class SkinnyAttention(Attention):
    """An Attention whose few new positions take one call, except in layers that the operator does not know.

    When compiled, which needs no Python between calls, it uses decode_attend alone. bits: of wqkv and wo.
    """

    def __init__(self, attention, bits):
        self.__dict__ = attention.__dict__  # the same linears
        self.attend, self.rotate_into_cache = decode_attend, fused_rotate
        normed = type(self.q_norm) is nn.RMSNorm and not self.whole_norm  # each head for itself
        usual = (normed or type(self.q_norm) is nn.Identity) and self.rotates and not self.gates
        self.in_one_call = usual and self.wo.bias is None and self.sinks is None and None not in bits
        self.most = min(most_rows(bits), FEW_POSITIONS)
        norms = ([self.q_norm.weight, self.k_norm.weight], self.q_norm.eps) if normed else ([], 0.0)
        N = self.wo.in_features // self.head_dim
        self.arguments = self.wqkv.weight, self.wo.weight, bits, N, self.wqkv.bias, *norms

    def forward(self, x, metadata, cache):
        plain = self.in_one_call and cache is not None and metadata.query_scale is None
        if not plain or x.shape[0] * x.shape[1] > self.most or torch.compiler.is_compiling():
            return super().forward(x, metadata, cache)
        rope = metadata.window_rope if self.window else metadata.rope  # in float32
        window = self.window or cache[0].shape[2]
        return torch.ops.ladder.attention_step(x, *self.arguments, *rope, metadata.positions, *cache, window)


class SkinnyLatentAttention(LatentAttention):
    """A LatentAttention whose few new positions read the parts of wkv_b and the cache no more often than they need.

    From the queries to the heads' outputs it is one call, or three in compiled code, which loses no time between calls.
    """

    def __init__(self, attention):
        self.__dict__ = attention.__dict__  # the same linears
        L, X, _, Y = self.sizes
        N = self.wkv_b.weight.shape[0] // (X + Y)
        keys, values = self.wkv_b.weight.detach().split([N * X, N * Y])
        self.parts = keys.view(N, X, L).mT.contiguous(), values.view(N, Y, L)  # a copy of the keys' rows, transposed
        self.fits = L % 64 == 0 and (L + self.sizes[2]) % 32 == 0  # decode_attention

    def attend(self, q, kv, metadata, cache):
        rope, scale = metadata.rope, self.scale * (metadata.query_scale or 1.0)  # a number, as read from config.json
        few = self.fits and cache is not None and metadata.mask is not None and self.has_few(q[:, None])
        if not few or q.shape[1] > FEW_POSITIONS or rope[0].dtype != torch.float32 or torch.compiler.is_compiling():
            return super().attend(q, kv, metadata, cache)
        norm, positions = self.kv_a_norm, metadata.positions
        return torch.ops.ladder.latent_attention(
            q, kv, norm.weight, norm.eps, *self.parts, *rope, positions, cache[0], scale
        )

    def attend_to_latents(self, q, cached, metadata):
        if not self.fits or q.shape[2] > FEW_POSITIONS:
            return super().attend_to_latents(q, cached, metadata)
        L, X, R, _ = self.sizes
        queries, rotated = q.split([X, R], -1)
        q = torch.cat((self.to_latents(queries), rotated), -1).transpose(1, 2)[:, None]  # (B, 1, S, N, L + R)
        values, positions, T = cached[..., :L], metadata.positions, cached.shape[2]
        y = torch.ops.ladder.decode_attention(q, cached, values, positions, T, self.scale)
        return self.to_values(y[:, 0].transpose(1, 2))

    def to_latents(self, q):
        return self.multiply(q, self.parts[0]) if self.has_few(q) else super().to_latents(q)

    def to_values(self, y):
        return self.multiply(y, self.parts[1]) if self.has_few(y) else super().to_values(y)

    def has_few(self, x):
        return x.shape[0] * x.shape[2] <= skinny_gemm.SKINNY_ROWS

    def multiply(self, x, weight):
        """Return x (B, N, S, in) times the heads' weights (N, out, in): (B, N, S, out)."""
        y = torch.ops.ladder.skinny_gemm_heads(x.transpose(0, 1).flatten(1, 2), weight)
        return y.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


@functools.cache
def is_built():
    """Return whether there is skinny_gemm.cpp, which is compiled once on a machine; else rank 0 prints why not."""
    try:
        skinny_gemm.build()
        return True
    except InputError as e:
        say(f"{e}: PyTorch's kernels, slower")
        return False


def use_skinny_gemm(model):
    """Let a model in bfloat16 use skinny_gemm.cpp, or PyTorch's kernels where that cannot be built.

    The matrices of a quantized model are packed, which frees the integers as the checkpoint stores them.
    """
    if model.dtype != torch.bfloat16:
        if model.config.quant == "int4":
            say(f"int4 in {str(model.dtype)[6:]} has no kernels: bfloat16 is many times faster")
        return
    if not is_built():
        use_kernels(model, "cpu")
        if not skinny_gemm.HAS_ONEDNN_BF16:
            swap(model, lambda _, m: skinny_gemm.Float32Linear(m) if type(m) is nn.Linear else None)
        return
    use_kernels(model, "skinny_gemm")

    def make(name, module):
        if type(module) is nn.Linear:
            return skinny_gemm.SkinnyLinear(module)
        if type(module) is nn.RMSNorm:
            return SkinnyNorm(module)
        if type(module) is FeedForward and module.activation is F.silu and module.w1.bias is None:
            bits, *others = {bits_in_skinny_gemm(linear) for linear in module.children()}
            return None if others or bits is None else SkinnyFeedForward(module, bits)
        if type(module) is Attention and module.head_dim % 64 == 0 and not module.score_cap:
            return SkinnyAttention(module, [bits_in_skinny_gemm(linear) for linear in (module.wqkv, module.wo)])
        return SkinnyLatentAttention(module) if type(module) is LatentAttention else None

    swap(model, make)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.kernel = multiply_experts
