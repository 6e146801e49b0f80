"""Reads quantized matrices: those of AWQ, GPTQ, compressed-tensors, FP8 and MXFP4; gguf_file.py reads more.

N outputs, K columns, G groups of columns. What is s q + z in groups, q from 0 to 15, stays integers. e4m3 stays e4m3:
the same bytes if there is a scale for each row, or one in all; of blocks, convert_hf_checkpoint.py makes rows.
"""

import contextlib
import functools
import math
import re
import struct
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from ladder.checkpoints import rounding
from ladder.errors import InputError, first_line
from ladder.kernels.quant_linear import unpack
from ladder.ranks.ending import out_of_memory

MATRICES = {  # last parts of names, of what may stay integers: nothing that chooses experts, no linear attention
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2",
    "w3", "lm_head", "embed_tokens", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
}  # fmt: skip
PARTS = (  # of a quantized matrix; the last four, of activations in 8 bits, are not needed
    "weight", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_zero_point",
    "weight_g_idx", "weight_scale", "weight_scale_inv", "blocks", "input_scale", "input_zero_point", "output_scale",
    "activation_scale",
)  # fmt: skip
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # of its 8 integers in a word
FP4 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
BITSANDBYTES = (
    "is in bitsandbytes' format: dequantize it first, in Python: m = transformers.AutoModelForCausalLM."
    'from_pretrained("SOURCE"); m.dequantize().save_pretrained("DIR")'
)


class Matrix(NamedTuple):
    """A quantized matrix: floats() returns W (N, K).

    group: the columns of a group if W can stay integers, or 0. Then there are q() (N, K) uint8, scales() and zeros()
    (N, K / group) float32. Those of experts have a dimension E in front. If W can stay e4m3, there are scales() (N, 1),
    but no group and no zeros, and q() if its bytes can stay, too.
    """

    kind: str  # its format
    floats: Callable
    group: int = 0
    q: Callable | None = None
    scales: Callable | None = None
    zeros: Callable | None = None


