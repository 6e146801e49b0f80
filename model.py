"""A Llama-type transformer whose residual wiring is a choice.

Single-device mathematics: tp.py shards the weights and supplies the collectives, nothing here knows of it. With those,
the known block, and a ladder's:

    standard   x = x + wait(start(attention(attention_norm(x))))
               x = x + wait(start(feed_forward(ffn_norm(x))))

    ladder     a = start(attention(attention_norm(x)))    # computes while m, the MLP of the block before, is summed
               x = x + wait(m)
               m = start(feed_forward(ffn_norm(x)))       # computes while a is summed
               x = x + wait(a)

Shape letters: B batch, S sequence, T cache length, D dim, N heads, K KV heads, G = N / K query heads that share a
KV head, H head_dim, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, NewType

import torch
import torch.nn as nn
import torch.nn.functional as F


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line that names it and says what would be right."""

    def __str__(self):  # what it quotes may come from a stranger's file: no line breaks, no terminal's escape codes
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())
        return text if len(text) <= 500 else f"{text[:300]} ... {text[-190:]}"


# ---------------------------------------------------------------------------------------------------------------------
# The collectives, as a wiring asks for them


class SingleDevice:
    """Of one device, where every partial is already the sum; tp.py has those of several ranks."""

    tp_size = 1

    def start(self, partial):
        """Put the all-reduce, the sum of all ranks' partials, in flight; returns what wait takes."""
        return partial

    def wait(self, pending):
        """The sum."""
        return pending

    def settle(self, x, pending, after=None):
        """x + wait(pending), or x if nothing is pending."""
        return x if pending is None else x + pending

    def gather(self, logits):
        """All of the logits from each rank's part of the vocabulary."""
        return logits


# ---------------------------------------------------------------------------------------------------------------------
# The wirings: a sublayer h maps the residual stream x (B, S, D) to this rank's partial of its output


def residual_stream(x, sublayers, comm, config):
    """standard x_i = x_{i-1} + AllReduce(h_i(x_{i-1})), ladder x_i = x_{i-1} + AllReduce(h_i(x_{i-2})), and both mixed.

    sublayers: list of (h, stale); a stale (ladder) sublayer reads x without the sum that is still in flight.
    """
    pending = None
    for (h, stale), (_, next_stale) in pairwise([*sublayers, (None, False)]):
        if not stale:  # standard: wait, then compute
            x, pending = comm.settle(x, pending), None
        started = comm.start(h(x))
        if stale or next_stale:  # ladder: the sum of the sublayer before is waited for only after h(x)
            x = comm.settle(x, pending, after=started)  # `after` is for the compiler: see tp.py
        pending = started
    return comm.settle(x, pending)


def delayed_stream(x, sublayers, comm, config):
    """x_i = x_{i-1} + AllReduce(h_i(x_{i-2} + p)): a ladder, but p, this rank's own partial of h_{i-1}, is there."""
    p = 0.0

    def with_own(h, stale):
        def read(x):
            nonlocal p
            p = h(x + p if stale else x)
            return p

        return read

    return residual_stream(x, [(with_own(h, stale), stale) for h, stale in sublayers], comm, config)


def desynced_stream(x, sublayers, comm, config):
    """Keep every n-th all-reduce (n = desync_period) and the last; between them each rank's stream drifts on its own.

    At a kept one x = AllReduce(x / tp_size + h(x)): the mean of the streams plus the sum of the partials.
    """
    for i, (h, _) in enumerate(sublayers, start=1):
        if i % config.desync_period and i < len(sublayers):
            x = x + h(x)
        else:
            x = comm.wait(comm.start(x / comm.tp_size + h(x)))
    return x


def unreduced_stream(x, sublayers, comm, config):
    """No all-reduce: not a model (unless on one device), but the speed that hiding every all-reduce would reach."""
    for h, _ in sublayers:
        x = x + h(x)
    return x


def attention_then_mlp(block, metadata, cache):
    return [
        lambda x: block.attention(block.attention_norm(x), metadata, cache),
        lambda x: block.feed_forward(block.ffn_norm(x)),
    ]


def attention_plus_mlp(block, metadata, cache):
    def both(x):
        x = block.attention_norm(x)
        return block.attention(x, metadata, cache) + block.feed_forward(x)

    return [both]


