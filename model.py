"""A Llama-type transformer whose residual wiring is a choice.

Single-device mathematics: tp.py shards the weights and supplies the collectives, and nothing here knows of it.

Shape letters: B batch, S sequence, T cache length, D dim, N heads, K KV heads, G = N / K query heads that share a
KV head, H head_dim, V vocabulary, v this rank's part of it.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from formats import wiring_text
from runtime.errors import InputError

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


class Lanes:
    """The collectives of several lanes on one device, which run in turns: the last start puts their sum in flight."""

    def __init__(self, comm, held, lanes):
        self.comm, self.held, self.tp_size, self.partials, self.started = comm, held, lanes, [], []

    def start(self, partial):
        self.partials.append(partial)
        started = self.started  # one list for all lanes, which the last of them fills
        if len(self.partials) == self.held:
            started.append(self.comm.start(functools.reduce(operator.add, self.partials)))
            self.partials, self.started = [], []
        return started

    def wait(self, pending):
        return self.comm.wait(pending[0])

    def settle(self, x, pending, after=None):
        return self.comm.settle(x, pending and pending[0], after[0] if isinstance(after, list) else after)


def take_turns(streams):
    """Run streams in turns, those of lanes and of parts of a prompt: one computes while another's partials are summed.

    Returns each x.
    """
    *_, xs = zip(*streams, strict=True)
    return xs


# ---- The wirings: a sublayer h maps the residual stream x (B, S, D) to a partial of its output -----------------------


def residual_stream(x, sublayers, comm, config):
    """Run standard x_i = x_{i-1} + AllReduce(h_i(x_{i-1})), ladder x_i = x_{i-1} + AllReduce(h_i(x_{i-2})), or both.

    sublayers: list of (h, stale); h reads x without the last `stale` sums, which are still in flight. A stream of your
    own yields after each start, and its x at the end. It may only add to x (a clock passes plain numbers) and
    calls each h once. It overlaps under torch.compile only if every wait between two sublayers is a settle with
    `after`, also where nothing is pending yet, and before the last one: see tests/test_wiring.py -k compiled_code.
    """
    pending = []  # the sums in flight
    for i, (h, stale) in enumerate(sublayers):
        while len(pending) > stale:  # standard: wait, then compute
            x = comm.settle(x, pending.pop(0), after=pending[-1] if pending else None)
        started = comm.start(h(x))
        yield  # to other lanes, and to other parts of the prompt: take_turns
        next_stale = sublayers[i + 1][1] if i + 1 < len(sublayers) else 0
        if stale or next_stale:  # ladder: the oldest sum is waited for only after h(x)
            oldest = pending.pop(0) if pending and len(pending) >= next_stale else None
            x = comm.settle(x, oldest, after=started)  # `after` is for the compiler: see tp.py
        pending.append(started)
    while pending:
        x = comm.settle(x, pending.pop(0), after=pending[-1] if pending else None)
    yield x


def delayed_stream(x, sublayers, comm, config):
    """Run a ladder whose sublayers also read this lane's own partials of the sums that are still in flight."""
    own = []

    def with_own(h, stale, x):
        del own[: max(0, len(own) - stale)]
        own.append(h(functools.reduce(operator.add, own, x)))
        return own[-1]

    return residual_stream(x, [(functools.partial(with_own, h, stale), stale) for h, stale in sublayers], comm, config)


def laneformer_stream(x, sublayers, comm, config):
    """Run x_i = x_{i-1} + p_i + the other lanes' p_{i-d}, where p_i is this lane's partial h_i(x_{i-1}).

    The first d sublayers wait for the sum of all p_i or, without early_comm, add sqrt(lanes) p_i, as do later ones of a
    kind, attention or MLP, that has no sums. The last d sums would come too late.
    """
    recent, has_sums = [], (config.attention_comm, config.mlp_comm)
    for i, (h, d) in enumerate(sublayers):
        p = h(x)
        now, later = i < d and config.early_comm, has_sums[i % 2] and i + d < len(sublayers)
        started = comm.start(p) if now or later else p
        yield
        recent.append((p, started))
        before, pending = recent.pop(0) if i >= d else (None, None)
        if now:
            x = comm.settle(x, started)
        elif i < d or not has_sums[i % 2]:
            x = comm.settle(x + comm.tp_size**0.5 * p, None, after=started)
        else:
            x = comm.settle(x + (p - before), pending, after=started)
    yield x


