"""A Llama-type transformer whose residual wiring is a choice.

This file is single-device mathematics: it has no rank and no process group. tp.py loads a shard of the weights into the
same Transformer, and generate.load_model sets its `comm` to collectives that sum the partial results of all ranks.

Shape letters: B batch, S sequence, T cache length, D dim, N heads, K KV heads, G = N / K query heads that share a
KV head, H head_dim, V vocabulary, v the local part of it.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from formats import fields
from kernels.attention import attention_metadata, norm_heads, rope_frequencies, rotate
from runtime.errors import load_extra  # load_extra(NAME, what needs it) imports extras/NAME

# ---- The wirings -----------------------------------------------------------------------------------------------------
#
# A sublayer h maps the residual x (B, S, D) to this rank's partial of its output. comm.start(partial) starts its
# all-reduce; comm.settle(x, pending) waits for it and returns x plus the sum (SingleDevice, below; tp.TensorParallel).
# A loop is a generator that runs all sublayers. It yields None after each start, so that interleave can run another
# chunk of the prompt meanwhile, and x at the end. The compiler keeps only the order that data imply: `newer` ties a
# wait to the last start, and comm.pin ties the next h to it. Neither changes a value (docs/code.md).


def residual_loop(x, sublayers, comm, config):
    """Run sublayers [(h, stale), ...]: each reads x without the last `stale` sums, which are still in flight.

    What h0 to h3 read; s0, s1, ... are their sums. A ladder is the paper's x_i = x_{i-1} + AllReduce(h_i(x_{i-2})).

    standard                 stale 0 0 0 0    h0(x) h1(x+s0) h2(x+s0+s1) h3(x+s0+s1+s2)
    ladder                         1 1 1 1    h0(x) h1(x)    h2(x+s0)    h3(x+s0+s1)
    ladder-2                       2 2 2 2    h0(x) h1(x)    h2(x)       h3(x+s0)
    ladder:1, the last of 2 layers 0 0 1 1    h0(x) h1(x+s0) h2(x+s0)    h3(x+s0+s1)
    """
    in_flight = []  # all-reduces, oldest first
    for h, stale in sublayers:
        if in_flight and len(in_flight) <= stale:  # nothing to settle, as before a ladder's h1
            x = comm.pin(x, newer=in_flight)  # keeps h behind the last start
        while len(in_flight) > stale:  # all but the last `stale`, which travel while h computes
            x = comm.settle(x, in_flight.pop(0), newer=in_flight)
        in_flight.append(comm.start(h(x)))
        yield  # other chunks of the prompt run here
    while in_flight:
        x = comm.settle(x, in_flight.pop(0), newer=in_flight)
    yield x


def interleave(loops):
    """Run loops in turns: while one's all-reduce travels, the next computes. Returns the last x of each."""
    *_, last = zip(*loops, strict=True)  # runs all rounds; a round advances each loop to its next yield
    return last


def delayed_loop(x, sublayers, comm, config):
    """Run a ladder whose h reads x + own: the other ranks' partials are late, this rank's on time."""
    own = []  # this rank's partials whose sums are in residual_loop's in_flight, oldest first

    def with_own(h, stale, x):
        while len(own) > stale:  # residual_loop has added their sums to x
            own.pop(0)
        own.append(h(sum(own, start=x)))
        return own[-1]

    delayed = [(functools.partial(with_own, h, stale), stale) for h, stale in sublayers]
    return residual_loop(x, delayed, comm, config)


def desynced_loop(x, sublayers, comm, config):
    """Keep every n-th all-reduce (n = config.period) and the last; between them the ranks' x drift apart.

    AllReduce(x / lanes + h(x)): the lanes' mean x (see Wiring) plus the sum of their partials. upper-bound keeps none.
    """
    for i, (h, _) in enumerate(sublayers, start=1):
        if config.period and (i % config.period == 0 or i == len(sublayers)):
            pending = comm.start(x / comm.lanes + h(x))
            yield
            x = comm.wait(pending)
        else:
            x = x + h(x)
    yield x


def attention(x, block, metadata, cache):
    return block.attention(block.attention_norm(x), metadata, cache)


def mlp(x, block, metadata, cache):
    return block.feed_forward(block.ffn_norm(x))


