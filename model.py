"""A Llama-type transformer whose residual wiring is a choice.

Single-device mathematics: tp.py shards the weights and supplies the collectives, and nothing here knows of it.

Shape letters: B batch, S sequence, T cache length, D dim, N heads, K KV heads, G = N / K query heads that share a
KV head, H head_dim, V vocabulary, v this rank's part of it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


# ---- The collectives, as a wiring asks for them ----------------------------------------------------------------------

BLOCK = 16  # ids that lie on one rank: no rank's part of the vocabulary begins within such a block


def padded(logits, width):
    """Return logits (..., width) of (..., v), the further ones the least number there is, which nothing chooses."""
    more = width - logits.shape[-1]
    return F.pad(logits, (0, more), value=torch.finfo(logits.dtype).min) if more else logits


class SingleDevice:
    """Collectives of a single device: no-ops, since its partial already is the sum. tp.py has the real ones."""

    tp_size = 1

    def start(self, partial):
        """Put the all-reduce in flight, the sum of all ranks' partials; returns the argument of wait."""
        return partial

    def wait(self, pending):
        """Return the sum."""
        return pending

    def settle(self, x, pending, after=None):
        """Return x + wait(pending), or x if nothing is pending."""
        return x if pending is None else x + pending

    def part(self, logits):
        """Return this rank's logits (..., v), padded to whole blocks and alike on all ranks, their first id, and V."""
        V = logits.shape[-1]
        return padded(logits, -(-V // BLOCK) * BLOCK), 0, V

    def exchange(self, x):
        """Return every rank's x, (tp_size, *x.shape)."""
        return x[None]

    def gather(self, logits):
        """Return the logits of the whole vocabulary (..., V), on every rank, from this rank's (..., v)."""
        return logits


# ---- The wirings: a sublayer h maps the residual stream x (B, S, D) to this rank's partial of its output -------------


def take_turns(streams):
    """Run the streams of a pass's parts in turns: one computes while another's partials are summed. Returns each x."""
    *_, xs = zip(*streams, strict=True)
    return xs


def residual_stream(x, sublayers, comm, config):
    """Run standard x_i = x_{i-1} + AllReduce(h_i(x_{i-1})), ladder x_i = x_{i-1} + AllReduce(h_i(x_{i-2})), or both.

    sublayers: list of (h, stale); a stale (ladder) sublayer reads x without the sum that is still in flight.

    A stream of your own yields after each start, and its x at the end. It may only add to x (measure/clock.py passes
    plain numbers) and calls each h once; what is not linear takes a sum. It overlaps under torch.compile only if every
    wait between two sublayers is a settle with `after`, also where nothing is pending yet, and before the last
    sublayer: see tests/test_wiring.py -k compiled_code.
    """
    pending = None
    for i, (h, stale) in enumerate(sublayers):
        next_is_stale = i + 1 < len(sublayers) and sublayers[i + 1][1]
        if not stale:  # standard: wait, then compute
            x, pending = comm.settle(x, pending), None
        started = comm.start(h(x))
        yield  # to other parts of the prompt: take_turns
        if stale or next_is_stale:  # ladder: the sum of the sublayer before is waited for only after h(x)
            x = comm.settle(x, pending, after=started)  # `after` is for the compiler: see tp.py
        pending = started
    yield comm.settle(x, pending)


def delayed_stream(x, sublayers, comm, config):
    """Run x_i = x_{i-1} + AllReduce(h_i(x_{i-2} + p)): a ladder that also reads p, its rank's partial of h_{i-1}."""
    p = 0.0

    def with_own(h, stale):
        def read(x):
            nonlocal p
            p = h(x + p if stale else x)
            return p

        return read

    return residual_stream(x, [(with_own(h, stale), stale) for h, stale in sublayers], comm, config)


def desynced_stream(x, sublayers, comm, config):
    """Keep every n-th all-reduce (n = config.period) and the last; between them each rank's stream drifts on its own.

    At a kept one x = AllReduce(x / tp_size + h(x)): the mean of the streams plus the sum of the partials.
    """
    for i, (h, _) in enumerate(sublayers, start=1):
        kept = i % config.period == 0 or i == len(sublayers)
        if kept:
            started = comm.start(x / comm.tp_size + h(x))
            yield
        x = comm.wait(started) if kept else x + h(x)
    yield x


def unreduced_stream(x, sublayers, comm, config):
    """Leave out every all-reduce: no model on several ranks, but the speed of hiding them all."""
    for h, _ in sublayers:
        x = x + h(x)
    yield x


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
    """Let the MLP read this rank's own partial y of the attention: the all-reduce between them is dropped."""

    def both(x):
        y = block.attention(block.attention_norm(x), metadata, cache)
        return y + block.feed_forward(block.ffn_norm(x + y))

    return [both]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The complete description of a wiring: flags, sweeps, plots, the clock and the tests read this table."""

    about: str  # its line of --help
    split: Callable = attention_then_mlp  # from a block to its sublayers, each a function of the residual stream
    n_sublayers: int = 2  # the number of these
    stream: Callable = residual_stream  # how the sublayers feed the residual stream
    stale: bool = False  # whether they read it one sublayer stale
    norms: tuple[str, ...] = ("attention_norm", "ffn_norm")  # that a block has
    parameter: str | None = "layers"  # what NAME:N chooses: "layers", the "period" of all-reduces, or nothing
    tp_bound: bool = False  # whether the same weights are another function on another number of ranks
    runs_standard: str = ""  # standard weights run in it without retraining on "one rank", where it is the standard
    # model, or on "any" number of them, there at less of a loss than in a ladder (benchmarks/zeroshot.md); "": on none


WIRINGS = {
    "standard": Wiring("the pre-norm Llama block", parameter=None),
    "ladder": Wiring("every sublayer reads the stream one sublayer stale", stale=True),
    "parallel": Wiring("attention + MLP of one input", attention_plus_mlp, 1, norms=("attention_norm",)),
    "parallel-ladder": Wiring("parallel, a block stale", attention_plus_mlp, 1, stale=True, norms=("attention_norm",)),
    "spd": Wiring("the MLP reads its rank's attention", attention_into_mlp, 1, tp_bound=True, runs_standard="any"),
    "spd-ladder": Wiring("spd, one block stale", attention_into_mlp, 1, stale=True, tp_bound=True),
    "delayed": Wiring("a ladder that misses only the other ranks' partials", stream=delayed_stream, stale=True,
                      tp_bound=True, runs_standard="any"),
    "desync": Wiring("only every N-th all-reduce (default: 2)", stream=desynced_stream, parameter="period",
                     tp_bound=True, runs_standard="one rank"),
    "upper-bound": Wiring("no all-reduce: a bound on speed, not a usable model", stream=unreduced_stream,
                          parameter=None, tp_bound=True, runs_standard="one rank"),
}  # fmt: skip


def parse_wiring(text):
    """Return (name, parameter) of NAME, NAME:N or NAME:I,J,...: the parameter is None, N or the tuple (I, J, ...).

    N is the number of last layers that are wired so, I, J, ... are such layers, from 0 (one alone is "3,"); the others
    are standard. desync:N keeps every N-th all-reduce. Raises InputError.
    """
    name, _, parameter = text.partition(":")
    if name not in WIRINGS:
        raise InputError(f"unknown wiring {name!r}; known: {', '.join(WIRINGS)}")
    forms = {None: "", "period": "(:[1-9][0-9]{0,8})?", "layers": "(:[0-9]{1,9}(,[0-9]{1,9})*,?)?"}
    if not re.fullmatch(name + forms[WIRINGS[name].parameter], text):
        written = {None: "", "period": f" or {name}:N", "layers": f", {name}:N or {name}:I,J,..."}
        raise InputError(f"no such wiring: {text!r}; write {name}{written[WIRINGS[name].parameter]}")
    if "," in parameter:
        return name, tuple(map(int, parameter.removesuffix(",").split(",")))
    return name, int(parameter) if parameter else None


def wiring_name(name, parameter=None):
    """Return a wiring's text: the inverse of parse_wiring."""
    if isinstance(parameter, tuple | list):
        return f"{name}:{','.join(map(str, parameter))}" + "," * (len(parameter) == 1)
    return name if parameter is None else f"{name}:{parameter}"


def rewired(config, wiring):
    """Return the config in another wiring, or the same config where that is None. Raises InputError."""
    return config if wiring in (None, config.wiring) else dataclasses.replace(config, wiring=wiring, made_for_tp=None)


# ---- The configuration -----------------------------------------------------------------------------------------------


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
    made_for_tp: int | None = None  # the ranks that the weights are meant for, if the wiring is bound to their number
    quant: str | None = None  # "int8", "int4" or None
    group_size: int | None = None  # of int4, in columns
    kept: tuple = ()  # names of matrices that the quantization leaves as they were

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if not {*self.window_layers} <= {*range(self.n_layers if (self.sliding_window or 0) > 0 else 0)}:
            raise InputError(f"window_layers takes 0 to {self.n_layers - 1}, with a sliding_window of 1 or more tokens")
        _ = self.kind, self.wirings, self.period  # now, once: the compiler does not trace how text is parsed

    @functools.cached_property
    def kind(self):
        """Return the named Wiring."""
        return WIRINGS[parse_wiring(self.wiring)[0]]

    @functools.cached_property
    def wirings(self):
        """Return the Wiring of each layer, as a tuple."""
        parameter, layers = parse_wiring(self.wiring)[1], range(self.n_layers)
        chosen = parameter if isinstance(parameter, tuple) else layers
        if isinstance(parameter, int) and self.kind.parameter == "layers":
            chosen = range(max(-1, self.n_layers - parameter), self.n_layers)  # -1: too many, refused below
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(layers):
            fit = f"NAME:N takes 1 to {self.n_layers}, NAME:I,J distinct layers from 0 to {self.n_layers - 1}"
            raise InputError(f"wiring {self.wiring} does not fit {self.n_layers} layers: {fit}")
        return tuple(self.kind if i in chosen else WIRINGS["standard"] for i in layers)

    @functools.cached_property
    def period(self):
        """Return n if desync keeps every n-th all-reduce, else None."""
        return parse_wiring(self.wiring)[1] or 2 if self.kind.parameter == "period" else None

    @property
    def function(self):
        """Return what decides whether two wirings compute the same: ladder:8 of 8 layers is ladder."""
        return self.wirings, self.period


# ---- The layers ------------------------------------------------------------------------------------------------------


def rope_frequencies(config):
    """Return the radians per position of each pair of dimensions, (H/2,) float32; scaled where configured.

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
    window: int | None = None  # that of the mask, for kernels that read positions instead


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
        """Return this rank's partial (B, S, D) of x (B, S, D). cache: None or (k, v), both (B, K, T, H), written to."""
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
        """Return the attention (B, K, G * S, H) of q (B, K, G, S, H) to keys and values (B, K, T, H), by their mask."""
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
        for name in config.wirings[layer].norms:
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

    def forward(self, tokens, positions=None, cache=None, cache_length=None, select=None, parts=1):
        """Return logits (B, S, v), or (B, 1, v) at the sequence index select (B,) of each row; see gather.

        tokens (B, S) int64. Without positions every row starts at position 0 (training, scoring, prefill); rows
        shorter than S are padded on the right, which causality hides from them. With positions (B, S) each row
        continues its cached sequence there (decode), reading the first cache_length slots of the cache.
        cache: as new_cache makes it, written in place, or None. parts: S or fewer, that take turns; with a cache.
        """
        B, S = tokens.shape
        causal, streams = positions is None, []
        if causal:
            positions, cache_length = torch.arange(S, device=tokens.device).expand(B, S), S
        filled = cache_length - S
        for part, at in zip(tokens.tensor_split(parts, dim=1), positions.tensor_split(parts, dim=1), strict=True):
            filled += part.shape[1]
            mask = None if causal else torch.arange(filled, device=tokens.device) <= at[..., None]  # (B, S, T')
            metadata = self.metadata(at, mask)
            sublayers, causal = self.sublayers(metadata, cache), False
            streams.append(self.config.kind.stream(self.tok_embeddings(part), sublayers, self.comm, self.config))
        x = self.norm(torch.cat(take_turns(streams), dim=1))
        if select is not None:
            x = x[metadata.rows, select[:, None]]
        return self.output(x)

    def metadata(self, positions, mask=None):
        """Return the AttentionMetadata of tokens at these positions (B, S)."""
        angles = (positions[..., None] * self.rope_frequencies)[:, None, None]  # (B, 1, 1, S, H/2)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        scale = (self.config.rope_scaling or {}).get("attention_factor", 1.0)  # YaRN's, of queries and of keys
        return AttentionMetadata(angles.cos() * scale, angles.sin() * scale, rows, positions, mask)

    def sublayers(self, metadata, cache=None):
        """Return the blocks' sublayers in order, [(h, stale)], as a stream function takes them."""
        config, window, windowed, out = self.config, self.config.sliding_window, metadata, []
        cos, sin = torch.ones_like(metadata.cos), torch.zeros_like(metadata.sin)
        mask, positions = metadata.mask, metadata.positions
        if config.window_layers and (mask is not None or positions.shape[1] > window):
            mask = positions[:, None] <= positions[..., None] if mask is None else mask
            keys = positions[:, None] if cache is None else torch.arange(mask.shape[-1], device=mask.device)
            near = keys > positions[..., None] - window  # (B, S, T')
            windowed = dataclasses.replace(metadata, mask=mask & near, window=window)
        for i, block in enumerate(self.layers):
            wiring, used = config.wirings[i], windowed if i in config.window_layers else metadata
            if i in config.nope_layers:
                used = dataclasses.replace(used, cos=cos, sin=sin)
            out += [(h, wiring.stale) for h in wiring.split(block, used, cache and cache[i])]
        return out

    def new_cache(self, batch, length):
        """Return a static KV cache of `length` slots: one (k, v) a layer, each (B, K, T, H), zeroed."""
        shapes = [(batch, b.attention.n_kv_heads, length, b.attention.head_dim) for b in self.layers]
        return [tuple(self.norm.weight.new_zeros(shape) for _ in "kv") for shape in shapes]
