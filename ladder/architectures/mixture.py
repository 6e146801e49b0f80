"""Mixtures of experts: a router, the experts, and perhaps a shared expert that every token takes.

Mixtral, Qwen's and DeepSeek's mixtures, GLM-4.5, gpt-oss and others. experts.py has the experts themselves.

Shape letters: B batch, S sequence, D dim, E experts, I neurons of an expert, k experts of a token.
"""

import dataclasses
import re

import torch
import torch.nn as nn

import model
from ladder.architectures import Architecture
from ladder.architectures.experts import GPU_KERNELS, Experts
from ladder.errors import FieldError, InputError, as_json
from ladder.sources.matrices import Renamed
from model import FeedForward, Linear

# {Mixture.router: the scores of float32 logits}. All but "softmax" compute the logits in float32, too.
ROUTERS = {"softmax": lambda x: x.softmax(-1), "softmax in float32": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}


@dataclasses.dataclass(frozen=True)
class Mixture(Architecture):
    """The settings of a mixture of experts, whose layers but dense_layers have a MoE for an MLP."""

    name = "mixture"

    n_experts: int
    experts_per_token: int
    expert_size: int  # neurons of an expert
    renormalize_experts: bool = True  # whether the weights of a token's experts add up to 1
    shared_expert_size: int | None = None  # neurons of an expert that every token takes
    shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()  # the layers that have an ordinary MLP
    router: str = "softmax"  # a name in ROUTERS: how a token's scores of the experts are made
    expert_groups: int | None = None  # neighbouring experts are groups, of which a token first chooses some
    chosen_groups: int | None = None  # how many of them
    expert_scale: float | None = None  # multiplies the weights of a token's experts
    clamped_swiglu: bool = False  # whether experts and router have biases, and experts gpt-oss's activation

    not_quantized = "router", "shared_gate"
    neuron_unit = 8  # grouped_mm takes rows of multiples of 16 bytes

    def check(self, config):
        """Raise InputError if the settings make no mixture of experts, or the wiring is none for it."""
        wiring = config.named_wiring
        E = self.n_experts
        groups = self.expert_groups
        if not {*self.dense_layers} <= {*range(config.n_layers)}:
            words = f"takes layers from 0 to {config.n_layers - 1}, not {self.dense_layers}"
            raise FieldError("{dense_layers.name} " + words, self)
        if self.shared_expert_gate and not self.shared_expert_size:
            raise FieldError("{shared_expert_gate.name} needs a {shared_expert_size.name}", self)
        if self.clamped_swiglu and (self.shared_expert_size or self.dense_layers or self.router != "softmax"):
            raise InputError("clamped_swiglu is not for shared experts, dense layers or other routers than 'softmax'")
        if config.activation != "silu" or config.mlp_bias:
            what = "mlp_bias" if config.mlp_bias else f"activation {config.activation}"
            raise InputError(f"{what} is not for a mixture of experts")
        if min(E, self.expert_size) < 1:
            raise InputError(f"a mixture of {E} experts of {self.expert_size} neurons needs at least 1 of each")
        if not 1 <= self.experts_per_token <= E:
            bounds = "from 1 to {n_experts.value}"
            raise FieldError("{experts_per_token.name} is {experts_per_token.value} but must be " + bounds, self)
        if wiring.reads_partials and config.wiring != "upper-bound":
            why = "ranks with streams of their own would choose different experts"
            raise InputError(f"wiring {config.wiring} is not for mixtures of experts: {why}")
        if self.router not in ROUTERS:
            raise InputError(f"router {self.router!r} is unknown; known: {', '.join(ROUTERS)}")
        if groups and (E % groups or not 1 <= (self.chosen_groups or 0) <= groups or E // groups < 2):
            raise FieldError(
                "{expert_groups}, of which {chosen_groups.value} are chosen, do not divide {n_experts}", self
            )
        if groups and self.experts_per_token > E // groups * self.chosen_groups:
            raise FieldError("{experts_per_token} are more than {chosen_groups.value} groups have", self)

    def of_first_layers(self, n_layers):
        return dataclasses.replace(self, dense_layers=tuple(i for i in self.dense_layers if i < n_layers))

    def feed_forward(self, config, layer):
        return None if layer in self.dense_layers else MoE(config.dim, self)

    def mlps(self, config):
        sizes = {"": config.intermediate_size if self.dense_layers else 0, "experts.": self.expert_size}
        sublayers = [h.__name__ for h in config.named_wiring.block_sublayers]
        if "experts_apart" not in sublayers:  # else each rank has all of the shared expert
            sizes["shared_expert."] = self.shared_expert_size
        return {prefix: neurons for prefix, neurons in sizes.items() if neurons}

    def stays_float32(self, name):
        """Return whether a parameter decides about experts so finely that it is never rounded."""
        return self.router != "softmax" and name.endswith((".router.weight", ".expert_bias"))

    def columns(self, config, columns):
        neurons = {*self.mlps(config).values(), self.shared_expert_size} - {None}
        return columns | {"w2": neurons}

    def share_read(self, name, tokens):
        """Return the expected share of a layer's experts that these tokens read, if each chooses evenly by itself."""
        return 1 - (1 - self.experts_per_token / self.n_experts) ** tokens if ".experts." in name else 1.0

    def kernels(self, device_type):
        if device_type == "cuda":
            return GPU_KERNELS
        from ladder.kernels.cpu import experts

        return experts.KERNELS

    hf_keys = {
        "n_experts": "num_experts", "experts_per_token": "num_experts_per_tok", "expert_size": "moe_intermediate_size",
        "shared_expert_size": "shared_expert_intermediate_size", "dense_layers": "mlp_only_layers",
        "renormalize_experts": "norm_topk_prob", "shared_expert_gate": "a shared expert", "expert_groups": "n_group",
        "chosen_groups": "topk_group", "expert_scale": "routed_scaling_factor",
    }  # fmt: skip
    hf_names = {"router": "gate", "shared_gate": "shared_expert_gate"}

    @classmethod
    def from_hf(cls, hf):
        if "n_routed_experts" in hf:
            return deepseek_from_hf(hf), {}
        n_experts = hf.get("num_experts") or hf.get("num_local_experts")  # as transformers 5 writes it
        if not n_experts:
            return None
        layers = range(hf["num_hidden_layers"])
        step = hf.get("decoder_sparse_step") or 1
        dense = hf.get("mlp_only_layers") or ()
        return {
            "n_experts": n_experts, "experts_per_token": hf["num_experts_per_tok"],
            "expert_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
            "renormalize_experts": hf.get("norm_topk_prob", True),
            "shared_expert_size": hf.get("shared_expert_intermediate_size"),
            "shared_expert_gate": "shared_expert_intermediate_size" in hf,
            "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
        }, {}  # fmt: skip

    def hf_weights(self, source, config, hf):
        return ExpertWeights(GptOssWeights(source) if self.clamped_swiglu else source)


class MoE(nn.Module):
    """A mixture of experts: a router chooses k of E MLPs for each token; a shared expert, if any, takes every token.

    Each rank holds some of the neurons of every expert. All ranks have the whole router and, since a collective returns
    the same bits on all of them, the same x, so they choose the same experts.
    """

    def __init__(self, dim, settings):
        super().__init__()
        E = settings.n_experts
        has_biases = settings.clamped_swiglu
        self.k = settings.experts_per_token
        self.renormalize = settings.renormalize_experts
        self.scale = settings.expert_scale
        self.groups = settings.expert_groups
        self.chosen_groups = settings.chosen_groups
        self.score_kind = settings.router
        self.router = Linear(dim, E, has_biases)
        # added to sigmoid scores for the choice alone, so that training could balance the experts
        self.expert_bias = nn.Parameter(torch.empty(E)) if settings.router == "sigmoid" else None
        self.experts = Experts(dim, settings.expert_size, E, has_biases)
        self.shared_expert = FeedForward(dim, settings.shared_expert_size) if settings.shared_expert_size else None
        self.shared_gate = Linear(dim, 1, bias=False) if settings.shared_expert_gate else None

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


def experts_apart(x, block, metadata, cache):
    """Return (the partial of the routed experts or of a dense MLP, the shared expert's output or None)."""
    if isinstance(block.feed_forward, MoE):
        return block.feed_forward(block.ffn_norm(x), apart=True)
    return model.mlp_sublayer(x, block, metadata, cache), None


# ---- Hugging Face folders --------------------------------------------------------------------------------------------

QWEN_NAMES = {  # {a part of a tensor's name in Mixtral's and GraniteMoE's files: the same part in Qwen's}
    "block_sparse_moe.": "mlp.", "router.layer.": "gate.", "input_linear.": "experts.gate_up_proj.",
    "output_linear.": "experts.down_proj.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip
DEEPSEEK_NAMES = {"mlp.shared_experts.": "mlp.shared_expert.", "mlp.gate.e_score_correction_bias": "mlp.expert_bias"}


class ExpertWeights(Renamed):
    """The tensors of a source under Qwen's names; the experts of a layer are stacked.

    Then mlp.experts.gate_proj and up_proj are (E, I, D), or a fused gate_up_proj (E, 2 I, D); down_proj is (E, D, I).
    Raises InputError if an expert is missing.
    """

    def __init__(self, source):
        places = {}  # {name: [(expert or 0, the source's name)]}
        for name in source.names():
            new = re.sub(r"experts\.\w+_proj$", r"\g<0>.weight", name)
            for theirs, qwen in QWEN_NAMES.items():
                new = new.replace(theirs, qwen) if "block_sparse_moe" in name else new
            for theirs, qwen in DEEPSEEK_NAMES.items():
                new = new.replace(theirs, qwen)
            one = re.fullmatch(r"(.*\.experts)\.(\d+)(\.\w+\.\w+)", new)
            place, expert = (one[1] + one[3], int(one[2])) if one else (new, 0)
            places.setdefault(place, []).append((expert, name))
        for place, parts in places.items():
            parts.sort()
            if (experts := [expert for expert, _ in parts]) != [*range(len(parts))]:
                raise InputError(f"the source's {place} has the experts {experts}")
        super().__init__(source, {place: [name for _, name in parts] for place, parts in places.items()})

    def join(self, name, *tensors):
        return torch.stack(tensors) if re.search(r"experts\.\d", self.places[name][0]) else tensors[0]


class GptOssWeights(Renamed):
    """gpt-oss's tensors under Qwen's names, in Qwen's form.

    Rows of the gate and of up, which alternate in one matrix and one bias, are taken apart. Matrices that are floats in
    the source are transposed there; those that were in MXFP4 are not, and end in ".weight".
    """

    def __init__(self, source):
        places = {}
        self.rows = {}  # {name: which rows it has}
        for name in source.names():
            new = re.sub(r"(experts\.\w+_proj)_bias$", r"\1.bias", name).replace(".mlp.router.", ".mlp.gate.")
            new = re.sub(r"experts\.\w+_proj$", r"\g<0>.weight", new)
            parts = {"gate_proj": 0, "up_proj": 1} if ".gate_up_proj." in new else {"": None}
            for part, first in parts.items():
                rows = slice(None) if first is None else slice(first, None, 2)
                place = new.replace("gate_up_proj", part)
                places[place] = [name]
                self.rows[place] = rows
        super().__init__(source, places)

    def join(self, name, tensor):
        tensor = tensor.mT if self.places[name][0].endswith("_proj") else tensor
        return tensor[:, self.rows[name]] if ".experts." in name else tensor


def deepseek_from_hf(hf):
    """Return the settings of a mixture with DeepSeek's keys, which GLM and Instella-MoE share."""
    layers = range(hf["num_hidden_layers"])
    types = hf.get("mlp_layer_types")
    if types and (len(types) != len(layers) or not {*types} <= {"dense", "sparse"}):
        raise InputError(f"mlp_layer_types must name dense or sparse for each of {len(layers)} layers")
    for key in "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor":
        if hf[key] is None:
            raise InputError(f"{key} is null but must be a number above 0")
    method = hf.get("topk_method", "group_limited_greedy")  # only DeepSeek V2 has another one
    if method not in ("greedy", "group_limited_greedy"):
        raise InputError(f"topk_method {as_json(method)} is not supported, only greedy and group_limited_greedy are")
    groups = hf["n_group"] if method != "greedy" and (hf["n_group"] or 1) > 1 else None
    n_dense = hf.get("first_k_dense_replace", 1) or 0
    return {
        "n_experts": hf["n_routed_experts"], "experts_per_token": hf["num_experts_per_tok"],
        "expert_size": hf["moe_intermediate_size"], "renormalize_experts": hf["norm_topk_prob"],
        "shared_expert_size": (hf["n_shared_experts"] or 0) * hf["moe_intermediate_size"] or None,
        "dense_layers": tuple(i for i in layers if (types[i] == "dense" if types else i < n_dense)),
        "expert_groups": groups, "chosen_groups": hf["topk_group"] if groups else None,
        "expert_scale": hf["routed_scaling_factor"],
    }  # fmt: skip
