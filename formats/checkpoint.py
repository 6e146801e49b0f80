"""A checkpoint folder: config.json, safetensors (with an index when there are several), tokenizer files."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import stat
import types
from pathlib import Path
from typing import Union, get_args, get_origin

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from kernels import int_linear
from model import LLAMA3, Config, Index, InputError, wiring_name
from runtime import watch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def first_line(error):
    """The first line of a library's error message, or its name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Files come from strangers. Whatever is in one, to read it executes nothing, allocates no more than some times its
# size, and ends within seconds: sizes are looked at before anything is read or built.

MOST_TEXT, MOST_JSON, MOST_HEADER = 2**30, 2**24, 2**24  # bytes; the largest index known, of 163 shards, has 9 MB
DEEPEST = 100  # of lists in lists in JSON


def check_file(path, at_most=None, flag=""):
    """Raise InputError, led by the flag, unless path is a regular file, or a link to one, of at most so many bytes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as e:  # a ValueError for a NUL in the name
        raise InputError(f"{flag}{path}: {getattr(e, 'strerror', None) or e}") from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{flag}{path}: it is {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
    if at_most is not None and found.st_size > at_most:
        raise InputError(f"{flag}{path} has {found.st_size / 1e6:,.0f} MB: at most {at_most / 1e6:,.0f} are read")


def read_text(path, flag="", at_most=MOST_TEXT):
    """The text of a UTF-8 file; the flag that named it, if given, leads the message of an InputError."""
    check_file(path, at_most, flag)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"{flag}{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag}{path} is not valid UTF-8") from None


def parse_json(text):
    """The value in JSON text; a ValueError for any text that has none, or one nested too deeply to be worked on."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [v for v in level if isinstance(v, dict | list)]
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    if level:
        raise ValueError("nested too deeply")
    return value


def read_json(path):
    """The object in a JSON file; InputError when there is no such file or it holds something else."""
    text = read_text(path, at_most=MOST_JSON)
    try:
        value = parse_json(text)
    except ValueError as e:
        raise InputError(f"{path} is not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


FIELDS = {f.name: f for f in dataclasses.fields(Config)}
MEANT = {int: "a positive integer", float: "a positive number", bool: "true or false", str: "a string"}
MEANT |= {Index: "an integer from 0 on", types.NoneType: "null"}
AT_MOST = {  # of a field, with much room above every known model; refused before anything is built
    "n_layers": 1000, "n_heads": 2**14, "n_kv_heads": 2**14, "head_dim": 2**14, "dim": 2**18,
    "intermediate_size": 2**20, "vocab_size": 2**24, "max_seq_len": 2**30, "norm_eps": 1.0, "rope_theta": 1e15,
}  # fmt: skip
LARGEST, LONGEST = 2**31 - 1, 2**16  # of the other integers; entries of a list
FLOATS = 1e-30, 1e15  # the smallest and the largest


def check_size(name, value, source, called=None):
    """Raise InputError when the number of a Config field, which the source may call otherwise, is absurdly large."""
    most = AT_MOST.get(name, LARGEST)
    if isinstance(value, int | float) and value > most:
        raise InputError(f"{source}: {called or name} is {value!r} but must be at most {most:,}")


def fits(value, kind):
    """Whether a value out of JSON is of the type of a Config field: numbers are positive, an Index may be 0."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) <= LONGEST and all(fits(v, parts[0]) for v in value)
    if origin is dict:
        keys = set(get_args(parts[0]))
        return isinstance(value, dict) and value.keys() == keys and all(fits(v, parts[1]) for v in value.values())
    if kind is Index:
        return type(value) is int and 0 <= value <= LARGEST
    if kind is float:
        return type(value) in (int, float) and FLOATS[0] <= value <= FLOATS[1]
    return type(value) is kind and (kind is not int or value > 0)


def meant(kind):
    """What fits, in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(meant, parts))
    if origin is tuple:
        return f"a list, each {meant(parts[0])}"
    if origin is dict:
        return f"an object of {', '.join(get_args(parts[0]))}, each {meant(parts[1])}"
    return MEANT[kind]


