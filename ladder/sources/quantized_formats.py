"""Reads quantized matrices: those of AWQ, GPTQ, compressed-tensors, FP8 and MXFP4; gguf_file.py reads more.

N outputs, K columns, G groups of columns. What is s q + z in groups, q of 4 or 8 bits, stays integers. e4m3 stays e4m3:
the same bytes if there is a scale for each row, or one in all; of blocks, convert_hf_checkpoint.py makes rows.
"""

import contextlib
import functools
import math
import re
import reprlib
import struct
from collections import Counter

import torch

from ladder.checkpoints import rounding
from ladder.checkpoints.checkpoint import dtype_name
from ladder.errors import InputError, first_line
from ladder.kernels.quant_linear import unpack
from ladder.ranks.ending import out_of_memory
from ladder.sources.matrices import E4M3, Form, Fp8, Integers, Tensors, in_groups

MATRICES = {  # last parts of names, of what may stay integers: nothing that chooses experts, no linear attention
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2",
    "w3", "lm_head", "embed_tokens", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
}  # fmt: skip
ACTIVATIONS = "input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"  # of 8 bits
CACHE = r".*\.(([kvq]|kv|prob)_(scale|zero_point)|kv_cache_scaling_factor)"  # names of scales of a cache in 8 bits
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # of its 8 integers in a word
FP4 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
SCALE_NAMES = "weight_scale_inv", "weight_scale"  # parts with the scales of 8 bits
SCALED = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz
EXPONENTS = torch.uint8, torch.float8_e8m0fnu  # dtypes of scales that are exponents of 2
COMPRESSED = {  # {a part that a matrix of compressed-tensors has: the formats in which it does}
    "weight_packed": ("pack-quantized",),
    "weight": ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized"),
}  # fmt: skip
# what a changed file may lead to, besides KeyError and OSError
FILE_ERRORS = ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError, re.error, struct.error
KNOWN_KEYS = {  # of a quantization_config: those that are read, and those that change no weight
    "quant_method", "bits", "w_bit", "num_bits", "group_size", "q_group_size", "sym", "symmetric", "desc_act",
    "zero_point", "version", "format", "checkpoint_format", "is_marlin_format", "dynamic", "meta", "fmt", "scale_fmt",
    "scale_dtype", "zp_dtype", "weight_block_size", "block_structure", "strategy", "type", "actorder", "config_groups",
    "targets", "weights", "input_activations", "output_activations", "kv_cache_scheme", "activation_scheme",
    "activation_scale_ub", "sparsity_config", "transform_config",  # read here, or told by shapes
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "lm_head", "modules_in_block_to_quantize",
    "block_name_to_quantize", "module_name_preceding_first_block", "to_quant_block_names",  # the tensors tell it
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "act_group_aware", "hyb_act",
    "dataset", "tokenizer", "batch_size", "nsamples", "seqlen", "iters", "lr", "minmax_lr", "low_gpu_mem_usage",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps", "amp",
    "observer", "observer_kwargs", "failsafe",  # how the weights were fitted
    "model_name_or_path", "model_file_base_name", "quantizer", "autoround_version", "provider", "uuid", "backend",
    "quantization_status", "global_compression_ratio", "pad_token_id", "model_seqlen", "max_input_length",
    "cache_block_outputs", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "do_fuse",
    "fuse_max_seq_len", "modules_to_fuse", "run_compressed", "dequantize", "pack_dtype", "parallel_packing",
    "offload_to_disk", "offload_to_disk_path",  # where it comes from, and how others run it
}  # fmt: skip
SMALLEST_GROUP = {4: 32, 8: 16}  # {bits: columns}
BITSANDBYTES = (
    "is in bitsandbytes' format: dequantize it first, in Python: m = transformers.AutoModelForCausalLM."
    'from_pretrained("SOURCE"); m.dequantize().save_pretrained("DIR")'
)


class Stored:
    """A quantized matrix as a source stores it.

    A subclass has `kind`, the name of its format, and floats(), which returns W. If it has a form, it has quantized(),
    which returns the Integers or Fp8 of that form.
    """

    form = None