def attention_plus_mlp(x, block, metadata, cache):
    x = block.attention_norm(x)
    return block.attention(x, metadata, cache) + block.feed_forward(x)


def attention_into_mlp(x, block, metadata, cache):
    """Sync-point drop: the MLP reads the local partial y of the attention, without an all-reduce between them."""
    y = attention(x, block, metadata, cache)
    return y + mlp(x + y, block, metadata, cache)


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The sublayers, and what they read.

    Config.wiring is NAME[-stale][:n][/lanes]: ladder-2 is two sublayers late, ladder:8 wires the last eight layers,
    desync:4 keeps every fourth sum. Some wirings depend on the number of lanes, shards that each keep their own x:
    spd/8 has eight lanes, on 1, 2, 4 or 8 ranks; spd has one lane per rank. Layers left over by `blocks` are standard.
    """

    about: str  # its line of --help
    sublayers: tuple[Callable, ...] = (attention, mlp)  # of a block
    blocks: int = 1  # how many share inputs: one sum for all their attentions, one for all their MLPs
    loop: Callable = residual_loop  # runs the sublayers, as described above
    stale: int = 0  # how many of the last sums a sublayer does not wait for
    norms: tuple[str, ...] = ("attention_norm", "ffn_norm")  # those of a block, which its sublayers use
    n_means: str | None = "layers"  # what n means: "layers", the last n; "period", every n-th sum; None: there is no n
    depends_on_lanes: bool = False  # whether what it computes depends on the number of lanes
    model: type | None = None  # its own subclass of Transformer, with a check(config); extras/lanes loads it


WIRINGS = {
    "standard": Wiring("the pre-norm Llama block", n_means=None),
    "ladder": Wiring("every sublayer reads the stream one sublayer late", stale=1),
    "parallel": Wiring("attention + MLP of one input", (attention_plus_mlp,), norms=("attention_norm",)),
    "parallel-ladder": Wiring("parallel, one block late", (attention_plus_mlp,), stale=1, norms=("attention_norm",)),
    "pair": Wiring("two neighbouring blocks of one input", blocks=2),
    "pair-ladder": Wiring("pair, one sublayer late", blocks=2, stale=1),
    "spd": Wiring("the MLP reads its rank's attention", (attention_into_mlp,), depends_on_lanes=True),
    "spd-ladder": Wiring("spd, one block late", (attention_into_mlp,), stale=1, depends_on_lanes=True),
    "delayed": Wiring("a ladder, but own partials are on time", loop=delayed_loop, stale=1, depends_on_lanes=True),
    "desync": Wiring("only every n-th sum (n=2)", loop=desynced_loop, n_means="period", depends_on_lanes=True),
    "upper-bound": Wiring("no sums: a bound on speed", loop=desynced_loop, n_means=None, depends_on_lanes=True),
}
WIRINGS_IN_EXTRAS = {"laneformer": "lanes", "farskip": "experts"}  # name: the extra whose import adds it to WIRINGS


# ---- The layers ------------------------------------------------------------------------------------------------------


def attend(q, k, v, mask, positions, window, score_cap):
    """Return the attention (B, K, G * S, H) of q (B, K, G, S, H) to keys and values (B, K, T, H).

    mask: (B, S, T'), T' <= T. positions (B, S), of q, and window: for other kernels, which take no mask.
    """
    # The G query heads of a KV head become one head of G * S queries: no key is ever copied.
    B, _, G, S, H = q.shape
    mask = mask[:, None, None].expand(B, 1, G, S, -1).flatten(2, 3)  # (B, 1, G * S, T')
    k, v = k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]]  # T' slots
    if score_cap:
        scores = (q.flatten(2, 3) * H**-0.5 @ k.mT).float()
        scores = score_cap * (scores / score_cap).tanh()
        return scores.masked_fill(~mask, -torch.inf).softmax(-1).type_as(v) @ v
    return F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask)


class Attention(nn.Module):
    """Grouped-query attention. wqkv is not [all q, all k, all v] but a group of rows for each KV head: its G query
    heads (with attention_gate, each followed by its gate), its key, its value.

    A rank holds whole groups, or one KV head and some of its query heads (tp.head_ranges): the shapes tell how many.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.window = config.sliding_window if layer in config.window_layers else None
        self.rotates = layer not in config.nope_layers
        self.head_dim, self.score_cap, self.whole_norm = config.head_dim, config.score_cap, config.whole_qk_norm
        self.gates = int(config.attention_gate)  # of a query head: 0 or 1
        n_heads, n_kv_heads, make_norm = config.n_heads, config.n_kv_heads, fields.NORMS[config.norm]
        width = (n_heads * (1 + self.gates) + 2 * n_kv_heads) * self.head_dim
        self.wqkv = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = nn.Linear(n_heads * self.head_dim, config.dim, bias=config.wo_bias)
        for name, heads in ("q_norm", n_heads), ("k_norm", n_kv_heads):
            size = self.head_dim * (heads if self.whole_norm else 1)
            self.add_module(name, make_norm(size, config.norm_eps) if config.qk_norm else nn.Identity())
        self.attend = attend  # --compile may choose another kernel

    @property
    def n_kv_heads(self):  # wqkv has N (1 + gates) + 2 K heads, wo has N
        return (self.wqkv.out_features - self.wo.in_features * (1 + self.gates)) // (2 * self.head_dim)

    def forward(self, x, metadata, cache):
        """Return this rank's partial (B, S, D) of x (B, S, D).

        metadata: AttentionMetadata (kernels/attention.py), the same for all layers: positions, rope, masks, comm, ...
        cache: None or (k, v), both (B, K, T, H), written to.
        """
        B, S, _ = x.shape
        qkv = self.wqkv(x).view(B, S, self.n_kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)  # (B, K, *, S, H)
        q, k, v = qkv.tensor_split((-2, -1), dim=2)  # of a KV head: G query heads (and gates), its key, its value
        q, gate = (q[:, :, ::2], q[:, :, 1::2]) if self.gates else (q, None)
        q, k = norm_heads(q, k, self.q_norm, self.k_norm, metadata.comm if self.whole_norm else None)
        if self.rotates:
            rope = metadata.window_rope if self.window else metadata.rope
            q, k = rotate(q, *rope), rotate(k, *rope)
        k, v = k.squeeze(2), v.squeeze(2)  # (B, K, S, H)
        if metadata.query_scale is not None:
            q = (q * metadata.query_scale).type_as(q)
        if cache is not None:
            cache[0][metadata.rows, :, metadata.positions] = k.transpose(1, 2)  # (B, S, K, H)
            cache[1][metadata.rows, :, metadata.positions] = v.transpose(1, 2)
        mask = metadata.window_mask if self.window else metadata.mask
        if mask is None:  # causal, no earlier keys, no score_cap: see attention_metadata
            y = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=True)  # (B, N, S, H)
        else:
            y = self.attend(q, *(cache or (k, v)), mask, metadata.positions, self.window, self.score_cap)
        y = y.reshape(q.shape)  # (B, K, G, S, H)
        if gate is not None:
            y = y * gate.sigmoid()
        return self.wo(y.flatten(1, 2).transpose(1, 2).reshape(B, S, -1))

    def new_cache(self, batch, length, device, dtype):
        """Return (k, v) of `length` slots, both (B, K, T, H), zeroed."""
        shape = batch, self.n_kv_heads, length, self.head_dim
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))


