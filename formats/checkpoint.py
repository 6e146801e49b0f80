"""A checkpoint folder: config.json, safetensors (with an index when there are several), tokenizer files."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from formats.wiring_text import wiring_name
from kernels import cpu, int_linear
from model import WIRINGS, Config, build, rope_frequencies
from runtime import watch
from runtime.errors import InputError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
LANEFORMER_KEYS = "early_comm", "attention_comm", "mlp_comm", "lane_head", "lane_norms"
MOST_LAYERS = 1000  # checked before so many are built
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def first_line(error):
    """Return the first line of a library's error message, or the error's name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_text(path, flag=""):
    """Return the text of a UTF-8 file; the flag that named it, if given, leads the message of an InputError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"{flag}{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag}{path} is not valid UTF-8") from None


def read_json(path):
    """Return the object in a JSON file, or raise InputError."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def make_config(values, source):
    """Return the Config of a dict from a file; InputError names the source and what is wrong."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}  # JSON has no tuples
    if {"ladder_layers", "desync_period"} & values.keys():  # as config.json was written before wirings were one word
        name = "ladder" if values.get("wiring") == "hybrid" else values.get("wiring")
        layers, period = values.pop("ladder_layers", None), values.pop("desync_period", None)
        values["wiring"] = wiring_name(name, period if name == "desync" else layers)
    ranks, name = values.pop("made_for_tp", None), str(values.get("wiring"))  # as it was before there were lanes
    if ranks and (kind := WIRINGS.get(name.partition(":")[0])) and kind.laned:
        values["wiring"] = f"{name}/{ranks}"
    old = {key: values.pop(key) for key in LANEFORMER_KEYS if key in values}  # as they were before they had a dict
    if name.startswith("laneformer") and old:
        values["laneformer"] = old
    for field in dataclasses.fields(Config):
        value, kind, positive = values.get(field.name), field.type, field.type in (int, float)
        right = isinstance(value, float | int if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if field.name in values and not (right and (not positive or value > 0)):
            kind = f"{kind.__name__} above 0" if positive else getattr(kind, "__name__", kind)
            raise InputError(f"{source}: {field.name} is {value!r} but must be {kind}")
    if values.get("n_layers", 0) > MOST_LAYERS:
        raise InputError(f"{source}: n_layers is {values['n_layers']} but must be at most {MOST_LAYERS}")
    try:
        config = Config(**values)
        int_linear.check(config)
        rope_frequencies(config)
        return config
    except InputError as e:
        raise InputError(f"{source}: {e}") from None
    except (ArithmeticError, KeyError, TypeError, ValueError) as e:  # names what is missing, of rope_scaling too
        raise InputError(f"{source}: {e!r}") from None


def name(folder):
    """Return the name of a folder."""
    return Path(folder).resolve().name


def read_config(folder):
    """Return the Config of a checkpoint folder."""
    path = Path(folder) / "config.json"
    if os.path.isfile(folder):
        raise InputError(f"{folder} is a file: run convert_hf_checkpoint.py {folder} --out DIR first")
    if not os.path.isfile(path):
        raise InputError(f"{folder} is not a checkpoint folder: it has no config.json, or does not exist")
    values = read_json(path)
    if "model_type" in values or "architectures" in values:
        raise InputError(f"{folder} is a Hugging Face folder: run convert_hf_checkpoint.py {folder} --out DIR first")
    return make_config(values, path)


def read_original(folder):
    """Return the Config of a checkpoint folder; raise InputError if it is quantized."""
    config = read_config(folder)
    if config.quant:
        raise InputError(f"{folder} is quantized ({config.quant}): give the original")
    return config


def digest(folder, samples=64):
    """Return a short hash of a checkpoint folder's files: of large ones, of the size and samples spread evenly."""
    found, kept = hashlib.sha256(), ("config.json", *TOKENIZER_FILES)
    for path in sorted(Path(folder).iterdir()):
        if not path.is_file() or (path.suffix != ".safetensors" and path.name not in kept):
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
    """Return {name: shape} of every tensor of a checkpoint; a tied output head is not one."""
    return {name: tuple(w.shape) for name, w in build(config).named_parameters()}