def attention_into_mlp(block, metadata, cache):
    """The MLP reads this rank's own partial y of the attention: the all-reduce between them is dropped."""

    def both(x):
        y = block.attention(block.attention_norm(x), metadata, cache)
        return y + block.feed_forward(block.ffn_norm(x + y))

    return [both]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The complete description of a wiring. Flags, sweeps, plots, the clock and the tests take it from here.

    about: its line of --help. split: from a block to its sublayers. stream: how these feed the residual stream. stale:
    whether they read it one sublayer stale. norms: of a block. parameter: the field of Config that it takes, if any;
    optional: whether that field may be None (then all layers are wired so, and not just the ladder_layers). tp_bound:
    whether it is another function of the same weights on another number of ranks. standard_alone: whether that on one
    is the standard model. runs_standard: whether also on several standard weights run in it without retraining, at less
    of a loss than in a ladder (benchmarks/zeroshot.md).
    """

    about: str
    split: Callable = attention_then_mlp
    stream: Callable = residual_stream
    stale: bool = False
    norms: tuple[str, ...] = ("attention_norm", "ffn_norm")
    parameter: str | None = "ladder_layers"
    optional: bool = True
    tp_bound: bool = False
    standard_alone: bool = False
    runs_standard: bool = False

    @property
    def sublayers(self):
        """The number of sublayers that a block has."""
        return len(self.split(None, None, None))


WIRINGS = {
    "standard": Wiring("the pre-norm Llama block", parameter=None),
    "ladder": Wiring("every sublayer reads the stream one sublayer stale", stale=True, parameter=None),
    "hybrid": Wiring("ladder in the --layers alone", stale=True, optional=False),
    "parallel": Wiring("attention + MLP of one input, one all-reduce", attention_plus_mlp, norms=("attention_norm",)),
    "parallel-ladder": Wiring("parallel, one block stale", attention_plus_mlp, stale=True, norms=("attention_norm",)),
    "spd": Wiring("the MLP reads this rank's own attention, one all-reduce", attention_into_mlp,
                  tp_bound=True, standard_alone=True, runs_standard=True),
    "spd-ladder": Wiring("spd, one block stale", attention_into_mlp, stale=True, tp_bound=True),
    "delayed": Wiring("a ladder that misses only the other ranks' partials", stream=delayed_stream, stale=True,
                      tp_bound=True, standard_alone=True, runs_standard=True),
    "desync": Wiring("only every --desync-period-th all-reduce", stream=desynced_stream,
                     parameter="desync_period", optional=False, tp_bound=True, standard_alone=True),
    "upper-bound": Wiring("no all-reduce: a bound on speed, not a usable model", stream=unreduced_stream,
                          parameter=None, tp_bound=True, standard_alone=True),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The configuration

Index = NewType("Index", int)  # of a token or a layer: unlike an int of Config it may be 0
LLAMA3 = Literal["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
YARN = Literal["factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"]
LINEAR = Literal["factor"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What a checkpoint is; its config.json holds these fields, of these types (checkpoint.py checks them). Never
    mutated: dataclasses.replace makes another.

    ladder_layers: the layers that are wired so, where others are standard: an int n means the last n, a tuple names
    them. made_for_tp: the number of ranks that the weights are meant for, where the wiring is bound to one.
    rope_scaling: None, Llama 3's, YaRN's or linear. nope_layers: layers without rotary embeddings. quant: "int8",
    "int4" (with a group_size, in columns) or None; kept: names of matrices that it leaves as they were.
    Raises InputError, naming the field, when the values do not fit together.
    """

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
    rope_scaling: dict[LLAMA3, float] | dict[YARN, float] | dict[LINEAR, float] | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    wo_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    nope_layers: tuple[Index, ...] = ()
    bos_id: Index | None = None
    eos_ids: tuple[Index, ...] = ()
    wiring: str = "standard"
    ladder_layers: int | tuple[Index, ...] | None = None
    desync_period: int = 2
    made_for_tp: int | None = None
    quant: str | None = None
    group_size: int | None = None
    kept: tuple[str, ...] = ()

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim {self.head_dim} is odd, but rotary embeddings turn pairs of dimensions")
        if not set(self.nope_layers) <= set(range(self.n_layers)):
            raise InputError(f"nope_layers {self.nope_layers!r} are not layers from 0 to {self.n_layers - 1}")
        if self.wiring not in WIRINGS:
            raise InputError(f"unknown wiring {self.wiring!r}; known: {', '.join(WIRINGS)}")
        wiring, layers = WIRINGS[self.wiring], self.wired_layers
        takes = wiring.parameter == "ladder_layers"
        if self.ladder_layers is None and takes and not wiring.optional:
            raise InputError(f"wiring {self.wiring} needs ladder_layers")
        if self.ladder_layers is not None and not takes:
            raise InputError(f"wiring {self.wiring} takes no ladder_layers")
        if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(self.n_layers)):
            raise InputError(
                f"ladder_layers {self.ladder_layers!r} does not fit: give a number of last layers from 1 to "
                f"{self.n_layers}, or distinct layers from 0 to {self.n_layers - 1}"
            )
        if self.made_for_tp is not None and not wiring.tp_bound:
            raise InputError(f"wiring {self.wiring} is the same on any number of ranks: it takes no made_for_tp")

    @property
    def wired_layers(self):
        """The layers that are of this wiring, as a tuple of indices; the others are standard."""
        if isinstance(self.ladder_layers, tuple):
            return self.ladder_layers
        last = self.n_layers if self.ladder_layers is None else self.ladder_layers
        return tuple(range(max(-1, self.n_layers - last), self.n_layers))  # -1: they are too many

    @property
    def stale_layers(self):
        """The layers whose sublayers read the residual stream one sublayer stale, as a tuple of indices."""
        return self.wired_layers if WIRINGS[self.wiring].stale else ()

    @property
    def function(self):
        """What the wiring does, as (its name, the layers of it in order, the desync_period or None).

        Equal for the several ways to write one wiring: of 8 layers the last 4, or 4, 5, 6 and 7, or 7, 6, 5 and 4; a
        hybrid of all layers is a ladder, and to keep every all-reduce is standard.
        """
        every = tuple(range(self.n_layers))
        if self.wiring == "hybrid" and len(self.wired_layers) == self.n_layers:
            return "ladder", every, None
        if WIRINGS[self.wiring].parameter == "desync_period":
            return ("standard", every, None) if self.desync_period == 1 else (self.wiring, every, self.desync_period)
        return self.wiring, tuple(sorted(self.wired_layers)), None

    def wiring_of(self, layer):
        """The Wiring of a layer."""
        return WIRINGS[self.wiring if layer in self.wired_layers else "standard"]