def make_config(values, source):
    """The Config of a dict that comes from a file; InputError names the source and the first field that is wrong."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}  # JSON has no tuples
    if {"ladder_layers", "desync_period"} & values.keys():  # as config.json was written before wirings were one word
        name = "ladder" if values["wiring"] == "hybrid" else values["wiring"]
        layers, period = values.pop("ladder_layers", None), values.pop("desync_period", None)
        values["wiring"] = wiring_name(name, period if name == "desync" else layers)
    for name, field in FIELDS.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise InputError(f"{source}: no {name!r}")
    for name, value in values.items():
        if name not in FIELDS:
            raise InputError(f"{source}: unknown key {name!r}")
        if not fits(value, FIELDS[name].type):
            raise InputError(f"{source}: {name} is {value!r} but must be {meant(FIELDS[name].type)}")
        check_size(name, value, source)
    try:
        config = Config(**values)
        int_linear.check(config)
        if config.rope_theta <= 1:
            raise InputError(f"rope_theta is {config.rope_theta!r} but must be above 1")
        return config
    except InputError as e:
        raise InputError(f"{source}: {e}") from None


def name(folder):
    """What a folder is called."""
    return Path(folder).resolve().name


def read_config(folder):
    """The Config of a checkpoint folder."""
    path = Path(folder) / "config.json"
    if os.path.isfile(folder):  # false, where Path's raises an error, for what can be no name of a file
        raise InputError(f"{folder} is a file: run convert_hf_checkpoint.py {folder} --out DIR first")
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is not a checkpoint folder: there is no such folder")
    if not os.path.isfile(path):
        raise InputError(f"{folder} is not a checkpoint folder: it has no config.json")
    values = read_json(path)
    if "model_type" in values or "architectures" in values:
        raise InputError(f"{folder} is a Hugging Face folder: run convert_hf_checkpoint.py {folder} --out DIR first")
    return make_config(values, path)


def digest(folder, samples=64):
    """A short hash of what a checkpoint folder holds; of large files, of the size and of samples spread evenly."""
    found = hashlib.sha256()
    kept = ("config.json", *TOKENIZER_FILES)
    for path in sorted(p for p in Path(folder).iterdir() if p.suffix == ".safetensors" or p.name in kept):
        if not path.is_file():
            continue
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        step = max(2**16, size // samples)
        with open(path, "rb") as f:
            for start in range(0, size, step):
                f.seek(start)
                found.update(f.read(2**16))
    return found.hexdigest()[:8]


def shapes(config):
    """{name: shape} of every tensor of a checkpoint; a tied output head is not one."""
    return {name: tuple(w.shape) for name, w in int_linear.skeleton(config).named_parameters()}


def read_weight_map(index):
    """{tensor name: file name} of an index of shards, which may name files of its own folder alone."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise InputError(f"{index} has no weight_map of tensor names to file names")
    for file in set(weight_map.values()):
        if not re.fullmatch(r"[\w-][\w.-]{0,200}", file, re.ASCII):
            raise InputError(f"{index} names {file!r}, which is no plain name of a file beside it")
    return weight_map


def check_header(path):
    """Raise InputError unless a safetensors file has a header of a size to be read."""
    check_file(path)
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
    if size > MOST_HEADER:
        raise InputError(f"{path} is no safetensors file: its header would have {size:,} bytes")