def shards(index):
    """Return the paths of the shards in an index, which may name plain files of its own folder only."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map of tensor names to file names")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII):
            raise InputError(f"{index} names {name!r}, which is no plain name of a file beside it")
        if not os.path.isfile(index.parent / name):
            raise InputError(f"{index.parent / name} is missing, but {index.name} names it: download or convert again")
    return [index.parent / name for name in names]


class Weights:
    """The tensors of a folder's safetensors files, memory-mapped; only what is read is loaded.

    Raises InputError for a file that is missing or truncated and for a tensor that is not there.
    """

    def __init__(self, folder):
        single, index = (Path(folder) / f"model.safetensors{ending}" for ending in ("", ".index.json"))
        if not single.is_file() and not index.is_file():
            raise InputError(f"{folder} has no {single.name} and no {index.name}")
        self.files = {}  # tensor name: the file that holds it
        for path in [single] if single.is_file() else shards(index):
            try:
                self.files.update(dict.fromkeys(safe_open(path, framework="pt").keys(), path))
            except SafetensorError as e:
                raise InputError(f"{path} is truncated or no safetensors file: {first_line(e)}") from None

    def names(self):
        return list(self.files)

    def shape(self, name):
        return tuple(self.read(name).shape)

    def dtype(self, name):
        return self.read(name).dtype

    def read(self, name):
        """Return the tensor, mapped into memory."""
        if name not in self.files:
            raise InputError(f"the checkpoint has no tensor {name}")
        # Opened anew each time: what was read stays mapped as long as its tensor lives, and no longer.
        return safe_open(self.files[name], framework="pt").get_tensor(name)

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


def open_weights(folder, config, device):
    """Return the Weights of a folder, or random ones where it is None."""
    if folder:
        return Weights(folder)
    from formats.sizes import RandomWeights

    return RandomWeights(config, device)


def own_dtype(weights, name):
    """Return the dtype of a checkpoint's tensor that is never quantized; weights: anything with read(name)."""
    dtype = weights.read(name).dtype
    if dtype not in DTYPES.values():
        raise InputError(f"tensor {name} holds {dtype_name(dtype)}: give --dtype, one of {', '.join(DTYPES)}")
    return dtype


def chosen_dtype(name, folder, weights=None):
    """Return the dtype of that name (default: that of the folder's weights, of random ones bfloat16)."""
    if name or not folder:
        return DTYPES.get(name, torch.bfloat16)
    return own_dtype(weights or Weights(folder), "norm.weight")


def check_shape(weights, name, shape):
    """Raise InputError unless the tensor has the config's shape. weights: as tp.load_shard takes them."""
    if weights.shape(name) != shape:
        raise InputError(f"tensor {name} is {weights.shape(name)}, but the config says {tuple(shape)}")


def read_slice(weights, name, piece, device):
    """Return what a rank holds of a tensor. piece: a tp.ShardSlice.

    Raises InputError for integers where floats should be, or integers of another type, and for numbers that are not
    finite.
    """
    stored, dtype = weights.dtype(name), piece.dtype
    if stored != dtype and not (stored.is_floating_point and dtype.is_floating_point):
        raise InputError(f"tensor {name} holds {dtype_name(stored)}, but the config says {dtype_name(dtype)}")
    if piece.ranges == []:
        return torch.zeros(piece.shape, dtype=dtype, device=device)
    stored_ranges = piece.ranges and [
        (start // piece.columns, -(-stop // piece.columns)) for start, stop in piece.ranges
    ]
    shape = list(piece.shape)
    if stored_ranges:
        shape[piece.dim] = sum(stop - start for start, stop in stored_ranges)
    tensor = cpu.empty(shape, dtype, device)
    weights.fill(tensor, name, piece.dim, stored_ranges)
    if tensor.shape != piece.shape:
        tensor = int_linear.regroup(tensor, *piece.ranges[0], piece.columns)
    if tensor.numel() and tensor.is_floating_point() and not torch.stack(tensor.aminmax()).isfinite().all():
        why = f"in {dtype_name(dtype)}; it is stored in {dtype_name(stored)}"
        raise InputError(f"tensor {name} holds NaN or infinite values {why}")
    return tensor


def write_config(folder, config):
    values = {k: v for k, v in dataclasses.asdict(config).items() if v not in (None, ())}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def write_weights(folder, sizes, read, shard_bytes=5_000_000_000):
    """Write tensors into model.safetensors, or into numbered shards of at most shard_bytes and their index.

    sizes: {name: bytes}, in the order to write. read(name) returns a tensor; one shard at a time is in memory.
    """
    total, shards, room = sum(sizes.values()), [], 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    weight_map = {}
    os.umask(mask := os.umask(0))
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", delay=1, disable=None) as bar:
        for i, names in enumerate(shards, start=1):
            number = f"-{i:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            weight_map |= dict.fromkeys(names, file := f"model{number}.safetensors")
            tensors = {}
            for name in names:
                tensors[name] = read(name).contiguous()
                bar.update(sizes[name])
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o666 & ~mask)  # safetensors makes files that only their owner may read
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_tokenizer(source, folder):
    """Copy the tokenizer files of the folder source."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


def write_model(folder, config, state, dtype):
    """Write config.json and safetensors of the given dtype from a model's state dict."""
    if config.tie_embeddings:
        state = {k: v for k, v in state.items() if k != "output.weight"}
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in state.items()}
    write_config(folder, config)
    write_weights(folder, sizes, lambda name: state[name].to(dtype))
