"""A Llama-type model whose residual wiring is a choice (Ladder Residual, arXiv 2501.06589), for transformers.

It is transformers' Llama but for what a layer does. On one device nothing is in flight; what a ladder keeps is that a
sublayer reads the residual stream x (B, S, D) without the outputs of the sublayers before, which are `pending` here.
"""

import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .configuration_ladder import LadderConfig


class LadderAttention(Qwen3Attention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not config.qk_norm:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()
        if config.attention_bias != config.attention_out_bias:
            o = self.o_proj
            self.o_proj = nn.Linear(o.in_features, o.out_features, bias=config.attention_out_bias)
        self.rope = config.no_rope_layers is None or bool(config.no_rope_layers[layer_idx])

    def forward(self, x, position_embeddings, **kwargs):
        if not self.rope:
            cos, sin = position_embeddings
            position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(x, position_embeddings=position_embeddings, **kwargs)


class LadderDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = LadderAttention(config, layer_idx)
        is_wired = layer_idx in (config.wired_layers or ())
        self.block, self.stale = (config.block, config.stale) if is_wired else ("standard", 0)
        self.is_first = layer_idx == 0
        self.is_last = layer_idx == config.num_hidden_layers - 1
        self.layers = [self]  # whose sublayers it runs: a pair's, or none if the layer before does
        if self.block == "parallel":
            del self.post_attention_layernorm

    def sublayers(self, **kwargs):
        """Return the functions of x that the layer adds to the stream."""

        def attention(x):
            return self.self_attn(x, **kwargs)[0]

        def both(x):
            x = self.input_layernorm(x)
            return attention(x) + self.mlp(x)

        if self.block == "parallel":
            return [both]
        return [lambda x: attention(self.input_layernorm(x)), lambda x: self.mlp(self.post_attention_layernorm(x))]

    def __call__(self, stream, **kwargs):
        # LlamaModel gives each layer what the layer before returned: the first the embedding, others (x, *pending).
        # As so many arguments: checkpointing with use_reentrant sees only tensors that are arguments themselves.
        return super().__call__(*([stream] if self.is_first else stream), **kwargs)

    def forward(self, x, *pending, **kwargs):
        """Run the layer. x: the residual stream; pending: the last sublayers' outputs, not yet added to it."""
        for hs in zip(*(layer.sublayers(**kwargs) for layer in self.layers), strict=True):
            while len(pending) > self.stale:  # standard: all of them, ladder: not the last ones
                x = x + pending[0]
                pending = pending[1:]
            pending = *pending, sum(h(x) for h in hs)
        return x + sum(pending) if self.is_last else (x, *pending)


class LadderPreTrainedModel(LlamaPreTrainedModel):
    config_class = LadderConfig
    _no_split_modules = ["LadderDecoderLayer"]
    _can_record_outputs = {"hidden_states": LadderDecoderLayer, "attentions": LadderAttention}


class LadderModel(LadderPreTrainedModel, LlamaModel):
    def __init__(self, config):
        super().__init__(config)  # its own layers are dropped; from_pretrained builds all of them without memory
        self.layers = nn.ModuleList(LadderDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        paired = [layer for layer in self.layers if layer.block == "pair"]
        for one, other in zip(paired[::2], paired[1::2], strict=True):
            one.layers = [one, other]
            other.layers = []
        self.post_init()


class LadderForCausalLM(LadderPreTrainedModel, LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = LadderModel(config)
        self.post_init()
