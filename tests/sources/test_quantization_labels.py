"""Changes one label of a quantized matrix at a time: each result is a naive dequantizer's, or is refused in one line.

A label is a value of the quantization_config, a tensor's dtype or shape, or which tensors there are. The dequantizers
are written element by element in float64, from the descriptions of the formats.
"""

import copy
import math

import pytest
import torch
from cases import refused, slow_case
from quantized_folders import int32

from ladder.errors import InputError
from ladder.sources.matrices import Fp8, Integers, to_floats
from ladder.sources.quantized_formats import METHODS, dequantizing

N = 16
K = 192
GROUP = 64
NAME = "model.layers.0.mlp.up_proj"


class Source:
    """The tensors of a folder, in memory."""

    def __init__(self, tensors):
        self.tensors = {f"{NAME}.{part}": tensor for part, tensor in tensors.items()}

    def names(self):
        return list(self.tensors)

    def read(self, name):
        return self.tensors[name]


def product(tensors, settings):
    """Return the matrix as the converter has it, in float64. Raises InputError."""
    source = dequantizing(Source(tensors), {"quantization_config": settings}, "config.json")
    if extra := [name for name in source.names() if not name.endswith(".weight")]:
        raise InputError(f"{extra[0]} is no part of such a model")  # as the converter says
    w = source.read(f"{NAME}.weight")
    if isinstance(w, Integers | Fp8) and (w.weight.shape != (N, K) or len(w.scales) != N):
        raise InputError("another shape than the config's")  # as the converter says, too
    w = to_floats(w)
    if w.shape != (N, K) or not w.isfinite().all():
        raise InputError("another shape than the config's, or NaN or infinite values")
    return w.double()


# ---- The naive dequantizers: (tensors, settings) -> the number at (n, k); any error means "refused" -----


def scale(tensor, *at):
    """A scale; a byte is the exponent of a power of two."""
    value = tensor[at]
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        byte = value.view(torch.uint8).item()
        return math.nan if byte == 255 else 2.0 ** (byte - 127)
    assert tensor.is_floating_point() and tensor.itemsize > 1
    return value.double().item()


def bits_at(word, bits, i):
    return (word.item() % 2**32) >> bits * i & 2**bits - 1


