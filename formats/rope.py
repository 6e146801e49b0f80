"""The frequencies of rotary embeddings, as a config scales them."""

import math

import torch

ROPE_KEYS = {  # those of Config.rope_scaling, by Hugging Face's name
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    "yarn": ["factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"],
    "longrope": ["short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"],
}


def rope_frequencies(config):
    """Return the radians per position of each pair of dimensions, (2, R/2) float32, R of a head's dimensions turning.

    The second row is that of layers with a window, if they have another base, or that of long texts in longrope, which
    has a list of factors for texts within the original context and one for longer ones.
    Linear scaling stretches every wavelength by `factor`. Llama 3.1 leaves those alone that are short against the
    original context and blends a band in between; so does YaRN (arXiv 2309.00071), over whole pairs of dimensions.
    """
    R, theta, s = config.rotary_dim or config.head_dim, config.rope_theta, config.rope_scaling or {}
    pairs = torch.arange(0, R, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / theta ** (pairs / R)
    keep = torch.zeros(1, device="cpu")  # the share of each frequency that is not stretched
    if "long_factor" in s:
        return frequencies / torch.tensor([s["short_factor"], s["long_factor"]], device="cpu")
    if "low_freq_factor" in s:
        turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    elif "beta_fast" in s:
        turns = s["original_max_position_embeddings"] / (2 * math.pi)  # of the first pair
        first, last = (math.log(turns / s[beta], theta) for beta in ("beta_fast", "beta_slow"))
        first, last = max(math.floor(first * R / 2), 0), min(math.ceil(last * R / 2), R - 1)
        keep = 1 - (pairs / 2 - first) / ((last - first) or 0.001)
    keep = keep.clamp(0, 1)
    scaled = frequencies * (keep + (1 - keep) / s.get("factor", 1.0))
    in_windows = 1.0 / config.window_rope_theta ** (pairs / R) if config.window_rope_theta else scaled
    return torch.stack((scaled, in_windows))
