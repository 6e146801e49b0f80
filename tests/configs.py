"""Configurations: a small Llama, what families and architectures change in it, and every wiring."""

import dataclasses
import functools

from ladder import wiring_text
from ladder.architectures import ARCHITECTURES, find_architecture
from ladder.lanes import wirings
from model import Config, all_wirings, find_wiring, list_sublayers, residual_loop

YARN = {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.2}
YARN["original_max_position_embeddings"] = 40
LONGROPE = {"attention_factor": 1.3, "original_max_position_embeddings": 10}
LONGROPE |= {"short_factor": [1.0, 1.5, 2.5], "long_factor": [1.25, 3.0, 7.0]}
GEMMA = {  # what Gemma 2 and 3 have together
    "norm": "rms+1", "postnorm": {}, "activation": "gelu_tanh", "embedding_scale": 7.0, "logit_cap": 3.0,
    "tie_embeddings": True, "rope_scaling": {"factor": 2.5}, "heads": {
        "query_scale": 0.7, "score_cap": 1.5, "qk_norm": True, "window_rope_theta": 50.0, "sliding_window": 4,
        "window_layers": (0, 2),
    },
}  # fmt: skip
OLMO = {
    "postnorm": {"input_norms": False}, "rope_scaling": YARN, "heads": {
        "qk_norm": True, "whole_qk_norm": True, "window_rope_theta": 10000.0, "sliding_window": 4,
        "window_layers": (0, 2),
    },
}  # fmt: skip
GLM = {"rotary_dim": 4, "postnorm": {}, "qkv_bias": True, "rope_scaling": YARN}
STABLELM = {"rotary_dim": 2, "norm": "layer", "qkv_bias": True}
PHI = {"rotary_dim": 6, "rope_scaling": LONGROPE, "heads": {"llama4_beta": 0.4}}
LONG_PHI = {**PHI, "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 6}}  # all rows are beyond that
FAMILIES = GEMMA, OLMO, GLM, STABLELM, PHI, LONG_PHI
BIASED = {
    "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "rope_scaling": YARN,
    "heads": {"nope_layers": (1,), "sliding_window": 4, "window_layers": (1, 2)},
}  # fmt: skip
BASE = Config(3, 6, 2, 8, 48, 100, 131, 64, norm_eps=1e-5, bos_id=1, eos_ids=(2,))


def change(config, **changes):
    """Return a changed copy of a config. mixture={setting: value} changes or adds that architecture; None drops it."""
    own = {each.name: each for each in config.architecture}
    for name in changes.keys() & ARCHITECTURES.keys():
        settings = changes.pop(name)
        before = own.pop(name, None)
        if settings is not None:
            own[name] = dataclasses.replace(before, **settings) if before else find_architecture(name)(**settings)
    return dataclasses.replace(config, architecture=tuple(own.values()), **changes)


UNEQUAL_SHARES = [(3, 1), (5, 2, 1), (1, 4, 2, 2)]
MANY = {"n_heads": 16, "n_kv_heads": 8, "intermediate_size": 101, "vocab_size": 130}  # enough for these
LINEAR_SETTINGS = {"key_heads": 5, "value_heads": 10, "key_dim": 8, "value_dim": 12, "conv_width": 4}
LINEAR_ATTENTION = change(
    BASE, n_heads=12, n_kv_heads=2, norm="rms+1", heads={"qk_norm": True, "gate": True},
    linear={"layers": (0, 2), **LINEAR_SETTINGS}, tie_embeddings=True,
)  # fmt: skip
parse_wiring = functools.partial(wiring_text.parse_wiring, find_wiring=find_wiring)


def table_entry(changes):
    """Return the Wiring of config changes."""
    return find_wiring(parse_wiring(changes["wiring"]).name)


def variants(name):
    """Return the config changes to test a wiring with; one layer alone has a seam on either side."""
    wiring = find_wiring(name)
    n = wiring.layers_per_input
    layers = ",".join(map(str, range(n))) if n > 1 else "1,"
    some = [f"{name}:{layers}"] if wiring.takes_layers else [f"{name}:4"] * (":N" in wiring.forms)
    more = {"ladder": ["ladder:2", "ladder:0,1", "ladder-3"], "delayed": ["delayed-2", "delayed-3:1-2"]}.get(name, [])
    return [{"wiring": text} for text in [name, *more, *some]]


# those of any dense model; farskip is for mixtures (test_experts.py), test_laneformer.py has its own
NAMES = [name for name, wiring in all_wirings().items() if name != "laneformer" and not name.startswith("farskip")]
WIRED = [changes for name in NAMES for changes in variants(name)]
ANY_TP = [changes for changes in WIRED if not table_entry(changes).reads_partials]
ONE_EACH = [*{id(table_entry(changes)): changes for changes in WIRED}.values()]  # with seams where there can be some
LOOPS = residual_loop, wirings.delayed_loop, wirings.desynced_loop, wirings.silent_loop
BY_HAND = [c for c in WIRED if table_entry(c).loop in LOOPS]  # nobody has reckoned by hand what another loop does


def staleness(config):
    """Of each sublayer, by how many it reads the stream stale."""
    return [stale for _, stale in list_sublayers(config, [None] * config.n_layers)]


def queued(sublayers, all_reduce, stale):
    """Seconds, if each sublayer waits for all sums but of the last so many before it; one at a time is on its way."""
    now = 0.0
    there = [0.0]
    for i, seconds in enumerate(sublayers):
        now = max(now, there[max(0, i - stale[i])]) + seconds
        there.append(max(there[-1], now) + all_reduce)
    return there[-1]


def wired_id(changes):
    return "-".join(str(v).replace(" ", "") for v in changes.values())
