"""What a CPU needs to decode at the speed of its memory: weights in huge pages, and few_rows.cpp to multiply them."""

import hashlib
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import InputError

FEW = 24  # rows of x up to which few_rows.cpp is the faster one, oneDNN beyond


def empty(shape, dtype, device="cpu"):
    """An uninitialised tensor; on a CPU in huge pages, where the system has them: small ones take time to translate."""
    size = dtype.itemsize * torch.Size(shape).numel()
    if torch.device(device).type != "cpu" or size < 2**21 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def build():
    """Compile few_rows.cpp for this processor, unless that was done before, and load the operator ladder::few_rows.

    The result lies in $XDG_CACHE_HOME/ladder-fast (~/.cache without it). Raises InputError without a C++ compiler.
    """
    if hasattr(torch.ops.ladder, "few_rows"):
        return
    source, home = Path(__file__).with_name("few_rows.cpp"), Path(torch.__file__).parent
    options = ["-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC"]
    options += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]  # sums in any order
    options += [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "g++")
    info = Path("/proc/cpuinfo")
    processor = info.read_text().partition("\n\n")[0].partition("flags")[2] if info.is_file() else ""
    made_of = repr((source.read_text(), compiler, options, torch.__version__, processor))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ladder-fast"
    library = folder / f"few_rows-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        if shutil.which(compiler) is None:
            raise InputError(f"--compile needs a C++ compiler: install g++, or name one in $CXX (now {compiler!r})")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = library.with_suffix(f".tmp-{os.getpid()}")
            subprocess.run([compiler, source, *options, "-o", temporary], check=True, capture_output=True, text=True)
            os.replace(temporary, library)  # two ranks may do this at once
        except OSError as e:
            raise InputError(f"cannot write {folder}: {e.strerror}; name another folder in $XDG_CACHE_HOME") from None
        except subprocess.CalledProcessError as e:
            lines = [line for line in e.stderr.splitlines() if "error" in line] or [f"code {e.returncode}"]
            raise InputError(f"{compiler} cannot compile {source.name}: {lines[0]}") from None
    torch.ops.load_library(library)
    torch.library.register_fake("ladder::few_rows", lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))


class Linear(nn.Linear):
    """A linear that multiplies few rows with few_rows.cpp."""

    def forward(self, x):
        if x.numel() > FEW * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        y = torch.ops.ladder.few_rows(x, self.weight)
        return y if self.bias is None else y + self.bias


def use_few_rows(model):
    """Let a model on a CPU, in bfloat16, multiply few rows with few_rows.cpp; another model stays as it is."""
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    if any(m.weight.device.type == "cpu" and m.weight.dtype == torch.bfloat16 for m in linears):
        build()
        for linear in linears:
            linear.__class__ = Linear