class Weights:
    """The tensors of a folder's safetensors files, memory-mapped; only what is read is loaded.

    Raises InputError when a file that the index names is absent, or one is truncated, or a tensor is asked for whose
    numbers are of a type that this project does not compute with.
    """

    TYPES = {"F64", "F32", "F16", "BF16", "I8", "U8"}

    def __init__(self, folder):
        folder = Path(folder)
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():
            paths = [single]
        elif index.is_file():
            weight_map = read_weight_map(index)
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        else:
            raise InputError(f"{folder} has no {single.name} and no {index.name}")
        self.files = {}  # tensor name: the file that holds it
        for path in paths:
            if not path.is_file():
                raise InputError(f"{path} is missing, but {index.name} names it: download or convert it again")
            check_header(path)
            try:
                self.files.update(dict.fromkeys(safe_open(path, framework="pt").keys(), path))
            except SafetensorError as e:
                raise InputError(f"{path} is truncated or no safetensors file: {e}") from None
        if paths[0] != single:
            lost = sorted(set(weight_map) - set(self.files))
            if lost:
                raise InputError(f"{index} names {lost[0]}, but no file holds it")

    def names(self):
        return list(self.files)

    def _open(self, name):
        if name not in self.files:
            raise InputError(f"the checkpoint has no tensor {name}")
        # Opened anew each time: what was read stays mapped as long as its tensor lives, and no longer.
        file = safe_open(self.files[name], framework="pt")
        found = file.get_slice(name).get_dtype()
        if found not in self.TYPES:
            raise InputError(f"tensor {name} is of dtype {found}: only {', '.join(sorted(self.TYPES))} are read")
        return file

    def shape(self, name):
        return tuple(self._open(name).get_slice(name).get_shape())

    def dtype(self, name):
        return self.read(name).dtype

    def read(self, name):
        """The tensor, mapped into memory."""
        return self._open(name).get_tensor(name)

    def fill(self, target, name, dim=0, ranges=None):
        """Copy the tensor, or the given ranges (start, stop) along dimension 0 or 1 of it, joined, into target.

        Nothing else is read, and some 16 MB at a time, so that little more than target takes memory.
        """
        start, step = 0, max(1, 2**24 // self.read(name)[:1].nbytes)
        for a, b in ranges or [(0, target.shape[dim])]:
            part = target.narrow(dim, start, b - a)
            start += b - a
            for i in range(0, len(part), step):
                # read anew: the pages behind what was copied go with the tensor
                source = self.read(name).narrow(dim, a, b - a)
                part[i : i + step].copy_(source[i : i + step])
                watch.beat()


def own_dtype(weights, name):
    """The dtype of a checkpoint, as a tensor says that is never stored as integers; weights: with read(name)."""
    dtype = weights.read(name).dtype
    if dtype not in DTYPES.values():
        raise InputError(f"tensor {name} holds {dtype_name(dtype)}: give --dtype, one of {', '.join(DTYPES)}")
    return dtype


def check_shape(weights, name, shape):
    """Raise InputError unless the tensor has the shape that the config says. weights: as tp.load_shard takes them."""
    if weights.shape(name) != shape:
        raise InputError(f"tensor {name} is {weights.shape(name)}, but the config says {tuple(shape)}")


def _llama3(n_layers, n_heads, head_dim, dim, intermediate_size, factor=8.0, tie_embeddings=False):
    rope = dict(zip(get_args(LLAMA3), (factor, 1.0, 4.0, 8192), strict=True))
    return Config(
        n_layers, n_heads, 8, head_dim, dim, intermediate_size, 128256, 131072, 1e-5, 500000.0, rope, tie_embeddings,
        bos_id=128000, eos_ids=(128001, 128008, 128009),
    )  # fmt: skip


SIZES = {  # shapes for benchmarks with random weights
    "1b": _llama3(16, 32, 64, 2048, 8192, factor=32.0, tie_embeddings=True),  # Llama 3.2 1B
    "3b": _llama3(28, 24, 128, 3072, 8192, factor=32.0, tie_embeddings=True),  # Llama 3.2 3B
    "8b": _llama3(32, 32, 128, 4096, 14336),  # Llama 3.1 8B
    "34b": Config(48, 64, 8, 128, 8192, 22016, 32000, 16384, rope_theta=1e6, bos_id=1, eos_ids=(2,)),  # CodeLlama 34B
    "70b": _llama3(80, 64, 128, 8192, 28672),  # Llama 3.1 70B
    # BLOOM 176B as the Ladder Residual paper times it: a Llama block of BLOOM's width with a gated MLP of 3.5 D
    "176b": Config(70, 112, 112, 128, 14336, 50176, 250880, 8192, rope_theta=500000.0, bos_id=1, eos_ids=(2,)),
    "405b": _llama3(126, 128, 128, 16384, 53248),  # Llama 3.1 405B
}


def named_size(name, n_layers=None, quant=None, group_size=None):
    """The Config of one of SIZES, as the flags --n-layers, --quant and --group-size change it."""
    config = SIZES[name]
    if (n_layers or 0) > config.n_layers:
        raise InputError(f"--n-layers is {n_layers} but {name} has {config.n_layers}")
    size = 64 if quant == "int4" and group_size is None else group_size
    config = dataclasses.replace(config, n_layers=n_layers or config.n_layers, quant=quant, group_size=size)
    int_linear.check(config)
    return config


class RandomWeights:
    """The same interface without a file: matrices from N(0, 0.02), norms 1, biases 0; integers of the same spread."""

    def __init__(self, config, device, seed=0):
        self.parameters = dict(int_linear.skeleton(config).named_parameters())
        self.scale = 0.02 * 12**0.5 / (15 if config.quant == "int4" else 254)  # of evenly distributed integers
        self.generator = torch.Generator(device).manual_seed(seed)

    def shape(self, name):
        return tuple(self.parameters[name].shape)

    def dtype(self, name):
        return self.parameters[name].dtype

    def fill(self, target, name, dim=0, ranges=None):
        if target.dim() == 1:
            target.fill_(float(not name.endswith("bias")))
        elif name.endswith(("scales", "zeros")):
            target.fill_(self.scale if name.endswith("scales") else -7.5 * self.scale)
        elif not target.is_floating_point():
            low, high = (0, 256) if target.dtype == torch.uint8 else (-127, 128)
            target.random_(low, high, generator=self.generator)
        else:
            target.normal_(0, 0.02, generator=self.generator)


def write_config(folder, config):
    values = {k: v for k, v in dataclasses.asdict(config).items() if v not in (None, ())}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def write_weights(folder, sizes, read, shard_bytes=5_000_000_000):
    """Write tensors into model.safetensors, or into numbered shards of at most shard_bytes and their index.

    sizes: {name: bytes}, in the order to write. read(name) makes the tensor, one shard's worth in memory at a time.
    """
    total = sum(sizes.values())
    free = shutil.disk_usage(folder).free
    if total > free:
        raise InputError(f"cannot write {folder.parent}: {total / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free")
    shards = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    os.umask(mask := os.umask(0))
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", delay=1) as bar:
        for file, names in zip(files, shards, strict=True):
            tensors = {}
            for name in names:
                tensors[name] = read(name).contiguous()
                bar.update(sizes[name])
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o666 & ~mask)  # safetensors makes files that only their owner may read
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_tokenizer(source, folder):
    """Copy whatever tokenizer files the folder source holds."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


def write_model(folder, config, state, dtype):
    """Write a whole model that is in memory (its state dict) as config.json and safetensors of the given dtype."""
    if config.tie_embeddings:
        state = {k: v for k, v in state.items() if k != "output.weight"}
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in state.items()}
    write_config(folder, config)
    write_weights(folder, sizes, lambda name: state[name].to(dtype))
