"""Hugging Face folders of quantized matrices: each format laid out by hand, and what its numbers mean in float64."""

import math

import numpy as np
import torch
from file_edits import write_json
from safetensors.torch import save_file


def in_groups(w, size, symmetric=False, seed=0):
    """Integers q (N, K), scales (N, G) in float16, and zero points (N, G): W is about s (q - z)."""
    w = w.double().numpy().reshape(len(w), -1, size)
    low = np.minimum(w.min(-1), 0)
    high = np.maximum(w.max(-1), 0)
    s = np.abs(w).max(-1) / 7.5 if symmetric else (high - low) / 15
    s = np.maximum(s, 1e-5).astype(np.float16)
    z = np.full(s.shape, 8) if symmetric else np.round(-low / s).clip(1, 15).astype(int)
    if symmetric:  # legal, and some tools write them
        s[::3] *= -1
    return np.round(w / s[..., None] + z[..., None]).clip(0, 15).astype(int).reshape(len(w), -1), s, z


def exact(q, s, z, index=None):
    """W in float64: s (q - z), each column in the group that index names."""
    index = np.arange(q.shape[1]) // (q.shape[1] // s.shape[1]) if index is None else index
    return torch.from_numpy(s.astype(float)[:, index] * (q - z[:, index]))


def int32(words):
    return torch.from_numpy((words % 2**32).astype(np.uint32).view(np.int32).copy())


def packed(values, places):
    """Whole numbers (rows, M) -> words (rows, M / n) of n parts, of which part i is number places[i] of n."""
    n = len(places)
    groups = values.reshape(len(values), -1, n).astype(np.int64)
    return int32(sum(groups[:, :, place] << 32 // n * i for i, place in enumerate(places)))


def awq(w, seed):
    q, s, z = in_groups(w, 64, seed=seed)
    order = 0, 2, 4, 6, 1, 3, 5, 7
    parts = {"qweight": packed(q.T, order), "qzeros": packed(z.T, order), "scales": torch.from_numpy(s.T.copy())}
    return parts, exact(q, s, z), q


def gptq(w, seed, version=1, act_order=False):
    q, s, z = in_groups(w, 128, seed=seed)
    index = np.arange(q.shape[1]) // 128
    if act_order:
        np.random.default_rng(seed).shuffle(index)
    parts = {"qweight": packed(q, range(8)).T.contiguous(), "qzeros": packed((z - (version == 1)).T, range(8))}
    parts |= {"scales": torch.from_numpy(s.T.copy()), "g_idx": torch.from_numpy(index).int()}
    return parts, exact(q, s, z, index), q


def gptq_in_8_bits(w, seed, columns=None, symmetric=True):
    """In groups of so many columns, or with a scale for each row; not symmetric: zero points from 100 on."""
    N, K = w.shape
    groups = w.view(N, -1, columns or K).double().numpy()
    s = (np.abs(groups).max(-1) / 127).astype(np.float16)
    z = np.full(s.shape, 128) if symmetric else 100 + np.arange(s.size).reshape(s.shape) % 56
    q = np.round(groups / s[..., None] + z[..., None]).clip(1, 255).astype(int).reshape(N, K)

    parts = {"qweight": packed(q, range(4)).T.contiguous(), "qzeros": packed(z.T - 1, range(4))}
    parts |= {"scales": torch.from_numpy(s.T.copy())}
    return parts, exact(q, s, z), q - 128


def pack_quantized(w, seed, symmetric=True, act_order=False, size=32):
    q, s, z = in_groups(w, size, symmetric, seed)
    parts = {"weight_packed": packed(q, range(8)), "weight_scale": torch.from_numpy(s)}
    parts |= {"weight_shape": torch.tensor(w.shape)}
    if not symmetric:
        parts["weight_zero_point"] = packed(z.T, range(8)).T.contiguous()
    if act_order:
        index = np.random.default_rng(seed).permutation(np.arange(w.shape[1]) // 32)
        parts["weight_g_idx"] = torch.from_numpy(index).int()
        return parts, exact(q, s, z, index), q
    return parts, exact(q, s, z), q


def fp8(w, seed, rows=1, columns=None, name="weight_scale", shape=None, scale_of=lambda least: least):
    """In blocks of so many rows and columns; the last ones may be smaller. scale_of(the least scale that fits)."""
    N, K = w.shape
    rows = rows or N
    columns = columns or K
    scales = torch.empty(math.ceil(N / rows), math.ceil(K / columns))
    stored = torch.empty(N, K, dtype=torch.float8_e4m3fn)
    result = torch.empty(N, K, dtype=torch.float64)
    for i in range(len(scales)):
        for j in range(len(scales[0])):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = scale_of(w[at].abs().max() / 448)
            stored[at] = (w[at] / scales[i, j]).to(stored.dtype)
            result[at] = stored[at].double() * scales[i, j].double()
    extra = {} if shape is None else {"input_scale": torch.ones(1)}
    return {"weight": stored, name: scales.view(scales.shape if shape is None else shape), **extra}, result, None


def block_fp8(w, seed):
    return fp8(w, seed, 128, 128, "weight_scale_inv")


COMPRESSED = {"quant_method": "compressed-tensors"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMATS = {  # name: (a format, quantization_config, group size of int4 or "int8 in" one of int8, or "fp8")
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 64}, 64),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4}, 128),
    "GPTQ 2": (lambda w, s: gptq(w, s, 2), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, 128),
    "GPTQ, act-order": (lambda w, s: gptq(w, s, act_order=True), {"quant_method": "gptq", "desc_act": True}, None),
    "GPTQ, 8 bits": (gptq_in_8_bits, {"quant_method": "gptq", "bits": 8}, "int8 in 128"),  # rows become several groups
    "GPTQ, 8 bits, groups": (
        lambda w, s: gptq_in_8_bits(w, s, 32, False), {"quant_method": "gptq", "bits": 8}, "int8 in 32",
    ),
    "pack-quantized": (pack_quantized, COMPRESSED, 32),
    "pack-quantized, asymmetric": (lambda w, i: pack_quantized(w, i, False), COMPRESSED, 32),
    "pack-quantized, rows": (lambda w, i: pack_quantized(w, i, size=w.shape[1]), COMPRESSED, 128),  # become several
    "pack-quantized, act-order": (lambda w, i: pack_quantized(w, i, act_order=True), COMPRESSED, None),
    "FP8, blocks": (block_fp8, BLOCKS, "fp8 anew"),
    "FP8, rows": (fp8, {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {}}}}, "fp8"),
    "FP8, tensors": (lambda w, s: fp8(w, s, None, shape=()), {"quant_method": "fp8"}, "fp8"),
}  # fmt: skip


