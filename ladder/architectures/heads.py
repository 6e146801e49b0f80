"""Attention whose heads differ from a Llama's: norms of queries and keys, windows, sinks, gates, caps, layers without
rotary embeddings. Qwen 3, Mistral, Gemma 2 and 3, OLMo 2 and 3, SmolLM3, Ministral 3, gpt-oss, Qwen3-Next and others.

Shape letters: model.py.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.architectures import Architecture
from ladder.errors import FieldError, InputError
from ladder.kernels.registry import plain
from ladder.layers.norms import NORMS
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT
from model import Attention


@dataclasses.dataclass(frozen=True)
class Heads(Architecture):
    """What differs; the defaults are a Llama's."""

    name = "heads"
    is_fallback = True  # after linear attention, which only some layers have

    qk_norm: bool = False  # whether queries and keys are normed, head by head
    whole_qk_norm: bool = False  # with qk_norm: one norm over the heads of all ranks, not one for each head
    sinks: bool = False  # whether a head attends to one more key, of a learned score and no value
    gate: bool = False  # whether a head's output is multiplied by sigmoid(another query projection)
    score_cap: float | None = None  # scores become cap tanh(score / cap)
    query_scale: float | None = None  # multiplies queries
    llama4_beta: float | None = None  # multiplies them by 1 + beta ln(1 + floor(position / the original context))
    sliding_window: int | None = None  # to how many positions a token attends, its own included
    window_layers: tuple[int, ...] = ()  # the layers with the sliding window
    window_rope_theta: float | None = None  # rope_theta of window_layers, which then ignore rope_scaling
    nope_layers: tuple[int, ...] = ()  # the layers without rotary embeddings

    def check(self, config):
        """Raise InputError if the settings contradict one another, or other fields of the config."""
        scaling = config.rope_scaling or {}
        if self.llama4_beta and ORIGINAL_CONTEXT not in scaling:
            raise FieldError("{llama4_beta.name} needs a rope_scaling with " + ORIGINAL_CONTEXT, self)
        if self.window_rope_theta and "long_factor" in scaling:
            raise FieldError("{window_rope_theta.name} is not for longrope", self)
        if self.whole_qk_norm and not (self.qk_norm and config.norm == "rms"):
            raise InputError("whole_qk_norm needs qk_norm and a norm 'rms'")
        if self.whole_qk_norm and config.named_wiring.reads_partials and config.wiring != "upper-bound":
            raise InputError(f"wiring {config.wiring} is not for whole_qk_norm: each lane would norm its own heads")
        if self.sinks and self.score_cap:
            raise InputError("sinks are not for score_cap")
        if self.window_layers and (self.sliding_window or 0) < 1:
            raise FieldError("{window_layers.name} needs a sliding_window of 1 or more tokens", self)
        for name in "window_layers", "nope_layers":
            if not {*getattr(self, name)} <= {*range(config.n_layers)}:
                message = f"{{{name}.name}} takes layers from 0 to {config.n_layers - 1}, not {getattr(self, name)}"
                raise FieldError(message, self)

    def of_first_layers(self, n_layers):
        windowed = tuple(i for i in self.window_layers if i < n_layers)
        without_rope = tuple(i for i in self.nope_layers if i < n_layers)
        return dataclasses.replace(self, window_layers=windowed, nope_layers=without_rope)

    def attention(self, config, layer):
        return HeadAttention(config, layer, self)

    @property
    def needs_mask(self):
        return bool(self.score_cap or self.sinks)  # PyTorch's kernels for causal attention know neither

    def window_theta(self, config):
        return self.window_rope_theta

    def metadata(self, config, metadata, key_at, make_rope):
        positions = metadata.positions
        mask = metadata.mask
        scale = self.query_scale
        if self.llama4_beta:
            contexts = positions // config.rope_scaling[ORIGINAL_CONTEXT]
            scale = (1 + self.llama4_beta * (contexts + 1).log())[:, None, None, :, None] * (scale or 1.0)
        if self.window_layers and (mask is not None or positions.shape[1] > self.sliding_window):
            mask = key_at <= positions[..., None] if mask is None else mask
            mask = mask & (key_at > positions[..., None] - self.sliding_window)
        rope = make_rope(1) if self.window_rope_theta else metadata.rope
        return HeadMetadata(rope, mask, scale)

    # ---- Shards ----

    def query_rows(self, config):
        return config.head_dim * 2 if self.gate else None

    def plan_of_heads(self, config, columns):
        H = config.head_dim
        plan = {"sinks": (0, [(start // H, stop // H) for start, stop in columns])}  # one of each head
        if self.whole_qk_norm:  # q_norm is cut as wo's columns are, k_norm by whole KV heads
            start, stop = columns[0]
            width = config.n_heads // config.n_kv_heads * H  # columns of a KV head's queries
            # the KV heads of these columns, with one that is shared with other ranks
            first = start // width
            end = -(-stop // width)
            plan |= {"q_norm": (0, columns), "k_norm": (0, [(first * H, end * H)])}
        return plan

    def kernels(self, device_type):
        if device_type == "cuda":
            return []
        from ladder.kernels.cpu import heads

        return heads.KERNELS

    # ---- Hugging Face folders ----

    hf_keys = {
        "llama4_beta": "llama_4_scaling_beta", "window_rope_theta": "rope_theta of sliding_attention",
        "window_layers": "sliding_attention", "nope_layers": "no_rope_layers",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, hf):
        head_dim = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
        scalar = hf.get("query_pre_attn_scalar") or head_dim
        windowed = window_layers(hf)
        settings = {
            "qk_norm": hf.get("qk_norm", hf.get("use_qk_norm", False)),
            "query_scale": (head_dim / scalar) ** 0.5 if scalar != head_dim else None,
            "score_cap": hf.get("attn_logit_softcapping"),
            "llama4_beta": hf["rope_scaling"].get("llama_4_scaling_beta"),
            "sliding_window": hf["sliding_window"] if windowed else None, "window_layers": windowed,
            "window_rope_theta": window_theta(hf), "nope_layers": nope_layers(hf),
        }  # fmt: skip
        settings = {name: value for name, value in settings.items() if value not in (None, False, ())}
        return (settings, {}) if settings else None


class HeadMetadata(NamedTuple):
    """What the layers share of a pass besides a Llama's AttentionMetadata.

    window_rope, window_mask: of the layers with a window. query_scale: multiplies queries (B, K, G, S, H), or None.
    """

    window_rope: tuple
    window_mask: torch.Tensor | None
    query_scale: torch.Tensor | float | None


class HeadAttention(Attention):
    """An Attention with these settings. With a gate, each query head of wqkv is followed by its gate."""

    def __init__(self, config, layer, settings):
        super().__init__(config, settings.query_rows(config))
        N = config.n_heads
        K = config.n_kv_heads
        H = config.head_dim
        self.window = settings.sliding_window if layer in settings.window_layers else None
        self.rotates = layer not in settings.nope_layers
        self.score_cap = settings.score_cap
        self.whole_norm = settings.whole_qk_norm
        self.gate = settings.gate
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        if settings.qk_norm:
            make_norm = NORMS[config.norm]
            self.q_norm = make_norm(N * H if self.whole_norm else H, config.norm_eps)
            self.k_norm = make_norm(K * H if self.whole_norm else H, config.norm_eps)
        self.sinks = nn.Parameter(torch.empty(N)) if settings.sinks else None

    def split_heads(self, qkv, metadata):
        """Return what Attention does, with queries and keys normed, and the gate (B, K, G, S, H) or None."""
        q, k, v = super().split_heads(qkv, metadata)
        q, gate = (q[:, :, ::2], q[:, :, 1::2]) if self.gate else (q, None)
        q, k = norm_heads(q, k, self.q_norm, self.k_norm, metadata.comm if self.whole_norm else None)
        return q, k, v, gate

    def shared(self, metadata):
        """Return the HeadMetadata of a pass."""
        return metadata.own[Heads.name]

    def rope_and_mask(self, metadata):
        own = self.shared(metadata)
        rope, mask = (own.window_rope, own.window_mask) if self.window else (metadata.rope, metadata.mask)
        return rope if self.rotates else None, mask

    def attend(self, q, k, v, mask, metadata):
        scale = self.shared(metadata).query_scale
        if scale is not None:
            q = (q * scale).type_as(q)
        if self.sinks is not None:
            return attend_with_sinks(q, k, v, mask, self.sinks)
        if self.score_cap:
            return attend_capped(q, k, v, mask, self.score_cap)
        return super().attend(q, k, v, mask, metadata)

    def join_heads(self, y, gate):
        return super().join_heads(y if gate is None else y * gate.sigmoid())

    def slots_read(self, filled):
        return min(filled, self.window) if self.window else filled


def norm_heads(q, k, q_norm, k_norm, comm=None):
    """Return the normed queries (B, K, G, S, H) and keys (B, K, 1, S, H).

    Each head is normed alone. With `comm`, all heads of all ranks are normed together: the collectives sum the squares
    over the ranks, in one all-reduce. q_norm, k_norm: RMSNorms; those of all heads have a rank's part of the weights.
    """
    if comm is None:
        return q_norm(q), k_norm(k)
    (queries,) = q_norm.normalized_shape  # the width over all ranks
    (keys,) = k_norm.normalized_shape
    share = q.shape[2] * keys / queries  # ranks with a copy of a KV head each add a share of its squares
    squares = torch.stack([q.float().square().sum((1, 2, 4)), k.float().square().sum((1, 2, 4)) * share])
    # float64: sums of partials may be rounded on their way (ladder/ranks/eight_bits.py), which would ruin a norm
    sums = comm.wait(comm.start(squares.double())).float()[:, :, None, None, :, None]  # (2, B, 1, 1, S, 1)

    def normed(x, norm, mean):
        weight = norm.weight.view(x.shape[1], x.shape[2], 1, x.shape[4])
        return (x.float() * (mean + norm.eps).rsqrt()).type_as(x) * weight

    return normed(q, q_norm, sums[0] / queries), normed(k, k_norm, sums[1] / keys)


@plain
def attend_with_sinks(q, k, v, mask, sinks):
    """Return what attend does, where each head has one more key, of value 0. sinks (K * G): its scores."""
    # In one more dimension all keys but the extra one are 0, so that its score is the sink, whatever the query is.
    # PyTorch's kernels want multiples of 8 dimensions.
    _, _, G, S, H = q.shape
    k = k[:, :, : mask.shape[-1]]
    v = v[:, :, : mask.shape[-1]]
    k = F.pad(k, (0, 8, 0, 1))
    v = F.pad(v, (0, 8, 0, 1))
    mask = F.pad(mask, (0, 1), value=True)
    k[:, :, -1, H] = H**0.5
    sinks = sinks.view(q.shape[1], G, 1, 1).expand(*q.shape[:4], 1)
    queries = torch.cat((q, sinks.type_as(q), torch.zeros_like(q[..., :7])), -1).flatten(2, 3)
    mask = mask[:, None, None].expand(-1, 1, G, S, -1).flatten(2, 3)  # (B, 1, G * S, T' + 1)
    y = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=H**-0.5)[..., :H]
    return y.reshape(q.shape)


@plain
def attend_capped(q, k, v, mask, score_cap):
    """Return what attend does, with scores score_cap tanh(score / score_cap)."""
    _, _, G, S, H = q.shape
    k = k[:, :, : mask.shape[-1]]
    v = v[:, :, : mask.shape[-1]]
    scores = (q.flatten(2, 3) * H**-0.5 @ k.mT).float()
    scores = score_cap * (scores / score_cap).tanh()
    hidden = ~mask[:, None, None].expand(-1, 1, G, S, -1).flatten(2, 3)  # (B, 1, G * S, T')
    y = scores.masked_fill(hidden, -torch.inf).softmax(-1).type_as(v) @ v
    return y.reshape(q.shape)


# ---- Hugging Face folders --------------------------------------------------------------------------------------------


def window_layers(hf):
    """Return the layers with a window shorter than the context: by layer_types, else by the family's pattern."""
    n_layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window")
    types = hf.get("layer_types")
    family = hf["family"]
    if window is None or not hf.get("use_sliding_window", True):
        return ()
    if window >= hf["context"] and not family.two_bases:
        return ()
    if types is None and family.needs_layer_types:
        raise InputError("a sliding_window needs layer_types in this family")
    if types is None:
        first = hf.get("max_window_layers", 0)
        step = hf.get("sliding_window_pattern", n_layers + 1)
        return tuple(i for i in range(first, n_layers) if (i + 1) % step)
    if len(types) != n_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise InputError(f"layer_types must name full_attention or sliding_attention for each of {n_layers} layers")
    return tuple(i for i in range(n_layers) if types[i] == "sliding_attention")


def nope_layers(hf):
    """Return the layers without rotary embeddings: those with a 0 in no_rope_layers, else every interval-th layer."""
    n_layers = hf["num_hidden_layers"]
    interval = hf.get("no_rope_layer_interval", n_layers + 1)
    has_rope = hf.get("no_rope_layers") or [i % interval for i in range(1, n_layers + 1)]
    if len(has_rope) < n_layers:
        raise InputError(f"no_rope_layers has {len(has_rope)} entries for {n_layers} layers")
    return tuple(i for i in range(n_layers) if not has_rope[i])


def window_theta(hf):
    """Return rope_theta of the layers with a window, or None if all layers turn alike."""
    if not hf["family"].two_bases:
        return None
    theta = hf["rope_scaling"].get("rope_theta", hf["rope_theta"])
    near = hf["near_rope"].get("rope_theta", hf.get("rope_local_base_freq") or theta)
    return near if hf["scaling"] or near != theta else None