def integer_form(bits, K, G):
    """Return the Form of integers in G groups of K columns, or None if groups are too small or uneven.

    Groups of more than 128 columns become several.
    """
    columns = math.gcd(K // G, 128) if G and K % G == 0 else 0
    return Form(bits, columns) if columns >= SMALLEST_GROUP[bits] else None


class QuantizedWeights(Tensors):
    """The tensors of a source, some of which are quantized matrices.

    A matrix X is X.weight. If any matrices can stay integers, these do; else those that can stay e4m3 do.
    """

    def __init__(self, plain, matrices):
        """plain: {name: a function that returns the tensor}; matrices: {X: Stored}."""
        forms = {name: m.form for name, m in matrices.items() if m.form and name.rpartition(".")[2] in MATRICES}
        integers = {name for name, form in forms.items() if form != E4M3}
        self.kept = {name: form for name, form in forms.items() if name in integers or not integers}
        self.plain = dict(plain)
        self.matrices = matrices
        self.floats = Counter(m.kind for name, m in matrices.items() if name not in self.kept)

    def names(self):
        return [*self.plain, *(f"{name}.weight" for name in self.matrices)]

    def form(self, name):
        return self.kept.get(name.removesuffix(".weight"))

    def read(self, name):
        path = name.removesuffix(".weight")
        with errors_of(name):
            if path in self.matrices:
                matrix = self.matrices[path]
                return matrix.quantized() if path in self.kept else matrix.floats()
            tensor = self.plain[name]()
            if name.endswith(".weight") and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
                raise InputError(f"it is in {dtype_name(tensor.dtype)}, but its scales are missing")
            return tensor


@contextlib.contextmanager
def errors_of(name):
    """Turn what a changed file leads to into an InputError that names the tensor or file."""
    try:
        yield
    except KeyError as e:
        raise InputError(f"{name} has no {e.args[0]}") from None
    except OSError as e:
        raise InputError(f"{e.filename}: {e.strerror}") from None
    except FILE_ERRORS as e:
        if out_of_memory(e):
            raise
        raise InputError(f"{name}: {first_line(e)}") from None


# ---- Formats of safetensors folders. parts: {part of a matrix's tensors: a function that returns it} ----
#
# settings, the quantization_config, may say different things of different modules. Which of GPTQ's `dynamic` hold for a
# matrix is told by its name, which of compressed-tensors' config_groups by its shapes: if none of them fits, or more
# than one, the matrix is refused.


def settings_of(settings, name):
    """Return the settings of one matrix: GPTQModel's `dynamic` maps patterns of names to what differs there.

    The first pattern that matches the beginning of the name holds. "+:" may stand before it; "-:" says that the matrix
    is not quantized. Raises InputError if it is.
    """
    common = {key: value for key, value in settings.items() if key != "dynamic"}
    for pattern, own in (settings.get("dynamic") or {}).items():
        if re.match(re.sub(r"^[+-]:", "", pattern), name):
            if pattern.startswith("-:"):
                raise InputError(f"it is quantized, but quantization_config says by {pattern!r} that it is not")
            return common | own
    return common


def check_keys(settings):
    """Raise InputError for a key that is not known here, unless its value is nothing, False or empty."""
    overrides = [own for own in (settings.get("dynamic") or {}).values() if isinstance(own, dict)]
    for place in (settings, *overrides, *config_groups(settings), *weight_groups(settings)):
        unknown = sorted(key for key in place.keys() - KNOWN_KEYS if place[key])
        if unknown:
            value = reprlib.repr(place[unknown[0]])
            raise InputError(f"{unknown[0]} {value} is unknown: drop it if the values of weights do not depend on it")


def config_groups(settings):
    """Return the groups of modules in compressed-tensors' settings."""
    return (settings.get("config_groups") or {}).values()


def weight_groups(settings):
    """Return what these groups say of how weights are stored."""
    return [group["weights"] for group in config_groups(settings) if group["weights"]]


def places(settings):
    """Return the dicts in settings that say something of all modules, or of some."""
    return [settings, *weight_groups(settings)]


def labels(settings, *keys):
    """Return the set of values that settings give to these keys, for all modules or for some."""
    return {place[key] for place in places(settings) for key in keys if place.get(key) is not None}


def check_label(what, value, allowed):
    """Raise InputError for a value that is none of those which the settings allow, if they say anything of it."""
    if allowed and value not in allowed:
        raise InputError(f"{what} is {value!r}, but quantization_config says {', '.join(sorted(map(repr, allowed)))}")


def float_scales(scales):
    """Return scales as float32. Those in bytes are exponents of 2 (E8M0, with a bias of 127)."""
    if scales.dtype in EXPONENTS:
        exponents = scales.view(torch.uint8).float()
        return torch.exp2(exponents - 127).masked_fill_(exponents == 255, math.nan)
    if not scales.is_floating_point() or scales.itemsize == 1:
        raise InputError(f"scales in {dtype_name(scales.dtype)} are not read")
    return scales.float()


def words(tensor, bits=4):
    """Return integers of 4 or 8 bits (..., 32 / bits * M) uint8, of int32 words (..., M), lowest bits first."""
    if tensor.dtype != torch.int32 or bits not in (4, 8):
        given = f"integers of {bits} bits in {dtype_name(tensor.dtype)}"
        raise InputError(f"{given} are not read, only 4 or 8 bits in int32")
    data = tensor.contiguous().view(torch.uint8)
    return unpack(data) if bits == 4 else data


def group_sizes(settings):
    """Return {(1, columns of a group)} that settings name; -1: all columns."""
    keys = ("group_size", "q_group_size")
    rows = ("channel", "tensor")
    sizes = {-1 if place.get("strategy") in rows else place.get(key) for place in places(settings) for key in keys}
    return {(1, size) for size in sizes - {None}}


def block_sizes(shape, scales, sizes, others=()):
    """Return how many (rows, columns) of a shape share one of `scales`, a shape: the one that fits of sizes and others.

    sizes: those that settings name, where -1 is all.
    """
    if len(shape) != 2 or len(scales) != 2:
        raise InputError(f"scales {scales} of a weight {shape} are not read")
    given = {tuple(n if size == -1 else min(n, size) for n, size in zip(shape, each, strict=True)) for each in sizes}
    if not sizes and shape[1] % scales[1] == 0:
        given.add((1, shape[1] // scales[1]))
    given = given.union(others)
    fitting = [each for each in given if scales == tuple(-(-n // size) for n, size in zip(shape, each, strict=True))]
    if len(fitting) != 1:
        said = f"quantization_config says {sorted(map(list, sizes))}" if sizes else "weight_block_size is missing"
        raise InputError(f"scales {scales} do not fit a weight {shape}: {said}")
    return fitting[0]


class Affine(Stored):
    """Integers in groups: W = scales q + zeros.

    A subclass has q() (N, K) int8, from 0 to 15 if they have 4 bits, scales() and zeros() (N, G) float32.
    """

    index = None  # (K,): the group of each column, if groups are not neighbours of one size

    def floats(self):
        w = self.q().float()
        s = self.scales()
        z = self.zeros()
        if self.index is not None:
            return w.mul_(s[:, self.index]).add_(z[:, self.index])
        return w.unflatten(-1, (s.shape[-1], -1)).mul_(s[..., None]).add_(z[..., None]).flatten(-2)

    def quantized(self):
        q = self.q()
        return in_groups(Integers(q, self.scales(), self.zeros()), q.shape[-1] // self.form.columns)


class Pointed(Affine):
    """W = scales (q - points). A subclass has points() (N, G) and stored_q() (N, K) uint8."""

    def __init__(self, settings, bits, K, symmetric, order=None):
        """symmetric: whether the settings say that all points are in the middle. order: the part that is `index`."""
        self.bits = bits
        self.offset = 128 if bits == 8 else 0  # is subtracted from 8 bits, so that they are signed
        self.symmetric = symmetric
        stored = self.stored_scales()
        N, G = stored.shape
        if stored.dtype in EXPONENTS:
            raise InputError("scales that are exponents of 2 are read in 8-bit formats and MXFP4 alone")
        check_label("the number of bits", bits, labels(settings, "bits", "w_bit", "num_bits"))
        _, size = block_sizes((N, K), (N, G), group_sizes(settings))
        groups = torch.arange(K) // size
        index = self.parts[order]() if order in self.parts else groups
        if index.is_floating_point() or index.shape != (K,) or not 0 <= index.amin() <= index.amax() < G:
            raise InputError(f"columns' groups are {K} whole numbers from 0 to {G - 1}")
        if size * G != K or not torch.equal(index, groups):  # else an order that changes nothing
            self.index = index.long()
        else:
            self.form = integer_form(bits, K, G)

    def stored_scales(self):
        """Return the scales (N, G) as the source has them."""
        return self.parts["scales"]().mT

    def scales(self):
        return float_scales(self.stored_scales())

    def q(self):
        # bytes overflow to the negative numbers that are meant
        return (self.stored_q() - self.offset).view(torch.int8)

    def zeros(self):
        s = self.scales()
        z = self.points()
        middle = 2 ** (self.bits - 1)
        if s.shape != z.shape:
            raise InputError(f"zero points {tuple(z.shape)} do not fit scales {tuple(s.shape)}")
        if self.symmetric and z.ne(middle).any():
            raise InputError(f"its zero points are not all {middle}, but quantization_config says symmetric")
        return -s * (z.float() - self.offset)


class Awq(Pointed):
    kind = "AWQ"

    def __init__(self, parts, settings):
        self.parts = parts
        versions = {version.lower() for version in labels(settings, "version", "checkpoint_format", "format")}
        bits = 32 * self.parts["qweight"]().shape[-1] // self.parts["scales"]().shape[-1]
        if versions - {"gemm"} or bits != 4:
            raise InputError("of AWQ only version 'gemm' of 4 bits is read")
        symmetric = labels(settings, "zero_point") == {False}
        super().__init__(settings, bits, len(self.parts["qweight"]()), symmetric)

    def rows(self, part):
        """Return integers (N, ...) of words (..., N / 8)."""
        return words(self.parts[part]()).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2).mT

    def stored_q(self):
        return self.rows("qweight")

    def points(self):
        return self.rows("qzeros")


class Gptq(Pointed):
    kind = "GPTQ"

    def __init__(self, parts, settings):
        self.parts = parts
        self.versions = labels(settings, "checkpoint_format", "format") or {"gptq"}
        if len(self.versions) > 1 or not self.versions <= {"gptq", "gptq_v2"} or settings.get("is_marlin_format"):
            what = f"checkpoint_format {min(self.versions)!r} of GPTQ is not read"
            raise InputError(f"{what}, only 'gptq' and 'gptq_v2' are")
        if labels(settings, "desc_act") == {True} and "g_idx" not in parts:
            raise InputError("has no g_idx, but desc_act says that its columns are in another order")
        bits = 32 * self.parts["qzeros"]().shape[-1] // self.parts["scales"]().shape[-1]
        K = len(self.parts["qweight"]()) * 32 // (bits or 1)
        super().__init__(settings, bits, K, labels(settings, "sym") == {True}, "g_idx")

    def stored_q(self):
        return words(self.parts["qweight"]().mT, self.bits)

    def points(self):
        stored = words(self.parts["qzeros"](), self.bits).mT.int()
        middle = 2 ** (self.bits - 1)
        if self.symmetric and stored.unique().tolist() in ([middle - 1], [middle]):  # whatever the version says
            return torch.full_like(stored, middle)
        # version 1 stores one less, and 0 as the largest integer
        return (stored + ("gptq" in self.versions)) % 2**self.bits


def is_symmetric(parts, settings):
    """Return whether compressed-tensors' settings say symmetric; raise InputError if zero points are missing."""
    symmetric = labels(settings, "symmetric")
    if symmetric == {False} and "weight_zero_point" not in parts:
        raise InputError("has no weight_zero_point, but its config says symmetric: false")
    return symmetric == {True}


class PackQuantized(Pointed):
    """compressed-tensors' format: what is stored is 2^(bits - 1) more than the signed integers."""

    kind = "pack-quantized"

    def __init__(self, parts, settings):
        self.parts = parts
        N, K = self.shape = [*map(int, self.parts["weight_shape"]().tolist())]
        stored = self.parts["weight_packed"]()
        symmetric = is_symmetric(parts, settings)
        check_label("what it stores", "int", labels(settings, "type"))
        if len(stored) != N:
            raise InputError(f"{len(stored)} rows do not fit weight_shape {N}, {K}")
        if labels(settings, "actorder") == {"group"} and "weight_g_idx" not in parts:
            raise InputError("has no weight_g_idx, but actorder says that its columns are in another order")
        super().__init__(settings, 32 * stored.shape[-1] // K, K, symmetric, "weight_g_idx")

    def stored_scales(self):
        s = self.parts["weight_scale"]()
        return s.expand(self.shape[0], 1) if s.numel() == 1 else s.reshape(len(s), -1)

    def stored_q(self):
        return words(self.parts["weight_packed"](), self.bits)[:, : self.shape[1]]

    def points(self):
        middle = 2.0 ** (self.bits - 1)
        if "weight_zero_point" not in self.parts:
            return torch.full(self.stored_scales().shape, middle)
        z = self.parts["weight_zero_point"]()
        return z + middle if z.dtype == torch.int8 else words(z.mT, self.bits)[:, : self.shape[0]].mT


class Scaled(Stored):
    """FP8, or 8-bit integers, with a scale for each block, group of columns, row or tensor."""

    kind = "8 bits with scales"

    def __init__(self, parts, settings):
        self.parts = parts
        self.scale_name = next(name for name in SCALE_NAMES if name in parts)
        w = self.parts["weight"]()
        scales = self.parts[self.scale_name]()
        self.symmetric = is_symmetric(parts, settings)
        self.shape = tuple(w.shape)
        kind = dtype_name(w.dtype)
        if w.dtype not in SCALED:
            raise InputError(f"weights in {kind} with scales are not read")
        check_label("what it stores", "int" if w.dtype == torch.int8 else "float", labels(settings, "type"))
        check_label("the format of its weights", kind[:11], {f"float8_{fmt[:4]}" for fmt in labels(settings, "fmt")})
        if scales.dtype == torch.uint8:
            check_label("the format of its scales", "ue8m0", labels(settings, "scale_fmt"))
            check_label("the type of its scales", "torch.uint8", labels(settings, "scale_dtype"))
        blocks = [settings.get("weight_block_size")]
        blocks += [group.get("block_structure") for group in weight_groups(settings)]
        blocks = {tuple(block) for block in blocks if block} | group_sizes(settings)
        scales_shape = tuple(scales.shape) if scales.dim() > 1 else (scales.numel(), 1)
        self.block = block_sizes(self.shape, scales_shape, blocks, {self.shape, (1, self.shape[-1])})
        if w.dtype == torch.float8_e4m3fn and "weight_zero_point" not in parts:
            self.form = E4M3

    def scales(self):
        return float_scales(self.parts[self.scale_name]())

    def spread(self, values):
        """Return values of blocks, (rows, columns) of these, as (N, K)."""
        row, column = (torch.arange(n) // size for n, size in zip(self.shape, self.block, strict=True))
        return values.reshape(-(-self.shape[0] // self.block[0]), -1)[row][:, column]

    def floats(self):
        w = self.parts["weight"]().float()
        s = self.scales()
        if "weight_zero_point" in self.parts:
            z = self.parts["weight_zero_point"]().float()
            if z.shape != s.shape or self.symmetric and z.any():
                raise InputError(f"zero points {tuple(z.shape)} do not fit scales {tuple(s.shape)} or symmetric: true")
            w -= self.spread(z)
        return w.mul_(self.spread(s))

    def quantized(self):
        N, K = self.shape
        if self.block[1] == K and self.block[0] in (1, N):
            return Fp8(self.parts["weight"](), self.scales().reshape(-1, 1).expand(N, 1))
        w = self.floats()
        return Fp8(w, rounding.e4m3_power_of_two(w))


class Mxfp4(Stored):
    """gpt-oss's: blocks (E, N, K / 32, 16) of two numbers in a byte, scales (E, N, K / 32), exponents of 2."""

    kind = "MXFP4"

    def __init__(self, parts, settings):
        self.parts = parts
        blocks = self.parts["blocks"]()
        scales = self.parts["scales"]()
        if {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise InputError("MXFP4 has blocks and scales of bytes")
        if blocks.shape[-1:] != (16,) or scales.shape != blocks.shape[:-1]:
            given = f"{(*blocks.shape,)}, {(*scales.shape,)}"
            raise InputError(f"MXFP4 has blocks (E, N, K / 32, 16) and scales (E, N, K / 32), not {given}")

    def floats(self):
        blocks = self.parts["blocks"]()
        table = torch.tensor([*FP4, *(-x for x in FP4)])
        w = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * 32, dtype=torch.bfloat16)  # which holds them exactly
        for expert, b, s in zip(w, blocks, self.parts["scales"](), strict=True):
            expert.copy_((table[unpack(b).int()] * float_scales(s)[..., None]).flatten(-2))
        return w


def compressed(parts, settings):
    """Return a matrix of compressed-tensors, whose format may differ by module."""
    part = "weight_packed" if "weight_packed" in parts else "weight"
    formats = [place.get("format") for place in (settings, *config_groups(settings))]
    said = {*formats} - {None, "mixed-precision"}
    if said and not said & {*COMPRESSED[part]}:
        raise InputError(f"of the format {', '.join(sorted(map(repr, said)))} no {part} is read")
    return (PackQuantized if part == "weight_packed" else Scaled)(parts, settings)


WORDS = "qweight", "qzeros", "scales"
FP8 = {name: (Scaled, ("weight", name)) for name in SCALE_NAMES}
METHODS = {  # quant_method: {a part that every quantized matrix has: (its reader, all parts that it reads)}
    "awq": {"qweight": (Awq, WORDS)}, "gptq": {"qweight": (Gptq, (*WORDS, "g_idx"))}, "fp8": FP8, "fbgemm_fp8": FP8,
    "mxfp4": {"blocks": (Mxfp4, ("blocks", "scales"))},
    "compressed-tensors": {
        "weight_packed": (compressed, (
            "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
        )),
        "weight_scale": (compressed, ("weight", "weight_scale", "weight_zero_point")),
    },
}  # fmt: skip
PARTS = {part for readers in METHODS.values() for _, parts in readers.values() for part in parts} | {*ACTIVATIONS}


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
        inputs = [group.get("input_activations") for group in config_groups(settings)]
        if (sparsity := (settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
            raise InputError(f"{path}: sparsity_config {sparsity!r} is not read, only 'dense' is")
        check_keys(settings)
    keys = "kv_cache_scheme", "activation_scheme", "activation_scale_ub"
    in_8_bits = any((*inputs, *map(settings.get, keys)))
    grouped = {}
    plain = {}
    matrices = {}
    for name in source.names():
        read = functools.partial(source.read, name)
        if match := re.fullmatch(rf"(.+?)[._]({'|'.join(PARTS)})", name):
            grouped.setdefault(match[1], {})[match[2]] = read
        elif re.fullmatch(CACHE, name):
            in_8_bits = True
        else:
            plain[name] = read
    for name, parts in grouped.items():
        make, read = next((reader for part, reader in METHODS[method].items() if part in parts), (None, ()))
        if make is None:
            plain |= {f"{name}.{part}": read for part, read in parts.items()}
            continue
        if unread := sorted(parts.keys() - {*read, *ACTIVATIONS}):
            raise InputError(f"{name}.{unread[0]} is not read beside the {', '.join(read)} of {method}")
        with errors_of(name):
            matrices[name] = make(parts, settings_of(settings, name))
    result = QuantizedWeights(plain, matrices)
    if in_8_bits:
        what = (
            "activations get a scale for each token, the cache stays"
            if E4M3 in result.kept.values()
            else "activations and the cache stay"
        )
        print(f"{what} floats, whatever quantization_config says of them")
    return result
