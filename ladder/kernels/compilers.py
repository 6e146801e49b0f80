"""The processor that kernels are compiled for, and the compilers: one of C++ for a CPU, one of C for a GPU."""

import os
import platform
import shlex
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch

from ladder.errors import InputError

ON_ARM = platform.machine() in ("aarch64", "arm64")


def features():
    """Return the names of this processor's features, which -march=native uses; none if this is not Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])


def instruction_set():
    """Return what the kernels for CPUs are compiled for: "avx512", "avx2", "neon", or "plain" if there are none.

    PyTorch's own setting $ATEN_CPU_CAPABILITY can choose a lesser one.
    """
    if ON_ARM:
        return "neon" if "asimddp" in features() and os.environ.get("ATEN_CPU_CAPABILITY") != "default" else "plain"
    if not features():  # not Linux; the compilers of other systems have another OpenMP than PyTorch
        return "plain"
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "plain")


def compiler(what="--compile"):
    """Return the C++ compiler, the same as torch.compile's. Without one, raises InputError: `what` needs it."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise InputError(f"{what} needs a C++ compiler: install g++, or name one in $CXX, no options: {name!r}")
    return name


def prepare_compile():
    """Set up torch.compile for a CPU, in a folder of any name. Raises InputError if there is no C++ compiler."""
    compiler()
    from torch.utils import cpp_extension  # late, since it imports setuptools, which edits the module path

    # Inductor (torch 2.13) splits its command at spaces, and quotes all paths but this one
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).parent / "lib"))
    # Else Inductor (torch 2.13) compiles for AVX2 what it cached for AVX-512, with loops in steps of longer vectors.
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # as in embeddings whose scales are float16
    if not ON_ARM:  # today's compilers know AVX2 and AVX-512; a test takes 10 s, or 2 s if cached
        torch._inductor.config.cpp.vec_isa_ok = True


def check_triton():
    """Raise InputError unless there are the C compiler and Python.h, with which Triton builds its launchers."""
    name = os.environ.get("CC") or shutil.which("gcc") or "clang"
    folders = [sysconfig.get_path("include", "posix_prefix"), *os.environ.get("CPATH", "").split(":")]
    if shutil.which(name) is None:
        raise InputError(f"kernels for a GPU need a C compiler: install gcc, or name one in $CC: {name!r}")
    if not any(Path(folder, "Python.h").is_file() for folder in folders if folder):
        raise InputError(f"kernels for a GPU need Python.h, not in {folders[0]}: install python3-dev, or its like")
