"""Multi-head latent attention (MLA, arXiv 2405.04434) of DeepSeek V2 and V3, GLM-4.7-Flash and Instella-MoE.

The keys and values of all heads are made of one short vector for each token, its *latent*. So the cache holds latents
alone, each beside a short key that is rotated and that all heads share. With latents c_t and shared keys r_t, head n
has the keys (K_n c_t, r_t) and the values V_n c_t, where K_n and V_n are rows of wkv_b.

There are two ways to compute a head's output for a query (q, p), of which p is rotated:

    expanded    make keys and values of all latents first; then attend as usual
    absorbed    sum_t softmax(q . K_n c_t + p . r_t) V_n c_t = V_n sum_t softmax((K_n^T q) . c_t + p . r_t) c_t:
                attend to the latents themselves, as if they were the keys and the values of one head

Absorbed, a key costs more multiplications for each query, but nothing is made for each key: it suits few queries.

Ranks share out the heads. Each has all latents, so the cache is the same on every rank.

Shape letters: B batch, S sequence, T slots of the cache, T' those that are read, D dim, N heads of this rank, L of a
latent, X of a head's key without its rotated part, R of that part, Y of its value.
"""

import dataclasses
import math
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.architectures import Architecture
from ladder.errors import FieldError, InputError
from ladder.kernels.registry import has_global_hooks, plain
from ladder.layers.attention_inputs import rotate, unpaired
from ladder.layers.norms import RMSNorm
from ladder.sources.matrices import Renamed
from model import Linear

LATENT_EPS = 1e-6  # of the latents' norms, as in transformers, whatever rms_norm_eps says of the others
NOT_COMPUTED = "qkv_bias", "wo_bias"


@dataclasses.dataclass(frozen=True)
class Latent(Architecture):
    """The settings of latent attention, which all layers have; the letters are those above."""

    name = "latent"

    latent_dim: int  # L
    key_dim: int  # X
    rope_dim: int  # R
    value_dim: int  # Y
    query_rank: int | None = None  # width of the latents of the queries, if these have any
    query_scale: float | None = None  # multiplies queries
    gate: bool = False  # whether a head's output is multiplied by sigmoid(a projection of x)

    not_quantized = ("wkv_b",)  # which decoding needs as floats

    def check(self, config):
        """Raise InputError if other fields of the config contradict the settings."""
        needed = self.key_dim + self.rope_dim, self.rope_dim, config.n_heads
        given = config.head_dim, config.rotary_dim or config.head_dim, config.n_kv_heads
        if given != needed:
            raise InputError(
                "latent attention needs head_dim {}, rotary_dim {} and n_kv_heads {}, ".format(*needed)
                + "not {}, {} and {}".format(*given)
            )
        if name := next((n for n in NOT_COMPUTED if getattr(config, n)), None):
            raise FieldError(f"{{{name}.name}} is not for latent attention", config)
        if self.query_rank == 0:
            raise FieldError("{query_rank.name} is 0 but must be above 0, or null", self)
        for other in config.architecture:
            if other is not self and type(other).attention is not Architecture.attention:
                raise InputError(f"a model with {self.name} has no {other.name}: both say how it attends")

    def attention(self, config, layer):
        return LatentAttention(config, self)

    def sharded_units(self, config):
        X = self.key_dim
        R = self.rope_dim
        Y = self.value_dim
        queries = 0, [(0, X + R)]
        keys_and_values = 0, [(0, X), (config.n_heads * X, Y)]
        linears = {
            "wq": queries,
            "wq_b": queries,
            "wkv_b": keys_and_values,
            "wgate": (0, [(0, Y)]),
            "wo": (1, [(0, Y)]),
        }
        return config.n_heads, "heads", linears

    def columns(self, config, columns):
        dim = config.dim
        queries = {"wq_a": {dim}, "wq_b": {self.query_rank}} if self.query_rank else {"wq": {dim}}
        gate = {"wgate": {dim}} if self.gate else {}
        others = {name: counts for name, counts in columns.items() if name != "wqkv"}
        return others | {**queries, "wkv_a": {dim}, **gate, "wo": {config.n_heads * self.value_dim}}

    def kernels(self, device_type):
        if device_type == "cuda":
            return []
        from ladder.kernels.cpu import latents

        return latents.KERNELS

    hf_keys = {
        "query_rank": "q_lora_rank", "latent_dim": "kv_lora_rank", "key_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim", "gate": "gated_attention",
    }  # fmt: skip
    hf_names = {
        "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "wq_b": "q_b_proj", "wq": "q_proj",
        "wkv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wgate": "gate_proj",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, hf):
        if "kv_lora_rank" not in hf:
            return None
        settings = {name: hf[key] for name, key in cls.hf_keys.items() if name != "gate"}
        rope = hf["rope_scaling"]
        scale = None
        if hf["num_key_value_heads"] not in (None, hf["num_attention_heads"]):
            raise InputError("num_key_value_heads must be num_attention_heads, since all heads share one latent")
        if missing := [cls.hf_keys[name] for name, value in settings.items() if value is None and name != "query_rank"]:
            raise InputError(f"{missing[0]} is null but must be a whole number above 0")
        key_dim = settings["key_dim"]
        rope_dim = settings["rope_dim"]
        if hf["head_dim"] not in (None, rope_dim, key_dim + rope_dim):
            raise InputError(f"head_dim {hf['head_dim']} is neither qk_rope_head_dim nor that plus qk_nope_head_dim")
        if rope.get("mscale_all_dim") and rope.get("rope_type", rope.get("type", "default")) != "default":
            if not rope.get("factor"):
                raise InputError("mscale_all_dim needs a factor beside it")
            scale = (0.1 * rope["mscale_all_dim"] * math.log(max(1.0, rope["factor"])) + 1) ** 2  # of the scores
        fields = {"head_dim": key_dim + rope_dim, "n_kv_heads": hf["num_attention_heads"], "rotary_dim": rope_dim}
        return {**settings, "gate": bool(hf.get("gated_attention")), "query_scale": scale}, fields

    def hf_weights(self, source, config, hf):
        return LatentWeights(source, self, hf.get("rope_interleave", True))


