"""Norms of what a sublayer adds to the stream, of Gemma 2 and 3, GLM-4-0414 and OLMo 2 and 3.

x_i = x_{i-1} + norm(AllReduce(h_i(x))), where h_i may also norm what it reads, as in a Llama.
"""

import dataclasses

import torch
import torch.nn as nn

from ladder.architectures import Architecture
from ladder.errors import InputError
from ladder.layers.norms import NORMS
from model import Collectives, attention_sublayer, mlp_sublayer

# which norm of a block is for the sums of a sublayer; a sublayer of your own that wants one is a line here
POST_NORMS = {attention_sublayer: "attention_post_norm", mlp_sublayer: "ffn_post_norm"}


@dataclasses.dataclass(frozen=True)
class PostNorm(Architecture):
    """Every layer has these norms."""

    name = "postnorm"

    input_norms: bool = True  # whether a sublayer also norms what it reads

    def check(self, config):
        """Raise InputError for a wiring that adds partials of several sublayers, or reads them, before they are summed.

        upper-bound is taken: its results mean nothing in any case.
        """
        wiring = config.named_wiring
        adds_partials = wiring.reads_partials or wiring.layers_per_input > 1 or len(wiring.norms) < 2
        if config.wiring != "upper-bound" and (adds_partials or not {*wiring.block_sublayers} <= POST_NORMS.keys()):
            raise InputError(
                f"wiring {config.wiring} is not for models with {self.name}: it takes partials that are not normed yet"
            )

    def complete_block(self, config, block):
        names = ["attention_post_norm", "ffn_post_norm"]
        for name in names:
            setattr(block, name, NORMS[config.norm](config.dim, config.norm_eps))
        if not self.input_norms:
            block.attention_norm = nn.Identity()
            block.ffn_norm = nn.Identity()

    def collectives(self, config, model):
        norms = []
        for block, wiring in zip(model.layers, config.layer_wirings, strict=True):
            norms += [getattr(block, POST_NORMS[sublayer]) for sublayer in wiring.block_sublayers]
        return PostNormSums(model.comm, norms)

    hf_names = {"attention_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}  # GLM's


class PostNormSums(Collectives):
    """The Collectives of a loop whose settle returns x + norm(wait(pending)).

    norms: one for each sublayer, in the order of their starts.
    """

    def __init__(self, comm, norms):
        self.comm = comm
        self.norms = iter(norms)
        self.tp_size = comm.tp_size
        self.lanes = comm.lanes

    def start(self, partial):
        return self.comm.start(partial), next(self.norms)

    def wait(self, pending):
        started, norm = pending
        return norm(self.comm.wait(started))

    def settle(self, x, pending, newer=()):
        started, norm = pending
        # of zeros, since only settle can come after `newer`, and an edit of it is to take effect in front of the norm
        return x + norm(self.comm.settle(torch.zeros_like(x), started, [later for later, _ in newer]))

    def pin(self, x, newer):
        return self.comm.pin(x, [later for later, _ in newer])
