"""Linear attention: the gated delta rule (arXiv 2412.06464) of Qwen3-Next, Qwen3.5 and Qwen3.6.

Instead of the keys and values of all tokens, each head has a state whose size does not grow with the text.

Shape letters: B batch, S sequence, D dim, K key heads, R value heads that share a key head, X and Y dimensions of a key
and of a value, C channels of the convolution, W its width, M tokens of a chunk, n chunks.
"""

import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.architectures import Architecture
from ladder.errors import FieldError, InputError
from ladder.layers.norms import RMSNorm
from ladder.sources.matrices import Renamed
from model import Linear

HF_TENSORS = {  # {Hugging Face's tensor: ours}; some of ours are made of two of theirs, in this order
    "in_proj_qkvz.weight": "wqkvz.weight", "in_proj_qkv.weight": "wqkvz.weight", "in_proj_z.weight": "wqkvz.weight",
    "in_proj_ba.weight": "wba.weight", "in_proj_b.weight": "wba.weight", "in_proj_a.weight": "wba.weight",
    "conv1d.weight": "conv", "norm.weight": "out_norm.weight", "out_proj.weight": "wout.weight",
}  # fmt: skip
DELTA_CHUNK = 64  # tokens whose updates of the state are computed at once; the work grows with its square


@dataclasses.dataclass(frozen=True)
class LinearAttention(Architecture):
    """The settings of linear attention."""

    name = "linear"

    layers: tuple[int, ...]  # the layers that have it; the others attend to the cache
    key_heads: int  # K
    value_heads: int  # K R
    key_dim: int  # X
    value_dim: int  # Y
    conv_width: int  # W

    not_quantized = ("wba",)  # which says how fast a state forgets

    def check(self, config):
        """Raise InputError if the settings describe no layer."""
        if not {*self.layers} <= {*range(config.n_layers)}:
            raise InputError(f"linear: layers are from 0 to {config.n_layers - 1}, not {self.layers}")
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width) < 1:
            raise InputError("linear: the numbers of heads, their dimensions and conv_width are at least 1")
        if self.value_heads % self.key_heads:
            raise FieldError("{value_heads} is no multiple of {key_heads}", self)

    def of_first_layers(self, n_layers):
        return dataclasses.replace(self, layers=tuple(i for i in self.layers if i < n_layers))

    @property
    def rewindable(self):
        return not self.layers  # a state cannot forget a token

    def attention(self, config, layer):
        return GatedDeltaNet(config, self) if layer in self.layers else None

    def sharded_units(self, config):
        X = self.key_dim
        Y = self.value_dim
        R = self.value_heads // self.key_heads
        rows = {
            "wqkvz": 2 * X + 2 * R * Y,
            "wba": 2 * R,
            "conv": 2 * X + R * Y,
            "A_log": R,
            "dt_bias": R,
            "wout": R * Y,
        }
        linears = {name: (int(name == "wout"), [(0, n)]) for name, n in rows.items()}
        return self.key_heads, "key heads of linear attention", linears

    def columns(self, config, columns):
        return columns | {"wqkvz": {config.dim}, "wout": {self.value_heads * self.value_dim}}

    hf_keys = {
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim", "conv_width": "linear_conv_kernel_dim",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, hf):
        if "linear_num_key_heads" not in hf:
            return None
        n_layers = hf["num_hidden_layers"]
        types = hf.get("layer_types")
        interval = hf.get("full_attention_interval")
        types = types or ["linear_attention" if i % interval else "full_attention" for i in range(1, n_layers + 1)]
        if len(types) != n_layers or not {*types} <= {"full_attention", "linear_attention"}:
            raise InputError(f"layer_types must name full_attention or linear_attention for each of {n_layers} layers")
        layers = tuple(i for i in range(n_layers) if types[i] == "linear_attention")
        return {"layers": layers} | {name: hf[key] for name, key in cls.hf_keys.items()}, {}

    def hf_weights(self, source, config, hf):
        return LinearWeights(source, self)


def delta_step(q, k, v, log_decay, beta, state):
    """Compute what gated_delta_rule does for one token (S = 1), reading the state twice and writing it once."""
    q = q.transpose(-1, -2)[:, :, None]  # (B, K, 1, X, 1)
    k = k.transpose(-1, -2)[:, :, None]
    v = v.squeeze(-2)
    decay = log_decay.exp()  # (B, K, R, 1)
    from_k = (state * k).sum(-2) * decay  # (B, K, R, Y)
    from_q = (state * q).sum(-2) * decay
    new = beta * (v - from_k)
    y = from_q + (q * k).sum(-2) * new
    return y[..., None, :], state * decay[..., None] + k * new[..., None, :]


def gated_delta_rule(q, k, v, log_decay, beta, state):
    """Return (y (B, K, R, S, Y), the state after the last token). All tensors are float32.

    For one token, with decay = exp(log_decay) and with k and q as columns:

        new = beta (v - decay state^T k)
        state = decay state + k new^T
        y = state^T q

    Here a chunk of tokens is computed at a time. Each `new` depends on the state before the chunk and on the earlier
    `new` of the chunk, so all of them solve one triangular system (section 3.3 of the paper).

    q, k (B, K, S, X). v (B, K, R, S, Y). log_decay, beta (B, K, R, S): a token with zeros leaves the state as it is.
    state (B, K, R, X, Y).
    """
    S = q.shape[2]
    if S == 1:
        return delta_step(q, k, v, log_decay, beta, state)
    chunk = min(DELTA_CHUNK, S)
    n = -(-S // chunk)
    q, k, v = (F.pad(x, (0, 0, 0, n * chunk - S)).unflatten(-2, (n, chunk)) for x in (q, k, v))
    log_decay, beta = (F.pad(x, (0, n * chunk - S)).unflatten(-1, (n, chunk)) for x in (log_decay, beta))
    since = log_decay.cumsum(-1)[..., None]  # (B, K, R, n, M, 1): log of the decay since the chunk's start
    between = (since - since.mT).exp().tril()  # (B, K, R, n, M, M): the decay from token j to token i >= j
    q = q[:, :, None]
    k = k[:, :, None]
    beta = beta[..., None]
    scores = q @ k.mT * between
    system = beta * (k @ k.mT) * between  # with ones on its diagonal: unitriangular
    right = beta * torch.cat((v, k.expand(*v.shape[:-1], -1) * since.exp()), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    v, from_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    q = q * since.exp()  # relative to the state before the chunk
    k = k * (since[..., -1:, :] - since).exp()  # relative to the state after it
    outputs = []
    for i in range(n):
        new = v[..., i, :, :] - from_state[..., i, :, :] @ state  # (B, K, R, M, Y)
        outputs.append(q[..., i, :, :] @ state + scores[..., i, :, :] @ new)
        state = state * since[..., i, -1:, :].exp() + k[..., i, :, :].mT @ new
    return torch.cat(outputs, -2)[..., :S, :], state


def normalized(x):
    """Return x (..., X) with rows of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class GatedDeltaNet(nn.Module):
    """A layer of linear attention. The rows of its matrices are grouped by key head.

    A key head has these rows: in wqkvz, its query, its key, its R values and their R gates; in wba, R write strengths
    and R decays; in conv (C, W), the channels of its query, its key and its values, each with weights for the last W
    tokens. So tp.py may give this module any range of whole key heads; how many they are is read from the shapes.
    """

    def __init__(self, config, settings):
        super().__init__()
        K = settings.key_heads
        V = settings.value_heads
        X = settings.key_dim
        Y = settings.value_dim
        self.sizes = V // K, X, Y
        self.wqkvz = Linear(config.dim, 2 * K * X + 2 * V * Y, bias=False)
        self.wba = Linear(config.dim, 2 * V, bias=False)
        self.conv = nn.Parameter(torch.empty(2 * K * X + V * Y, settings.conv_width))
        self.A_log = nn.Parameter(torch.empty(V))
        self.dt_bias = nn.Parameter(torch.empty(V))
        self.out_norm = RMSNorm(Y, config.norm_eps)
        self.wout = Linear(V * Y, config.dim, bias=False)

    def forward(self, x, metadata, cache):
        """Return this rank's partial (B, S, D) of x (B, S, D).

        cache: None, or made by new_cache and written in place. metadata: an AttentionMetadata. Without a mask every row
        starts anew, whatever the cache holds. Tokens after `last` are padding and do not change the cache.
        """
        B, S, _ = x.shape
        R, X, Y = self.sizes
        qkv, z = self.wqkvz(x).view(B, S, -1, 2 * X + 2 * R * Y).split([2 * X + R * Y, R * Y], -1)
        strength, rate = self.wba(x).float().view(B, S, -1, 2, R).unbind(-2)  # (B, S, K, R)
        beta = strength.sigmoid()
        log_decay = -self.A_log.float().exp().view(-1, R) * F.softplus(rate + self.dt_bias.float().view(-1, R))
        state, before = self.new_cache(B, 0, x.device, x.dtype) if metadata.mask is None or cache is None else cache
        columns = torch.cat((before, qkv.flatten(2)), 1)  # (B, W - 1 + S, C)
        if cache is not None:
            end = S
            if metadata.last is not None:
                real = (metadata.positions <= metadata.last)[:, :, None, None]
                beta = beta * real
                log_decay = log_decay * real
                end = real.sum(1, keepdim=True)[:, :, 0, 0]
            last_columns = end + torch.arange(before.shape[1], device=x.device).expand(B, -1)
            cache[1].copy_(columns[metadata.rows, last_columns])
        weights = self.conv.float()
        mixed = sum(columns[:, i : i + S] * weights[:, i] for i in range(weights.shape[1]))  # (B, S, C) float32
        mixed = F.silu(mixed).view(B, S, -1, 2 * X + R * Y).transpose(1, 2)  # (B, K, S, 2 X + R Y)
        q, k, v = mixed.split([X, X, R * Y], -1)
        v = v.unflatten(-1, (R, Y)).transpose(2, 3)  # (B, K, R, S, Y)
        log_decay, beta = (x.permute(0, 2, 3, 1) for x in (log_decay, beta))  # (B, K, R, S)
        y, state = gated_delta_rule(normalized(q) * X**-0.5, normalized(k), v, log_decay, beta, state)
        if cache is not None:
            cache[0].copy_(state)
        y = self.out_norm(y.permute(0, 3, 1, 2, 4).type_as(x)) * F.silu(z.unflatten(-1, (R, Y)))  # (B, S, K, R, Y)
        return self.wout(y.flatten(2))

    def multiplications(self):
        return 0  # for each cached token: there is none

    def new_cache(self, batch, length, device, dtype):
        """Return (the state (B, K, R, X, Y) float32, the convolution's last W - 1 inputs (B, W - 1, C)), zeroed."""
        R, X, Y = self.sizes
        C, W = self.conv.shape
        state = torch.zeros(batch, C // (2 * X + R * Y), R, X, Y, device=device)
        return state, torch.zeros(batch, W - 1, C, device=device, dtype=dtype)


def hf_order(name):
    """Return the place of a tensor's name in HF_TENSORS, by which those that make one of ours are sorted."""
    tensor = name.partition("linear_attn.")[2]
    return [*HF_TENSORS].index(tensor) if tensor in HF_TENSORS else -1


class LinearWeights(Renamed):
    """The tensors of a source, with linear attention under our names and in our order.

    Qwen3-Next's tensors are in this order already, except the convolution's. Qwen3.5 has all queries, then all keys,
    then all values, and separate tensors for gates, strengths and decays.
    """

    def __init__(self, source, settings):
        self.key_heads = settings.key_heads
        keys = settings.key_heads * settings.key_dim
        self.rows = [keys, keys, settings.value_heads * settings.value_dim]
        places = {}
        for name in sorted(source.names(), key=hf_order):
            layer, linear, tensor = name.partition("linear_attn.")
            place = f"{layer}self_attn.{HF_TENSORS.get(tensor, tensor)}" if linear else name
            places.setdefault(place, []).append(name)
        super().__init__(source, places)

    def join(self, name, first, *rest):
        if not rest and not name.endswith(".conv"):
            return first
        parts = first.squeeze(1).split(self.rows) if name.endswith(("wqkvz.weight", ".conv")) else [first]
        return torch.cat([part.unflatten(0, (self.key_heads, -1)) for part in (*parts, *rest)], 1).flatten(0, 1)
