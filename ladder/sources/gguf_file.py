"""Reads GGUF files, llama.cpp's: what would be a config.json, tensors under Hugging Face's names, and the tokenizer."""

import math
import mmap
import re
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ladder.checkpoints import checkpoint
from ladder.errors import InputError
from ladder.layers.attention_inputs import unpaired
from ladder.sources.families import FAMILIES, REQUIRED
from ladder.sources.gguf_tokenizer import end_token_ids, write_tokenizer
from ladder.sources.huggingface import LlamaWeights, read_config
from ladder.sources.matrices import Renamed
from ladder.sources.quantized_formats import Affine, QuantizedWeights, errors_of, integer_form

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # types of values
STRING = 8
ARRAY = 9
ROWS = 4096  # of W that are dequantized at a time
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEYS = {  # config.json's, as far as a family has them: GGUF's
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "rope_local_base_freq": "rope.freq_base_swa", "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window", "num_experts": "expert_count", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}  # fmt: skip
SCALING = {
    "rope_type": "rope.scaling.type", "factor": "rope.scaling.factor", "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}  # fmt: skip
OTHERS = {  # that need no entry of their own, or change nothing
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned", "attention.causal",
    "expert_weights_norm", "expert_feed_forward_length", "tensor_data_layout", "attention.sliding_window_pattern",
}  # fmt: skip
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
SUM_NORMS = {  # other names in Gemma and OLMo
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
FUSED = {"ffn_up": "mlp.gate_up_proj"}  # where there is no ffn_gate
NEEDED = (  # that llama.cpp has no default of
    "embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FREQUENCIES = "rope_freqs.weight"  # Llama 3's


class GgufArchitecture(NamedTuple):
    """What an architecture of GGUF is in a Hugging Face folder, and what is its own in its files."""

    family: str  # its model_type
    mixture: str | None = None  # that of a model with experts, if it is another
    windowed: str | None = None  # that of a model with a sliding window, if it is another
    names: dict = {}  # of modules, where NAMES has others
    needed: tuple = ()  # a value that llama.cpp has no default of, besides NEEDED
    window: int | None = None  # llama.cpp's default of attention.sliding_window
    wide_queries: int | None = None  # layers of the model whose queries are scaled as if the heads shared out the width
    paired: bool = False  # whether its converter turned the rows of q and k, for rotary embeddings of neighbours
    shifted_norms: bool = False  # whether norms are stored as what they multiply with, not as 1 less


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", mixture="mixtral", paired=True), "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"), "qwen3moe": GgufArchitecture("qwen3_moe"),
    "gemma2": GgufArchitecture("gemma2", names=SUM_NORMS, window=4096, wide_queries=46, shifted_norms=True),
    "gemma3": GgufArchitecture("gemma3_text", names=SUM_NORMS, wide_queries=62, shifted_norms=True),
    "phi3": GgufArchitecture("phi3"), "granite": GgufArchitecture("granite", needed=("logit_scale",), paired=True),
    "olmo2": GgufArchitecture("olmo2", windowed="olmo3", names=SUM_NORMS), "glm4": GgufArchitecture("glm4"),
}  # fmt: skip


class File:
    """A GGUF file, memory-mapped: values {key: value} and tensors {name: Stored}."""

    def __init__(self, path):
        import gguf

        with open(path, "rb") as f:
            self.data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 4
        size = len(self.data)
        version, n_tensors, n_values = self.take("IQQ")
        if self.data[:4] != b"GGUF" or version not in (2, 3):
            raise InputError("it is no GGUF file of version 2 or 3")
        self.values = {}
        for _ in range(n_values):
            key = self.text()
            self.values[key] = self.value(*self.take("I"))
        infos = [(self.text(), self.take(f"{min(*self.take('I'), 9)}Q"), *self.take("IQ")) for _ in range(n_tensors)]
        unit = self.values.get("general.alignment", 32)
        start = -(-self.at // unit) * unit
        self.tensors = {}
        for name, shape, kind, offset in infos:
            kind = gguf.GGMLQuantizationType(kind)
            columns, width = gguf.GGML_QUANT_SIZES[kind]
            if not shape or shape[0] % columns or len(shape) > 3:
                raise InputError(f"tensor {name} {shape[::-1]} does not fit blocks of {columns} ({kind.name})")
            first = start + offset
            count = math.prod(shape) // columns * width
            if first + count > size:
                raise InputError(f"it has {size} bytes, but {name} ends at byte {first + count}: copy it again")
            data = np.frombuffer(self.data, np.uint8, count, first) if count else np.empty(0, np.uint8)
            self.tensors[name] = Blocks(shape[::-1], kind.name, data.reshape(*shape[:0:-1], -1), width)

    def take(self, form):
        self.at, start = self.at + struct.calcsize(f"<{form}"), self.at
        if self.at > len(self.data):
            raise InputError("it is truncated, or no GGUF file")
        return struct.unpack_from(f"<{form}", self.data, start)

    def text(self):
        return self.take(f"{self.take('Q')[0]}s")[0].decode(errors="replace")

    def value(self, kind):
        return self.several(*self.take("IQ")) if kind == ARRAY else self.several(kind, 1)[0]

    def several(self, kind, count):
        if kind == STRING:
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise InputError(f"values of type {kind} are not read")
        return [*self.take(f"{count}{NUMBERS[kind]}")]


class Blocks(Affine):
    """A tensor of a file: its type's name, its bytes (..., N, bytes of a row), the bytes of a block of columns."""

    def __init__(self, shape, kind, data, width):
        self.shape = shape
        self.kind = kind
        self.data = data
        self.width = width
        if kind in FORMATS and len(shape) > 1:
            known = FORMATS[kind]
            self.form = integer_form(known.bits, shape[-1], shape[-1] // known.group)

    def floats(self):
        if self.kind in FLOATS:
            return torch.from_numpy(self.data.copy()).view(FLOATS[self.kind]).view(self.shape)
        return self.dequantized({}, lambda w: w)

    def dequantized(self, changes, keep):
        """Return keep(W), where W is what the package gguf makes of the blocks with changes. W takes 4 bytes a number.

        changes: {first byte of each block: what stands there instead}. keep: a function from rows of W to what is kept.
        """
        import gguf

        kind = gguf.GGMLQuantizationType[self.kind]
        pieces = []
        rows = self.data.reshape(-1, self.data.shape[-1])
        for piece in np.array_split(rows, len(rows) // ROWS + 1):
            blocks = piece.reshape(-1, self.width).copy()
            for start, replacement in changes.items():
                blocks[:, start : start + len(replacement)] = np.frombuffer(replacement, np.uint8)
            try:
                with np.errstate(all="ignore"):  # what is not finite is refused later
                    w = gguf.dequantize(blocks.reshape(piece.shape), kind)
            except NotImplementedError:
                raise InputError(f"type {self.kind} is not read") from None
            pieces.append(keep(torch.from_numpy(w)))
        return torch.cat(pieces).view(*self.shape[:-1], -1)

    def of_groups(self, changes):
        """Return what `dequantized` does, of each group its first number."""
        group = FORMATS[self.kind].group
        return self.dequantized(changes, lambda w: w[:, ::group].contiguous())

    def q(self):
        known = FORMATS[self.kind]
        return self.dequantized(known.scales_of_1, lambda w: (w + known.offset).to(torch.int8))

    def scales(self):
        return self.of_groups(FORMATS[self.kind].ones)

    def zeros(self):
        changes = FORMATS[self.kind].nothing
        if changes:
            return self.of_groups(changes)
        return torch.zeros(*self.shape[:-1], self.shape[-1] // FORMATS[self.kind].group)


class Format(NamedTuple):
    """How W = scales q + zeros is found by what gguf makes of changed blocks. The changes are {first byte: bytes}."""

    bits: int  # of q
    group: int  # columns of a group
    scales_of_1: dict  # with which all scales are 1 and all minima 0, so that W is q - offset
    ones: dict  # with which all q - offset are 1 and all minima 0, so that W is the scales
    nothing: dict | None = None  # with which all q are 0, so that W is the zeros; None: these are 0
    offset: int = 0


ONE = np.float16(1).tobytes()
NIL = bytes(2)
SIX_BITS = b"\1" * 4 + bytes(4) + b"\1" * 4  # 8 scales of 1 and 8 minima of 0
FORMATS = {
    "Q4_0": Format(4, 32, {0: ONE}, {2: b"\x99" * 16}, {2: bytes(16)}, offset=8),
    "Q4_1": Format(4, 32, {0: ONE + NIL}, {2: NIL + b"\x11" * 16}, {4: bytes(16)}),
    "Q4_K": Format(4, 32, {0: ONE + NIL + SIX_BITS}, {2: NIL, 16: b"\x11" * 128}, {16: bytes(128)}),
    "Q8_0": Format(8, 32, {0: ONE}, {2: b"\1" * 32}),
    "Q5_0": Format(8, 32, {0: ONE}, {2: b"\xff" * 4 + b"\x11" * 16}),
    "Q5_1": Format(8, 32, {0: ONE + NIL}, {2: NIL + bytes(4) + b"\x11" * 16}, {4: bytes(20)}),
    "Q5_K": Format(8, 32, {0: ONE + NIL + SIX_BITS}, {2: NIL, 16: bytes(32) + b"\x11" * 128}, {16: bytes(160)}),
    "Q6_K": Format(8, 16, {192: b"\1" * 16 + ONE}, {0: b"\x11" * 128 + b"\xaa" * 64}),
    "Q2_K": Format(8, 16, {0: b"\1" * 16, 80: ONE + NIL}, {16: b"\x55" * 64, 82: NIL}, {16: bytes(64)}),
    "Q3_K": Format(8, 16, {96: b"\x11" * 8 + b"\xaa" * 4 + ONE}, {0: b"\xff" * 32 + b"\x55" * 64}),
    "IQ4_NL": Format(8, 32, {0: ONE}, {2: b"\x88" * 16}),
    "IQ4_XS": Format(8, 32, {0: ONE + b"\xaa" * 2 + b"\x11" * 4}, {8: b"\x88" * 128}),
    "MXFP4": Format(8, 32, {0: b"\x80"}, {1: b"\x11" * 16}),
}


def open_gguf(path, with_tokenizer=True):
    """Return the Source of a GGUF file, of a split one by any of its files, or None for another path.

    Raises InputError.
    """
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF" and path.suffix != ".gguf":
            return None
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise InputError(f"{path} is a GGUF file, which needs a package: pip install gguf==0.19.0") from None
    with errors_of(path):
        checkpoint.refuse_pointer(path)
        values, tensors = read_files(path)
        hf = config(values, tensors)
        folder = tempfile.TemporaryDirectory(prefix=f"{path.name}-")
        if with_tokenizer:
            write_tokenizer(values, Path(folder.name))
        own = read_tensors(tensors, GGUF_ARCHITECTURES[values["general.architecture"]], hf["head_dim"])
    source = LlamaWeights(own, *read_config(hf, path, {}))
    source.temporary = folder  # which lasts as long as the source
    source.tokenizer_folder = Path(folder.name)
    return source


def read_files(path):
    """Return ({key: value}, {name: Blocks}) of a file, and of the others if it is one of several."""
    paths = [path]
    if split := re.fullmatch(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)", str(path)):
        paths = [Path(f"{split[1]}{i:05d}{split[3]}") for i in range(1, min(int(split[4]), 999) + 1)]
    files = [File(each) for each in paths]
    values = files[0].values
    if (count := values.get("split.count", 1)) != len(files):
        raise InputError(f"it is one of {count} files, which llama.cpp calls NAME-00001-of-{count:05d}.gguf")
    return values, {name: blocks for file in files for name, blocks in file.tensors.items()}


def read_tensors(tensors, architecture, head_dim):
    """Return the Tensors of a file under Hugging Face's names."""
    fused = {} if {"blk.0.ffn_gate.weight", "blk.0.ffn_gate_exps.weight"} & tensors.keys() else FUSED
    names = {**NAMES, **architecture.names, **fused}
    plain = {}
    matrices = {}
    for name, blocks in tensors.items():
        if name in (*FACTORS, FREQUENCIES):
            continue
        match = re.fullmatch(r"(blk\.\d+\.)?(\w+)\.(weight|bias)", name)
        if not match or match[2] not in names:
            raise InputError(f"tensor {name} is no part of a {architecture.family} that is computed here")
        layer, module, part = match.groups()
        place = (layer or "").replace("blk", "model.layers") + names[module]
        if blocks.kind in FLOATS or part == "bias":
            plain[f"{place}.{part}"] = blocks.floats
        else:
            matrices[place] = blocks
    return GGUFWeights(QuantizedWeights(plain, matrices), architecture, head_dim)


class GGUFWeights(Renamed):
    """The tensors of a file in the order of rows, and with the norms, that Hugging Face has."""

    def __init__(self, source, architecture, head_dim):
        super().__init__(source)
        self.architecture = architecture
        self.head_dim = head_dim

    def join(self, name, tensor):
        if self.architecture.paired and re.search(r"\.[qk]_proj\.", name):
            return unpaired(tensor, self.head_dim)
        return tensor.float() - 1 if self.architecture.shifted_norms and name.endswith("norm.weight") else tensor


def config(values, tensors):
    """Return what would be the config.json. Raises InputError for an architecture or value that is not computed."""
    name = values["general.architecture"]
    if name not in GGUF_ARCHITECTURES:
        raise InputError(f"architecture {name!r} is not supported; {', '.join(GGUF_ARCHITECTURES)} are")
    architecture = GGUF_ARCHITECTURES[name]
    given = given_values(values, architecture, f"{name}.")
    mixture = "expert_count" in given and architecture.mixture
    windowed = "attention.sliding_window" in given and architecture.windowed
    family = mixture or windowed or architecture.family
    known = {*FAMILIES[family].keys, *REQUIRED}
    hf = {key: given[name] for key, name in KEYS.items() if name in given and key in known}
    read = {KEYS[key] for key in hf}
    hf |= {"model_type": family, "vocab_size": tensors["token_embd.weight"].shape[0]}
    hf |= {"tie_word_embeddings": "output.weight" not in tensors}
    width = hf["hidden_size"] // hf["num_attention_heads"]
    n_layers = hf["num_hidden_layers"]
    if not 0 < n_layers <= checkpoint.MOST_LAYERS:
        raise InputError(f"{name}.block_count is {n_layers} but must be 1 to {checkpoint.MOST_LAYERS}")
    head_dim = hf.setdefault("head_dim", width)
    if given.get("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{name}.attention.value_length is not {head_dim}, the size of a head, which is not computed")
    absent = {  # llama.cpp's defaults, where those of transformers are others
        "sliding_window": architecture.window, "attention_multiplier": head_dim**-0.5,
        "original_max_position_embeddings": hf["max_position_embeddings"],
    }  # fmt: skip
    hf |= {key: value for key, value in absent.items() if key in known and key not in hf}
    more = {
        "attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "norm_topk_prob": values.get(f"{name}.expert_weights_norm", True),
        "query_pre_attn_scalar": width if n_layers == architecture.wide_queries else head_dim,  # not in the file
    }  # fmt: skip
    hf |= {key: value for key, value in more.items() if key in known}
    if pattern := given.get("attention.sliding_window_pattern"):  # every such layer has no window, or a list
        windows = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in range(n_layers)]
        hf["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    rope, read_by_rope = rope_settings(given, tensors, head_dim)
    if left := given.keys() - OTHERS - read - read_by_rope:
        raise InputError(f"{name}.{min(left)} {given[min(left)]!r} is unknown here")
    hf["eos_token_id"] = end_token_ids(values)
    return {**hf, "bos_token_id": values.get("tokenizer.ggml.bos_token_id"), "rope_scaling": rope or None}


def given_values(values, architecture, prefix):
    """Return the values whose keys begin with prefix, without that, and with llama.cpp's defaults of absent ones."""
    given = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix) and value}
    if not values.get(f"{prefix}attention.causal", True):
        raise InputError(f"{prefix}attention.causal is false: a model that reads what follows is not computed")
    needed = *NEEDED, *("expert_used_count",) * ("expert_count" in given), *architecture.needed
    if missing := [name for name in needed if name not in given]:
        raise InputError(f"it has no {prefix}{missing[0]}")
    scaling = {"rope.scaling.type": "linear"} if "rope.scaling.factor" in given else {}
    return {"attention.head_count_kv": given["attention.head_count"], "rope.freq_base": 10000.0, **scaling, **given}


def rope_settings(given, tensors, head_dim):
    """Return (rope_scaling of a config.json, the keys of `given` that it comes from)."""
    rope = {}
    read = set()
    if given.get("rope.dimension_count", head_dim) != head_dim:
        rope["partial_rotary_factor"] = given["rope.dimension_count"] / head_dim
    if given.get("rope.scaling.type") in ("linear", "yarn"):
        rope |= {key: given[name] for key, name in SCALING.items() if name in given}
        read |= {*SCALING.values()}
    factors = [tensors[name].floats().tolist() for name in (*FACTORS, FREQUENCIES, FREQUENCIES) if name in tensors]
    if factors:
        rope |= {"rope_type": "longrope", "attention_factor": given.get("rope.scaling.attn_factor", 1.0)}
        rope |= dict(zip(("short_factor", "long_factor"), factors, strict=True))
        read |= {"rope.scaling.type", "rope.scaling.attn_factor", "rope.scaling.factor"}
    return rope, read
