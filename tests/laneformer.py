"""A Laneformer written out naively in float64: one sequence, lane by lane and head by head, every partial kept.

Written from Kog's equations, it takes nothing from model.py. hf: the values of a config.json; state: tensors as they
lie in such a folder, each linear (L, out, in).
"""

import numpy as np
from reference import rms_norm


def frequencies(hf, H):
    found = []
    for i in range(H // 2):
        f = hf["rope_theta"] ** (-2 * i / H)
        s = hf.get("rope_scaling")
        if s:
            wavelength = 2 * np.pi / f
            context = s["original_max_position_embeddings"]
            stretched = f / s["scaling_factor"]
            turns = (context / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            f = stretched + min(max(turns, 0), 1) * (f - stretched)
        found.append(f)
    return np.array(found)


def rotate(x, angles):
    """Turn the neighbours 2i, 2i + 1 of x (S, H): complex numbers times e^(i angle)."""
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


class Laneformer:
    def __init__(self, hf, state):
        self.hf = hf
        self.w = {name: tensor.double().numpy() for name, tensor in state.items()}
        self.H = hf["hidden_size"] // hf["num_attention_heads"]

    def norm(self, x, name, lane):
        scale = self.w.get(f"{name}.weight")
        return rms_norm(x, self.w[f"{name}.scale"][lane] if scale is None else scale, self.hf["norm_eps"])

    def windowed(self, layer):
        hf = self.hf
        n = self.hf["num_hidden_layers"]
        first = hf.get("sliding_window_n_layers", 0)
        chosen = hf.get("swa_layers") or (range(first) if first >= 0 else range(n + first, n))
        return layer in chosen and layer not in hf.get("unclamped_layers", [])

    def attention(self, layer, x, lane):
        wq, wk, wv, wo = (self.w[f"model.layers.{layer}.attention.w{letter}.weight"][lane] for letter in "qkvo")
        H = self.H
        S = len(x)
        angles = np.outer(np.arange(S), frequencies(self.hf, H))
        q = x @ wq.T
        k = x @ wk.T
        v = x @ wv.T
        shared = q.shape[1] // k.shape[1]
        heads = []
        i = np.arange(S)[:, None]
        j = np.arange(S)
        hidden = j > i
        if self.windowed(layer):
            hidden = hidden | (j <= i - self.hf["sliding_window"])
        for head in range(q.shape[1] // H):
            query, key, value = (
                t[:, at * H : (at + 1) * H] for t, at in ((q, head), (k, head // shared), (v, head // shared))
            )
            scores = np.where(hidden, -np.inf, rotate(query, angles) @ rotate(key, angles).T / np.sqrt(H))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ value)
        return np.concatenate(heads, axis=1) @ wo.T

    def feed_forward(self, layer, x, lane):
        w1, w2, w3 = (self.w[f"model.layers.{layer}.feed_forward.w{i}.weight"][lane] for i in (1, 2, 3))
        gate = x @ w1.T
        return (gate / (1 + np.exp(-gate)) * (x @ w3.T)) @ w2.T

    def logits(self, tokens):
        """(S, V) for one sequence of token ids."""
        hf = self.hf
        L = self.hf["num_lanes"]
        delay = self.hf["broadcast_delay"]
        x = [self.w["model.tok_embeddings.weight"][np.asarray(tokens)]] * L
        partials = {}
        for layer in range(hf["num_hidden_layers"]):
            for kind, norm, comm in (("attention", "attention_norm", "attention"), ("feed_forward", "ffn_norm", "mlp")):
                name = f"model.layers.{layer}.{norm}"
                h = getattr(self, kind)
                p = [h(layer, self.norm(x[lane], name, lane), lane) for lane in range(L)]
                partials[kind, layer] = p
                if layer < delay and hf.get("use_early_comm", True):
                    x = [x[lane] + sum(p) for lane in range(L)]
                elif layer < delay or not hf.get(f"use_{comm}_comm", hf.get("use_comm", True)):
                    x = [x[lane] + np.sqrt(L) * p[lane] for lane in range(L)]
                else:
                    past = partials[kind, layer - delay]
                    x = [x[a] + p[a] + sum(past[b] for b in range(L) if b != a) for a in range(L)]
        tied = hf.get("tie_word_embeddings")
        head = self.w["model.tok_embeddings.weight" if tied else "lm_head.weight"]
        if hf.get("pre_norm_lane_agg"):
            return rms_norm(sum(x), self.w["model.norm.weight"], hf["norm_eps"]) @ head.T
        x = [self.norm(x[lane], "model.norm", lane) for lane in range(L)]
        if hf.get("lm_head_type") == "vocab_parallel":
            return np.concatenate([x[lane] @ head[lane].T for lane in range(L)], axis=1)
        return sum(x) / L @ head.T