def write_quantized(folder, theirs, make, settings, chosen=lambda name: name.endswith("_proj.weight")):
    """Write a model as a Hugging Face folder whose chosen tensors are quantized, and dequantize them in the model.

    Returns {name of a matrix: q}.
    """
    folder.mkdir()
    values = theirs.config.to_dict()
    state = {}
    integers = {}
    with torch.no_grad():
        for seed, (name, w) in enumerate(theirs.state_dict().items()):
            if chosen(name):
                parts, result, q = make(w, seed)
                integers[name.removesuffix(".weight")] = q
                separator = "." if name.endswith(".weight") else "_"
                state |= {name.removesuffix(".weight") + separator + part: t.clone() for part, t in parts.items()}
                w.copy_(result)
            elif name != "lm_head.weight" or not theirs.config.tie_word_embeddings:
                state[name] = w.clone()
    save_file(state, folder / "model.safetensors")
    write_json(folder / "config.json", {**values, "quantization_config": settings})
    return integers


def mxfp4(w, seed):
    """Draw an MXFP4 matrix of w's shape (E, N, K): its parts, what they mean, and no integers."""
    draw = np.random.default_rng(seed)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    q = draw.integers(0, 16, w.shape)
    e = draw.integers(120, 124, (*w.shape[:-1], w.shape[-1] // 32))
    pairs = q.reshape(*e.shape, 16, 2)
    parts = {"blocks": pairs[..., 0] | pairs[..., 1] << 4, "scales": e}
    result = torch.from_numpy(np.array(table)[q] * np.repeat(2.0 ** (e - 127), 32, -1))
    return {part: torch.from_numpy(value.astype(np.uint8)) for part, value in parts.items()}, result, None
