"""Models of integers and of e4m3, and what their numbers mean, written independently in float64."""

import functools
import types

import torch
from configs import BASE, GEMMA, GLM, OLMO, change
from helpers import (
    counted_kernels,
    last_logits,
    randn,
    random_model,
    rank_logits,
    seeded,
    shard,
    unequal_rows,
    write_model,
)
from reference import Reference
from running import run_main, run_ranks
from safetensors.torch import load_file

import quantize
from ladder.checkpoints import checkpoint, writing
from ladder.kernels import compiling, quant_kernels, registry

# groups of 32 make few parts of the MLP, so that ranks get unequal ones
UNQUANTIZED = change(BASE, n_heads=8, n_kv_heads=4, head_dim=16, dim=64, intermediate_size=160)
INT8 = change(UNQUANTIZED, quant="int8")
INT4 = change(UNQUANTIZED, quant="int4", group_size=32)
KEPT = change(INT4, intermediate_size=172, not_quantized=("output", "w2"))  # 172 is no multiple of 32
# with 3 heads of 16 columns a rank, groups of wo straddle the ranks' edges
BIASED_INT4 = change(INT4, n_kv_heads=8, qkv_bias=True, wo_bias=True, mlp_bias=True, heads={"qk_norm": True})
TIED = change(INT4, tie_embeddings=True)
MIXED = change(TIED, int8=("tok_embeddings", "w1"))
GROUPS = change(INT8, group_size=16, qkv_bias=True, int8=("w1:32", "layers.1.feed_forward.w2:32"))
SEVERAL = change(TIED, int8=("tok_embeddings:32", "w3", "layers.1.attention.wqkv:16", "layers.2.feed_forward.w2:16"))
TABLE = change(INT8, tie_embeddings=True, not_quantized=("tok_embeddings",))
NARROW = change(INT4, intermediate_size=64)  # two groups, for up to four ranks
GEMMA_INT8, OLMO_INT4 = (change(c, **{**family, "rope_scaling": None}) for c, family in ((INT8, GEMMA), (INT4, OLMO)))
GLM_INT8 = change(INT8, **{**GLM, "rope_scaling": None})  # which a cache could not hash
QUANTIZED = {"gemma": GEMMA_INT8, "olmo": OLMO_INT4, "glm": GLM_INT8}
QUANTIZED |= {"int8": INT8, "int4": INT4, "kept": KEPT, "biased": BIASED_INT4, "mixed": MIXED, "tied": TIED}
QUANTIZED |= {"table": TABLE, "narrow": NARROW, "groups": GROUPS, "several": SEVERAL}


def exact_weights(config):
    """What a model of floats has for the config."""
    plain = change(config, quant=None, group_size=None, not_quantized=(), int8=())
    return types.SimpleNamespace(read=random_model(plain).state_dict().get)


def quantized_state(config):
    """The state dict of random_model, quantized; that of a standard model, for any wiring."""
    return _quantized_state(change(config, wiring="standard"))


@functools.cache
def _quantized_state(config):
    read = quantize.quantized(exact_weights(config), config)
    state = {name: read(name) for name in writing.shapes(config)}
    for name in [name for name in state if name.endswith(".zeros")]:  # those of 8 bits would be 0
        scales, q = (state[name.replace("zeros", part)] for part in ("scales", "weight"))
        state[name] = state[name] if q.dtype == torch.uint8 else 3 * scales
    return state


def in_float64(weight, scales, zeros=None):
    """What integers stand for, written independently: number by number of the definition."""
    if weight.dtype == torch.uint8:  # the even column in the lower half
        weight = torch.stack([weight[..., k // 2] >> 4 * (k % 2) & 15 for k in range(2 * weight.shape[-1])], -1)
    group = [k * scales.shape[-1] // weight.shape[-1] for k in range(weight.shape[-1])]
    w = weight.double() * scales.double()[..., group]
    return w if zeros is None else w + zeros.double()[..., group]


def dequantized_state(state):
    """What quantized tensors stand for in float64."""
    result = {}
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        if last == "bias" or f"{path}.scales" not in state:
            result[name] = tensor.double()
        elif last == "weight":
            result[name] = in_float64(tensor, state[f"{path}.scales"], state.get(f"{path}.zeros"))
    return result


def e4m3_value(bits):
    """What the bits of e4m3 stand for, by the definition: 1 of sign, 4 of exponent (bias 7), 3 of mantissa."""
    sign = -1 if bits & 128 else 1
    exponent = bits >> 3 & 15
    mantissa = bits & 7
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7))


E4M3_BITS = [i for i in range(256) if i & 127 != 127]  # without NaN
E4M3_VALUES = torch.tensor(sorted(map(e4m3_value, E4M3_BITS)), dtype=torch.float64)


def random_integers(N, K, size, seed=0):
    """weight, scales, zeros with the extremes of their range among them. Some sizes have scales in float16."""
    generator = seeded(N + K + seed)
    if size is None:
        weight = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
        weight[0] = 127
        return weight, (randn(N, 1).abs() + 0.1).bfloat16(), None
    weight = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    weight[0] = 255
    dtype = torch.float16 if size in (16, 64) else torch.bfloat16
    return weight, (randn(N, K // size).abs() + 0.1).to(dtype), randn(N, K // size).to(dtype)


@functools.cache
def expected_logits(config):
    """What a float64 model of the numbers makes of unequal_rows: (4, V) of each row."""
    exact = dequantized_state(quantized_state(config))
    if config.tie_embeddings:
        exact["output.weight"] = exact["tok_embeddings.weight"]
    reference = Reference(config, exact)
    rows = zip(*unequal_rows(config), strict=True)
    return [torch.from_numpy(reference.logits(row[:length]))[-4:] for row, length in rows]


def check_quantized_model(config, dtype, tolerance, fast=False, compile=False):
    """Check that the logits of a quantized model are those that its numbers say; return it and its kernels' counts.

    fast: with the kernels of skinny_gemm.cpp.
    """
    net = shard(config, None, dtype, quantized_state(config))
    registry.use(quant_kernels.KERNELS["cpu"])
    for _ in range(2 * fast):  # as for two Runners of one model: the second changes nothing
        compiling.use_decode_kernels(net)
    with counted_kernels() as counts:
        logits = last_logits(net, *unequal_rows(config), compile=compile)
    for row, expected in zip(logits, expected_logits(config), strict=True):
        assert (row - expected).abs().max() < tolerance * expected.abs().max()
    return net, counts


def check_quantized_twin(config, exact, mode, ranks, tmp_path):
    """Quantize the tensors `exact`; the logits of ranks are those of the integers as floats. Returns their names."""
    write_model(tmp_path / "float", config, exact)
    options = ["--group-size", "32"] if mode == "int4" else []
    run_main(quantize, "--checkpoint", tmp_path / "float", "--mode", mode, *options, "--out", tmp_path / mode)
    own = checkpoint.read_config(tmp_path / mode)
    state = load_file(tmp_path / mode / "model.safetensors")
    expected = rank_logits(None, config, dequantized_state(state))
    for logits in run_ranks(ranks, rank_logits, own, state):
        assert (logits - expected).abs().max() < 2e-3
    return state.keys()
