"""A Llama-type transformer whose residual wiring is a choice. The idea is residual_loop; begin there if you like.

Nothing here asks which rank it is. tp.py loads a rank's shard of the weights into the same Transformer, and
generate.load_model sets its `comm` to collectives that sum the partial results of all ranks.
The order here: the configuration; the collectives that the loop calls; the loop and the wirings; the layers; the
Transformer.

Shape letters: B batch, S sequence, T slots of the cache, T' those that are read, D dim, N heads, K KV heads, G = N / K
query heads that share a KV head, H head_dim, V vocabulary, v a rank's part of it. In shapes N, K and G count what the
rank holds; config.n_heads and config.n_kv_heads count those of the whole model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder import config_check, wiring_text
from ladder.architectures import Architecture
from ladder.errors import InputError, did_you_mean
from ladder.kernels import quant_linear
from ladder.kernels.registry import begin_pass, end_pass, plain
from ladder.layers.attention_inputs import attention_metadata, rope_frequencies, rotate
from ladder.layers.norms import ACTIVATIONS, NORMS
from ladder.wiring_rules import WiringRules, wirings_of_layers

# A function marked @plain is what the model computes. A faster kernel may compute the same in its place, as
# ladder/kernels/cpu/ does for attend on a CPU, but only while the function is as it was when the kernel was made: what
# you edit runs as you wrote it (docs/change-it.md). --plain runs no kernel.

# ---- The configuration -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape and the settings of a checkpoint, as in its config.json. It is never changed: rewired returns a copy.

    Raises InputError for settings that make no model (ladder/config_check.py).
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
    rope_scaling: dict | None = None  # see ladder/layers/rope_scaling.py
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    wiring: str = "standard"  # a text such as ladder:16; see ladder/wiring_text.py
    # quantization
    quant: str | None = None  # "int8", "int4", "fp8" or None
    group_size: int | None = None  # how many columns share a scale: of int4, of int8 in groups
    not_quantized: tuple[str, ...] = ()  # names of matrices that stay floats
    int8: tuple[str, ...] = ()  # matrices that have 8 bits in another form: quant_linear.eight_bits
    # small differences between families
    qkv_bias: bool = False
    wo_bias: bool = False
    rotary_dim: int | None = None  # how many dimensions of a head turn, from the first one on; None: all
    norm: str = "rms"  # a name in NORMS (ladder/layers/norms.py); called as NORMS[norm](dim, eps)
    mlp_bias: bool = False
    activation: str = "silu"  # of the MLP's gate, a name in ACTIVATIONS
    embedding_scale: float | None = None
    logit_cap: float | None = None
    # what else differs from a Llama, such as a mixture of experts or latent attention
    architecture: tuple[Architecture, ...] = ()

    def __post_init__(self):
        ordered = sorted(self.architecture, key=lambda each: (each.is_fallback, each.name))
        object.__setattr__(self, "architecture", tuple(ordered))
        _ = self.layer_wirings  # is computed and kept now, since the compiler cannot trace how text is parsed
        config_check.check(self)

    @functools.cached_property
    def parsed(self):
        """The parts of the text `wiring`: name, parameter, stale, lanes."""
        return wiring_text.parse_wiring(self.wiring, find_wiring)

    @functools.cached_property
    def named_wiring(self):
        """The Wiring that `wiring` names, with what the text says of it: of "ladder-2:8" the ladder with stale=2."""
        return find_wiring(self.parsed.name).configured(self.parsed)

    @functools.cached_property
    def layer_wirings(self):
        """The Wiring of each layer, as a tuple: the named one, or where NAME:N leaves a layer out, usually standard.

        Of 16 layers with "ladder-2:8": 8 times standard, then 8 times the ladder with stale=2.
        """
        named = self.named_wiring
        left_out = named.left_out()
        chosen = wiring_text.choose_layers(self.parsed, named, self.n_layers)
        if len(chosen) < self.n_layers and not named.can_run(left_out):
            raise InputError(f"wiring {self.wiring}: its loop cannot run layers that are {left_out.about!r}")
        return tuple(named if i in chosen else left_out for i in range(self.n_layers))

    def find(self, kind):
        """Return the Architecture of this class, or None."""
        return next((each for each in self.architecture if isinstance(each, kind)), None)

    def ask(self, question, *arguments):
        """Return the first answer of the architectures to a question, such as "attention"; None: as in a Llama.

        The questions are the methods of Architecture (ladder/architectures/__init__.py).
        """
        answers = (getattr(each, question)(self, *arguments) for each in self.architecture)
        return next((answer for answer in answers if answer is not None), None)

    @property
    def mlps(self):
        """{prefix of matrices' names: neurons} of the sharded MLPs: {"": 14336}; of a mixture {"experts.": 768}."""
        return self.ask("mlps") or {"": self.intermediate_size}

    def stays_float32(self, name):
        """Return whether a parameter is never rounded to the dtype of the others."""
        return any(each.stays_float32(name) for each in self.architecture)

    @property
    def rewindable(self):
        """Whether a row's cache can forget its last tokens."""
        return all(each.rewindable for each in self.architecture)


def rewired(config, wiring):
    """Return the config in another wiring, or the same config where that is None. Raises InputError."""
    return config if wiring in (None, config.wiring) else dataclasses.replace(config, wiring=wiring)


# ---- The collectives -------------------------------------------------------------------------------------------------


class Collectives:
    """What the loop asks of whoever adds up the ranks' partials. A partial is a rank's part of a sublayer's output.

    tp.TensorParallel sums over the ranks of a process group, and SingleDevice, below, is the plainest form. A class of
    your own defines what SingleDevice does, and becomes the `comm` of the model in generate.load_model.

    The compiler keeps only the order that data imply. In p0 = start(h0(x)); p1 = start(h1(x)); x = x + wait(p0), no
    data say that the wait comes after h1: moved in front of it, p0 would travel behind nothing. pin, and the argument
    `newer` of settle, are there to keep the order, and never change a result. Here they do nothing. The kernels of
    tp.TensorParallel obey them (ladder/kernels/ordered.py): derive from that class what is to be compiled.
    """

    tp_size: int  # how many ranks there are
    lanes: int  # how many partials a sum adds up: one of each rank, except where a rank holds several (ladder/lanes/)
    slow_link = False  # whether sums take so long that even short parts of a prompt are worth overlapping
    on_host = frozenset()  # which of "sums" and "gathers" go through the host's memory: a CUDA graph cannot hold those

    def start(self, partial):
        """Start the all-reduce of a partial (B, S, D) and return at once. What it returns is an argument of wait."""
        raise NotImplementedError

    def wait(self, pending):
        """Return the sum (B, S, D) of all lanes' partials, in their dtype. On a GPU its stream waits, not the host."""
        raise NotImplementedError

    def settle(self, x, pending, newer=()):
        """Return x + wait(pending). newer: the starts since then, the last of which the wait is to come after."""
        return x + self.wait(pending)

    def pin(self, x, newer):
        """Return x. Whatever reads the result is to come after the last start in `newer`."""
        return x

    # What choosing a token asks (generate.sample and its kernel), since a rank has the logits of its part of the
    # vocabulary only.

    def local_logits(self, logits):
        """Return (local logits padded to whole blocks, equally wide on all ranks; their first token id; V)."""
        raise NotImplementedError

    def all_gather(self, x):
        """Return every rank's x, (tp_size, *x.shape)."""
        raise NotImplementedError

    def gather_logits(self, logits):
        """Return the logits of the whole vocabulary (..., V) from the local ones (..., v)."""
        raise NotImplementedError


class SingleDevice(Collectives):
    """The collectives of a single device, whose partial already is the sum: nothing travels."""

    tp_size = lanes = 1

    def start(self, partial):
        return partial

    def wait(self, pending):
        return pending

    def local_logits(self, logits):
        return pad_logits(logits, logits.shape[-1]), 0, logits.shape[-1]

    def all_gather(self, x):
        return x[None]

    def gather_logits(self, logits):
        return logits


# Token ids. A rank holds whole blocks: generate.sample draws a block, with a random number for each, and then an id in
# it. So sample's kernel needs the logits of a rank's own blocks only, and any number of ranks draws the same id.
VOCAB_BLOCK = 16


def pad_logits(logits, n):
    """Pad local logits to n, rounded up to whole blocks, with the dtype's minimum, so that padding is never sampled."""
    missing = -(-n // VOCAB_BLOCK) * VOCAB_BLOCK - logits.shape[-1]
    return F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min) if missing else logits


# ---- The loop and the wirings ----------------------------------------------------------------------------------------
#
# A sublayer h maps the residual stream x (B, S, D) to this rank's partial of its output. A wiring says what each
# sublayer reads. `stale` is how many of the newest sums are still missing from x when a sublayer reads it.


def residual_loop(x, sublayers, comm, config):
    """Run the sublayers [(h, stale), ...], each on x without the newest `stale` sums, which are still in flight.

    A loop is a generator. It yields None after each start, so that interleave can run another loop meanwhile, and x at
    its end.

    Below is what h0 to h3 read, the attentions and MLPs of two layers; e is the embedding, and s0, s1, ... are the sums
    of their partials. A ladder is the paper's x_i = x_{i-1} + AllReduce(h_i(x_{i-2})), with e for x_{-1} and x_{-2}.

    standard                 stale 0 0 0 0    h0(e) h1(e+s0) h2(e+s0+s1) h3(e+s0+s1+s2)
    ladder                         1 1 1 1    h0(e) h1(e)    h2(e+s0)    h3(e+s0+s1)
    ladder-2                       2 2 2 2    h0(e) h1(e)    h2(e)       h3(e+s0)
    ladder:1, the last of 2 layers 0 0 1 1    h0(e) h1(e+s0) h2(e+s0)    h3(e+s0+s1)

    In parallel, a sublayer is attention + MLP of a layer. In pair, it is the attentions of two layers, or their MLPs:
    pair-ladder: a0(e) + a1(e), m0(e) + m1(e), a2(e+s0) + a3(e+s0), m2(e+s0+s1) + m3(e+s0+s1), ...
    """
    in_flight = []  # the all-reduces that have been started and not settled, oldest first
    for h, stale in sublayers:
        if in_flight and len(in_flight) <= stale:  # no sum to settle yet, as before a ladder's h1
            x = comm.pin(x, newer=in_flight)  # the compiler must not move h in front of the last start
        while len(in_flight) > stale:  # settle all but the newest `stale`, which travel while h computes
            x = comm.settle(x, in_flight.pop(0), newer=in_flight)
        in_flight.append(comm.start(h(x)))
        yield  # the loop of another part of the prompt computes here
    while in_flight:
        x = comm.settle(x, in_flight.pop(0), newer=in_flight)
    yield x


def interleave(loops):
    """Run loops in turns, so that one computes while another's all-reduce travels; return the last x of each."""
    xs = ()
    begun = begin_pass()  # which kernels may stand in is found out once for all layers
    try:
        for xs in zip(*loops, strict=True):  # noqa: B007  a round advances each loop to its next yield
            pass
    finally:
        end_pass(begun)
    return xs


def attention_sublayer(x, block, metadata, cache):
    return block.attention(block.attention_norm(x), metadata, cache)


def mlp_sublayer(x, block, metadata, cache):
    return block.feed_forward(block.ffn_norm(x))


def attention_plus_mlp(x, block, metadata, cache):
    x = block.attention_norm(x)
    return block.attention(x, metadata, cache) + block.feed_forward(x)


@dataclasses.dataclass(frozen=True)
class Wiring(WiringRules):
    """The sublayers of a model, and what they read.

    Config.wiring is NAME[-K][:N]. For example, ladder-2 is two sublayers stale, and ladder:8 wires the last eight
    layers as a ladder; the others are standard, as are the first layers where layers_per_input leaves some over.

    A wiring of your own is an entry of WIRINGS, whose name ends in a letter; its flag, its line of --help and its tests
    follow from that. If it needs another sublayer or another loop, write that function beside those above, and for its
    tests a naive one in tests/reference.py:

    a sublayer  h(x, block, metadata, cache) -> this rank's partial (B, S, D)
    a loop      loop(x, [(h, stale), ...], comm, config), a generator like residual_loop, which yields as often whatever
                x is. One that only changes `stale` calls residual_loop, as delayed_loop does
                (ladder/lanes/wirings.py). NAME:N wants a subclass of Wiring that says takes_layers = True

    Where that is not enough, a subclass gives other answers than WiringRules, as FarSkip does
    (ladder/architectures/farskip.py).
    """

    about: str  # its line of --help
    block_sublayers: tuple[Callable, ...] = (attention_sublayer, mlp_sublayer)
    layers_per_input: int = 1  # neighbours that read one input, with one sum of their attentions and one of their MLPs
    loop: Callable = residual_loop  # runs the sublayers
    stale: int = 0  # how many of the newest sums are still missing from what a sublayer reads
    norms: tuple[str, ...] = ("attention_norm", "ffn_norm")  # the norms of a block that its sublayers use

    def left_out(self):
        """Return the Wiring of the layers that NAME:n leaves out, which this wiring's loop runs, too."""
        return WIRINGS["standard"]

    def new_model(self, config):
        """Return the module of a whole model, or of a shard; its weights are set later."""
        return Transformer(config)


WIRINGS = {
    "standard": Wiring("the pre-norm Llama block"),
    "ladder": Wiring("every sublayer reads the stream one sublayer stale", stale=1),
    "parallel": Wiring("attention + MLP of one input", (attention_plus_mlp,), norms=("attention_norm",)),
    "parallel-ladder": Wiring("parallel, one block stale", (attention_plus_mlp,), stale=1, norms=("attention_norm",)),
    "pair": Wiring("two neighbouring blocks of one input", layers_per_input=2),
    "pair-ladder": Wiring("pair, one sublayer stale", layers_per_input=2, stale=1),
}


def all_wirings():
    """Return {name: Wiring}: WIRINGS, and those that are made of the same parts elsewhere."""
    from ladder.architectures.farskip import FARSKIPS  # for mixtures of experts
    from ladder.lanes.wirings import LANE_WIRINGS  # whose function depends on the number of ranks

    return WIRINGS | FARSKIPS | LANE_WIRINGS


def find_wiring(name):
    """Return the Wiring of this name. Raises InputError if there is none."""
    wirings = WIRINGS if name in WIRINGS else all_wirings()
    if name not in wirings:
        raise InputError(f"unknown wiring {name!r}; known: {', '.join(wirings)}{did_you_mean(name, wirings)}")
    return wirings[name]


def list_sublayers(config, layers, metadata=None, cache=None):
    """Return residual_loop's [(h, stale)] of all layers, in order: the sublayers with all arguments but x bound.

    At a seam, such as ladder:8 has, nothing is special: each sublayer has the `stale` of its own layer's wiring.
    """
    sublayers = []
    i = 0
    layers = list(layers)  # a ModuleList takes a microsecond for each look-up
    wirings = wirings_of_layers(config, len(layers))
    while i < len(layers):
        wiring = wirings[i]
        side_by_side = [(layers[j], metadata, cache and cache[j]) for j in range(i, i + wiring.layers_per_input)]
        for h in wiring.sublayers_as_defined_now():  # an edit from a notebook takes effect, too
            sublayers.append((functools.partial(_run_blocks, h, side_by_side), wiring.stale))
        i += wiring.layers_per_input
    return sublayers


def _run_blocks(sublayer, side_by_side, x):  # usually of one block
    if len(side_by_side) == 1:
        return sublayer(x, *side_by_side[0])
    first, *others = [sublayer(x, *arguments) for arguments in side_by_side]
    return sum(others, start=first)


# ---- The layers ------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """PyTorch's linear; with integers a QuantLinear is in its place."""

    @plain
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@plain
def attend(q, k, v, mask=None):
    """Return the attention (B, K, G, S, H) of q (B, K, G, S, H) to keys and values (B, K, T, H).

    mask: (B, S, T'), T' <= T: which keys a query attends to; only the first T' slots are read. None: queries and keys
    are of the same tokens, and each attends to all up to itself.
    """
    # What you change in one of the two calls belongs in the other one, too.
    if mask is None:
        return F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=True).view(q.shape)
    # The G query heads of a KV head become one head of G * S queries, so that no key is ever copied.
    B, _, G, S, _ = q.shape
    mask = mask[:, None, None].expand(B, 1, G, S, -1).flatten(2, 3)  # (B, 1, G * S, T')
    k = k[:, :, : mask.shape[-1]]
    v = v[:, :, : mask.shape[-1]]
    return F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask).view(q.shape)