# ---------------------------------------------------------------------------------------------------------------------
# The layers


def rope_frequencies(config):
    """Radians per position of each pair of dimensions, (H/2,) float32; scaled where configured.

    Linear scaling stretches every wavelength by `factor`. Llama 3.1 leaves those alone that are short against the
    original context and blends a band in between; so does YaRN (arXiv 2309.00071), over whole pairs of dimensions.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    if config.rope_scaling is None:
        return frequencies
    s, H, keep = config.rope_scaling, config.head_dim, torch.zeros(1, device="cpu")
    if "low_freq_factor" in s:
        turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    elif "beta_fast" in s:
        turns = s["original_max_position_embeddings"] / (2 * math.pi)  # of the first pair
        first, last = (math.log(turns / s[beta], config.rope_theta) for beta in ("beta_fast", "beta_slow"))
        first, last = max(math.floor(first * H / 2), 0), min(math.ceil(last * H / 2), H - 1)
        keep = 1 - (pairs / 2 - first) / ((last - first) or 0.001)
    keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / s["factor"])


def rotate(x, cos, sin):
    """Turn each pair (i, i + H/2) of x (B, K, *, S, H) by its angle; cos and sin are (B, 1, 1, S, H/2)."""
    # contiguous in this order: then a head is one long loop, where otherwise each position would be a short one
    a, b = x.float(memory_format=torch.contiguous_format).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


@dataclasses.dataclass
class AttentionMetadata:
    """Inputs that all attention layers of a forward pass share.

    cos, sin: (B, 1, 1, S, H/2). rows (B, 1), positions (B, S): where this pass writes the cache.
    mask: (B, S, T') bool over the first T' slots of the cache, or, without a cache, over the keys of this very pass
    (T' = S); None when each row starts at position 0 and so attends causally to the keys of this very pass.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None


class Attention(nn.Module):
    """Grouped-query attention. The rows of wqkv come KV head by KV head: its G query heads, its key, its value.

    So a run of rows is a run of whole groups, and tp.py may hand this module any number of them: head counts are
    read from the shapes.
    """

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        n_heads, n_kv_heads = config.n_heads, config.n_kv_heads
        self.wqkv = nn.Linear(config.dim, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(n_heads * self.head_dim, config.dim, bias=config.wo_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    @property
    def n_kv_heads(self):
        return (self.wqkv.out_features - self.wo.in_features) // (2 * self.head_dim)

    def forward(self, x, metadata, cache):
        """x (B, S, D) -> this rank's partial (B, S, D). cache: None or (k, v), each (B, K, T, H), written in place."""
        B, S, _ = x.shape
        qkv = self.wqkv(x).view(B, S, self.n_kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)  # (B, K, G + 2, S, H)
        q = rotate(self.q_norm(qkv[:, :, :-2]), metadata.cos, metadata.sin)  # (B, K, G, S, H)
        k = rotate(self.k_norm(qkv[:, :, -2:-1]), metadata.cos, metadata.sin).squeeze(2)  # (B, K, S, H)
        v = qkv[:, :, -1]  # (B, K, S, H)
        if cache is not None:
            cache[0][metadata.rows, :, metadata.positions] = k.transpose(1, 2)
            cache[1][metadata.rows, :, metadata.positions] = v.transpose(1, 2)
        if metadata.mask is None:
            y = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=True)  # (B, N, S, H)
        else:
            y = self.attend(q, *(cache or (k, v)), metadata)
        return self.wo(y.reshape(B, -1, S, self.head_dim).transpose(1, 2).reshape(B, S, -1))

    def attend(self, q, k, v, metadata):
        """Attention of q (B, K, G, S, H) to keys and values (B, K, T, H), by their mask -> (B, K, G * S, H)."""
        # The G query heads of a KV head become G more queries of one head: no key is ever copied.
        B, _, G, S, _ = q.shape
        T = metadata.mask.shape[-1]
        mask = metadata.mask[:, None, None].expand(B, 1, G, S, T).flatten(2, 3)  # (B, 1, G * S, T')
        return F.scaled_dot_product_attention(q.flatten(2, 3), k[:, :, :T], v[:, :, :T], attn_mask=mask)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.intermediate_size, bias=config.mlp_bias)  # gate
        self.w3 = nn.Linear(config.dim, config.intermediate_size, bias=config.mlp_bias)  # up
        self.w2 = nn.Linear(config.intermediate_size, config.dim, bias=config.mlp_bias)  # down

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """The weights of one layer. It has no forward: the wirings, above, say what they compute."""

    def __init__(self, config, layer):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        for name in config.wiring_of(layer).norms:
            setattr(self, name, nn.RMSNorm(config.dim, config.norm_eps))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.comm = SingleDevice()
        # without nn.Embedding's initial values: to draw them on the device "meta" imports the compiler, for seconds
        table = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope_frequencies", rope_frequencies(config), persistent=False)

    def forward(self, tokens, positions=None, cache=None, cache_length=None, select=None):
        """Logits (B, S, V), or (B, 1, V) at the sequence index select (B,) of each row.

        tokens (B, S) int64. Without positions every row starts at position 0 (training, scoring, prefill); rows
        shorter than S are padded on the right, which causality hides from them. With positions (B, S) each row
        continues its cached sequence there (decode), reading the first cache_length slots of the cache.
        cache: as new_cache makes it, written in place, or None.
        """
        B, S = tokens.shape
        mask = None
        if positions is not None:
            slots = torch.arange(cache_length, device=tokens.device)
            mask = slots <= positions[..., None]  # (B, S, T')
        else:
            positions = torch.arange(S, device=tokens.device).expand(B, S)
        metadata = self.metadata(positions, mask)
        stream = WIRINGS[self.config.wiring].stream
        x = self.norm(stream(self.tok_embeddings(tokens), self.sublayers(metadata, cache), self.comm, self.config))
        if select is not None:
            x = x[metadata.rows, select[:, None]]
        return self.comm.gather(self.output(x))

    def metadata(self, positions, mask=None):
        """The AttentionMetadata of tokens at these positions (B, S)."""
        angles = (positions[..., None] * self.rope_frequencies)[:, None, None]  # (B, 1, 1, S, H/2)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        scale = (self.config.rope_scaling or {}).get("attention_factor", 1.0)  # YaRN's, of queries and of keys
        return AttentionMetadata(angles.cos() * scale, angles.sin() * scale, rows, positions, mask)

    def sublayers(self, metadata, cache=None):
        """What the wiring makes of the blocks, in their order: [(h, stale)], as a stream function takes it."""
        nope_layers, out = self.config.nope_layers, []
        plain = nope_layers and dataclasses.replace(
            metadata, cos=torch.ones_like(metadata.cos), sin=torch.zeros_like(metadata.sin)
        )
        for i, block in enumerate(self.layers):
            wiring, used = self.config.wiring_of(i), plain if i in nope_layers else metadata
            out += [(h, wiring.stale) for h in wiring.split(block, used, cache and cache[i])]
        return out

    def new_cache(self, batch, length):
        """A static KV cache of `length` slots: one (k, v) a layer, each (B, K, T, H), zeroed."""
        weight = self.norm.weight
        return [
            tuple(weight.new_zeros(batch, a.n_kv_heads, length, a.head_dim) for _ in "kv")
            for a in (block.attention for block in self.layers)
        ]