def desynced_stream(x, sublayers, comm, config):
    """Keep every n-th all-reduce (n = config.period) and the last; between them each lane's stream drifts on its own.

    There x = AllReduce(x / lanes + h(x)). Without n none is kept: no model, but the speed of hiding them all.
    """
    for i, (h, _) in enumerate(sublayers, start=1):
        kept = config.period and (i % config.period == 0 or i == len(sublayers))
        if kept:
            started = comm.start(x / comm.tp_size + h(x))
            yield
        x = comm.wait(started) if kept else x + h(x)
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
    """Let the MLP read this lane's own partial y of the attention: the all-reduce between them is dropped."""

    def both(x):
        y = block.attention(block.attention_norm(x), metadata, cache)
        return y + block.feed_forward(block.ffn_norm(x + y))

    return [both]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The complete description of a wiring: flags, sweeps, plots, the clock and the tests read this table."""

    about: str  # its line of --help
    split: Callable = attention_then_mlp  # from a block to its sublayers, each a function of the residual stream
    blocks: int = 1  # neighbours whose sublayers read one input and are added up
    stream: Callable = residual_stream  # how the sublayers feed the residual stream
    stale: int = 0  # by how many sublayers they read it stale; NAME-K says another number
    norms: tuple[str, ...] = ("attention_norm", "ffn_norm")  # that a block has
    parameter: str | None = "layers"  # what NAME:N chooses: "layers", the "period" of all-reduces, or nothing
    laned: bool = False  # whether the same weights are another function in another number of lanes
    small_loss: bool = False  # whether standard weights lose little in it, in a few layers (benchmarks/quality.md)


WIRINGS = {
    "standard": Wiring("the pre-norm Llama block", parameter=None),
    "ladder": Wiring("every sublayer reads the stream one sublayer stale", stale=1),
    "parallel": Wiring("attention + MLP of one input", attention_plus_mlp, norms=("attention_norm",)),
    "parallel-ladder": Wiring("parallel, a block stale", attention_plus_mlp, stale=1, norms=("attention_norm",)),
    "pair": Wiring("two neighbouring blocks of one input", blocks=2, small_loss=True),
    "pair-ladder": Wiring("pair, one sublayer stale", blocks=2, stale=1),
    "spd": Wiring("the MLP reads its lane's attention", attention_into_mlp, laned=True, small_loss=True),
    "spd-ladder": Wiring("spd, one block stale", attention_into_mlp, stale=1, laned=True),
    "delayed": Wiring("a ladder that misses only other lanes' partials", stream=delayed_stream, stale=1, laned=True),
    "laneformer": Wiring("Kog's Laneformer", stream=laneformer_stream, stale=4, parameter=None, laned=True),
    "desync": Wiring("only every N-th all-reduce (2)", stream=desynced_stream, parameter="period", laned=True),
    "upper-bound": Wiring("no all-reduce: a bound on speed", stream=desynced_stream, parameter=None, laned=True),
}  # fmt: skip


# ---- The configuration -----------------------------------------------------------------------------------------------


def parse_wiring(text):
    """Return the wiring_text.Parsed of a wiring's text. Raises InputError."""
    return wiring_text.parse(text, WIRINGS)