@plain
def rotate_into_cache(q, k, v, rope, metadata, cache):
    """Turn queries q (B, K, G, S, H) and keys by their positions, and write keys and values to the cache.

    k, v (B, K, 1, S, H). rope: (cos, sin), or None. Returns (q, k, v), the last two (B, K, S, H).
    """
    if rope:
        q = rotate(q, *rope)
        k = rotate(k, *rope)
    k = k.squeeze(2)
    v = v.squeeze(2)
    if cache is not None:
        cache[0][metadata.rows, :, metadata.positions] = k.transpose(1, 2)  # (B, S, K, H)
        cache[1][metadata.rows, :, metadata.positions] = v.transpose(1, 2)
    return q, k, v


class Attention(nn.Module):
    """Grouped-query attention.

    wqkv holds a group of rows for each KV head: its G query heads, its key and its value. A rank holds whole groups, or
    one KV head and some of its query heads (tp.head_ranges); how many it holds is read from the shapes.
    """

    def __init__(self, config, query_rows=None):  # query_rows: of wqkv for a query head, by default head_dim
        super().__init__()
        N = config.n_heads
        K = config.n_kv_heads
        H = config.head_dim
        self.head_dim = H
        self.group_rows = N // K * (query_rows or H) + 2 * H  # of wqkv for a whole group
        self.wqkv = Linear(config.dim, K * self.group_rows, bias=config.qkv_bias)
        self.wo = Linear(N * H, config.dim, bias=config.wo_bias)

    @plain
    def forward(self, x, metadata, cache):
        """Return this rank's partial (B, S, D) of x (B, S, D).

        metadata: what all layers share of this pass, an AttentionMetadata (ladder/layers/attention_inputs.py).
        cache: None or (k, v), both (B, K, T, H), which are written to.
        """
        q, k, v, *others = self.split_heads(self.wqkv(x), metadata)  # others: gates, in heads.py
        rope, mask = self.rope_and_mask(metadata)
        q, k, v = rotate_into_cache(q, k, v, rope, metadata, cache)
        if cache is not None and mask is not None:  # without a mask nothing older is in the cache: k and v are all
            k, v = cache
        y = self.attend(q, k, v, mask, metadata)
        return self.wo(self.join_heads(y, *others))

    # The steps of forward, which an Architecture may change (ladder/architectures/heads.py):

    def split_heads(self, qkv, metadata):
        """Return q (B, K, G, S, H), k and v (B, K, 1, S, H) of the output of wqkv (B, S, rows)."""
        B, S, rows = qkv.shape
        heads = qkv.view(B, S, self.count_kv_heads(rows), -1, self.head_dim).permute(0, 2, 3, 1, 4)  # (B, K, G+2, S, H)
        return heads.tensor_split((-2, -1), dim=2)

    def rope_and_mask(self, metadata):
        return metadata.rope, metadata.mask

    def attend(self, q, k, v, mask, metadata):
        return attend(q, k, v, mask)

    def join_heads(self, y):
        """Return (B, S, N H) of y (B, K, G, S, H), in the order of wo's columns."""
        return y.flatten(1, 2).transpose(1, 2).flatten(2)

    def count_kv_heads(self, rows):
        """Return the number of KV heads in so many rows of wqkv: of whole groups, or 1, with a part of its queries."""
        return max(1, rows // self.group_rows)

    def slots_read(self, filled):
        """Return how many of the filled slots of the cache a step reads."""
        return filled

    def multiplications(self):
        """Return how many multiplications this rank's heads need for each query and cached token."""
        return 2 * self.wo.in_features

    def new_cache(self, batch, length, device, dtype):
        """Return (k, v) of `length` slots, both (B, K, T, H), zeroed. Raises InputError for a wqkv of unknown width."""
        if not hasattr(self.wqkv, "out_features"):
            name = type(self.wqkv).__name__
            raise InputError(f"wqkv is a {name} without out_features, by which the KV heads are counted: give it some")
        shape = batch, self.count_kv_heads(self.wqkv.out_features), length, self.head_dim
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))