class FeedForward(nn.Module):
    def __init__(self, dim, neurons, bias=False, activation="silu"):
        super().__init__()
        self.activation = fields.ACTIVATIONS[activation]
        self.w1 = nn.Linear(dim, neurons, bias)  # gate
        self.w3 = nn.Linear(dim, neurons, bias)  # up
        self.w2 = nn.Linear(neurons, dim, bias)  # down

    def forward(self, x):
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """The weights of one layer, without a forward: the sublayers above compute with them."""

    def __init__(self, config, layer):
        super().__init__()
        make_attention = Attention
        if layer in config.linear_layers:
            make_attention = load_extra("linear_attention", "linear_layers").GatedDeltaNet
        self.attention = make_attention(config, layer)
        if config.n_experts and layer not in config.dense_layers:
            self.feed_forward = load_extra("experts", "n_experts").MoE(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.intermediate_size, config.mlp_bias, config.activation)
        make = functools.partial(fields.NORMS[config.norm], config.dim, config.norm_eps)
        for name in config.layer_wirings[layer].norms:
            self.add_module(name, make() if config.input_norms else nn.Identity())
        if config.sum_norms:
            self.attention_sum_norm, self.ffn_sum_norm = make(), make()


def list_sublayers(config, layers, metadata=None, cache=None):
    """Return [(h, stale)] of all layers, in order: h(x) is attention(x, block, metadata, cache) or another sublayer."""
    sublayers, i = [], 0
    while i < config.n_layers:
        wiring = config.layer_wirings[i]
        side_by_side = [(layers[j], metadata, cache and cache[j]) for j in range(i, i + wiring.blocks)]
        sublayers += [(functools.partial(_add_partials, h, side_by_side), wiring.stale) for h in wiring.sublayers]
        i += wiring.blocks
    return sublayers


