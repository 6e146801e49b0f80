"""The C++ compiler: for torch.compile, and for the operators of this folder."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from runtime.errors import InputError


def compiler(what="--compile"):
    """Return the C++ compiler that torch.compile takes, too. Raises InputError, which says that `what` needs one."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise InputError(f"{what} needs a C++ compiler: install g++, or name one in $CXX, no options: {name!r}")
    return name


def prepare_compile():
    """Let torch.compile work in any folder. Raises InputError without a C++ compiler."""
    compiler()
    from torch.utils import cpp_extension  # late: with it comes setuptools, which edits the module path

    # Inductor (torch 2.13) splits its command at spaces, and quotes all paths but this one
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).parent / "lib"))


def load_operators(source, what, *options):
    """Compile a C++ file of this folder for this processor, unless that was done before, and load its operators.

    The result lies in $XDG_CACHE_HOME/ladder-fast (~/.cache without it). Raises InputError without a C++ compiler, of
    which `what` is in need, or with nowhere to write.
    """
    source, home = Path(__file__).parent / source, Path(torch.__file__).parent
    options = ["-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC", *options]
    paths = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [os.environ.get("CXX", "g++"), source, *options, *paths]
    made_of = repr((source.read_text(), command, torch.__version__, _processor()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ladder-fast"
    library = folder / f"{source.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.ops.load_library(library)
        except OSError:  # not there yet, or damaged
            compiler(what)
            print(f"compiling {source.name}, once ...", file=sys.stderr, flush=True)
            # others may be at it too; who is done last replaces an equal file
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                made = Path(temporary) / library.name
                subprocess.run([*command, "-o", made], check=True, capture_output=True, text=True)
                os.replace(made, library)
            torch.ops.load_library(library)
    except subprocess.CalledProcessError as e:
        reason = next((line for line in e.stderr.splitlines() if "error" in line), f"it ends with code {e.returncode}")
        raise InputError(f"{command[0]} cannot compile {source.name}: {reason}") from None
    except OSError as e:
        reason = e.strerror or str(e).splitlines()[0]
        raise InputError(f"cannot use {folder}: {reason}; name another folder in $XDG_CACHE_HOME") from None


def load_group(source, operator, what):
    """Load the operators of a process group's C++, one of which is named. Raises InputError as load_operators does."""
    if not hasattr(torch.ops.ladder, operator):
        include = Path(torch.__file__).parent / "include/torch/csrc/api/include"
        load_operators(source, what, "-DUSE_DISTRIBUTED", "-DUSE_C10D", f"-I{include}")


def _processor():
    """Return the features of this processor, for which -march=native compiles."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
