"""The MLP of a mixture of experts: a router, the experts, and perhaps a shared expert that every token takes.

Shape letters: B batch, S sequence, D dim, E experts, k experts of a token.
"""

import torch
import torch.nn as nn

from ladder.errors import InputError
from ladder.layers.experts import Experts
from ladder.layers.farskip import APART
from model import FeedForward, Linear

# {Config.router: the scores of float32 logits}. All but "softmax" compute the logits in float32, too.
ROUTERS = {"softmax": lambda x: x.softmax(-1), "softmax in float32": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}


class MoE(nn.Module):
    """A mixture of experts: a router chooses k of E MLPs for each token; a shared expert, if any, takes every token.

    Each rank holds some of the neurons of every expert. All ranks have the whole router and, since a collective returns
    the same bits on all of them, the same x, so they choose the same experts.
    """

    def __init__(self, config):
        super().__init__()
        dim, E = config.dim, config.n_experts
        self.k, self.renormalize, self.scale = config.experts_per_token, config.renormalize_experts, config.expert_scale
        self.groups, self.chosen_groups, self.score_kind = config.expert_groups, config.chosen_groups, config.router
        self.router = Linear(dim, E, config.mlp_bias)
        # added to sigmoid scores for the choice alone, so that training could balance the experts
        self.expert_bias = nn.Parameter(torch.empty(E)) if config.router == "sigmoid" else None
        self.experts = Experts(dim, config.expert_size, E, config.mlp_bias)
        self.shared_expert = FeedForward(dim, config.shared_expert_size) if config.shared_expert_size else None
        self.shared_gate = Linear(dim, 1, bias=False) if config.shared_expert_gate else None

    def choose(self, tokens):
        """Return (weights (T, k) float32, chosen experts (T, k)) of tokens (T, D)."""
        if self.score_kind == "softmax":
            logits = self.router(tokens).float()
        else:
            logits = self.router(tokens.to(self.router.weight.dtype)).float()  # the weight is float32: stays_float32
        scores = ROUTERS[self.score_kind](logits)
        ranked = scores if self.expert_bias is None else scores + self.expert_bias.float()
        if self.groups:
            by_group = ranked.unflatten(-1, (self.groups, -1))
            best = by_group.amax(-1) if self.expert_bias is None else by_group.topk(2).values.sum(-1)
            best = best.topk(self.chosen_groups).indices
            is_chosen = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=best.device).scatter(-1, best, True)
            ranked = by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)
        chosen = ranked.topk(self.k).indices
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if self.scale is None else weights * self.scale, chosen

    def forward(self, x, apart=False):
        """Return the partial (B, S, D) of x (B, S, D); if apart, (chosen experts', shared one's or None)."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.choose(tokens)  # (B * S, k)
        y = self.experts(tokens, chosen)  # (B * S, k, D)
        y = (y * weights[..., None].type_as(y)).unflatten(0, x.shape[:-1]).sum(-2)
        if self.shared_expert is None:
            return (y, None) if apart else y
        shared = self.shared_expert(x)
        if self.shared_gate is not None:
            shared = self.shared_gate(x).sigmoid() * shared
        return (y, shared) if apart else y + shared


def check(config):
    """Raise InputError if the fields of a Config make no mixture of experts."""
    c, wiring = config, config.named_wiring
    if not c.expert_size:
        raise InputError("a model with n_experts needs an expert_size")
    if c.shared_expert_gate and not c.shared_expert_size:
        raise InputError("shared_expert_gate needs a shared_expert_size")
    is_gpt_oss = c.mlp_bias and c.activation == "clamped_swiglu" and c.router == "softmax"
    if is_gpt_oss and (c.shared_expert_size or c.dense_layers):
        raise InputError("clamped_swiglu is not for shared experts nor dense layers")
    if not is_gpt_oss and (c.activation != "silu" or c.mlp_bias):
        what = "mlp_bias" if c.mlp_bias else f"activation {c.activation}"
        raise InputError(
            f"{what} is not for a mixture of experts, unless its activation is clamped_swiglu, with mlp_bias and a "
            "router 'softmax'"
        )
    if not 1 <= (c.experts_per_token or 0) <= c.n_experts:
        raise InputError(f"experts_per_token is {c.experts_per_token} but must be from 1 to {c.n_experts}")
    if wiring.depends_on_lanes and c.wiring != "upper-bound" or wiring.model:
        why = "ranks with streams of their own would choose different experts"
        raise InputError(f"wiring {c.wiring} is not for mixtures of experts: {why}")
    if c.post_norms and wiring.block_sublayers == APART:
        raise InputError(
            f"wiring {c.wiring} is not for models with post_norms: it reads outputs before they are normed"
        )

    E, groups = c.n_experts, c.expert_groups
    if c.router not in ROUTERS:
        raise InputError(f"router {c.router!r} is unknown; known: {', '.join(ROUTERS)}")
    if groups and (E % groups or not 1 <= (c.chosen_groups or 0) <= groups or E // groups < 2):
        raise InputError(f"expert_groups {groups}, of which {c.chosen_groups} are chosen, do not divide n_experts {E}")
    if groups and c.experts_per_token > E // groups * c.chosen_groups:
        raise InputError(f"experts_per_token {c.experts_per_token} are more than {c.chosen_groups} groups have")


def stays_float32(config, name):
    """Return whether a parameter decides about experts so finely that it is never rounded to the model's dtype."""
    return config.router != "softmax" and name.endswith((".router.weight", ".expert_bias"))


def mlps(config):
    """Return {prefix of their matrices' names: neurons} of the MLPs that are sharded."""
    sizes = {"": config.intermediate_size if config.dense_layers else 0, "experts.": config.expert_size}
    if config.named_wiring.block_sublayers != APART:  # else each rank has all of the shared expert
        sizes["shared_expert."] = config.shared_expert_size
    return {prefix: neurons for prefix, neurons in sizes.items() if neurons}


def chosen_share(config, tokens):
    """Return the expected share of a layer's experts that these tokens read, if each chooses evenly by itself."""
    return 1 - (1 - config.experts_per_token / config.n_experts) ** tokens