def _add_partials(sublayer, side_by_side, x):  # usually one block
    first, *others = [sublayer(x, *arguments) for arguments in side_by_side]
    return sum(others, start=first)


def cache_slots(cache):
    """Return the slots T (1 if no layer has any). The last is scrap: positions past the end are written there."""
    return next((keys.shape[2] for keys, _ in cache if keys.dim() == 4), 1)


class Transformer(nn.Module):
    """The whole model, or the shard of a rank: tp.load_shard makes it, and generate.load_model sets `comm`.

    forward makes a loop over all sublayers for each chunk of the prompt; usually there is one. A standard layer:
    x = x + AllReduce(attention(attention_norm(x))), x = x + AllReduce(feed_forward(ffn_norm(x))).
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.comm = SingleDevice()
        # without nn.Embedding's initial values: drawing them on "meta" imports the compiler, which takes seconds
        table = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = fields.NORMS[config.norm](config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rope_frequencies", rope_frequencies(config), persistent=False)

    device = property(lambda self: self.norm.weight.device)
    dtype = property(lambda self: self.norm.weight.dtype)  # of activations, and of weights that are not quantized

    def forward(self, tokens, positions=None, cache=None, cache_length=None, select=None, chunks=1):
        """Return the local logits (B, S, v) of tokens (B, S) int64; with select (B,), those at that index (B, 1, v).

        forward(tokens)                                          training, scoring: from position 0, padded at the right
        forward(tokens, None, cache, None, select)               prefill, its first pass: also fills the cache
        forward(tokens, positions, cache, cache_length, select)  later passes; decode, without select

        positions (B, S); None: every row starts at 0. cache: new_cache's, written in place (by linear attention up to
        `select`; -1: the row ended in an earlier pass). cache_length: slots to read, this pass's included. chunks: how
        many to cut S into, so that one computes while another's all-reduce travels; more than 1 need a cache.
        """
        x = torch.cat(interleave(self.chunk_loops(tokens, positions, cache, cache_length, select, chunks)), dim=1)
        return self.head(x, select)

    def chunk_loops(self, tokens, positions, cache, cache_length, select, chunks):
        """Yield the loop of each chunk of the sequence; the arguments are those of forward.

        In each layer a chunk attends to the keys of those before it, which interleave has put into the cache.
        """
        S, fresh = tokens.shape[1], positions is None
        if fresh:
            positions = torch.arange(S, device=tokens.device).expand(tokens.shape)
        n_keys = 0 if fresh else cache_length - S  # slots to read before this chunk's
        last = None if select is None else positions[:, :1] + select[:, None]  # the position of each selected token
        max_length = cache_slots(cache) - 1 if cache else S  # without the scrap slot
        for chunk, at in zip(tokens.tensor_split(chunks, 1), positions.tensor_split(chunks, 1), strict=True):
            causal = fresh and n_keys == 0  # it attends to nothing but itself, and needs no mask
            n_keys += chunk.shape[1]
            keys = None if causal else torch.arange(n_keys, device=tokens.device)
            yield self.loop(self.embed(chunk), attention_metadata(self, at, keys, max_length, last), cache)

    def embed(self, tokens):
        """Return the embeddings (B, S, D) of tokens (B, S)."""
        x, scale = self.tok_embeddings(tokens), self.config.embedding_scale
        return x if scale is None else x * x.new_full((), scale)  # rounded to x's dtype, as Gemma was trained

    def loop(self, x, metadata, cache=None):
        """Return the loop from the embeddings x (B, S, D) to the last layer."""
        comm = self.comm
        if self.config.sum_norms:
            comm = NormedSums(comm, [n for b in self.layers for n in (b.attention_sum_norm, b.ffn_sum_norm)])
        sublayers = list_sublayers(self.config, self.layers, metadata, cache)
        return self.config.named_wiring.loop(x, sublayers, comm, self.config)

    def head(self, x, select=None):
        """Return the logits of the last layer's x (B, S, D); select: as in forward."""
        if select is not None:
            x = x[torch.arange(len(x), device=x.device)[:, None], select[:, None]]
        return self.logits(self.norm(x))

    def logits(self, x):
        """Return the local logits (..., v) of the normed x (..., D)."""
        logits, cap = self.output(x), self.config.logit_cap
        return logits if cap is None else cap * (logits / cap).tanh()

    def new_cache(self, batch, length):
        """Return a static cache of `length` slots: for each layer a (k, v), or the state of a linear one."""
        return [block.attention.new_cache(batch, length, self.device, self.dtype) for block in self.layers]