def of_words(tensor, size, bits, dim):
    assert tensor.dtype == torch.int32 and bits in (4, 8) and tensor.shape[dim] == -(-size * bits // 32)


def size_of_group(group_size, count):
    size = K if group_size in (-1, None) else group_size
    assert -(-K // size) == count
    return size


def naive_gptq(t, c):
    s = t["scales"]
    version = c.get("checkpoint_format", "gptq")
    assert version in ("gptq", "gptq_v2") and s.shape[1] == N and s.is_floating_point() and s.itemsize > 1
    c = c | c.get("dynamic", {}).get(r"+:.*up_proj", {})
    bits = c["bits"]
    size = size_of_group(c.get("group_size"), len(s))
    of_words(t["qweight"], K, bits, 0)
    of_words(t["qzeros"], N, bits, 1)
    assert "g_idx" in t or not c.get("desc_act")
    each = 32 // bits

    def value(n, k):
        g = t["g_idx"][k].item() if "g_idx" in t else k // size
        q = bits_at(t["qweight"][k // each, n], bits, k % each)
        z = bits_at(t["qzeros"][g, n // each], bits, n % each)
        z = 2 ** (bits - 1) if c.get("sym") else (z + 1) % 2**bits if version == "gptq" else z
        return scale(s, g, n) * (q - z)

    return value


def naive_awq(t, c):
    s, order = t["scales"], (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is number order[i]
    assert s.is_floating_point() and s.itemsize > 1
    assert c["version"] == "gemm" and c["bits"] == 4 and s.shape[1] == N and len(t["qweight"]) == K
    size = size_of_group(c["group_size"], len(s))
    for name in "qweight", "qzeros":
        of_words(t[name], N, 4, 1)

    def value(n, k):
        nibble = order.index(n % 8)
        g = k // size
        q = bits_at(t["qweight"][k, n // 8], 4, nibble)
        z = bits_at(t["qzeros"][g, n // 8], 4, nibble)
        assert c["zero_point"] or z == 8
        return scale(s, g, n) * (q - z)

    return value


def naive_packed(t, c):
    group = c["config_groups"]["group_0"]
    w = group["weights"]
    s = t["weight_scale"]
    bits = group["weights"]["num_bits"]
    form = group.get("format") or c["format"]
    assert s.is_floating_point() and s.itemsize > 1
    assert form == "pack-quantized" and w["type"] == "int" and t["weight_shape"].tolist() == [N, K]
    of_words(t["weight_packed"], K, bits, 1)
    size = size_of_group(w["group_size"] if w["strategy"] == "group" else -1, s.shape[1])
    each = 32 // bits

    def value(n, k):
        z = 2 ** (bits - 1)
        g = k // size
        if "weight_zero_point" in t:
            of_words(t["weight_zero_point"], N, bits, 0)
            z = bits_at(t["weight_zero_point"][n // each, g], bits, n % each)
            assert not w["symmetric"] or z == 2 ** (bits - 1)
        else:
            assert w["symmetric"]
        return scale(s, n, g) * (bits_at(t["weight_packed"][n, k // each], bits, k % each) - z)

    return value


def naive_scaled(t, c):
    groups = [group["weights"] for group in c.get("config_groups", {}).values()]
    name = next(name for name in ("weight_scale_inv", "weight_scale") if name in t)
    w = t["weight"]
    s = t[name]
    blocks = [c.get("weight_block_size")] + [group.get("block_structure") for group in groups]
    blocks += [[1, group["group_size"]] for group in groups if group.get("group_size")]
    blocks = [block for block in blocks if block] + [[N, K], [1, K]]
    s = s if s.dim() == 2 else s.reshape(-1, 1)
    sizes = {(min(a, N), min(b, K)) for a, b in blocks if (-(-N // a), -(-K // b)) == tuple(s.shape)}
    [(a, b)] = sizes
    z = t.get("weight_zero_point")
    assert z is None or z.shape == s.shape
    assert (
        w.itemsize == 1
        and w.dtype != torch.uint8
        and (not groups or ("int" if w.dtype == torch.int8 else "float") in [group.get("type") for group in groups])
    )
    assert z is not None or all(group.get("symmetric", True) for group in groups)
    points = [[0.0] * s.shape[1]] * len(s) if z is None else z.double().tolist()
    values = w.double().tolist()
    return lambda n, k: (values[n][k] - points[n // a][k // b]) * scale(s, n // a, k // b)


def naive_mxfp4(t, c):
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert t["blocks"].dtype == torch.uint8 and t["scales"].dtype == torch.uint8
    assert t["blocks"].shape == (N, K // 32, 16) and t["scales"].shape == (N, K // 32)

    def value(n, k):
        number = bits_at(t["blocks"][n, k // 32, k % 32 // 2], 4, k % 2)
        return (-1.0 if number > 7 else 1.0) * table[number % 8] * scale(t["scales"], n, k // 32)

    return value


# ---- The matrices, and what may be changed ----------------------------------------------------------------


def random_words(*shape, bits=None):
    return torch.randint(-(2**31), 2**31, shape).int() if bits is None else int32(torch.full(shape, bits).numpy())


def scales(*shape):
    return (torch.rand(shape) + 0.5).mul(0.01).half()


def a_gptq(bits=4, group=GROUP, order=False, **settings):
    index = torch.arange(K) // group
    t = {"qweight": random_words(K * bits // 32, N), "qzeros": random_words(-(-K // group), N * bits // 32)}
    t |= {"scales": scales(-(-K // group), N), "g_idx": (index[torch.randperm(K)] if order else index).int()}
    return t, {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": False, "desc_act": order, **settings}


def a_symmetric_gptq(zero, **settings):
    t, c = a_gptq(**{"sym": True, **settings})
    return t | {"qzeros": random_words(K // GROUP, N // 8, bits=zero)}, c


def an_awq():
    t = {
        "qweight": random_words(K, N // 8),
        "qzeros": random_words(K // GROUP, N // 8),
        "scales": scales(K // GROUP, N),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return t, settings


def compressed(form, **weights):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def a_packed(bits=4, symmetric=True):
    t = {"weight_packed": random_words(N, K * bits // 32), "weight_scale": scales(N, K // GROUP)}
    t |= {"weight_shape": torch.tensor([N, K])}
    if not symmetric:
        t["weight_zero_point"] = random_words(N * bits // 32, K // GROUP)
    labels = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return t, compressed("pack-quantized", **labels)


def e4m3():
    return torch.randn(N, K).to(torch.float8_e4m3fn)


def rows_of_fp8():
    t = {"weight": e4m3(), "weight_scale": scales(N, 1).float(), "input_scale": torch.ones(1)}
    return t, compressed("float-quantized")


def one_scale():
    return {"weight": e4m3(), "weight_scale": scales(1)}, {"quant_method": "fp8", "activation_scheme": "static"}


def blocks_of_fp8(**settings):
    t = {"weight": e4m3(), "weight_scale_inv": scales(2, 3).float()}
    return t, {"quant_method": "fp8", "weight_block_size": [8, 64], "fmt": "e4m3", **settings}


def mxfp8():
    t = {"weight": e4m3(), "weight_scale": torch.randint(115, 125, (N, K // 32)).to(torch.uint8)}
    return t, compressed("mxfp8-quantized", strategy="group", group_size=32, scale_dtype="torch.uint8")


def two_schemes():
    t, c = blocks_of_fp8()
    groups = {"a": {"weights": {"type": "float", "block_structure": [8, 64]}}, "b": {"weights": {"type": "float"}}}
    return {"weight": t["weight"], "weight_scale": t["weight_scale_inv"]}, {
        **compressed("float-quantized"), "config_groups": groups,
    }  # fmt: skip


def int8_rows(symmetric=True):
    t = {"weight": torch.randint(-128, 128, (N, K)).to(torch.int8), "weight_scale": scales(N, 1)}
    if not symmetric:
        t["weight_zero_point"] = torch.randint(-9, 9, (N, 1)).to(torch.int8)
    return t, compressed("int-quantized", type="int", symmetric=symmetric)


def mxfp4():
    t = {"blocks": torch.randint(256, (N, K // 32, 16)).to(torch.uint8)}
    return t | {"scales": torch.randint(115, 125, (N, K // 32)).to(torch.uint8)}, {"quant_method": "mxfp4"}


SYMMETRIC = {r"-:.*gate_proj": {}, r"+:.*up_proj": {"sym": True}, r"+:.*": {"sym": False}}  # the first match holds
MATRICES = {  # name: (what makes the tensors and settings, the naive dequantizer)
    "GPTQ 1": (a_gptq, naive_gptq),
    "GPTQ 2": (lambda: a_gptq(checkpoint_format="gptq_v2"), naive_gptq),
    "GPTQ with act-order": (lambda: a_gptq(order=True), naive_gptq),
    "GPTQ whose last group is smaller": (lambda: a_gptq(group=128), naive_gptq),
    "GPTQ with other bits in some modules": (
        lambda: a_gptq(bits=8, dynamic={r"+:.*up_proj": {"bits": 8}}), naive_gptq
    ),
    "symmetric GPTQ": (lambda: a_symmetric_gptq(0x77777777), naive_gptq),
    "symmetric GPTQ 2 that says 1": (lambda: a_symmetric_gptq(0x88888888), naive_gptq),
    "symmetric GPTQ 1 that says 2": (lambda: a_symmetric_gptq(0x77777777, checkpoint_format="gptq_v2"), naive_gptq),
    "symmetric GPTQ in some modules": (
        lambda: a_symmetric_gptq(0x77777777, checkpoint_format="gptq_v2", sym=False, dynamic=SYMMETRIC), naive_gptq
    ),
    "AWQ": (an_awq, naive_awq),
    "pack-quantized": (a_packed, naive_packed),
    "pack-quantized, asymmetric": (lambda: a_packed(symmetric=False), naive_packed),
    "pack-quantized, 8 bits": (lambda: a_packed(8), naive_packed),
    "pack-quantized, 8 bits, asymmetric": (lambda: a_packed(8, symmetric=False), naive_packed),
    "FP8 in rows": (rows_of_fp8, naive_scaled),
    "FP8 with one scale": (one_scale, naive_scaled),
    "FP8 in blocks": (blocks_of_fp8, naive_scaled),
    "MXFP8": (mxfp8, naive_scaled),
    "FP8 in blocks here and in rows there": (two_schemes, naive_scaled),
    "MXFP4": (mxfp4, naive_mxfp4),
    "int8": (int8_rows, naive_scaled),
    "asymmetric int8": (lambda: int8_rows(False), naive_scaled),
}  # fmt: skip
VARIANTS = (  # of a format whose tensors are changed by another name
    "GPTQ 2", "GPTQ whose last group is smaller", "symmetric GPTQ", "symmetric GPTQ 2 that says 1",
    "symmetric GPTQ 1 that says 2", "symmetric GPTQ in some modules", "pack-quantized, 8 bits",
    "pack-quantized, 8 bits, asymmetric", "FP8 with one scale",
    "FP8 in blocks here and in rows there",
)  # fmt: skip
VALUES = {  # {a label of a quantization_config: what it may become}
    "quant_method": METHODS, "bits": (2, 3, 4, 8), "num_bits": (2, 4, 8), "group_size": (-1, 32, 48, 64, 128, 192),
    "sym": (True, False), "symmetric": (True, False), "desc_act": (True, False), "zero_point": (True, False),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin"), "version": ("gemm", "gemv"), "type": ("int", "float"),
    "format": ("pack-quantized", "float-quantized", "int-quantized", "nvfp4-pack-quantized", "marlin-24"),
    "strategy": ("channel", "group", "tensor"), "weight_block_size": (None, [8, 64], [64, 8], [4, 64], [16, 192]),
    "block_structure": (None, [16, 64], [8, 96]), "fmt": ("e4m3", "e5m2"), "scale_fmt": ("ue8m0", "float"),
    "scale_dtype": ("torch.uint8", "torch.float32"), "actorder": ("group", "static", None),
}  # fmt: skip
DTYPES = torch.float32, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e5m2
DTYPES = *DTYPES, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e4m3fnuz
ADDED = {  # tensors that a matrix may have besides
    "weight_scale": scales(N, 1), "weight_scale_inv": scales(N, 1), "weight_scale_2": torch.ones(1) * 0.5,
    "weight_global_scale": torch.ones(1) * 0.5, "g_idx": torch.arange(K).flip(0).int() // GROUP,
    "weight_zero_point": torch.ones(N, 1).to(torch.int8), "input_scale": torch.ones(1),
}  # fmt: skip


def settings_changes(values, path=()):
    """Yield (the path of a label, its new value) of all places in a config."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from settings_changes(value, (*path, key))
    for key, choices in VALUES.items():
        if key in values or (key in ("actorder", "block_structure") and path[-1:] == ("weights",)):
            yield from (((*path, key), new) for new in choices if new != values.get(key))


def changes(tensors, settings):
    """Yield (words, tensors, settings) of each change, the first of which is none."""
    yield "nothing", tensors, settings
    for path, new in settings_changes(settings):
        changed = copy.deepcopy(settings)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = new
        yield f"{'.'.join(path)} {new}", tensors, changed
    for name, t in tensors.items():
        yield f"no {name}", {key: value for key, value in tensors.items() if key != name}, settings
        for dtype in DTYPES:
            if dtype != t.dtype:
                same_size = dtype.itemsize == t.dtype.itemsize
                yield f"{name} in {dtype}", tensors | {name: t.view(dtype) if same_size else t.to(dtype)}, settings
        if t.dim() == 2:
            for words, other in ("turned", t.T), ("halved", t[: len(t) // 2]), ("narrowed", t[:, : t.shape[1] // 2]):
                yield f"{name} {words}", tensors | {name: other.contiguous()}, settings
    for name, t in ADDED.items():
        if name not in tensors:
            yield f"with {name}", tensors | {name: t}, settings


def naive(dequantizer, tensors, settings):
    """Return what a naive dequantizer makes of the tensors, or None if the labels contradict one another."""
    try:
        value = dequantizer(tensors, settings)
        return torch.tensor([[value(n, k) for k in range(K)] for n in range(N)], dtype=torch.float64)
    except (ArithmeticError, AssertionError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError):
        return None


@pytest.mark.parametrize("name, tensors_too", [
    *((name, name not in VARIANTS) for name in MATRICES),
    *(slow_case(name, True) for name in VARIANTS),
])  # fmt: skip
def test_a_changed_label_changes_the_matrix_or_is_refused(name, tensors_too):
    make, dequantizer = MATRICES[name]
    torch.manual_seed(0)
    computed = []
    refused = []
    wrong = []
    all_changes = list(changes(*make()))
    _, _, unchanged = all_changes[0]
    for words, tensors, settings in all_changes:
        if not tensors_too and settings is unchanged and words != "nothing":
            continue
        try:
            ours = product(tensors, settings)
        except InputError as e:
            refused.append(words)
            assert "\n" not in str(e)
            continue
        right = naive(dequantizer, tensors, settings)
        fits = (
            right is not None and ours.shape == right.shape and (ours - right).abs().max() <= 4e-6 * right.abs().max()
        )
        (computed if fits else wrong).append(words)
    assert not wrong and "nothing" in computed and len(computed) > 1 and len(refused) > 10 * tensors_too


def test_scales_of_a_cache_are_left_out_and_other_names_are_not():
    tensors, settings = one_scale()
    source = Source(tensors)
    right = naive(naive_scaled, tensors, settings)
    for name in "k_scale", "v_scale", "q_scale", "kv_scale", "attn.k_scale", "k_zero_point":
        source.tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
    source.tensors["model.layers.0.self_attn.x_scale"] = torch.ones(1)
    read = dequantizing(source, {"quantization_config": settings}, "config.json")
    assert read.names() == ["model.layers.0.self_attn.x_scale", f"{NAME}.weight"]
    w, scales = read.read(f"{NAME}.weight")
    w = w.double() * scales.double()
    assert torch.equal(w, right)


def test_a_quantized_matrix_of_which_dynamic_says_that_it_is_not_is_refused():
    tensors, settings = a_gptq(dynamic={r"-:.*up_proj": {}})
    refused("up_proj: it is quantized, but quantization_config says", product, tensors, settings)


@pytest.mark.parametrize("make, path", [
    (a_gptq, ()), (lambda: a_gptq(dynamic={"+:.*down_proj": {"bits": 8}}), ("dynamic", "+:.*down_proj")), (mxfp4, ()),
    (a_packed, ("config_groups", "group_0")), (a_packed, ("config_groups", "group_0", "weights")),
])  # fmt: skip
def test_an_unknown_label_is_refused_by_its_name(make, path):
    tensors, settings = make()
    place = settings
    for key in path:
        place = place[key]
    place |= {"rotation": None, "scale_factor": False}
    product(tensors, settings)
    place["rotation"] = "hadamard"
    refused("quantization_config: rotation 'hadamard' is unknown: drop it if", product, tensors, settings)
