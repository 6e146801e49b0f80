"""What kernels are compiled for, and by which compilers: of C++ for a CPU, of C for a GPU."""

import os
import platform
import shlex
import shutil
import sysconfig
from pathlib import Path

import torch

from ladder.errors import InputError

ON_ARM = platform.machine() in ("aarch64", "arm64")


def features():
    """Return the names of this processor's features, of which -march=native makes use; none if this is not Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])


def instruction_set():
    """Return what the kernels for CPUs are compiled for: "avx512", "avx2", "neon", or "plain" for none of them.

    $ATEN_CPU_CAPABILITY, PyTorch's own setting, chooses one.
    """
    if ON_ARM:
        return "neon" if "asimddp" in features() and os.environ.get("ATEN_CPU_CAPABILITY") != "default" else "plain"
    if not features():  # not Linux: other systems' compilers have OpenMP of another kind than PyTorch
        return "plain"
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "plain")


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
    # else Inductor (torch 2.13) compiles for AVX2 what it cached for AVX-512, loops in steps of longer vectors
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    if not ON_ARM:  # any compiler of today knows AVX2 and AVX-512; to test it takes 10 s, with a warm cache still 2
        torch._inductor.config.cpp.vec_isa_ok = True


def check_triton():
    """Raise InputError unless there is what Triton builds the launchers of its kernels with."""
    name = os.environ.get("CC") or shutil.which("gcc") or "clang"
    folders = [sysconfig.get_path("include", "posix_prefix"), *os.environ.get("CPATH", "").split(":")]
    if shutil.which(name) is None:
        raise InputError(f"kernels for a GPU need a C compiler: install gcc, or name one in $CC: {name!r}")
    if not any(Path(folder, "Python.h").is_file() for folder in folders if folder):
        raise InputError(f"kernels for a GPU need Python.h, not in {folders[0]}: install python3-dev, or its like")