class FeedForward(nn.Module):
    """The gated MLP. A rank holds some of its neurons: rows of w1 and w3, columns of w2."""

    def __init__(self, dim, neurons, bias=False, activation="silu"):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.w1 = Linear(dim, neurons, bias)  # gate
        self.w3 = Linear(dim, neurons, bias)  # up
        self.w2 = Linear(neurons, dim, bias)  # down

    @plain
    def forward(self, x):
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class NeverCalled(nn.Module):
    """A module that only holds others, so that a hook on it would never run."""

    def register_forward_hook(self, *args, **kwargs):
        name = type(self).__name__
        raise InputError(
            f"a {name} is never called: hook the modules in it, or probe list_sublayers (docs/change-it.md)"
        )

    register_forward_pre_hook = register_full_backward_hook = register_forward_hook


class Block(NeverCalled):
    """The weights of one layer. It has no forward: the sublayers of its wiring compute with them."""

    def __init__(self, config, layer):
        super().__init__()
        self.attention = config.ask("attention", layer) or Attention(config)
        # a mixture of experts, for example, enters here: ladder/architectures/mixture.py
        self.feed_forward = config.ask("feed_forward", layer) or FeedForward(
            config.dim, config.intermediate_size, config.mlp_bias, config.activation
        )
        make_norm = functools.partial(NORMS[config.norm], config.dim, config.norm_eps)
        used = config.layer_wirings[layer].norms
        if "attention_norm" in used:
            self.attention_norm = make_norm()
        if "ffn_norm" in used:
            self.ffn_norm = make_norm()
        for each in config.architecture:
            each.complete_block(config, self)