def build(config, kind=None):
    """Return a Transformer, or its subclass `kind`, quantized as its config says, on "meta", so without its weights."""
    with torch.device("meta"):
        model = (kind or config.named_wiring.model or Transformer)(config)
        if config.quant:
            from kernels import int_linear

            int_linear.replace_matrices(model)
        if config.tie_embeddings:
            for name, parameter in model.tok_embeddings.named_parameters():
                setattr(model.output, name, parameter)
    return model


# ---- The configuration -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape and settings of a checkpoint, as in its config.json. Raises InputError."""

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
    rope_scaling: dict | None = None  # see kernels/rope_scaling.py
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    wiring: str = "standard"  # see fields.parse_wiring
    # quantization
    quant: str | None = None  # "int8", "int4" or None
    group_size: int | None = None  # of int4, in columns
    kept: tuple[str, ...] = ()  # names of matrices that are not quantized
    # what only some families have: attention
    qkv_bias: bool = False
    wo_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False  # one norm over the heads of all ranks, not one per head
    attention_gate: bool = False  # whether a head's output is multiplied by sigmoid(another query projection)
    score_cap: float | None = None  # scores become cap tanh(score / cap)
    query_scale: float | None = None  # multiplies queries
    llama4_beta: float | None = None  # multiplies them by 1 + beta ln(1 + floor(position / the original context))
    sliding_window: int | None = None  # how many positions a token attends to, itself included
    window_layers: tuple[int, ...] = ()  # layers with the sliding window
    window_rope_theta: float | None = None  # rope_theta of window_layers, which then ignore rope_scaling
    nope_layers: tuple[int, ...] = ()  # layers without rotary embeddings
    rotary_dim: int | None = None  # how many dimensions of a head turn, the first ones; None: all
    # norms, MLPs and logits
    norm: str = "rms"  # one of fields.NORMS
    input_norms: bool = True  # of what a sublayer reads
    sum_norms: bool = False  # of the sum of a sublayer's partials, before it is added to x
    mlp_bias: bool = False
    activation: str = "silu"  # of the MLP's gate, one of fields.ACTIVATIONS
    embedding_scale: float | None = None
    logit_cap: float | None = None
    # extras/experts, a mixture of experts
    n_experts: int | None = None
    experts_per_token: int | None = None
    expert_size: int | None = None  # neurons of an expert
    renormalize_experts: bool = True  # whether the weights of a token's experts add up to 1
    shared_expert_size: int | None = None  # neurons of an expert that every token takes
    shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()  # layers of a mixture with an ordinary MLP
    # extras/linear_attention, extras/lanes: their settings
    linear_layers: tuple[int, ...] = ()
    linear_attention: dict | None = None
    laneformer: dict | None = None

    def __post_init__(self):
        _ = self.layer_wirings  # once, now: the compiler cannot trace how text is parsed
        fields.check(self)

    parsed = functools.cached_property(lambda self: fields.parse_wiring(self.wiring, WIRINGS, WIRINGS_IN_EXTRAS))

    @functools.cached_property
    def named_wiring(self):
        """The Wiring that `wiring` names."""
        stale, name = self.parsed.stale, self.parsed.name
        if name == "farskip" and not (self.shared_expert_size or self.dense_layers):
            name = "ladder"  # farskip without shared experts and dense layers is a ladder
        return dataclasses.replace(WIRINGS[name], stale=stale) if stale else WIRINGS[name]

    fixed_lanes = property(lambda self: self.parsed.lanes)  # 8 in "spd/8"; None: as many as ranks

    @property
    def period(self):
        """n if desync keeps every n-th all-reduce, else None."""
        return (self.parsed.parameter or 2) if self.named_wiring.n_means == "period" else None

    @functools.cached_property
    def layer_wirings(self):
        """The Wiring of each layer, as a tuple: the named one, or standard where NAME:N leaves a layer out."""
        chosen = fields.choose_layers(self.parsed, self.named_wiring, self.n_layers)
        return tuple(self.named_wiring if i in chosen else WIRINGS["standard"] for i in range(self.n_layers))

    @property
    def mlps(self):
        """{prefix of their matrices' names: neurons} of the sharded MLPs."""
        return load_extra("experts", "n_experts").mlps(self) if self.n_experts else {"": self.intermediate_size}

    @property
    def wiring_key(self):
        """A key that two configs share if their wirings compute the same: ladder:8 of 8 layers is ladder."""
        return self.layer_wirings, self.period, self.fixed_lanes


