"""Outputs that are complete or absent, even if their writer is killed: docs/reliability.md, "Killed writers"."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from formats.checkpoint import DTYPES, first_line, read_config
from formats.compare import TOKENIZER_FILES
from model import build
from runtime.cli import number
from runtime.errors import InputError


@contextlib.contextmanager
def reserved(path):
    """Lock an output and yield the empty folder NAME.tmp. Raises InputError if another process has locked it."""
    folder = Path(f"{os.path.realpath(path)}.tmp")
    with _errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if os.listdir(folder) and not (folder / "lock").exists():
            raise InputError(f"{folder} is needed to write {path}: give it another name")
        lock = open(folder / "lock", "a")  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(lock.fileno()).st_nlink:  # another process has just ended, and removed it
                raise BlockingIOError
        except BlockingIOError:
            raise InputError(f"{path} is being written by another process") from None
        try:
            for left in folder.iterdir():
                if left.name != "lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_file(path):
    """Yield the name of an unfinished file or folder, which replaces `path` only when the block ends well."""
    path = os.path.realpath(path)
    with reserved(path) as folder, _errors(path):
        unfinished = folder / os.path.basename(path)
        yield unfinished
        publish(unfinished, path)


@contextlib.contextmanager
def new_folder(path):
    """Yield an unfinished folder, which appears as `path` only when the block ends well."""
    with new_file(path) as unfinished:
        check_absent(path)
        unfinished.mkdir()
        yield unfinished


def check_absent(path):
    """Raise InputError if a file or a folder has this name."""
    if os.path.lexists(os.path.realpath(path)):
        raise InputError(f"{path} already exists: remove it or give another folder")


def publish(unfinished, path):
    """Give a complete file or folder its name, once all of it is on the disk."""
    for file in (unfinished, *unfinished.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    os.replace(unfinished, path)


@contextlib.contextmanager
def _errors(path):
    """Turn the system's errors in this block, above all a full disk, into an InputError that names the output."""
    try:
        yield
    except OSError as e:
        raise InputError(f"cannot write {path}: {e}") from None


def append_line(path, line):
    """Append a line of JSON to a file in one write. Other processes may append to it at the same time.

    A killed process may leave an incomplete line. The next line starts on its own, and readers skip the incomplete one.
    """
    data = (json.dumps(line) + "\n").encode()
    with _errors(path), open(path, "a+b", buffering=0) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        size = os.fstat(f.fileno()).st_size
        if size and os.pread(f.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if f.write(data) < len(data):
            f.truncate(size)
            raise InputError(f"cannot write {path}: No space left on device")


# ---- A checkpoint folder ---------------------------------------------------------------------------------------------


def add_output_flags(parser, example):
    """Add the flags of a script that writes a folder in another format."""
    parser.add_argument("--out", metavar="DIR", required=True, help=f"the folder to write, e.g. {example}")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; default: their own")
    size, words = number(float, 0, above=True), "GB of the largest file, about the memory needed"
    parser.add_argument("--shard-gb", type=size, default=5.0, metavar="N", help=words)


def read_original(folder):
    """Return the Config of a checkpoint folder; raise InputError if it is quantized."""
    config = read_config(folder)
    if config.quant:
        raise InputError(f"{folder} is quantized ({config.quant}): give the original, or convert it --to-float")
    return config


def shapes(config):
    """Return {name: shape} of every tensor of a checkpoint; a tied output head is not one."""
    return {name: tuple(w.shape) for name, w in build(config).named_parameters()}


def write_config(folder, config):
    values = {k: v for k, v in dataclasses.asdict(config).items() if v not in (None, ())}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def write_weights(folder, sizes, read, shard_bytes=5_000_000_000):
    """Write tensors into model.safetensors, or into numbered shards of at most shard_bytes and their index.

    sizes: {name: bytes}, in the order of writing. read(name) returns a tensor. Only one shard is in memory at a time.
    """
    total, shards, room = sum(sizes.values()), [], 0
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
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_tokenizer(source, folder):
    """Copy the tokenizer files of the folder source."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)