def rewired(config, wiring):
    """Return the config in another wiring, or the same config where that is None. Raises InputError."""
    return config if wiring in (None, config.wiring) else dataclasses.replace(config, wiring=wiring)


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
    nope_layers: tuple[int, ...] = ()  # layers without rotary embeddings
    sliding_window: int | None = None  # the tokens that a position sees, itself included
    window_layers: tuple[int, ...] = ()  # in these layers
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    wiring: str = "standard"  # as parse_wiring reads it
    early_comm: bool = True  # of a Laneformer: see laneformer_stream
    attention_comm: bool = True
    mlp_comm: bool = True
    # what the output head reads: the mean of the normed lanes, the norm of their "sum", or, in "vocab_parallel", each
    # part of it one lane's normed stream
    lane_head: str = "replicate"
    lane_norms: bool = False  # each lane has norms of its own, stored one after another
    quant: str | None = None  # "int8", "int4" or None
    group_size: int | None = None  # of int4, in columns
    kept: tuple[str, ...] = ()  # names of matrices that the quantization leaves as they were

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs")
        if not {*self.nope_layers} <= {*range(self.n_layers)}:
            raise InputError(f"nope_layers {self.nope_layers} takes layers from 0 to {self.n_layers - 1}")
        if not {*self.window_layers} <= {*range(self.n_layers if (self.sliding_window or 0) > 0 else 0)}:
            raise InputError(f"window_layers takes 0 to {self.n_layers - 1}, with a sliding_window of 1 or more tokens")
        if self.lane_head not in (heads := ("replicate", "sum", "vocab_parallel")):
            raise InputError(f"lane_head {self.lane_head!r} is none of {', '.join(heads)}")
        if self.lane_head == "vocab_parallel" and self.vocab_size % (BLOCK * (self.lanes or 1)):
            raise InputError(f"vocab_size {self.vocab_size} is no multiple of {BLOCK} for each of {self.lanes} lanes")
        if self.lane_norms and self.lanes is None:
            raise InputError(f"lane_norms: each lane has norms of its own, but wiring {self.wiring} names no lanes")
        _ = self.kind, self.spans, self.period, self.lanes  # once, now: the compiler does not trace how text is parsed

    @functools.cached_property
    def named(self):
        """Return the Parsed wiring."""
        return parse_wiring(self.wiring)

    @functools.cached_property
    def kind(self):
        """Return the named Wiring."""
        stale, wiring = self.named.stale, WIRINGS[self.named.name]
        return dataclasses.replace(wiring, stale=stale) if stale else wiring

    @functools.cached_property
    def lanes(self):
        """Return the number of lanes, or None for as many as there are ranks, or for a wiring without any."""
        return self.named.lanes

    @functools.cached_property
    def wirings(self):
        """Return the Wiring of each layer, as a tuple."""
        parameter, n, size = self.named.parameter, self.n_layers, self.kind.blocks
        chosen = parameter if isinstance(parameter, tuple) else range(n % size, n)
        if isinstance(parameter, int) and self.kind.parameter == "layers":
            chosen = range(max(-1, n - parameter), n)  # -1: too many, refused below
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(n)):
            fit = f"NAME:N takes 1 to {n}, NAME:I,J and NAME:I-J distinct layers from 0 to {n - 1}"
            raise InputError(f"wiring {self.wiring} does not fit {n} layers: {fit}")
        if self.kind.stale > 2 * n:
            raise InputError(
                f"wiring {self.wiring} is {self.kind.stale} sublayers stale: {n} layers take up to {2 * n}"
            )
        if self.kind.stream is laneformer_stream and self.kind.stale % 2:
            raise InputError(f"wiring {self.wiring}: a Laneformer's delay is of whole layers, of two sublayers each")
        return tuple(self.kind if i in chosen else WIRINGS["standard"] for i in range(n))

    @functools.cached_property
    def spans(self):
        """Return [(Wiring, layers)], in order: the neighbouring layers whose sublayers read one input, mostly one."""
        found, i = [], 0
        while i < self.n_layers:
            wiring, layers = self.wirings[i], range(i, i + self.wirings[i].blocks)
            if self.wirings[i : layers.stop] != (wiring,) * len(layers):
                text = f"layer {i} has no neighbour for a pair, as in pair:4 or pair:2-5"
                raise InputError(f"wiring {self.wiring}: {text}")
            found.append((wiring, layers))
            i = layers.stop
        return found

    @functools.cached_property
    def period(self):
        """Return n if desync keeps every n-th all-reduce, else None."""
        return self.named.parameter or 2 if self.kind.parameter == "period" else None

    @property
    def standard_alone(self):
        """Return whether standard weights are in one lane of this wiring what they are in the standard one."""
        return self.kind.laned and (self.kind.stream is not residual_stream or not self.kind.stale)

    @property
    def sums_lanes(self):
        """Return whether the output head reads a sum over the lanes: one more all-reduce."""
        return self.kind.stream is laneformer_stream and self.lane_head != "vocab_parallel"

    @property
    def function(self):
        """Return what decides whether two wirings compute the same: ladder:8 of 8 layers is ladder."""
        return self.wirings, self.period, self.lanes

    def sublayers(self, split):
        """Return [(h, stale)], as a stream takes them. split(wiring, i): the sublayers of layer i."""
        found = []
        for wiring, layers in self.spans:
            for hs in zip(*(split(wiring, i) for i in layers), strict=True):
                found.append((hs[0] if len(hs) == 1 else functools.partial(_added, hs), wiring.stale))
        return found

    def rope_frequencies(self):
        """Return the radians per position of each pair of dimensions, (H/2,) float32; scaled where configured.

        Linear scaling stretches every wavelength by `factor`. Llama 3.1 leaves those alone that are short against the
        original context and blends a band in between; so does YaRN (arXiv 2309.00071), over whole pairs of dimensions.
        """
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / self.rope_theta ** (pairs / self.head_dim)
        if self.rope_scaling is None:
            return frequencies
        s, H, keep = self.rope_scaling, self.head_dim, torch.zeros(1, device="cpu")
        if "low_freq_factor" in s:
            turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
            keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        elif "beta_fast" in s:
            turns = s["original_max_position_embeddings"] / (2 * math.pi)  # of the first pair
            first, last = (math.log(turns / s[beta], self.rope_theta) for beta in ("beta_fast", "beta_slow"))
            first, last = max(math.floor(first * H / 2), 0), min(math.ceil(last * H / 2), H - 1)
            keep = 1 - (pairs / 2 - first) / ((last - first) or 0.001)
        keep = keep.clamp(0, 1)
        return frequencies * (keep + (1 - keep) / s["factor"])