def affine(kind, q, scales, zeros, K, G, bits=4, index=None):
    """Return the Matrix scales q + zeros. index (K,): each column's group, if groups are not of neighbours.

    q() returns (N, K) uint8, scales() and zeros() (N, G) float32. Groups of more than 128 columns become several.
    """

    def floats():
        w, s, z = q().float(), scales(), zeros()
        if index is not None:
            return w.mul_(s[:, index]).add_(z[:, index])
        return w.unflatten(-1, (s.shape[-1], -1)).mul_(s[..., None]).add_(z[..., None]).flatten(-2)

    size = K // G if K % G == 0 else 0
    group = math.gcd(size, 128)
    if bits != 4 or index is not None or group < 32:
        return Matrix(kind, floats)
    each = (lambda f=f: f().repeat_interleave(size // group, -1) for f in (scales, zeros))
    return Matrix(kind, floats, group, q, *each)


class QuantizedWeights:
    """The tensors of a source, names() and read(name), with those of quantized matrices as this project has them.

    X.weight is floats. Or, if X is 4-bit integers in groups of `group_size` columns, X.weight is (N, K / 2) uint8, as
    ladder/kernels/quant_linear.py packs them, with X.scales and X.zeros (N, K / group_size) float32, not yet rounded.
    Or, if none is such integers, it has X.scales (N, 1) and is e4m3, or floats that can become e4m3 with these scales.
    group_size: of the smallest groups, which divides the others, or None. quant: "int4", "fp8" or None. floats: {a
    format: how many matrices are floats here, and stay so}.
    folder: of a GGUF file, a TemporaryDirectory with its other files.
    """

    def __init__(self, plain, matrices):
        """plain: {name: a function that returns the tensor}; matrices: {X: Matrix}."""
        last = {name: name.rpartition(".")[2] for name in matrices}
        stay = {name: m for name, m in matrices.items() if m.group and last[name] in MATRICES}
        self.group_size = math.gcd(*(m.group for m in stay.values())) or None
        e4m3 = {name for name, m in matrices.items() if m.scales and not m.group and last[name] in MATRICES}
        self.quant = "int4" if stay else "fp8" if e4m3 else None
        self.tensors, self.floats, self.folder = dict(plain), Counter(), None
        for name, m in matrices.items():
            if name in stay:
                self.tensors[f"{name}.weight"] = functools.partial(_packed, m.q)
                for part, read in ("scales", m.scales), ("zeros", m.zeros):
                    self.tensors[f"{name}.{part}"] = functools.partial(_repeated, read, m.group // self.group_size)
            elif self.quant == "fp8" and name in e4m3:
                self.tensors |= {f"{name}.weight": m.q or m.floats, f"{name}.scales": m.scales}
            else:
                self.tensors[f"{name}.weight"] = m.floats
                self.floats[m.kind] += 1

    def names(self):
        return list(self.tensors)

    def read(self, name):
        with errors_of(name):
            tensor = self.tensors[name]()
            is_float = tensor.is_floating_point() and tensor.dtype.itemsize > 1
            has_scales = name.removesuffix("weight") + "scales" in self.tensors
            if name.endswith(".weight") and not is_float and not has_scales:
                raise InputError(f"it is in {str(tensor.dtype)[6:]}, but its scales are missing")
            return tensor


def _repeated(read, times):
    return read().repeat_interleave(times, -1)


def _packed(q):
    q = q()
    return q[..., ::2] | q[..., 1::2] << 4


@contextlib.contextmanager
def errors_of(name):
    """Turn what a changed file leads to into an InputError that names the tensor or file."""
    try:
        yield
    except KeyError as e:
        raise InputError(f"{name} has no {e.args[0]}") from None
    except OSError as e:
        raise InputError(f"{e.filename}: {e.strerror}") from None
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError, struct.error) as e:
        if out_of_memory(e):
            raise
        raise InputError(f"{name}: {first_line(e)}") from None


# ---- Formats of safetensors folders. parts: {part of a matrix's tensors: a function that returns it} ----


def words(tensor, bits=4):
    """Return integers of 4 or 8 bits (..., 32 / bits * M) uint8, of int32 words (..., M), lowest bits first."""
    if tensor.dtype != torch.int32 or bits not in (4, 8):
        raise InputError(f"integers of {bits} bits in {str(tensor.dtype)[6:]} are not read, only 4 or 8 bits in int32")
    data = tensor.contiguous().view(torch.uint8)
    return unpack(data) if bits == 4 else data


def with_points(kind, parts, name, q, points, *shape, turned=True, index=None):
    """Return the Matrix scales (q - points), of the scales in the part `name`. turned: they are (G, N), not (N, G)."""

    def scales():
        return (parts[name]().mT if turned else parts[name]()).float()

    def zeros():
        s, z = scales(), points()
        if s.shape != z.shape:
            raise InputError(f"zero points {tuple(z.shape)} do not fit scales {tuple(s.shape)}")
        return -s * z

    K, G = shape[:2]
    index = parts[index]().long() if index in parts else None
    if index is not None and torch.equal(index, torch.arange(K) // -(-K // G)):  # act-order that changes nothing
        index = None
    return affine(kind, q, scales, zeros, *shape, index=index)


def awq(parts, settings):
    if settings.get("version", "gemm").lower() != "gemm" or settings.get("bits", 4) != 4:
        raise InputError("of AWQ only version 'gemm' of 4 bits is read")

    def rows(name):  # (..., N / 8) -> (N, ...)
        return words(parts[name]()).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2).mT

    K, G = len(parts["qweight"]()), len(parts["scales"]())
    return with_points("AWQ", parts, "scales", lambda: rows("qweight"), lambda: rows("qzeros"), K, G)


def gptq(parts, settings):
    version, bits = settings.get("checkpoint_format", "gptq"), settings.get("bits", 4)
    if version not in ("gptq", "gptq_v2"):
        raise InputError(f"checkpoint_format {version!r} of GPTQ is not read, only 'gptq' and 'gptq_v2' are")

    def q():
        return words(parts["qweight"]().mT, bits)

    def points():
        return words(parts["qzeros"](), bits).mT.float() + (version == "gptq")  # version 1 stores one less

    if settings.get("desc_act") and "g_idx" not in parts:
        raise InputError("has no g_idx, but desc_act says that its columns are in another order")
    K, G = len(parts["qweight"]()) * 32 // bits, len(parts["scales"]())
    return with_points("GPTQ", parts, "scales", q, points, K, G, bits, index="g_idx")


def weight_groups(settings):
    """Return the groups of compressed-tensors' settings that say how weights are stored."""
    return [group for group in (settings.get("config_groups") or {}).values() if group["weights"]]


def packed(parts, settings):
    """compressed-tensors' pack-quantized: what is stored is 2^(bits - 1) more than the signed integers."""
    (N, K), G = parts["weight_shape"]().tolist(), parts["weight_scale"]().shape[-1]
    bits = 32 * parts["weight_packed"]().shape[-1] // K
    if len(parts["weight_packed"]()) != N:
        raise InputError(f"{len(parts['weight_packed']())} rows do not fit weight_shape {N}, {K}")
    asymmetric = [group["weights"].get("symmetric") is False for group in weight_groups(settings)]
    if asymmetric and all(asymmetric) and "weight_zero_point" not in parts:
        raise InputError("has no weight_zero_point, but its config says symmetric: false")

    def points():
        if "weight_zero_point" not in parts:
            return torch.full_like(parts["weight_scale"](), 2.0 ** (bits - 1), dtype=torch.float32)
        z = parts["weight_zero_point"]()
        return z + 2.0 ** (bits - 1) if z.dtype == torch.int8 else words(z.mT, bits)[:, :N].mT

    def q():
        return words(parts["weight_packed"](), bits)[:, :K]

    shape = K, G, bits
    return with_points("pack-quantized", parts, "weight_scale", q, points, *shape, turned=False, index="weight_g_idx")


def scaled(parts, settings, name="weight_scale"):
    """FP8, or 8-bit integers, with a scale for each block, row or tensor."""
    block = settings.get("weight_block_size")
    for group in weight_groups(settings):
        block = block or group["weights"].get("block_structure")

    def floats():
        w, s = parts["weight"](), parts[name]().float()
        s = s.reshape(-1, 1) if s.dim() < 2 else s
        sizes = block or [-(-n // count) for n, count in zip(w.shape, s.shape, strict=True)]
        if not block and (s.shape[0] not in (1, len(w)) or w.shape[1] % s.shape[1]):
            raise InputError(
                f"scales {tuple(s.shape)} do not fit a weight {tuple(w.shape)}: weight_block_size is missing"
            )
        if w.dtype.itemsize > 1 or w.dtype == torch.uint8 or "weight_zero_point" in parts:
            raise InputError(f"weights in {str(w.dtype)[6:]} with scales are not read")
        if s.shape != tuple(-(-n // size) for n, size in zip(w.shape, sizes, strict=True)):
            raise InputError(f"{tuple(s.shape)} scales do not fit a weight {tuple(w.shape)}")
        row, column = (torch.arange(n) // size for n, size in zip(w.shape, sizes, strict=True))  # of s
        return w.float().mul_(s[row][:, column])

    def q():
        floats()  # raises InputError where these do not fit one another
        return parts["weight"]()

    def scales():
        return parts[name]().float().reshape(-1, 1).expand(len(parts["weight"]()), 1)

    kind = "8 bits with scales"
    if parts["weight"]().dtype != torch.float8_e4m3fn:
        return Matrix(kind, floats)
    if not block and parts[name]().numel() in (1, len(parts["weight"]())):
        return Matrix(kind, floats, 0, q, scales)
    return Matrix(kind, floats, scales=lambda: rounding.e4m3_power_of_two(floats()))


def mxfp4(parts, settings):
    """gpt-oss's: blocks (E, N, K / 32, 16) of two numbers in a byte, scales (E, N, K / 32), exponents of 2."""

    def floats():
        blocks, table = parts["blocks"](), torch.tensor([*FP4, *(-x for x in FP4)])
        w = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * 32, dtype=torch.bfloat16)  # which holds them exactly
        for expert, b, s in zip(w, blocks, parts["scales"](), strict=True):
            expert.copy_((table[unpack(b).int()] * torch.exp2(s.float() - 127)[..., None]).flatten(-2))
        return w

    return Matrix("MXFP4", floats)


FP8 = {"weight_scale_inv": functools.partial(scaled, name="weight_scale_inv"), "weight_scale": scaled}
METHODS = {  # quant_method: {a part that every quantized matrix has: its reader}
    "awq": {"qweight": awq}, "gptq": {"qweight": gptq}, "fp8": FP8, "fbgemm_fp8": FP8, "mxfp4": {"blocks": mxfp4},
    "compressed-tensors": {"weight_packed": packed, "weight_scale": scaled},
}  # fmt: skip


def dequantizing(source, values, path):
    """Return the source itself, or QuantizedWeights of it if a config.json's values have a quantization_config."""
    nested = values.get("text_config")
    settings = values.get("quantization_config") or isinstance(nested, dict) and nested.get("quantization_config")
    if not settings:
        return source
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == "bitsandbytes":
        raise InputError(f"{path} {BITSANDBYTES}")
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(f"{path}: quant_method {method!r} is not read, only {', '.join(METHODS)} are")
    if settings.get("transform_config"):
        raise InputError(f"{path}: transform_config, which rotates activations, is not computed")
    with errors_of(f"{path}/config.json: quantization_config"):
        inputs = [group.get("input_activations") for group in (settings.get("config_groups") or {}).values()]
    keys = "kv_cache_scheme", "activation_scheme", "activation_scale_ub"
    in_8_bits = any((*inputs, *map(settings.get, keys)))
    grouped, plain, matrices = {}, {}, {}
    for name in source.names():
        read = functools.partial(source.read, name)
        if match := re.fullmatch(rf"(.+?)[._]({'|'.join(PARTS)})", name):
            grouped.setdefault(match[1], {})[match[2]] = read
        elif not name.endswith((".k_scale", ".v_scale")):  # of a cache in 8 bits
            plain[name] = read
    for name, parts in grouped.items():
        make = next((make for part, make in METHODS[method].items() if part in parts), None)
        if make is None:
            plain |= {f"{name}.{part}": read for part, read in parts.items()}
            continue
        with errors_of(name):
            matrices[name] = make(parts, settings)
    result = QuantizedWeights(plain, matrices)
    if in_8_bits:
        what = (
            "activations get a scale for each token, the cache stays"
            if result.quant == "fp8"
            else "activations and the cache stay"
        )
        print(f"{what} floats, whatever quantization_config says of them")
    return result