def sizes(settings):
    """Return (L, X, R, Y) of a Latent."""
    return settings.latent_dim, settings.key_dim, settings.rope_dim, settings.value_dim


class LatentAttention(nn.Module):
    """A layer of latent attention.

    wq (or wq_b, which reads a latent of the queries) has X + R rows for each head, wgate has Y. wkv_b has the X rows of
    the keys of all heads, then the Y rows of the values of all, and is never quantized. tp.py may give this module any
    range of heads; how many they are is read from the shapes.
    """

    def __init__(self, config, settings):
        super().__init__()
        L, X, R, Y = self.sizes = sizes(settings)
        N = config.n_heads
        rank = settings.query_rank
        self.scale = (X + R) ** -0.5  # of the scores
        self.query_scale = settings.query_scale
        if rank:
            self.wq_a = Linear(config.dim, rank, bias=False)
            self.q_a_norm = RMSNorm(rank, LATENT_EPS)
            self.wq_b = Linear(rank, N * (X + R), bias=False)
        else:
            self.wq = Linear(config.dim, N * (X + R), bias=False)
        self.wkv_a = Linear(config.dim, L + R, bias=False)
        self.kv_a_norm = RMSNorm(L, LATENT_EPS)
        self.wkv_b = Linear(L, N * (X + Y), bias=False)
        self.wgate = Linear(config.dim, N * Y, bias=False) if settings.gate else None
        self.wo = Linear(N * Y, config.dim, bias=False)
        # From so many queries on, "expanded" takes fewer multiplications of a head and key, (X + R + Y) S + L (X + Y)
        # against (2 L + R) S: from 143 on for Instella-MoE, from 171 on for DeepSeek V3.
        self.most_absorbed = L * (X + Y) // (2 * L - X - Y) if 2 * L > X + Y else 2**30

    def forward(self, x, metadata, cache):
        """Return this rank's partial (B, S, D) of the normed x (B, S, D).

        metadata: an AttentionMetadata, whose rope is of R dimensions. cache: None, or made by new_cache and written to.
        """
        q = self.wq_b(self.q_a_norm(self.wq_a(x))) if hasattr(self, "wq_b") else self.wq(x)
        y = self.attend(q, self.wkv_a(x), metadata, cache)
        return self.wo(y if self.wgate is None else y * self.wgate(x).sigmoid())

    @plain
    def attend(self, q, kv, metadata, cache):
        """Return the heads' outputs (B, S, N Y). q: (B, S, N (X + R)), kv: latents and shared keys (B, S, L + R)."""
        B, S, _ = q.shape
        L, X, R, Y = self.sizes
        q, rotated = q.view(B, S, -1, 1, X + R).permute(0, 2, 3, 1, 4).split([X, R], -1)  # (B, N, 1, S, X and R)
        latents, keys = kv.split([L, R], -1)
        q = torch.cat((q, rotate(rotated, *metadata.rope)), -1).squeeze(2)  # (B, N, S, X + R)
        if self.query_scale is not None:
            q = (q * self.query_scale).type_as(q)
        keys = rotate(keys[:, None, None], *metadata.rope).squeeze(2)  # (B, 1, S, R), of all heads
        cached = torch.cat((self.kv_a_norm(latents)[:, None], keys), -1)  # (B, 1, S, L + R)
        mask = metadata.mask
        if cache is not None:
            cache[0][metadata.rows, :, metadata.positions] = cached.transpose(1, 2)
            if mask is not None:  # else each row begins here, and the keys are those of this pass
                cached = cache[0][:, :, : mask.shape[-1]]
        if mask is not None and self.absorbs(q.shape[2]):
            y = self.attend_to_latents(q, cached, metadata)
        else:
            N = q.shape[1]
            expanded = self.wkv_b(cached[:, 0, :, :L])  # (B, T', N X + N Y)
            k, v = (w.unflatten(-1, (N, -1)).transpose(1, 2) for w in expanded.split([N * X, N * Y], -1))
            k = torch.cat((k, cached[..., L:].expand(*k.shape[:-1], R)), -1)
            v = F.pad(v, (0, max(0, X + R - Y)))  # PyTorch's fast kernels want keys and values of one width
            visible = {"is_causal": True} if mask is None else {"attn_mask": mask[:, None]}
            y = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **visible)[..., :Y]
        return y.transpose(1, 2).flatten(2)

    def absorbs(self, queries):
        """Return whether so many queries attend to latents. What hooks or wraps wkv_b runs only where it is called."""
        weight_alone = type(self.wkv_b) is Linear and self.wkv_b.bias is None
        if not weight_alone or self.wkv_b._forward_hooks or self.wkv_b._forward_pre_hooks or has_global_hooks():
            return False
        return "forward" not in self.wkv_b.__dict__ and queries <= self.most_absorbed

    @plain
    def attend_to_latents(self, q, cached, metadata):
        """Return the heads' outputs (B, N, S, Y), "absorbed". q: (B, N, S, X + R), cached: (B, 1, T', L + R)."""
        L, X, R, _ = self.sizes
        queries, rotated = q.split([X, R], -1)
        q = torch.cat((self.to_latents(queries), rotated), -1) * self.scale  # (B, N, S, L + R)
        scores = (q.flatten(1, 2) @ cached[:, 0].mT).float()  # (B, N S, T')
        hidden = ~metadata.mask[:, None]
        scores = scores.unflatten(1, q.shape[1:3]).masked_fill(hidden, -torch.inf).softmax(-1).type_as(q)
        y = (scores.flatten(1, 2) @ cached[:, 0, :, :L]).unflatten(1, q.shape[1:3])  # (B, N, S, L)
        return self.to_values(y)

    @plain
    def to_latents(self, q):
        """Return K_n^T q of each head (B, N, S, L) for q (B, N, S, X)."""
        N = q.shape[1]
        X = q.shape[3]
        return torch.einsum("bnsx,nxl->bnsl", q, self.wkv_b.weight[: N * X].unflatten(0, (N, X)))

    @plain
    def to_values(self, y):
        """Return V_n y of each head (B, N, S, Y) for y (B, N, S, L)."""
        N = y.shape[1]
        Y = self.sizes[3]
        return torch.einsum("bnsl,nyl->bnsy", y, self.wkv_b.weight[-N * Y :].unflatten(0, (N, Y)))

    def slots_read(self, filled):
        """Return how many of the filled slots of the cache a step reads."""
        return filled

    def multiplications(self):
        """Return how many multiplications this rank's heads need for each query and cached token."""
        L, _, R, Y = self.sizes
        return self.wo.in_features // Y * (2 * L + R)

    def new_cache(self, batch, length, device, dtype):
        """Return (latents with shared keys (B, 1, T, L + R), no values (B, 1, T, 0)), zeroed."""
        L, _, R, _ = self.sizes
        return tuple(torch.zeros(batch, 1, length, width, device=device, dtype=dtype) for width in (L + R, 0))


class LatentWeights(Renamed):
    """The tensors of a source with rows in our order: see LatentAttention.

    interleaved: rotated rows were neighbours (2i, 2i + 1), and become pairs (i, i + R/2).
    """

    def __init__(self, source, settings, interleaved):
        super().__init__(source)
        self.settings = settings
        self.interleaved = interleaved

    def join(self, name, weight):
        L, X, R, Y = sizes(self.settings)
        if "kv_b_proj" in name:
            return torch.cat([w.flatten(0, 1) for w in weight.unflatten(0, (-1, X + Y)).split([X, Y], 1)])
        if not self.interleaved or not re.search(r"\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.", name):
            return weight
        first = L if "kv_a_proj" in name else X
        plain, rotated = weight.unflatten(0, (-1, first + R)).split([first, R], 1)
        return torch.cat((plain, unpaired(rotated.flatten(0, 1), R).unflatten(0, (-1, R))), 1).flatten(0, 1)
