"""Kog's Laneformer (kogai/laneformer-2b-it): a wiring whose lanes get each other's partials late; reads its folders."""

import re

import torch
import torch.nn as nn

from formats.huggingface import unpaired
from formats.sizes import SIZES
from model import VOCAB_BLOCK, WIRINGS, Config, Transformer, Wiring, list_sublayers
from runtime.errors import InputError

SETTINGS = {  # what Config.laneformer may hold; the first value is what an absent key means
    "early_comm": (True, False),  # whether the first sublayers wait for their own sums
    "attention_comm": (True, False),  # whether attentions are summed over the lanes at all, and MLPs
    "mlp_comm": (True, False),
    # what the output head reads. "replicate": the mean of the normed lanes. "sum": the norm of their sum.
    # "vocab_parallel": for each lane's part of the vocabulary, that lane's normed stream.
    "lane_head": ("replicate", "sum", "vocab_parallel"),
    "lane_norms": (False, True),  # whether each lane has norms of its own, stored one after another
}


def settings(config):
    return {key: values[0] for key, values in SETTINGS.items()} | (config.laneformer or {})


def check(config):
    """Raise InputError for settings that make no model."""
    values = settings(config)
    for key, value in values.items():
        if value not in SETTINGS.get(key, ()):
            raise InputError(f"laneformer: {key} {value!r} is none of {', '.join(SETTINGS)} with their values")
    if config.named_wiring.stale % 2:
        raise InputError(f"wiring {config.wiring}: a Laneformer's delay is of whole layers, of two sublayers each")
    if values["lane_head"] == "vocab_parallel" and config.vocab_size % (VOCAB_BLOCK * (config.fixed_lanes or 1)):
        raise InputError(f"vocab_size {config.vocab_size} is no multiple of {VOCAB_BLOCK} for each of its lanes")
    if values["lane_norms"] and config.fixed_lanes is None:
        raise InputError(f"lane_norms: each lane has norms of its own, but wiring {config.wiring} names no lanes")


def laneformer_loop(x, sublayers, comm, config, norm=lambda x: x):
    """Run x_i = x_{i-1} + p_i + the other lanes' p_{i-d}, where p_i is this lane's partial h_i(x_{i-1}).

    The first d sublayers wait for the sum of all p_i. Without early_comm they add sqrt(lanes) p_i, and so do all later
    attentions without attention_comm, and MLPs without mlp_comm. The last d sums would come too late. At the end one
    more all-reduce adds up the lanes' streams, or takes the mean of their norms, but not for the head "vocab_parallel".
    """
    own, recent, last = settings(config), [], None
    has_sums = own["attention_comm"], own["mlp_comm"]
    for i, (h, d) in enumerate(sublayers):
        p = h(x)
        now, later = i < d and own["early_comm"], has_sums[i % 2] and i + d < len(sublayers)
        started = comm.start(p) if now or later else None
        yield
        recent.append((p, started))
        last = last if started is None else started  # what a wait must not be moved before
        before, pending = recent.pop(0) if i >= d else (None, None)
        if now:
            x = comm.settle(x, started)
        elif i < d or not has_sums[i % 2]:
            x = x + comm.lanes**0.5 * p
            x = x if last is None else comm.pin(x, [last])
        else:
            x = comm.settle(x + (p - before), pending, newer=[last])
    if own["lane_head"] != "vocab_parallel":
        summed = own["lane_head"] == "sum"
        started = comm.start(x if summed else norm(x))
        yield
        x = comm.wait(started) / (1 if summed else comm.lanes)
    yield x


class Laneformer(Transformer):
    """A Transformer whose loop ends with its lanes' sum, and whose norms may differ by lane."""

    check = staticmethod(check)

    def __init__(self, config):
        super().__init__(config)
        self.settings = own = settings(config)
        for name, module in self.named_modules() if own["lane_norms"] else ():
            if isinstance(module, nn.RMSNorm) and (name, own["lane_head"]) != ("norm", "sum"):
                module.weight = nn.Parameter(torch.empty(config.fixed_lanes * config.dim))

    def loop(self, x, metadata, cache=None):
        sublayers = list_sublayers(self.config, self.layers, metadata, cache)
        return laneformer_loop(x, sublayers, self.comm, self.config, self.norm)

    def head(self, x, select=None):
        if self.settings["lane_head"] != "replicate":
            return super().head(x, select)
        if select is not None:
            x = x[torch.arange(len(x), device=x.device)[:, None], select[:, None]]
        return self.output(x)  # normed already, before the lanes' mean