def _added(hs, x):
    return functools.reduce(operator.add, [h(x) for h in hs])


# ---- The layers ------------------------------------------------------------------------------------------------------


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
            setattr(self, name, rms_norm(config))


def rms_norm(config, of_lanes=True):
    """Return a norm of the stream; of_lanes: whether it is one of those that each lane may have of its own."""
    norm = nn.RMSNorm(config.dim, config.norm_eps)
    if config.lane_norms and of_lanes:
        norm.weight = nn.Parameter(torch.empty(config.lanes * config.dim))  # which tp.py cuts
    return norm


class Transformer(nn.Module):
    """held: the lanes of it that this device has, if it has its own for each; else it is whole, or a rank's shard."""

    def __init__(self, config, held=1):
        super().__init__()
        self.config = config
        self.comm = SingleDevice()
        # without nn.Embedding's initial values: to draw them on the device "meta" imports the compiler, for seconds
        table = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)

        def lane():
            layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
            return {"layers": layers, "norm": rms_norm(config, config.lane_head != "sum")}

        for name, module in lane().items():
            self.add_module(name, module)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.other_lanes = nn.ModuleList(nn.ModuleDict(lane()) for _ in range(1, held))
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope_frequencies", config.rope_frequencies(), persistent=False)

    @property
    def lanes(self):
        return [self, *self.other_lanes]

    def forward(self, tokens, positions=None, cache=None, cache_length=None, select=None, parts=1):
        """Return logits (B, S, v), or (B, 1, v) at the sequence index select (B,) of each row; see gather.

        tokens (B, S) int64. Without positions every row starts at position 0 (training, scoring, prefill); rows
        shorter than S are padded on the right, which causality hides from them. With positions (B, S) each row
        continues its cached sequence there (decode), reading the first cache_length slots of the cache.
        cache: as new_cache makes it, written in place, or None. parts: S or fewer, that take turns; with a cache.
        """
        (B, S), held = tokens.shape, len(self.lanes)
        causal, streams = positions is None, []
        if causal:
            positions, cache_length = torch.arange(S, device=tokens.device).expand(B, S), S
        filled = cache_length - S
        for part, at in zip(tokens.tensor_split(parts, dim=1), positions.tensor_split(parts, dim=1), strict=True):
            filled += part.shape[1]
            mask = None if causal else torch.arange(filled, device=tokens.device) <= at[..., None]  # (B, S, T')
            causal = False
            streams += self.streams(self.tok_embeddings(part), self.metadata(at, mask), cache)
        xs = take_turns(streams)
        xs = [torch.cat(xs[lane::held], dim=1) for lane in range(held)]
        if select is not None:
            rows = torch.arange(B, device=tokens.device)[:, None]
            xs = [x[rows, select[:, None]] for x in xs]
        return self.head(xs)

    def streams(self, x, metadata, cache=None):
        """Return the running streams of the lanes that are held, from the embeddings x (B, S, D) on."""
        held, config = len(self.lanes), self.config
        comm = self.comm if held == 1 else Lanes(self.comm, held, config.lanes)
        sublayers = [self.sublayers(metadata, cache, lane) for lane in range(held)]
        return [config.kind.stream(x, each, comm, config) for each in sublayers]

    def head(self, xs):
        """Return the logits that the ends (B, S, D) of the lanes' streams give: all are one but for a Laneformer's."""
        config, kind = self.config, self.config.lane_head
        if config.kind.stream is not laneformer_stream:
            return self.output(self.norm(xs[0]))
        ends = xs if kind == "sum" else [lane.norm(x) for lane, x in zip(self.lanes, xs, strict=True)]
        if kind == "vocab_parallel":  # all rows with each lane's stream, and of these its own
            parts = self.output(torch.stack(ends)).chunk(len(xs), dim=-1)
            return torch.cat([part[lane] for lane, part in enumerate(parts)], dim=-1)
        x = self.comm.wait(self.comm.start(functools.reduce(operator.add, ends)))
        return self.output(self.norm(x) if kind == "sum" else x / (config.lanes or self.comm.tp_size))

    def metadata(self, positions, mask=None):
        """Return the AttentionMetadata of tokens at these positions (B, S)."""
        angles = (positions[..., None] * self.rope_frequencies)[:, None, None]  # (B, 1, 1, S, H/2)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        scale = (self.config.rope_scaling or {}).get("attention_factor", 1.0)  # YaRN's, of queries and of keys
        return AttentionMetadata(angles.cos() * scale, angles.sin() * scale, rows, positions, mask)

    def sublayers(self, metadata, cache=None, lane=0):
        """Return the sublayers of a lane in order, [(h, stale)], as a stream function takes them."""
        config, layers, window, windowed = self.config, self.lanes[lane].layers, self.config.sliding_window, metadata
        cos, sin = torch.ones_like(metadata.cos), torch.zeros_like(metadata.sin)
        mask, positions = metadata.mask, metadata.positions
        if config.window_layers and (mask is not None or positions.shape[1] > window):
            mask = positions[:, None] <= positions[..., None] if mask is None else mask
            keys = positions[:, None] if cache is None else torch.arange(mask.shape[-1], device=mask.device)
            near = keys > positions[..., None] - window  # (B, S, T')
            windowed = dataclasses.replace(metadata, mask=mask & near, window=window)

        def split(wiring, i):
            used = windowed if i in config.window_layers else metadata
            if i in config.nope_layers:
                used = dataclasses.replace(used, cos=cos, sin=sin)
            return wiring.split(layers[i], used, cache and cache[lane * config.n_layers + i])

        return config.sublayers(split)

    def new_cache(self, batch, length):
        """Return a static KV cache of `length` slots: a (k, v) for each layer of each lane, (B, K, T, H), zeroed."""
        attentions = [block.attention for lane in self.lanes for block in lane.layers]
        shapes = [(batch, a.n_kv_heads, length, a.head_dim) for a in attentions]
        return [tuple(self.norm.weight.new_zeros(shape) for _ in "kv") for shape in shapes]
