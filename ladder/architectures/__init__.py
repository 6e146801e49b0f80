"""What differs from a Llama: each difference has one file here, with all that it means.

A Config lists the differences of its model in Config.architecture. Each is an Architecture: its fields are settings, as
they stand in config.json, and its methods answer the questions that model.py, tp.py and the others ask. The defaults
are the answers of a Llama. A model may have several: Qwen3-Next has a mixture of experts and linear attention.

An architecture of your own is a file here with a subclass, and a line of ARCHITECTURES: docs/change-it.md has one.
"""

import dataclasses
import pkgutil

ARCHITECTURES = {  # {its name in config.json: module:class}
    "postnorm": "ladder.architectures.postnorm:PostNorm",
    "mixture": "ladder.architectures.mixture:Mixture",
    "latent": "ladder.architectures.latent:Latent",
    "linear": "ladder.architectures.linear:LinearAttention",
    "heads": "ladder.architectures.heads:Heads",
    "laneformer": "ladder.lanes.laneformer:LaneformerSettings",
}


def find_architecture(name):
    """Return the subclass of Architecture with a name of ARCHITECTURES."""
    return pkgutil.resolve_name(ARCHITECTURES[name])


def all_architectures():
    """Return {name: subclass of Architecture}."""
    return {name: find_architecture(name) for name in ARCHITECTURES}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A difference from a Llama. Subclasses are frozen dataclasses; `config` is the Config that lists this object."""

    name = ""  # in ARCHITECTURES
    # Whether others that answer the same question, such as which attention a layer has, are asked before it.
    is_fallback = False
    # Whether a row's cache can forget its last tokens, as drafts and a server's reuse of prompts need.
    rewindable = True
    # Linears that are never quantized: they are small, but their errors would not be, or their floats are needed.
    # Modules of your own with a forward of their own stay floats in any case.
    not_quantized = ()
    # Whether attention needs a mask where a Llama's knows by itself that each token attends to all up to itself.
    needs_mask = False
    # Neurons of an MLP stay together on a rank in units of so many, where these divide them.
    neuron_unit = 1

    def check(self, config):
        """Raise InputError if the settings make no model of this config."""

    def of_first_layers(self, n_layers):
        """Return the architecture of a model's first n layers, where settings name layers."""
        return self

    # ---- What model.py asks; None: as in a Llama ----
    #
    # Where two architectures of a model answer a question, the first one in Config.architecture counts: refuse in
    # `check` what cannot be together, as Latent does.

    def attention(self, config, layer):
        """Return the attention of a layer: a module that answers what model.Attention does.

        That is forward(x, metadata, cache), new_cache, multiplications and, if its cache has slots, slots_read.
        """

    def feed_forward(self, config, layer):
        """Return the MLP of a layer: a module with forward(x)."""

    def complete_block(self, config, block):
        """Add modules to a Block, or replace some."""

    def collectives(self, config, model):
        """Return the Collectives of a new loop of a model, which wrap model.comm."""

    def metadata(self, config, metadata, key_at, make_rope):
        """Return what this architecture's layers share of a pass, as AttentionMetadata.own[name].

        metadata: the AttentionMetadata so far. key_at: the positions of the keys (T') or (B, 1, S). make_rope(row):
        cos and sin by a row of Transformer.rope_frequencies.
        """

    def window_theta(self, config):
        """Return the rope_theta of some layers, which becomes the second row of rope_frequencies, or None."""

    # ---- What tp.py asks ----

    def query_rows(self, config):
        """Return how many rows of wqkv a query head has, or None: head_dim."""

    def plan_of_heads(self, config, columns):
        """Return {parameter: (dimension, ranges)} of what is cut as the heads are. columns: those of wo.

        parameter: its path in the attention, without ".weight": "sinks" or "q_norm". Ranges may overlap those of other
        ranks, as where these share a KV head.
        """
        return {}

    def mlps(self, config):
        """Return {prefix of matrices' names: neurons} of the MLPs that ranks share out, or None: one, as in a Llama."""

    def sharded_units(self, config):
        """Return (n, name, {linear: (dimension, [(offset, size), ...])}): what ranks share out in n units, or None.

        For example, of 16 heads with 4 rows each, (16, "heads", {"wq": (0, [(0, 4)])}): a rank of two holds the rows 0
        to 32 or 32 to 64. Several parts are joined. name: of the units, in the plural, for messages. Where it names
        wqkv and wo, as for heads that belong together in pairs, this is their plan, and there are at most n ranks.
        """

    def stays_float32(self, name):
        """Return whether a parameter is never rounded to the model's dtype."""
        return False

    # ---- What quantization and those who count bytes ask ----

    def columns(self, config, columns):
        """Return {linear: {how many columns}} of the linears that may be quantized, from that of a Llama."""
        return columns

    def share_read(self, name, tokens):
        """Return the expected share of the parameter `name` that a pass of so many tokens reads."""
        return 1.0

    def kernels(self, device_type):
        """Return the Kernels (ladder/kernels/registry.py) that stand in for functions of this architecture."""
        return []

    # ---- Hugging Face folders ----

    hf_keys = {}  # {a setting: the key of config.json that it comes from}, for messages
    hf_names = {}  # {a module of our tensors' names: Hugging Face's}; the last part of a name stays

    @classmethod
    def from_hf(cls, hf):
        """Return ({setting: value}, {further field of Config: value}) of a model, or None if it has no such difference.

        hf: as ladder.sources.huggingface.read_hf returns it. Raises InputError. This is asked of all families: go by a
        key that only those with the difference have. A family that has it in any case, with no or the same settings,
        says so in its entry of FAMILIES (ladder/sources/families.py).
        """

    def hf_weights(self, source, config, hf):
        """Return the Tensors (ladder/sources/matrices.py) of a source, in the form of a Llama's or in our order.

        Mostly a subclass of Renamed, whose join(name, tensor) changes some. All names begin with "model." or
        "lm_head."; norms have the family's names, fused projections are not split yet, and rotary embeddings of
        neighbours turn q_proj and k_proj afterwards. `multiply` scales integers, too. What is computed is returned in
        float32. Rows of q_proj, k_proj and v_proj become KV-head groups afterwards: put heads that belong together side
        by side here, and the columns of o_proj in the same order.
        """
        return source