# ---- The model -------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """The whole model, or the shard of a rank: tp.load_shard makes it, and generate.load_model sets `comm`.

    forward embeds the tokens, runs residual_loop over all sublayers, and computes the logits. A prompt may be cut into
    several parts ("sequence split"), each with a loop of its own; then one part computes while another's all-reduce
    travels.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.comm = SingleDevice()
        # without nn.Embedding's initial values: drawing them on "meta" imports the compiler, which takes seconds
        table = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = NORMS[config.norm](config.dim, config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        # theta^(-2i / R) for each pair i of the R dimensions that turn, scaled for a longer context; never on "meta"
        self.register_buffer("rope_frequencies", rope_frequencies(config), persistent=False)

    @property
    def attentions(self):
        """The attentions, in the order of the cache."""
        return [block.attention for block in self.layers]

    device = property(lambda self: self.norm.weight.device)
    dtype = property(lambda self: self.norm.weight.dtype)  # of activations, and of weights that are not quantized

    def forward(self, tokens, positions=None, cache=None, cache_length=None, last_index=None, splits=1):
        """Return the local logits (B, S, v) of tokens (B, S) int64; with last_index (B,) those of one token (B, 1, v).

        There are four calls:
        forward(tokens)                                              training, scoring: padded on the right
        forward(tokens, None, cache, None, last_index)               the first chunk of a prefill
        forward(tokens, positions, cache, cache_length, last_index)  its later chunks
        forward(tokens, positions, cache, cache_length)              decode

        positions (B, S): None if every row starts at position 0. cache: made by new_cache and written in place.
        cache_length: how many slots to read, those of this pass included. last_index: the index among these tokens of
        each row's last token, which is followed by padding; -1 for a row that ended in an earlier chunk. splits: into
        how many parts to cut the sequence; more than 1 need a cache.
        """
        # usually there is one part, hence one loop: embed, residual_loop over all sublayers, head
        loops = self.split_loops(tokens, positions, cache, cache_length, last_index, splits)
        x = torch.cat(interleave(loops), dim=1)
        return self.head(x, last_index)

    def split_loops(self, tokens, positions, cache, cache_length, last_index, splits):
        """Yield the loop of each part of the sequence; the arguments are those of forward.

        In each layer a part attends to the keys of the parts before it, which interleave lets run first. For example,
        of 4 tokens in 2 parts, the first part has the queries 0 and 1 and the keys 0 and 1, which are its own, so that
        it needs no mask; the second has the queries 2 and 3 and the keys 0 to 3.
        """
        S = tokens.shape[1]
        fresh = positions is None
        if fresh:
            positions = torch.arange(S, device=tokens.device).expand(tokens.shape)
        keys_so_far = 0 if fresh else cache_length - S  # of earlier chunks, in the longest row
        # the position of each row's last token, for linear attention
        last = None if last_index is None else positions[:, :1] + last_index[:, None]
        max_length = dummy_slot(cache) if cache else S  # how long a row may get, by which longrope chooses factors
        split_positions = positions.tensor_split(splits, 1)
        for part, part_positions in zip(tokens.tensor_split(splits, 1), split_positions, strict=True):
            alone = fresh and keys_so_far == 0  # the part attends to nothing but itself, and needs no mask
            keys_so_far += part.shape[1]
            keys = None if alone else torch.arange(keys_so_far, device=tokens.device)
            metadata = attention_metadata(self, part_positions, keys, max_length, last)
            yield self.loop(self.embed(part), metadata, cache)

    def embed(self, tokens):
        """Return the embeddings (B, S, D) of tokens (B, S)."""
        x = self.tok_embeddings(tokens).to(self.dtype)
        scale = self.config.embedding_scale
        return x if scale is None else x * x.new_full((), scale)  # rounded to x's dtype, as Gemma was trained

    def loop(self, x, metadata, cache=None):
        """Return the loop from the embeddings x (B, S, D) to the last layer."""
        sublayers = list_sublayers(self.config, self.layers, metadata, cache)
        return self.config.named_wiring.run(x, sublayers, self.loop_comm(), self.config)

    def loop_comm(self):
        """Return the Collectives of a new loop: `comm`, or what an architecture puts around it."""
        return self.config.ask("collectives", self) or self.comm

    def head(self, x, last_index=None):
        """Return the local logits of the last layer's x (B, S, D); last_index: as in forward."""
        if last_index is not None:
            x = x[torch.arange(len(x), device=x.device)[:, None], last_index[:, None]]
        return self.logits(self.norm(x))

    def logits(self, x):
        """Return the local logits (..., v) of the normed x (..., D)."""
        logits = self.output(x)
        cap = self.config.logit_cap
        return logits if cap is None else cap * (logits / cap).tanh()

    def new_cache(self, batch, length):
        """Return a static cache of `length` slots: for each layer a (k, v), or the state of a linear one."""
        return [block.attention.new_cache(batch, length, self.device, self.dtype) for block in self.layers]


def has_slots(layer_cache):
    """Return whether a layer's part of a cache has a slot for each token, and is not a state."""
    return layer_cache[0].dim() == 4


def cache_slots(cache):
    """Return the number of slots T of a cache, 1 if no layer has any.

    Slot i holds the key and the value of position i. The last one is the dummy slot.
    """
    return next((layer[0].shape[2] for layer in cache if has_slots(layer)), 1)


def dummy_slot(cache):
    """Return the index of the last slot, which is also the number of slots that a pass may read: not this one.

    Tokens at positions past the end, such as a draft's last proposals, are written there. And it keeps a step from
    reading all slots, for which the compiler would make another graph.
    """
    return cache_slots(cache) - 1


def cache_size(cache):
    """Return (rows, slots) of a cache; without a limit of slots, an infinite number."""
    slots = cache_slots(cache) if any(map(has_slots, cache)) else math.inf
    return len(cache[0][0]), slots


def build(config, kind=None):
    """Return a Transformer, or its subclass `kind`, quantized as its config says, on "meta", so without its weights."""
    with torch.device("meta"):
        model = kind(config) if kind else config.named_wiring.new_model(config)
        if config.quant:
            quant_linear.replace_matrices(model)
        if config.tie_embeddings:
            for name, parameter in model.tok_embeddings.named_parameters():
                setattr(model.output, name, parameter)
    return model
