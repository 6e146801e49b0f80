"""Loads operators written in C++, which are compiled when a machine needs them for the first time."""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from ladder import outputs
from ladder.errors import InputError
from ladder.kernels import compilers


def load_operators(source, what, *options):
    """Load the operators of the C++ file at Path `source`. It is compiled for this processor if that was not done yet.

    The compiled library is stored in $XDG_CACHE_HOME/ladder-fast (by default ~/.cache), for all copies of the project.
    what: what needs the compiler, for the message. Raises InputError.
    """
    home = Path(torch.__file__).parent
    texts = [path.read_text() for path in (source, source.with_suffix(".h")) if path.is_file()]
    options = ["-O3", "-mcpu=native" if compilers.ON_ARM else "-march=native", "-std=c++20", "-fopenmp", *options]
    contents = repr((texts, os.environ.get("CXX"), options, torch.__version__, compilers.features()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ladder-fast"
    if folder.parts[0] == "~":
        raise InputError(f"{what}: no home folder to keep compiled code in: name a folder in $XDG_CACHE_HOME")
    library = folder / f"{source.stem}-{hashlib.sha256(contents.encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not library.is_file():
            with open(folder / "lock", "a") as f:
                outputs.lock(f, fcntl.LOCK_EX)
                if not library.is_file():  # else another process has compiled it meanwhile
                    includes = [f"-I{home / path}" for path in ("include", "include/torch/csrc/api/include")]
                    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
                    command = [compilers.compiler(what), "-shared", "-fPIC", source, *options, *includes, *libraries]
                    print(f"compiling {source.name}, once ...", file=sys.stderr, flush=True)
                    unfinished = library.with_suffix(f".{os.getpid()}")  # without locks there may be two
                    subprocess.run([*command, "-o", unfinished], check=True, capture_output=True, text=True)
                    os.replace(unfinished, library)
        torch.ops.load_library(library)
    except subprocess.CalledProcessError as e:
        reason = next((line for line in e.stderr.splitlines() if "error" in line), f"it ends with code {e.returncode}")
        raise InputError(f"{e.cmd[0]} cannot compile {source.name}: {reason}") from None
    except OSError as e:
        reason = e.strerror or str(e).splitlines()[0]
        raise InputError(f"cannot use {folder}: {reason}; name another folder in $XDG_CACHE_HOME") from None
