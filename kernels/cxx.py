"""The C++ compiler: for torch.compile, and for the operators of this folder."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from kernels import cpu


class CompilerError(RuntimeError):
    """There is no working compiler, or nowhere to keep what it compiles: one line says what to do."""


def compiler(what="--compile"):
    """Return the C++ compiler that torch.compile takes, too. Raises CompilerError, which says that `what` needs one."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise CompilerError(f"{what} needs a C++ compiler: install g++, or name one in $CXX, no options: {name!r}")
    return name


def prepare_compile():
    """Let torch.compile work in any folder. Raises CompilerError without a C++ compiler."""
    compiler()
    from torch.utils import cpp_extension  # late: with it comes setuptools, which edits the module path

    # Inductor (torch 2.13) splits its command at spaces, and quotes all paths but this one
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).parent / "lib"))
    # else Inductor (torch 2.13) compiles for AVX2 what it cached for AVX-512, loops in steps of longer vectors
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()


def check_triton():
    """Raise CompilerError unless there is what Triton builds the launchers of its kernels with."""
    name = os.environ.get("CC") or shutil.which("gcc") or "clang"
    folders = [sysconfig.get_path("include", "posix_prefix"), *os.environ.get("CPATH", "").split(":")]
    if shutil.which(name) is None:
        raise CompilerError(f"kernels for a GPU need a C compiler: install gcc, or name one in $CC: {name!r}")
    if not any(Path(folder, "Python.h").is_file() for folder in folders if folder):
        raise CompilerError(f"kernels for a GPU need Python.h, not in {folders[0]}: install python3-dev, or its like")


def load_operators(source, what, *options):
    """Load a C++ file's operators, compiled for this processor unless that was done before.

    source: its path, from this folder. The result is kept in $XDG_CACHE_HOME/ladder-fast (by default ~/.cache), for all
    copies of the project. what: who needs a compiler, for the message. Raises CompilerError.
    """
    source, home = Path(__file__).parent / source, Path(torch.__file__).parent
    native = "-mcpu=native" if cpu.ON_ARM else "-march=native"
    texts = [path.read_text() for path in (source, source.with_suffix(".h")) if path.is_file()]
    options = ["-O3", native, "-std=c++20", "-fopenmp", "-shared", "-fPIC", *options]
    contents = repr((texts, os.environ.get("CXX"), options, torch.__version__, cpu.features()))
    name = f"{source.stem}-{hashlib.sha256(contents.encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ladder-fast"
    if folder.parts[0] == "~":
        raise CompilerError(f"{what}: no home folder to keep compiled code in: name a folder in $XDG_CACHE_HOME")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.ops.load_library(folder / name)
        except OSError:  # not there yet, or damaged
            includes = [home / "include", home / "include/torch/csrc/api/include"]
            paths = [*(f"-I{path}" for path in includes), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [compiler(what), source, *options, *paths]
            print(f"compiling {source.name}, once ...", file=sys.stderr, flush=True)
            # other processes may compile it, too: the last one replaces an equal file
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                output = Path(temporary) / name
                subprocess.run([*command, "-o", output], check=True, capture_output=True, text=True)
                os.replace(output, folder / name)
            torch.ops.load_library(folder / name)
    except subprocess.CalledProcessError as e:
        reason = next((line for line in e.stderr.splitlines() if "error" in line), f"it ends with code {e.returncode}")
        raise CompilerError(f"{e.cmd[0]} cannot compile {source.name}: {reason}") from None
    except OSError as e:
        reason = e.strerror or str(e).splitlines()[0]
        raise CompilerError(f"cannot use {folder}: {reason}; name another folder in $XDG_CACHE_HOME") from None
