"""Convert a Hugging Face folder or hub model, a GGUF or a llama2.c file into a checkpoint for generate.py.

python convert_hf_checkpoint.py meta-llama/Llama-3.2-1B --out checkpoints/1b
python convert_hf_checkpoint.py SmolLM2-135M-Instruct.Q4_1.gguf --out checkpoints/smollm2
python convert_hf_checkpoint.py stories260K.bin --tokenizer tok512.model --out checkpoints/stories260K
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import ladder.openmp  # noqa: F401 (before torch loads)

import torch

import tp
from ladder import config_check, outputs
from ladder.checkpoints import checkpoint, rounding, writing
from ladder.checkpoints.checkpoint import dtype_name
from ladder.checkpoints.compare import TOKENIZER_FILES
from ladder.command_line import flags
from ladder.errors import InputError, first_line
from ladder.kernels.quant_linear import dequantize, eight_bits, nearest, pack_pairs
from ladder.ranks import launch
from ladder.ranks.ending import out_of_memory
from ladder.sources.huggingface import group, hf_names
from ladder.sources.matrices import E4M3, Form, Fp8, by_rows, in_groups, to_floats
from ladder.sources.source import SOURCES, open_path
from ladder.text.tokenizer import load_tokenizer
from model import build


def open_source(source, revision=None, with_tokenizer=True):
    """Return the Source of a folder, a hub id or a file. Raises InputError; prints what is ignored or left out."""
    path = Path(source)
    if os.path.isfile(path) and not os.path.getsize(path):
        raise InputError(f"{source} is empty: copy it again")
    local = os.path.exists(path) or os.path.isdir(source.partition("/")[0]) or path.suffix in (".gguf", ".bin")
    if not local and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        path = download(source, revision)
    is_known = path.suffix == ".gguf" or os.path.isfile(path / "config.json")
    missing = ": it has no config.json" if os.path.isdir(path) else ""
    if not is_known and (hint := checkpoint.explain(path) or missing):
        files = sorted(path.glob("*.gguf"))
        hint = f": give the file itself: {files[0]}" if "is in GGUF" in hint else hint
        raise InputError(f"{source} cannot be converted{hint}")
    opened = open_path(path, with_tokenizer)
    if opened is None:
        raise InputError(f"{source}: no such file or folder, and no hub id such as meta-llama/Llama-3.2-1B")
    for note in opened.notes:
        print(note)
    return opened


def download(repository, revision=None):
    """Download a hub model and return its folder. Raises InputError."""
    import huggingface_hub

    # the code in a folder (*.py) is left to those who verify; none of it is run here
    patterns = ["model*.safetensors", "*.json", "*.py", *TOKENIZER_FILES]
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as e:  # errors of huggingface_hub, of its HTTP library, of the operating system
        raise InputError(f"{repository} is not a local folder, and could not be downloaded: {first_line(e)}") from None


# ---- The plan: what each tensor is made of, and in what form ---------------------------------------------------------


def forms_of(source, config):
    """Return {kind of a matrix, such as w2: {its path in our model: its Form in the source, or None: floats}}."""
    kinds = {}
    may_be_quantized = config_check.quantizable(config)
    for name in writing.shapes(config):
        path, _, tensor = name.rpartition(".")
        kind = path.rpartition(".")[2]
        if tensor == "weight" and kind in may_be_quantized:
            forms = [source.form(each) for each in hf_names(name, config)]  # those of queries, keys and values join
            form = forms[0]
            if None in forms:
                form = None
            elif form != E4M3:
                form = Form(max(each.bits for each in forms), math.gcd(*(each.columns for each in forms)))
            kinds.setdefault(kind, {})[path] = form
    return kinds


def keep_quantized(config, source):
    """Return the config with those kinds of matrices, such as w2, quantized that the source has so in every layer.

    Where matrices have several forms, the config lists those with 8 bits, by their kind if all of it are alike.
    """
    kinds = forms_of(source, config)
    floats = tuple(kind for kind, forms in kinds.items() if None in forms.values())
    kinds = {kind: forms for kind, forms in kinds.items() if kind not in floats}
    forms = [form for paths in kinds.values() for form in paths.values()]
    if not forms:
        return config
    if E4M3 in forms:
        return dataclasses.replace(config, quant="fp8", not_quantized=floats)
    in_four = [form.columns for form in forms if form.bits == 4]
    usual = Form(4, math.gcd(*in_four)) if in_four else Counter(forms).most_common(1)[0][0]
    listed = []
    for kind, paths in kinds.items():
        others = {path: form for path, form in paths.items() if form.bits == 8 and form != usual}
        if len(others) == len(paths) and len({*others.values()}) == 1:
            others = {kind: next(iter(others.values()))}
        listed += [f"{name}:{form.columns}" for name, form in others.items()]
    return dataclasses.replace(
        config, quant=f"int{usual.bits}", group_size=usual.columns, not_quantized=floats, int8=tuple(listed)
    )


def plan(source, config, parameters):
    """Return {our name: the names of the source's tensors that make it}, without scales and zeros.

    parameters: the names of ours. Raises InputError for tensors that are missing, or that are no part of the model.
    """
    available = {*source.names()}
    sources = {name: hf_names(name, config) for name in parameters if not name.endswith((".scales", ".zeros"))}
    if config.tie_embeddings and not available.issuperset(sources["tok_embeddings.weight"]):
        # under whose name some folders have the tied tensor
        sources["tok_embeddings.weight"] = hf_names("output.weight", config)
    needed = {each for names in sources.values() for each in names}
    if missing := sorted(needed - available):
        raise InputError(f"the source has no tensor {missing[0]}")
    unused = ["rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_embeddings else [])]
    if "ffn_norm" not in config.named_wiring.norms:  # a parallel block has one norm, attention_norm
        unused += ["post_attention_layernorm.weight", "post_attention_layernorm.bias"]
    extra = sorted(name for name in available - needed if not name.endswith(tuple(unused)))
    extra = [name for name in extra if not name.endswith(".bias") or source.read(name).any()]  # AutoGPTQ adds zeros
    if extra:
        raise InputError(f"the source has a tensor {extra[0]} that is no part of such a model")
    return sources


# ---- Reading and writing ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_errors(names, shape):
    """Turn errors about tensors that torch cannot split, stack or reshape into an InputError."""
    try:
        yield
    except (IndexError, RuntimeError) as e:
        if out_of_memory(e):
            raise
        raise InputError(f"{', '.join(names)}: {first_line(e)}; the config makes it {tuple(shape)}") from None


class Reader:
    """Reads the tensors of our model from a Source's: floats of a dtype, and the integers and e4m3 of the config.

    dequantized: the kinds of matrices that are quantized in the source and become floats. squares: [(squares of what
    rounding changed, squares of all)] of the matrices that became e4m3 here.
    """

    def __init__(self, source, config, dtype):
        self.source = source
        self.config = config
        self.dtype = dtype
        self.parameters = dict(build(config).named_parameters())
        self.names = plan(source, config, self.parameters)
        floats = [name for name in self.names if name.removesuffix("weight") + "scales" not in self.parameters]
        kinds = [name.split(".")[-2] for name in floats if any(map(source.form, self.names[name]))]
        self.dequantized = list(dict.fromkeys(kinds))
        self.squares = []
        self.read_quantized = functools.lru_cache(1)(self.read_quantized)  # its parts are read one after another

    def stored_dtype(self, name):
        """Return the dtype of a tensor, but for the scales of groups: these are float16 or bfloat16."""
        parameter = self.parameters[name]
        if name.endswith((".scales", ".zeros")) or parameter.itemsize == 1:
            return parameter.dtype
        return torch.float32 if self.config.stays_float32(name) else self.dtype

    def read(self, name):
        """Return a tensor. Raises InputError for another shape than the config's, and for NaN or infinity."""
        path, _, part = name.rpartition(".")
        if part == "bias" or f"{path}.scales" not in self.parameters:
            return self.read_floats(name)
        return self.read_quantized(path)[part]

    def join(self, *tensors):
        return group(*tensors, self.config) if len(tensors) == 3 else tensors[0]

    def read_floats(self, name):
        names = self.names[name]
        shape = self.parameters[name].shape
        with torch_errors(names, shape):
            tensor = self.join(*(to_floats(self.source.read(each)) for each in names))
        return checked(names, tensor, shape, self.stored_dtype(name))

    def read_quantized(self, path):
        """Return {"weight", "scales" and perhaps "zeros": the tensor} of a matrix."""
        own = {part: self.parameters.get(f"{path}.{part}") for part in ("weight", "scales", "zeros")}
        weights = self.names[f"{path}.weight"]
        names = {part: [name.removesuffix("weight") + part for name in weights] for part in own}
        with torch_errors(weights, own["weight"].shape):
            matrices = [self.source.read(each) for each in weights]
            dtype = own["scales"].dtype
            if own["zeros"] is not None:
                dtype = nearest(*(matrix.scales for matrix in matrices), *(matrix.zeros for matrix in matrices))
                matrices = [in_groups(matrix, own["scales"].shape[-1]) for matrix in matrices]
            matrix = by_rows(self.join, *matrices)
            weight = pack_pairs(matrix.weight) if own["weight"].dtype == torch.uint8 else matrix.weight
        result = {"weight": checked(weights, weight, own["weight"].shape)}
        for part in matrix._fields[1:]:
            result[part] = checked(names[part], getattr(matrix, part), own[part].shape, dtype)
        if isinstance(matrix, Fp8) and weight.itemsize > 1:  # what the source has in blocks
            result["weight"], scales = rounding.to_e4m3(weight, result["scales"])
            error = dequantize(result["weight"], scales.float()) - weight
            self.squares.append((error.square().sum().item(), weight.square().sum().item()))
        return result


def checked(names, tensor, shape, dtype=None):
    """Return a tensor in the dtype. Raises InputError, which names the source's tensors."""
    names = ", ".join(names)
    if tensor.shape != shape:
        raise InputError(f"{names}: shape {tuple(tensor.shape)} does not make the {tuple(shape)} of the config")
    tensor = tensor.to(dtype or tensor.dtype)
    if not checkpoint.all_finite(tensor):
        raise InputError(f"{names}: NaN or infinite values in {dtype_name(tensor.dtype)}")
    return tensor


def convert(source, config, folder, dtype, shard_bytes):
    """Write our config.json and safetensors from a Source, with one file in memory at a time; return the Reader.

    Raises InputError for tensors that are missing, of another shape than the config says, not finite, or not part of
    the model.
    """
    reader = Reader(source, config, dtype)
    sizes = {name: p.numel() * reader.stored_dtype(name).itemsize for name, p in reader.parameters.items()}
    writing.write_weights(folder, sizes, reader.read, shard_bytes)
    writing.write_config(folder, config)
    return reader


def check_lanes(config):
    """Raise InputError for a wiring that needs a number of lanes but names none, or that has too many for the shape."""
    if config.named_wiring.varies_with_ranks:
        name = config.wiring
        raise InputError(f"--wiring {name} is another function in other numbers of lanes: name them, e.g. {name}/8")
    tp.shard_plan(config, 0, config.named_wiring.shards())


def choose_dtype(name, source, path):
    """Return the dtype of floats, by --dtype or the source's values. Raises InputError. path: the source's."""
    values = next((name for name in source.names() if name.endswith((".v_proj.weight", ".kv_b_proj.weight"))), None)
    if values is None:
        raise InputError(f"{path} has no tensor v_proj.weight")
    if source.floats or any(map(source.form, source.names())):  # whose floats are of no dtype
        return checkpoint.DTYPES[name or "bfloat16"]
    return checkpoint.chosen_dtype(name, source, values)


def open_tokenizer(path, config):
    """Return (the tokenizer of a file or folder, or None, and the config with the tokens that end a text in it)."""
    tokenizer = load_tokenizer(path, config.vocab_size) if path else None
    if tokenizer is None:
        return None, config
    if tokenizer.left_out:
        print(f"left out: the tokens {', '.join(tokenizer.left_out)}, for which the embedding has no rows")
    from ladder.text.rendering import turn_end  # late: it imports jinja2

    # several ids were chosen for this model's turns, of which one may have more messages than one
    named = tokenizer.end_tokens | (turn_end(tokenizer) if len(config.eos_ids) < 2 else {})
    if more := {name: i for name, i in named.items() if i not in config.eos_ids}:
        print(f"a text also ends at {', '.join(more)}, which the tokenizer has and config.json does not name")
        config = dataclasses.replace(config, eos_ids=(*config.eos_ids, *more.values()))
    return tokenizer, config


def report(source, reader):
    """Print what became floats, and what rounding e4m3 anew changed."""
    if reader.dequantized or source.floats:
        names = [f"{count} of {name}" for name, count in source.floats.items()]
        names += [f"all of {name}" for name in reader.dequantized]
        print(f"dequantized to {dtype_name(reader.dtype)}: {', '.join(names)}")
    if reader.squares:
        errors, sizes = map(sum, zip(*reader.squares, strict=True))
        what = f"{len(reader.squares)} matrices of e4m3 in blocks"
        change = math.sqrt(errors / (sizes or 1))
        print(f"{what} got a scale for each row, which changed them by {change:.1%} (root mean square)")


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("source", metavar="SOURCE", help=f"{', '.join(SOURCES)}, or a hub id")
    p.add_argument("--to-float", action="store_true", help="dequantize what could stay integers or fp8, to retrain it")
    p.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.model or tokenizer.json; default: SOURCE's")
    p.add_argument("--revision", help="of a hub model, e.g. main")
    flags.add_output_flags(p, "checkpoints/1b")
    flags.add_wiring_flags(p)
    args = p.parse_args(argv)
    outputs.check_absent_first(args.out)
    if args.tokenizer and not os.path.isfile(args.tokenizer):
        raise InputError(f"--tokenizer {args.tokenizer}: no such file (in a folder, give e.g. its tokenizer.model)")
    source = open_source(args.source, args.revision, with_tokenizer=not args.tokenizer)
    own = source.config if args.to_float else keep_quantized(source.config, source)
    config = flags.with_wiring(own, args)
    check_lanes(config)
    flags.warn_of_wiring(own, config, (1,))
    dtype = choose_dtype(args.dtype, source, args.source)
    # which refuses a bad tokenizer before the work
    tokenizer, config = open_tokenizer(args.tokenizer or source.tokenizer_folder, config)
    with outputs.new_folder(args.out) as out:
        if args.tokenizer:
            name = "tokenizer.json" if args.tokenizer.endswith(".json") else "tokenizer.model"
            shutil.copyfile(args.tokenizer, out / name)
        elif source.tokenizer_folder is not None:
            writing.copy_tokenizer(source.tokenizer_folder, out)
        reader = convert(source, config, out, dtype, int(args.shard_gb * 1e9))
    report(source, reader)
    form = f", {config.quant}" if config.quant else ""
    form += f" in groups of {config.group_size}" if config.group_size else ""
    others = dict.fromkeys(name.rpartition(".")[2] for name in eight_bits(config))
    form += f", other groups of 8 bits in {', '.join(others)}" if others else ""
    size = f"{config.n_layers} layers, wiring {config.wiring}, {dtype_name(dtype)}{form}"
    print(f"wrote {args.out}: {size}{'' if tokenizer else ', NO TOKENIZER (see --tokenizer)'}")


if __name__ == "__main__":
    launch.run(main)
