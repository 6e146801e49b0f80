"""Writing the files of a checkpoint folder; ladder/outputs.py makes the folder appear only when it is complete."""

import dataclasses
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from ladder.checkpoints.checkpoint import read_config
from ladder.checkpoints.compare import TOKENIZER_FILES
from ladder.errors import InputError, first_line
from model import build


def read_original(folder):
    """Return the Config of a checkpoint folder; raise InputError if it is quantized."""
    config = read_config(folder)
    if config.quant:
        raise InputError(f"{folder} is quantized ({config.quant}): give the original, or convert it --to-float")
    return config


def shapes(config):
    """Return {name: shape} of every tensor of a checkpoint; a tied output head is not one."""
    return {name: tuple(w.shape) for name, w in build(config).named_parameters()}


def config_values(config):
    """Return what a config.json says of a Config, as checkpoint.make_config reads it."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if v not in (None, ())}
    if config.architecture:
        values["architecture"] = {each.name: dataclasses.asdict(each) for each in config.architecture}
    return values


def write_json(path, values):
    path.write_text(json.dumps(values, indent=2) + "\n")


def write_config(folder, config):
    write_json(folder / "config.json", config_values(config))


def write_weights(folder, sizes, read, shard_bytes=5_000_000_000):
    """Write tensors into model.safetensors, or into numbered shards of at most shard_bytes and their index.

    sizes: {name: bytes}, in the order of writing. read(name) returns a tensor. Only one shard is in memory at a time.
    """
    total = sum(sizes.values())
    shards = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    weight_map = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", delay=1, disable=None) as bar:
        for i, names in enumerate(shards, start=1):
            number = f"-{i:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            weight_map |= dict.fromkeys(names, file := f"model{number}.safetensors")
            tensors = {}
            for name in names:
                tensors[name] = read(name).contiguous()
                bar.update(sizes[name])
            (folder / file).touch()
            mode = (folder / file).stat().st_mode  # as the umask has it; save_file lets only the owner read
            try:
                save_file(tensors, folder / file, metadata={"format": "pt"})
            except SafetensorError as e:  # above all a full disk
                raise OSError(first_line(e)) from None
            (folder / file).chmod(mode)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def copy_tokenizer(source, folder):
    """Copy the tokenizer files of the folder source."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)