WIRINGS["laneformer"] = Wiring(
    "Kog's Laneformer", loop=laneformer_loop, stale=4, n_means=None, depends_on_lanes=True, model=Laneformer
)
SIZES["laneformer-2b"] = Config(  # the width is inferred from its 2.3 B parameters and an MLP of 4 D
    15, 32, 16, 96, 3072, 12288, 32000, 4096, wiring="laneformer-4/8",
    sliding_window=512, window_layers=tuple(range(10)),
)  # fmt: skip

# ---- A Hugging Face folder -------------------------------------------------------------------------------------------

KEYS = {  # that only a Laneformer has, with the defaults of its code
    "norm_eps": 1e-5, "num_lanes": 1, "broadcast_delay": 1, "use_comm": True, "use_attention_comm": None,
    "use_mlp_comm": None, "use_early_comm": True, "lm_head_type": "replicate", "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True, "sliding_window_n_layers": 0, "swa_layers": None, "unclamped_layers": None,
    "attn_mask_type": "causal", "multiple_of": None, "depth_init": None, "use_flex_attn": None,
}  # fmt: skip
LLAMA = {
    "model.tok_embeddings": "model.embed_tokens",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def laneformer_as_ministral(values):
    """Return a Laneformer's config.json as a Ministral's, with one more key, "laneformer": {field of Config: value}."""
    own, hf = KEYS | values, {k: v for k, v in values.items() if k not in KEYS}
    lanes, layers, first = own["num_lanes"], range(own["num_hidden_layers"]), own["sliding_window_n_layers"]
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters")  # before transformers 5, and since
    heads = ("replicate",) if own["pre_norm_lane_agg"] else ("replicate", "vocab_parallel")
    for key, known in (("lm_head_type", heads), ("attn_mask_type", ("causal",))):
        if own[key] not in known:
            raise InputError(f"{key} {own[key]!r} is not supported here, only {' and '.join(known)}")
    windowed = (layers[:first] if first >= 0 else layers[first:]) if own["swa_layers"] is None else own["swa_layers"]
    windowed = {*windowed} - {*(own["unclamped_layers"] or ())}
    if isinstance(scaling, dict) and not {"rope_type", "type"} & scaling.keys():  # TorchTitan's keys
        factor = scaling.get("scaling_factor")
        scaling = {"rope_type": "llama3", "factor": factor} | {k: scaling[k] for k in scaling if k != "scaling_factor"}
    comm = {f"{kind}_comm": own[f"use_{kind}_comm"] for kind in ("early", "attention", "mlp")}
    settings = {key: own["use_comm"] if value is None else value for key, value in comm.items()}
    settings |= {"lane_head": "sum" if own["pre_norm_lane_agg"] else own["lm_head_type"]}
    settings |= {"lane_norms": not own["replicated_rmsn_scale"]}
    return {
        "bos_token_id": None, "eos_token_id": 0, "sliding_window": None, **hf,
        "rms_norm_eps": own["norm_eps"], "rope_scaling": scaling,
        "layer_types": ["sliding_attention" if i in windowed else "full_attention" for i in layers],
        "laneformer": {"wiring": f"laneformer-{2 * own['broadcast_delay']}/{lanes}", "laneformer": settings},
    }  # fmt: skip


class LaneformerWeights:
    """The tensors of such a folder under Llama's names, joined over the lanes, for rotations of pairs (i, i + H/2).

    There each linear lies lane by lane, (L, out, in) for L lanes: o_proj and down_proj by columns, others by rows.
    """

    def __init__(self, source, head_dim):
        self.source, self.head_dim, self.theirs = source, head_dim, {}
        for name in source.names():
            match = re.fullmatch(r"(model\.layers\.\d+\.)?(.*)\.(?:weight|scale)", name)
            layer, module = match.groups("") if match else ("", name)
            if module != "model.freqs_cis":  # the rotations, which are computed here
                self.theirs[f"{layer}{LLAMA.get(module, module)}.weight"] = name

    def names(self):
        return list(self.theirs)

    def read(self, name):
        tensor = self.source.read(self.theirs[name])
        if name.endswith("norm.weight"):
            return tensor.flatten()
        if tensor.dim() == 3:
            tensor = torch.cat([*tensor], dim=1 if "o_proj" in name or "down_proj" in name else 0)
        return unpaired(tensor, self.head_dim) if re.search("[qk]_proj", name) else tensor
