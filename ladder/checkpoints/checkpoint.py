"""Reads a checkpoint folder: config.json, and weights in safetensors files, with an index if there are several."""

import dataclasses
import fnmatch
import inspect
import json
import os
import re
import types
import typing
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ladder.architectures import ARCHITECTURES, find_architecture
from ladder.errors import FieldError, InputError, as_json, first_line, naming
from ladder.kernels.huge_pages import empty_in_huge_pages
from ladder.layers.attention_inputs import rope_frequencies
from ladder.progress import progress
from ladder.ranks.ending import out_of_memory
from model import Config

MOST_LAYERS = 1000  # more are refused before they are built
LARGEST_NUMBER = {int: 2**24, float: 1e30}  # in a config.json
TYPE_NAMES = {  # of JSON, for messages
    int: "a whole number", float: "a number", bool: "true or false", int | None: "a whole number or null",
    float | None: "a number or null", dict | None: "an object or null",
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {  # {what a safetensors file calls a dtype: the dtype}
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
UNQUANTIZED = "such quantized weights are not read: take the model's unquantized folder"
LFS_POINTER = "version https://git-lfs."  # how a pointer begins, which stands for a file that is not pulled yet
MERGE = "merge it: peft.AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(DIR)"
WRAPPERS = re.compile(r"^module\.|(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.(module\.)?")  # in names
SAFETENSORS = "take the model's folder in Hugging Face's form, with config.json and model*.safetensors"
OTHER_FORMATS = {  # {a file that is not read here: what it is, and what to do}
    "adapter_config.json": f"an adapter's: {MERGE}",
    "*.gguf": "in GGUF: convert it first, convert_hf_checkpoint.py FILE.gguf --out DIR",
    "params.json": f"in Meta's or Mistral's own format: {SAFETENSORS}", "*.pth": f"a pickle: {SAFETENSORS}",
    "pytorch_model*.bin": "a pickle: transformers makes safetensors of it (docs/formats.md)",
}  # fmt: skip


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def explain(path):
    """Return the end of an error message that says which of the OTHER_FORMATS a file is, or a folder has, or ""."""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else [os.path.basename(path)]
    hints = [f"; {name} is {OTHER_FORMATS[form]}" for form in OTHER_FORMATS for name in fnmatch.filter(names, form)]
    return hints[0] if hints else ""


def refuse_pointer(path):
    """Raise InputError if the file is a Git LFS pointer."""
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER.encode():
            raise InputError(f"{path} is a Git LFS pointer: git lfs pull brings the file itself")


def read_text(path, flag=""):
    """Return the text of a UTF-8 file, with or without a BOM. Raises InputError, whose message begins with the flag."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as e:
        raise InputError(f"{flag}{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag}{path} is not valid UTF-8") from None


def read_json_if_there(path):
    """Return the object in a JSON file, {} if there is no file. Raises InputError."""
    return read_json(path) if path.exists() else {}


def read_json(path):
    """Return the object in a JSON file, or raise InputError."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        refuse_pointer(path)
        raise InputError(f"{path} is not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _is_a(value, annotation):
    """Return whether a value of JSON has a field's type. A bool does not count as a number; numbers are at least 0."""
    if isinstance(annotation, types.UnionType):
        return any(_is_a(value, each) for each in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(_is_a(each, typing.get_args(annotation)[0]) for each in value)
    if annotation in LARGEST_NUMBER:
        number = isinstance(value, int | annotation) and not isinstance(value, bool)
        return number and 0 <= value <= LARGEST_NUMBER[annotation]
    return isinstance(value, annotation)


def check_fields(kind, values, prefix=""):
    """Raise InputError, with a prefix, unless a dict from a file has a dataclass's fields and their types."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        value = values.get(name)
        above_zero = field.type in LARGEST_NUMBER
        if name in values and not (_is_a(value, field.type) and (value or not above_zero)):
            words = TYPE_NAMES.get(field.type, inspect.formatannotation(field.type)) + " above 0" * above_zero
            raise FieldError(f"{prefix}{{{name}.name}} is {{{name}.value}} but must be {words}", kind, values)
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if unknown := values.keys() - fields.keys():
        old = "; if an earlier version converted this folder, convert it again" if kind is Config else ""
        raise InputError(f"{prefix}unknown key {min(unknown)!r}{old}")
    if missing := required - values.keys():
        name = min(missing)
        raise FieldError(f"{prefix}no key '{{{name}.name}}'", kind, {name: None})


def with_tuples(values):
    """Return a dict from a file with tuples for lists, since JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def make_architecture(values):
    """Return Config.architecture from {name: {setting: value}}. Raises InputError."""
    if not isinstance(values, dict):
        raise InputError(f"architecture is {as_json(values)} but must be an object")
    result = []
    for name, settings in values.items():
        if name not in ARCHITECTURES or not isinstance(settings, dict):
            known = ", ".join(ARCHITECTURES)
            raise InputError(f"architecture {name!r} is unknown, or no object; known: {known}")
        kind = find_architecture(name)
        settings = with_tuples(settings)
        check_fields(kind, settings, f"{name}: ")
        result.append(kind(**settings))
    return tuple(result)


def make_config(values):
    """Return the Config of a dict from a file. Raises InputError, a FieldError where a field is bad."""
    values = with_tuples(values)
    values["architecture"] = make_architecture(values.get("architecture", {}))
    check_fields(Config, values)
    if values["n_layers"] > MOST_LAYERS:
        raise FieldError(f"{{n_layers.name}} is {{n_layers.value}} but must be at most {MOST_LAYERS}", Config, values)
    try:
        config = Config(**values)
        rope_frequencies(config)
        return config
    except InputError:
        raise
    except (ArithmeticError, TypeError, ValueError) as e:
        raise InputError(f"values do not fit one another: {first_line(e)}") from None


def read_config(folder):
    """Return the Config of a checkpoint folder."""
    path = Path(folder) / "config.json"
    if os.path.isfile(folder):
        hint = explain(folder) or "; a llama2.c file is for convert_hf_checkpoint.py first"
        raise InputError(f"{folder} is a file: give its folder{hint}")
    if not os.path.isdir(folder):
        is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(folder)) and not os.path.isdir(Path(folder).parent)
        hint = f"; if it is a hub model, first: convert_hf_checkpoint.py {folder} --out DIR" if is_hub_name else ""
        raise InputError(f"{folder}: no such folder{hint}")
    if not os.path.isfile(path):
        raise InputError(f"{folder} is not a checkpoint folder: it has no config.json{explain(folder)}")
    values = read_json(path)
    if "model_type" in values or "architectures" in values:
        raise InputError(f"{folder} is a Hugging Face folder: run convert_hf_checkpoint.py {folder} --out DIR first")
    with naming(path):
        return make_config(values)


def shards(index):
    """Return {path of a file: names of its tensors} of an index. Raises InputError unless they are files beside it.

    Other tensors in these files, such as one that another file replaces, are not the model's.
    """
    weight_map = read_json(index).get("weight_map")
    result = {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map of tensor names to file names")
    for tensor, name in sorted(weight_map.items(), key=lambda item: str(item[1])):
        if not re.fullmatch(r"[\w-][\w.-]*", str(name), re.ASCII):
            raise InputError(f"{index} names {str(name)!r}, which is no plain name of a file beside it")
        result.setdefault(index.parent / str(name), set()).add(tensor)
    return result


def read_header(path):
    """Return ({tensor: (dtype, shape, (start, stop))}, bytes of the file) of a safetensors file. Raises InputError."""
    try:
        names = safe_open(path, framework="pt").keys()  # it refuses a file that is not valid
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")  # of the tensors, behind the header
            header = json.loads(file.read(begin - 8))
    except (OSError, SafetensorError) as e:
        if isinstance(e, SafetensorError):
            refuse_pointer(path)
        raise InputError(f"{path} is missing, truncated or no safetensors file: {first_line(e)}") from None
    tensors = {}
    for name in names:
        offsets = header[name]["data_offsets"]
        tensors[name] = header[name]["dtype"], header[name]["shape"], [begin + offset for offset in offsets]
    return tensors, os.path.getsize(path)


class Weights:
    """The tensors of a folder's safetensors files, memory-mapped, so that only what is read is loaded.

    Raises InputError for a file that is missing or truncated, and for a tensor that is missing.
    """

    def __init__(self, folder):
        single, index = (Path(folder) / f"model.safetensors{ending}" for ending in ("", ".index.json"))
        if not single.is_file() and not index.is_file():
            raise InputError(f"{folder} has no {single.name}, no {index.name}{explain(folder)}")
        self.files = {}  # {a tensor's name, without what wrappers add: (its file, its name there)}
        self.headers = {}  # {a file: what read_header returns}
        for path, names in ({single: None} if single.is_file() else shards(index)).items():
            stored, _ = self.headers[path] = read_header(path)
            if peft := [name for name in stored if re.search(r"^base_model\.model\.|\.(base_layer|lora_[AB])\.", name)]:
                raise InputError(f"{path}: tensor {peft[0]} is of a PEFT adapter: {MERGE}")
            if absent := (names or {*stored}) - {*stored}:
                raise InputError(f"{path} has no tensor {min(absent)!r}, which the index names")
            for name in (each for each in stored if names is None or each in names):
                own = WRAPPERS.sub("", name)
                if self.files.get(own, (path, name))[1] != name:
                    raise InputError(f"{path}: tensor {name} is a second {own}: drop one")
                self.files[own] = path, name

    def names(self):
        return list(self.files)

    def read(self, name):
        """Return a tensor that is mapped into memory. Raises InputError if there is none of this name."""
        if name not in self.files:
            raise InputError(f"the checkpoint has no tensor {name}")
        path, stored = self.files[name]
        header, size = self.headers[path]
        dtype, shape, (start, stop) = header[stored]
        if dtype not in STORED_DTYPES:
            raise InputError(f"{path}: tensor {stored} holds {dtype}, which is not supported")
        # The file is mapped anew each time, so that the mapping lives only as long as the tensor.
        try:
            mapping = torch.UntypedStorage.from_file(str(path), False, size)
        except RuntimeError as e:
            if out_of_memory(e):
                raise
            raise InputError(f"{path} has changed since its header was read: {first_line(e)}") from None
        return torch.empty(0, dtype=STORED_DTYPES[dtype]).set_(mapping[start:stop], 0, shape)

    def fill(self, target, name, dim=0, ranges=None):
        """Copy a tensor into target, or of its dimension dim only the given ranges [(start, stop), ...], joined.

        Nothing else is read. About 16 MB, or one expert, are copied at a time, so that little memory is needed besides
        target.
        """
        if target.dim() == 0:
            target.copy_(self.read(name))
            return
        start = 0
        step = max(1, 2**24 // self.read(name)[:1].nbytes)
        for a, b in ranges or [(0, target.shape[dim])]:
            part = target.narrow(dim, start, b - a)
            start += b - a
            for i in range(0, len(part), step):
                source = self.read(name).narrow(dim, a, b - a)  # read anew, which frees the pages copied before
                part[i : i + step].copy_(source[i : i + step])
                progress.beat()


def open_weights(folder, config, device):
    """Return the Weights of a folder, or random ones if it is None. Raises InputError if config has fewer layers."""
    if folder is None:
        from ladder.checkpoints.random_weights import RandomWeights

        return RandomWeights(config, device)
    weights = Weights(folder)
    if more := [name for name in weights.names() if name.startswith(f"layers.{config.n_layers}.")]:
        raise InputError(f"{folder} has a tensor {more[0]}, but its config has n_layers {config.n_layers}")
    return weights


def chosen_dtype(name, weights, tensor="norm.weight"):
    """Return the dtype of this name, or without a name the weights' own, which `tensor` has: it is never quantized.

    weights: anything with read(name), or None for random weights, which are bfloat16. Raises InputError for a dtype
    that models do not compute in.
    """
    stored = weights.read(tensor).dtype if weights else torch.bfloat16
    if stored.itemsize == 1 or not (name or stored.is_floating_point):  # such as FP8, whose scales are not read
        raise InputError(f"tensor {tensor} holds {dtype_name(stored)}: {UNQUANTIZED}")
    if not name and stored not in DTYPES.values():
        raise InputError(f"tensor {tensor} holds {dtype_name(stored)}: give --dtype, one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else stored


def check_shape(weights, name, shape):
    """Raise InputError unless the tensor has the config's shape. weights: anything with read(name)."""
    if (stored := weights.read(name).shape) != shape:
        raise InputError(f"tensor {name} is {tuple(stored)}, but the config says {tuple(shape)}")


def all_finite(tensor):
    """Return whether no number of a tensor is NaN or infinite. PyTorch checks no e4m3, which has NaN only."""
    if tensor.dtype == torch.float8_e4m3fn:
        return not tensor.view(torch.uint8).bitwise_and(127).eq(127).any()
    return not (tensor.numel() and tensor.is_floating_point()) or torch.stack(tensor.aminmax()).isfinite().all()


def read_slice(weights, name, piece, device):
    """Return a rank's slice of a tensor, on the device. piece: a tp.ShardSlice.

    Raises InputError if the tensor holds integers where the config says floats, integers of another type, or numbers
    that are not finite.
    """
    stored = weights.read(name).dtype
    dtype = piece.dtype
    both_floats = stored.is_floating_point and dtype.is_floating_point and min(stored.itemsize, dtype.itemsize) > 1
    if stored != dtype and not both_floats:
        raise InputError(f"tensor {name} holds {dtype_name(stored)}, but the config says {dtype_name(dtype)}")
    if piece.as_stored and stored == torch.float16:
        dtype = stored
    if piece.zeros:
        return torch.zeros(piece.shape, dtype=dtype, device=device)
    shape = list(piece.shape)
    columns = piece.columns_per_element
    ranges = piece.ranges
    if ranges:  # of columns; from here on, of stored elements
        ranges = [(start // columns, -(-stop // columns)) for start, stop in ranges]
        shape[piece.dim] = sum(stop - start for start, stop in ranges)
    tensor = empty_in_huge_pages(shape, dtype, device)
    weights.fill(tensor, name, piece.dim, ranges)
    if tensor.shape != piece.shape:
        from ladder.kernels import quant_linear

        tensor = quant_linear.regroup(tensor, *piece.ranges[0], columns)
    if not all_finite(tensor):
        why = f"in {dtype_name(dtype)}; it is stored in {dtype_name(stored)}"
        raise InputError(f"tensor {name} holds NaN or infinite values {why}")
    return tensor
