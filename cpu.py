"""What a CPU needs to decode at the speed of its memory: weights in huge pages, and few_rows.cpp to multiply them."""

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from int_linear import Int8Linear, IntLinear
from model import Attention, InputError

# rows of x up to which few_rows.cpp is the faster one, oneDNN beyond (benchmarks/few_rows.py): fewer where it has AMX
FEW, FEW_INT = 7 if torch.cpu._is_amx_tile_supported() else 24, 24


def empty(shape, dtype, device="cpu"):
    """An uninitialised tensor; on a CPU in huge pages, where the system has them: small ones take time to translate."""
    size = dtype.itemsize * torch.Size(shape).numel()
    if torch.device(device).type != "cpu" or size < 2**21 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def keep_freed_memory():
    """Let glibc keep what is freed for the next tensor: a prefill would spend its time on pages new from the system."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the most that it takes
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def compiler():
    """The C++ compiler that torch.compile takes too. Raises InputError if there is none."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise InputError(f"--compile needs a C++ compiler: install g++, or name one in $CXX, no options: {name!r}")
    return name


def build():
    """Compile few_rows.cpp for this processor, unless that was done before, and load the operator ladder::few_rows.

    The result lies in $XDG_CACHE_HOME/ladder-fast (~/.cache without it). Raises InputError without a C++ compiler, or
    with nowhere to write.
    """
    if hasattr(torch.ops.ladder, "few_rows"):
        return
    source, home = Path(__file__).with_name("few_rows.cpp"), Path(torch.__file__).parent
    options = ["-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC"]
    options += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]  # sums in any order
    command = [compiler(), source, *options, f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    made_of = repr((source.read_text(), command, torch.__version__, _processor()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ladder-fast"
    library = folder / f"few_rows-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.ops.load_library(library)
        except OSError:  # not there yet, or damaged
            # others may be at it too; who is done last replaces an equal file
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                made = Path(temporary) / library.name
                subprocess.run([*command, "-o", made], check=True, capture_output=True, text=True)
                os.replace(made, library)
            torch.ops.load_library(library)
    except subprocess.CalledProcessError as e:
        lines = [line for line in e.stderr.splitlines() if "error" in line or "cannot find" in line]
        reason = lines[0] if lines else f"it ends with code {e.returncode}"
        raise InputError(f"{command[0]} cannot compile {source.name}: {reason}") from None
    except OSError as e:
        reason = e.strerror or str(e).splitlines()[0]
        raise InputError(f"cannot use {folder}: {reason}; name another folder in $XDG_CACHE_HOME") from None
    for name in ("ladder::few_rows", "ladder::few_rows_int", "ladder::many_rows_int"):
        torch.library.register_fake(name, lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]))
    torch.library.register_fake("ladder::decode_attention", lambda q, *_: q.new_empty(q.shape))


def _processor():
    """What this processor can do, for which -march=native compiles."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


class Linear(nn.Linear):
    """A linear that multiplies few rows with few_rows.cpp."""

    def forward(self, x):
        if x.numel() > FEW * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        y = torch.ops.ladder.few_rows(x, self.weight)
        return y if self.bias is None else y + self.bias


class FewRowsIntLinear(IntLinear):
    """An IntLinear that multiplies with few_rows.cpp: few rows by the integers themselves, many by pieces of floats."""

    def forward(self, x):
        few = x.numel() <= FEW_INT * x.shape[-1]
        multiply = torch.ops.ladder.few_rows_int if few else torch.ops.ladder.many_rows_int
        y = multiply(x, self.weight, self.scales, self.zeros)
        return y if self.bias is None else y + self.bias


class DecodeAttention(Attention):
    """An Attention that decodes with few_rows.cpp."""

    def attend(self, q, k, v, step):
        if q.shape[3] > 1:
            return super().attend(q, k, v, step)
        return torch.ops.ladder.decode_attention(q[:, :, :, 0], k, v, step.positions)


def use_few_rows(model):
    """Let a model on a CPU, in bfloat16, decode and multiply few rows with few_rows.cpp; another stays as it is.

    Raises InputError when that cannot be compiled.
    """
    weight = model.norm.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return
    build()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif type(module) is Attention and module.head_dim % 64 == 0:
            module.__class__ = DecodeAttention
        elif type(module) in (IntLinear, Int8Linear) and (
            module.zeros is None or module.in_features // module.scales.shape[1] in (8, 16, 32, 64, 128)
        ):
            module.__class__ = FewRowsIntLinear
