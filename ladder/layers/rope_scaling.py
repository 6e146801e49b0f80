"""Rotary embeddings for a context that was extended after training: Config.rope_scaling."""

import math
import reprlib

import torch

ORIGINAL_CONTEXT = "original_max_position_embeddings"  # the context before it was extended, in tokens
ROPE_KEYS = {  # {Hugging Face's rope_type: its keys}
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", ORIGINAL_CONTEXT],
    "yarn": ["factor", "beta_fast", "beta_slow", "attention_factor", ORIGINAL_CONTEXT],
    "longrope": ["short_factor", "long_factor", "attention_factor", ORIGINAL_CONTEXT],
}


def scaled(frequencies, config):
    """Return scaled frequencies (2, R/2). With longrope, the second row is for texts beyond the original context.

    Linear scaling makes every wavelength `factor` times longer. Llama 3.1 keeps wavelengths that are short against the
    original context, and blends over a band between short and long ones. YaRN (arXiv 2309.00071) does the same, but its
    band is counted in pairs of dimensions, and made of whole pairs unless "truncate" is false.
    """
    s = config.rope_scaling
    R = 2 * frequencies.shape[-1]
    keep = torch.zeros(1, device="cpu")  # the share of each frequency that is not stretched
    if "long_factor" in s:
        return frequencies / torch.tensor([s["short_factor"], s["long_factor"]], device="cpu")
    if "low_freq_factor" in s:
        turns = s[ORIGINAL_CONTEXT] * frequencies / (2 * math.pi)  # of each pair within the original context
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    elif "beta_fast" in s:
        turns = s[ORIGINAL_CONTEXT] / (2 * math.pi)  # of the first pair
        first, last = (math.log(turns / s[beta], config.rope_theta) for beta in ("beta_fast", "beta_slow"))
        first *= R / 2
        last *= R / 2
        if s.get("truncate", True):
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, R - 1)
        keep = 1 - (torch.arange(R // 2, device="cpu") - first) / ((last - first) or 0.001)
    keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / s["factor"])


def error(config):
    """Return what is wrong with a Config's rope_scaling, or None."""
    s = config.rope_scaling
    pairs = (config.rotary_dim or config.head_dim) // 2
    if s.get("truncate", False) is not False or "truncate" in s and "beta_fast" not in s:
        return f"rope_scaling has truncate {s['truncate']!r}, which only yarn has, as false"
    s = {key: value for key, value in s.items() if key != "truncate"}
    if s.keys() not in [set(keys) for keys in ROPE_KEYS.values()]:
        forms = "; or ".join(", ".join(keys) for keys in ROPE_KEYS.values())
        return f"rope_scaling has the keys {reprlib.repr([*s])}, not {forms}"
    if s.get("high_freq_factor", 2) <= s.get("low_freq_factor", 1):
        return f"high_freq_factor {s['high_freq_factor']} must be above low_freq_factor {s['low_freq_factor']}"
    for name, value in s.items():
        is_list = name in ("short_factor", "long_factor")
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, list) != is_list or not all(type(n) in (int, float) and 0 < n <= 1e30 for n in numbers):
            return f"rope_scaling is {reprlib.repr(s)}, but its values are numbers above 0"
        if is_list and len(numbers) != pairs:
            return f"{name} has {len(numbers)} numbers, not {pairs}, one for each pair of dimensions"
    return None