def rewired(config, wiring):
    """Return the config in another wiring, or the same config where that is None. Raises InputError."""
    return config if wiring in (None, config.wiring) else dataclasses.replace(config, wiring=wiring)


# ---- Collectives without ranks, and what the output head shares with tp.py -------------------------------------------


class SingleDevice:
    """The collectives of a single device: no-ops, since its partial already is the sum. tp.py has the real ones."""

    tp_size = 1  # ranks
    lanes = 1  # partials that an all-reduce adds up: one from each rank, or several with extras/lanes

    def start(self, partial):
        """Start the all-reduce of a partial and return at once; the result is the argument of wait."""
        return partial

    def wait(self, pending):
        """Return the sum of all ranks' partials."""
        return pending

    def settle(self, x, pending, newer=()):
        """Return x + wait(pending). newer: the all-reduces started since; compiled, it waits after the last start."""
        return x + pending

    def pin(self, x, newer):
        """Return x. Compiled, what reads it comes after the last start in `newer`."""
        return x

    def local_logits(self, logits):
        """Return (local logits padded to whole blocks, equally wide on all ranks; their first token id; V)."""
        return pad_logits(logits, logits.shape[-1]), 0, logits.shape[-1]

    def all_gather(self, x):
        """Return every rank's x, (tp_size, *x.shape)."""
        return x[None]

    def gather_logits(self, logits):
        """Return the logits of the whole vocabulary (..., V) from the local ones (..., v)."""
        return logits


class NormedSums:
    """The collectives of a loop whose sums are normed before they are added: settle returns x + norm(wait(pending)).

    norms: one for each sublayer, in the order of their starts. Not x + norm(wait(...)): only settle takes `newer`.
    """

    def __init__(self, comm, norms):
        self.comm, self.norms, self.lanes = comm, iter(norms), comm.lanes

    def start(self, partial):
        return self.comm.start(partial), next(self.norms)

    def settle(self, x, pending, newer=()):
        started, norm = pending
        return x + norm(self.comm.settle(torch.zeros_like(x), started, [later for later, _ in newer]))

    def pin(self, x, newer):
        return self.comm.pin(x, [later for later, _ in newer])


VOCAB_BLOCK = 16  # token ids: ranks hold whole blocks, among which Sampler draws alike on any number of ranks


def pad_logits(logits, n):
    """Pad local logits to n, rounded up to whole blocks, with the dtype's minimum, so that padding is never sampled."""
    missing = -(-n // VOCAB_BLOCK) * VOCAB_BLOCK - logits.shape[-1]
    return F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min) if missing else logits
