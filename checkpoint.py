"""A checkpoint folder: config.json, safetensors (with an index when there are several), tokenizer files."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import types
from pathlib import Path
from typing import Union, get_args, get_origin

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from kernels import int_linear
from model import LLAMA3, Config, Index, InputError

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


def read_text(path, flag=""):
    """The text of a UTF-8 file; the flag that named it, if given, leads the message of an InputError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"{flag}{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag}{path} is not valid UTF-8") from None


def read_json(path):
    """The object in a JSON file; InputError when there is no such file or it holds something else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{path}: {e.strerror or e}") from None
    except ValueError as e:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


FIELDS = {f.name: f for f in dataclasses.fields(Config)}
MEANT = {int: "a positive integer", float: "a positive number", bool: "true or false", str: "a string"}
MEANT |= {Index: "an integer from 0 on", types.NoneType: "null"}


def fits(value, kind):
    """Whether a value out of JSON is of the type of a Config field: numbers are positive, an Index may be 0."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, parts[0]) for v in value)
    if origin is dict:
        keys = set(get_args(parts[0]))
        return isinstance(value, dict) and value.keys() == keys and all(fits(v, parts[1]) for v in value.values())
    if kind is Index:
        return type(value) is int and value >= 0
    if kind is float:
        return type(value) in (int, float) and 0 < value < math.inf
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
    for name, field in FIELDS.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise InputError(f"{source}: no {name!r}")
    for name, value in values.items():
        if name not in FIELDS:
            raise InputError(f"{source}: unknown key {name!r}")
        if not fits(value, FIELDS[name].type):
            raise InputError(f"{source}: {name} is {value!r} but must be {meant(FIELDS[name].type)}")
    try:
        config = Config(**values)
        int_linear.check(config)
        return config
    except InputError as e:
        raise InputError(f"{source}: {e}") from None


def name(folder):
    """What a folder is called."""
    return Path(folder).resolve().name


def read_config(folder):
    """The Config of a checkpoint folder."""
    path = Path(folder) / "config.json"
    if Path(folder).is_file():
        raise InputError(f"{folder} is a file: run convert_hf_checkpoint.py {folder} --out DIR first")
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is not a checkpoint folder: there is no such folder")
    if not path.is_file():
        raise InputError(f"{folder} is not a checkpoint folder: it has no config.json")
    values = read_json(path)
    if "model_type" in values or "architectures" in values:
        raise InputError(f"{folder} is a Hugging Face folder: run convert_hf_checkpoint.py {folder} --out DIR first")
    return make_config(values, path)


def digest(folder, samples=64):
    """A short hash of what a checkpoint folder holds; of large files, of the size and of samples spread evenly."""
    found = hashlib.sha256()
    for path in sorted(p for p in Path(folder).iterdir() if p.suffix in (".json", ".safetensors", ".model", ".jinja")):
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
    """{tensor name: file name} of an index of shards."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{index} has no weight_map of tensor names to file names")
    return weight_map


class Weights:
    """The tensors of a folder's safetensors files, memory-mapped; only what is read is loaded.

    Raises InputError when a file that the index names is absent, or one is truncated.
    """

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
        return safe_open(self.files[name], framework="pt")

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


@contextlib.contextmanager
def new_folder(path):
    """A folder that appears under its name only when the block ends well; yields the temporary one to write into."""
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} already exists: remove it or give another folder")
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as e:  # above all: no space left on the device
        raise InputError(f"cannot write {path}: {e}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
