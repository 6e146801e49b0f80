"""A Llama-type model written out naively in float64: one sequence, head by head, no cache, x_i kept in a list.

Of model.py it takes only the names of what a wiring is made of. Weights are taken from our state dict, whose wqkv
holds, KV head by KV head, the G query heads, the key and the value.
"""

import functools
import itertools
import re

import numpy as np
import torch

import model
from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture
from ladder.architectures.postnorm import PostNorm
from ladder.lanes import wirings
from model import find_wiring, residual_loop


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, eps, bias):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weight + bias


def heads_of(config):
    """The settings of its heads; those of a Llama, if it has none."""
    return config.find(Heads) or Heads()


def rope_angles(config, length, windowed=False):
    frequencies = []
    R = config.rotary_dim or config.head_dim
    theta = config.rope_theta
    if windowed and heads_of(config).window_rope_theta:
        return np.outer(np.arange(length), [heads_of(config).window_rope_theta ** (-2 * i / R) for i in range(R // 2)])
    for i in range(R // 2):
        f = theta ** (-2 * i / R)
        s = config.rope_scaling or {}
        original = s.get("original_max_position_embeddings")
        wavelength = 2 * np.pi / f
        if s.keys() == {"factor"}:
            f = f / s["factor"]
        elif "long_factor" in s:
            f = f / s["long_factor" if length > original else "short_factor"][i]
        elif "beta_fast" in s:  # YaRN: the pairs that turn so often within the original context bound its ramp
            fast, slow = (
                R / 2 * np.log(original / 2 / np.pi / s[beta]) / np.log(theta) for beta in ("beta_fast", "beta_slow")
            )
            fast = max(np.floor(fast), 0)
            slow = min(np.ceil(slow), R - 1)
            stretched = np.clip((i - fast) / max(slow - fast, 0.001), 0, 1)
            f = stretched * f / s["factor"] + (1 - stretched) * f
        elif s:
            if wavelength > original / s["low_freq_factor"]:
                f = f / s["factor"]
            elif wavelength >= original / s["high_freq_factor"]:
                smooth = (original / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                f = (1 - smooth) * f / s["factor"] + smooth * f
        frequencies.append(f)
    return np.outer(np.arange(length), frequencies)


def rotate(x, angles):
    """Of the dimensions beyond two for each angle, nothing turns."""
    half = angles.shape[1]
    out = x.copy()
    for i in range(half):
        c = np.cos(angles[:, i])
        s = np.sin(angles[:, i])
        out[:, i] = x[:, i] * c - x[:, i + half] * s
        out[:, i + half] = x[:, i + half] * c + x[:, i] * s
    return out


class Reference:
    """logits(tokens) of a model; shards: per rank its (heads, hidden) as (start, stop), default one rank with all."""

    def __init__(self, config, state, shards=None):
        self.c = config
        self.w = {name: tensor.detach().double().cpu().numpy() for name, tensor in state.items()}
        self.shards = shards or [((0, config.n_heads), (0, config.intermediate_size))]

    def norm(self, x, name):
        weight = self.w[name + ".weight"]
        eps = self.c.norm_eps
        if self.c.norm == "layer":
            return layer_norm(x, weight, eps, self.w[name + ".bias"])
        return rms_norm(x, weight + (self.c.norm == "rms+1"), eps)

    def read(self, x, norm):
        """What a sublayer takes of the stream."""
        postnorm = self.c.find(PostNorm)
        return self.norm(x, norm) if not postnorm or postnorm.input_norms else x

    def attention(self, layer, x, shard, norm="attention_norm"):
        c = self.c
        w = self.w
        heads = heads_of(self.c)
        H = c.head_dim
        G = c.n_heads // c.n_kv_heads
        p = f"layers.{layer}."
        qkv = self.read(x, p + norm) @ w[p + "attention.wqkv.weight"].T
        if c.qkv_bias:
            qkv = qkv + w[p + "attention.wqkv.bias"]
        windowed = layer in heads.window_layers
        angles = rope_angles(c, len(x), windowed)
        out = 0.0
        factor = 1 if windowed and heads.window_rope_theta else (c.rope_scaling or {}).get("attention_factor", 1)
        if heads.whole_qk_norm:
            grouped = qkv.reshape(len(x), c.n_kv_heads, G + 2, H)
            for letter, of_all in ("q", grouped[:, :, :G]), ("k", grouped[:, :, G]):
                normed = self.norm(of_all.reshape(len(x), -1), f"{p}attention.{letter}_norm")
                of_all[:] = normed.reshape(of_all.shape)
            qkv = grouped.reshape(len(x), -1)
        for head in range(*shard[0]):
            group = qkv[:, head // G * (G + 2) * H :][:, : (G + 2) * H]
            q = group[:, head % G * H :][:, :H]
            k = group[:, G * H : (G + 1) * H]
            v = group[:, (G + 1) * H :]
            if heads.qk_norm and not heads.whole_qk_norm:
                q = self.norm(q, p + "attention.q_norm")
                k = self.norm(k, p + "attention.k_norm")
            if layer not in heads.nope_layers:
                q = rotate(q, angles)
                k = rotate(k, angles)
                q[:, : 2 * angles.shape[1]] *= factor
                k[:, : 2 * angles.shape[1]] *= factor
            scores = q @ k.T / np.sqrt(H) * (heads.query_scale or 1)
            if heads.llama4_beta:
                original = c.rope_scaling["original_max_position_embeddings"]
                scores *= (1 + heads.llama4_beta * np.log(1 + np.arange(len(x)) // original))[:, None]
            if heads.score_cap:
                scores = heads.score_cap * np.tanh(scores / heads.score_cap)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            if windowed:
                scores[np.tril_indices(len(x), -heads.sliding_window)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            y = weights / weights.sum(-1, keepdims=True) @ v
            out = out + y @ w[p + "attention.wo.weight"][:, head * H : (head + 1) * H].T
        first = shard[0][0] == 0  # one rank adds the bias, since they are summed
        return out + w[p + "attention.wo.bias"] if c.wo_bias and first else out

    def mlp(self, layer, x, shard, norm="ffn_norm"):
        w = self.w
        p = f"layers.{layer}."
        a, b = shard[1]
        x = self.read(x, p + norm)
        gate = x @ w[p + "feed_forward.w1.weight"][a:b].T
        up = x @ w[p + "feed_forward.w3.weight"][a:b].T
        if self.c.mlp_bias:
            gate = gate + w[p + "feed_forward.w1.bias"][a:b]
            up = up + w[p + "feed_forward.w3.bias"][a:b]
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        gate = gate * (1 + np.tanh(inner)) / 2 if self.c.activation == "gelu_tanh" else gate / (1 + np.exp(-gate))
        out = gate * up @ w[p + "feed_forward.w2.weight"][:, a:b].T
        return out + w[p + "feed_forward.w2.bias"] if self.c.mlp_bias and a == 0 else out

    def attention_into_mlp(self, layer, x, shard):
        y = self.attention(layer, x, shard)
        return y + self.mlp(layer, x + y, shard)

    def wiring(self):
        """(the Wiring, its layers, the n of desync, by how much it is stale) that the config's text names."""
        c = self.c
        found = re.fullmatch(r"(.*?)(-\d+)?(?::([^/]*))?(?:/\d+)?", self.c.wiring)
        name, stale, chosen = found.groups()
        wiring = find_wiring(name)
        layers = [*range(c.n_layers % find_wiring(name).layers_per_input, c.n_layers)]
        if chosen and name != "desync":
            numbers = [int(number) for number in re.findall(r"\d+", chosen)]
            if "-" in chosen:
                layers = [*range(numbers[0], numbers[1] + 1)]
            else:
                layers = numbers if "," in chosen else [*range(c.n_layers - numbers[0], c.n_layers)]
        return wiring, layers, chosen, int((stale or "-0")[1:]) or int(wiring.stale)

    def parts(self, layer, wiring):
        """What a layer adds to the stream, each a partial(x, shard)."""
        attention = functools.partial(self.attention, layer)
        mlp = functools.partial(self.mlp, layer)
        if wiring.block_sublayers == (model.attention_sublayer, model.mlp_sublayer):
            return [attention, mlp]
        if wiring.block_sublayers == (model.attention_plus_mlp,):
            return [lambda x, shard: attention(x, shard) + mlp(x, shard, norm="attention_norm")]
        if wiring.block_sublayers == (wirings.attention_into_mlp,):
            return [functools.partial(self.attention_into_mlp, layer)]
        raise NotImplementedError(f"write {wiring.block_sublayers} here, too")

    def sublayers(self):
        """[(partial(x, shard), by how much it is stale)]: attention, MLP, ..., or both of a block at once."""
        wiring, layers, _, stale = self.wiring()
        out = []
        layer = 0
        while layer < self.c.n_layers:
            wired = layer in layers
            together = range(layer, layer + (wiring.layers_per_input if wired else 1))
            parts = [self.parts(i, wiring if wired else find_wiring("standard")) for i in together]
            for side_by_side in zip(*parts, strict=True):
                out.append((lambda x, s, hs=side_by_side: sum(h(x, s) for h in hs), stale if wired else 0))
            layer += len(together)
        return out

    def stream(self, x0):
        """The final residual stream, of each rank."""
        wiring, _, n, _ = self.wiring()
        sublayers = self.sublayers()
        if wiring.loop in (residual_loop, wirings.delayed_loop):
            x, partials, seen = [x0], [], 0  # x[i]: with the sums of the first i sublayers; seen: how many of them
            for i, (h, stale) in enumerate(sublayers):
                seen = max(seen, i - stale)
                missed = partials[seen:] if wiring is find_wiring("delayed") else []
                own = [sum((p[r] for p in missed), start=np.zeros_like(x0)) for r in range(len(self.shards))]
                partials.append([h(x[seen] + y, shard) for y, shard in zip(own, self.shards, strict=True)])
                total = sum(partials[-1])
                if self.c.find(PostNorm):
                    total = self.norm(total, f"layers.{i // 2}.{'ffn' if i % 2 else 'attention'}_post_norm")
                x.append(x[-1] + total)
            return [x[-1]] * len(self.shards)
        if wiring.loop not in (wirings.desynced_loop, wirings.silent_loop):
            raise NotImplementedError(f"write {wiring.loop.__name__} here, too")
        x = [x0] * len(self.shards)
        for i, (h, _) in enumerate(sublayers, start=1):
            partials = [h(x_r, shard) for x_r, shard in zip(x, self.shards, strict=True)]
            kept = i % int(n or 2) == 0 or i == len(sublayers)
            if kept and wiring.loop is wirings.desynced_loop:
                x = [sum(x) / len(x) + sum(partials)] * len(x)
            else:
                x = [x_r + partial for x_r, partial in zip(x, partials, strict=True)]
        return x

    def logits(self, tokens):
        return self.all_logits(tokens)[0]

    def all_logits(self, tokens):
        """[(S, V) from each rank's final stream] for one sequence of token ids."""
        head = self.w["tok_embeddings.weight" if self.c.tie_embeddings else "output.weight"]
        cap = self.c.logit_cap
        x0 = self.w["tok_embeddings.weight"][np.asarray(tokens)] * (self.c.embedding_scale or 1)
        every = (self.norm(x, "norm") @ head.T for x in self.stream(x0))
        return [cap * np.tanh(logits / cap) if cap else logits for logits in every]


class MixtureReference(Reference):
    """With experts in the MLPs, on one rank."""

    @property
    def mixture(self):
        return self.c.find(Mixture)

    def mlp(self, layer, x, shard, norm="ffn_norm"):
        if not self.mixture or layer in self.mixture.dense_layers:
            return super().mlp(layer, x, shard, norm)
        p = f"layers.{layer}."
        x = self.norm(x, p + norm)
        return self.experts(p + "feed_forward.", x) + self.shared_expert(p + "feed_forward.", x)

    def stream(self, x0):
        return [self.farskip(x0)] if "farskip" in self.c.wiring else super().stream(x0)

    def gated(self, x, w1, w3, w2):
        gate = w1 @ x
        return w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ x))

    def experts(self, p, x):
        """What each token's likeliest experts give, weighted with their probabilities. On one rank, token by token."""
        w = self.w
        out = np.zeros_like(x)
        for t, token in enumerate(x):
            scores = np.exp(w[p + "router.weight"] @ token)
            probabilities = scores / scores.sum()
            chosen = sorted(range(self.mixture.n_experts), key=lambda e: -probabilities[e])[
                : self.mixture.experts_per_token
            ]
            whole = sum(probabilities[e] for e in chosen) if self.mixture.renormalize_experts else 1
            for e in chosen:
                matrices = (w[f"{p}experts.{name}.weight"][e] for name in ("w1", "w3", "w2"))
                out[t] += probabilities[e] / whole * self.gated(token, *matrices)
        return out

    def shared_expert(self, p, x):
        if not self.mixture.shared_expert_size:
            return np.zeros_like(x)
        matrices = [self.w[f"{p}shared_expert.{name}.weight"] for name in ("w1", "w3", "w2")]
        out = np.stack([self.gated(token, *matrices) for token in x])
        if self.mixture.shared_expert_gate:
            out = out / (1 + np.exp(-x @ self.w[p + "shared_gate.weight"].T))
        return out

    def farskip(self, x0):
        """The stream x; y is x without the routed experts of the layer before, and after a dense layer all of x."""
        x = x0
        y = x0
        layers = self.wiring()[1]
        for layer in range(self.c.n_layers):
            p = f"layers.{layer}."
            is_early = [layer in layers and f"-{skip}" not in self.c.wiring for skip in ("mlp", "attention")]
            a = self.attention(layer, y if is_early[0] else x, self.shards[0])
            read = x if is_early[1] else x + a
            if layer in self.mixture.dense_layers:
                x = y = x + a + self.mlp(layer, read, self.shards[0])
                continue
            normed = self.norm(read, p + "ffn_norm")  # if early, of x without this layer's attention
            y = x + a + self.shared_expert(p + "feed_forward.", normed)
            x = y + self.experts(p + "feed_forward.", normed)
        return x


def exact_attention(q, keys, values, mask, sinks=None):
    """In float64, row by row, head by head and position by position. sinks (heads): scores of what has no value."""
    out = torch.empty_like(q, dtype=torch.float64)
    for b, k, s in itertools.product(*map(range, q.shape[:3])):
        seen = mask[b, s].nonzero()[:, 0]
        scores = q[b, k, s].double() @ keys[b, k, seen].double().T / q.shape[-1] ** 0.5
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, q.shape[3], 1)[k]), -1)
        out[b, k, s] = torch.softmax(scores, -1)[:, : len(seen)] @ values[b, k, seen].double()
    return out
