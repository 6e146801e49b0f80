"""A Llama-type model whose residual wiring is a choice (Ladder Residual, arXiv 2501.06589), for transformers.

It is transformers' Llama but for what a layer does. On one device nothing is in flight; what a ladder keeps is that a
sublayer reads the residual stream without the outputs of the sublayers before, which are `pending` here.

Some wirings have lanes: a lane is what one of so many devices would hold, some heads and some neurons, and misses what
the others would not have sent yet. x (B, S, L, D) is then each lane's residual stream; (B, S, D) without lanes.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .configuration_ladder import LadderConfig


def share(n, parts):
    """Return the ranges [(start, stop), ...] of n things that so many parts get."""
    return list(pairwise(-(-n * i // parts) for i in range(parts + 1)))


def lane_heads(config):
    """Return the range of each lane's query heads: those of whole KV heads, or, of more lanes than those, a part."""
    K, G, L = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads, config.parsed[-1]
    if L <= K:
        return [(G * start, G * stop) for start, stop in share(K, L)]
    sharers = [stop - start for start, stop in share(L, K)]
    return [(G * k + start, G * k + stop) for k in range(K) for start, stop in share(G, sharers[k])]


class Cut(nn.Linear):
    """A linear that is cut into lanes: cuts are (lane, start, stop). Their own x, or partials, lie side by side."""

    def __init__(self, linear, cuts):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.cuts = cuts


class Rows(Cut):
    """From the lanes' x (B, S, L * D) to all rows (B, S, out): each lane computes some."""

    def forward(self, x):
        xs = x.split(self.in_features, dim=-1)
        biases = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
        return torch.cat([F.linear(xs[lane], self.weight[a:b], biases[a:b]) for lane, a, b in self.cuts], dim=-1)


class Columns(Cut):
    """From all columns (B, S, in) to the lanes' partials (B, S, L * D), of which the first has the bias."""

    def forward(self, x):
        partials = [F.linear(x[..., a:b], self.weight[:, a:b], None if lane else self.bias) for lane, a, b in self.cuts]
        return torch.cat(partials, dim=-1)


class LadderAttention(Qwen3Attention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.attention_bias != config.attention_out_bias:
            o = self.o_proj
            self.o_proj = nn.Linear(o.in_features, o.out_features, bias=config.attention_out_bias)
        self.rope = config.no_rope_layers is None or bool(config.no_rope_layers[layer_idx])
        if lanes := config.parsed[-1]:
            H, G, heads = self.head_dim, self.num_key_value_groups, list(enumerate(lane_heads(config)))
            # lanes that share a KV head differ in it: then each query head has one of its own, also in the cache
            self.num_key_value_groups = each = G if lanes <= config.num_key_value_heads else 1
            q = [(lane, start * H, stop * H) for lane, (start, stop) in heads]
            kv = [(lane, i // G * H, (i // G + 1) * H) for lane, (a, b) in heads for i in range(a, b, each)]
            self.q_proj, self.o_proj = Rows(self.q_proj, q), Columns(self.o_proj, q)
            self.k_proj, self.v_proj = Rows(self.k_proj, kv), Rows(self.v_proj, kv)

    def forward(self, x, position_embeddings, **kwargs):
        if not self.rope:
            cos, sin = position_embeddings
            position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(x, position_embeddings=position_embeddings, **kwargs)


class LadderDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = LadderAttention(config, layer_idx)
        self.name, self.stale, layers, self.lanes = config.parsed
        self.index, self.is_last = layer_idx, layer_idx == config.num_hidden_layers - 1
        self.blocks = [self]  # whose sublayers it runs: a pair's, or none if the layer before does
        self.period = layers if self.name == "desync" else None
        if self.name != "desync" and layer_idx not in layers:
            self.name, self.stale = "standard", 0
        if self.name == "parallel":
            del self.post_attention_layernorm
        if self.lanes:
            cuts = [(lane, *cut) for lane, cut in enumerate(share(config.intermediate_size, self.lanes))]
            self.mlp.gate_proj, self.mlp.up_proj = Rows(self.mlp.gate_proj, cuts), Rows(self.mlp.up_proj, cuts)
            self.mlp.down_proj = Columns(self.mlp.down_proj, cuts)

    def sublayers(self, **kwargs):
        """Return the functions of x that the block adds to the stream; of lanes, the partials of their sum."""

        def attention(x):
            return self.self_attn(x.flatten(2), **kwargs)[0].view_as(x)

        def mlp(x):
            return self.mlp(x.flatten(2)).view_as(x)

        def both(x):
            normed = self.input_layernorm(x)
            y = attention(normed)
            if self.name == "spd":  # the MLP reads its own lane's attention
                normed = self.post_attention_layernorm(x + y)
            return y + mlp(normed)

        if self.name in ("parallel", "spd"):
            return [both]
        return [lambda x: attention(self.input_layernorm(x)), lambda x: mlp(self.post_attention_layernorm(x))]

    def total(self, partial):
        return partial.sum(2, keepdim=True).expand_as(partial) if self.lanes else partial

    def __call__(self, stream, **kwargs):
        # LlamaModel gives each layer what the layer before returned: the first the embedding, others (x, *pending).
        # As so many arguments: checkpointing with use_reentrant sees only tensors that are arguments themselves.
        if self.index == 0:
            stream = [stream.unsqueeze(2).expand(-1, -1, self.lanes, -1) if self.lanes else stream]
        return super().__call__(*stream, **kwargs)

    def forward(self, x, *pending, **kwargs):
        """Run the layer. x: the residual stream; pending: the last sublayers' outputs, not yet added to it."""
        for i, hs in enumerate(zip(*(block.sublayers(**kwargs) for block in self.blocks), strict=True)):
            while len(pending) > self.stale:  # standard: all of them, ladder: not the last ones
                x, pending = x + self.total(pending[0]), pending[1:]
            seen = x + sum(pending) if self.name == "delayed" else x  # with this lane's own partials
            partial = sum(h(seen) for h in hs)
            if not self.period:
                pending = *pending, partial
            elif (2 * self.index + i + 1) % self.period and not (self.is_last and i):
                x = x + partial  # until the next sum the lanes drift apart
            else:
                x = x.mean(2, keepdim=True) + self.total(partial)
        if not self.is_last:
            return x, *pending
        x = x + sum(self.total(partial) for partial in pending)
        return x[:, :, 0] if self.lanes else x


class LadderPreTrainedModel(LlamaPreTrainedModel):
    config_class = LadderConfig
    _no_split_modules = ["LadderDecoderLayer"]
    _can_record_outputs = {"hidden_states": LadderDecoderLayer, "attentions": LadderAttention}


class LadderModel(LadderPreTrainedModel, LlamaModel):
    def __init__(self, config):
        super().__init__(config)  # its own layers are dropped; from_pretrained builds all of them without memory
        self.layers = nn.ModuleList(LadderDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        paired = [layer for layer in self.layers if layer.name == "pair"]
        for one, other in zip(paired[::2], paired[1::2], strict=True):
            one.blocks, other.blocks = [one, other], []
        self.post_init()


class LadderForCausalLM(LadderPreTrainedModel, LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = LadderModel(config)
        self.post_init()
