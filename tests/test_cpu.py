"""few_rows.cpp against float64, huge pages, the memory of loading."""

import dataclasses
import itertools
import os
import pwd
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers import BASE, ROOT, last_logits, random_model, unequal_rows, write_model
from reference import Reference

import generate
from formats import checkpoint
from kernels import cpu, few_rows
from model import Attention
from runtime import compiling
from runtime.errors import InputError


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).bfloat16()


@pytest.mark.parametrize("N, K", [(1, 1), (33, 2731), (100, 64), (301, 2048)])
def test_few_rows_are_exact_up_to_the_last_rounding(N, K, threads):
    check_few_rows(N, K)


def check_few_rows(N, K):
    """bfloat16 has 8 bits: half a unit in the last place is at most 2^-8 of the result; float32 sums add far less."""
    few_rows.build()
    for M in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24):
        x, weight = numbers(M, K), numbers(N, K)
        y = torch.ops.ladder.few_rows(x, weight)
        exact = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        assert y.shape == (M, N) and y.dtype == torch.bfloat16
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * size).all(), M


def test_few_rows_of_any_shape_and_stride():
    few_rows.build()
    weight = numbers(12, 40)
    x = numbers(40, 3, 2).permute(1, 2, 0)  # (3, 2, 40), not contiguous
    y = torch.ops.ladder.few_rows(x, weight)
    assert torch.equal(y, torch.ops.ladder.few_rows(x.contiguous().view(6, 40), weight).view(3, 2, 12))
    torch.library.opcheck(torch.ops.ladder.few_rows.default, (x, weight))
    assert torch.ops.ladder.few_rows(numbers(0, 40), weight).shape == (0, 12)
    with pytest.raises(RuntimeError, match="few_rows takes x"):
        torch.ops.ladder.few_rows(x, weight.float())


def attention(q, keys, values, positions, window):
    """In float64, row by row, head by head and position by position."""
    out = torch.empty_like(q, dtype=torch.float64)
    for b, k, s in itertools.product(*map(range, q.shape[:3])):
        seen = slice(max(int(positions[b, s]) + 1 - window, 0), int(positions[b, s]) + 1)
        scores = q[b, k, s].double() @ keys[b, k, seen].double().T / q.shape[-1] ** 0.5
        out[b, k, s] = torch.softmax(scores, -1) @ values[b, k, seen].double()
    return out


def check_attention(G, H):
    few_rows.build()
    cases = (1, 1, [0]), (70, 1, [69, 0, 33, 2]), (40, 3, [3, 4, 15, 16]), (30, 5, [29, 4])
    for (T, S, last), window in itertools.product(cases, (100, 7, 1)):
        B, positions = len(last), torch.tensor(last)[:, None] + torch.arange(1 - S, 1)
        q, keys, values = 3 * numbers(B, G, S, 2, H).permute(0, 3, 2, 1, 4), numbers(B, 2, T, H), numbers(T, B, 2, H)
        values = values.permute(1, 2, 0, 3).contiguous()
        for row, position in enumerate(last):  # nobody reads what lies behind
            keys[row, :, position + 1 :] = values[row, :, position + 1 :] = torch.nan
            before = max(position + 2 - S - window, 0)
            keys[row, :, :before] = values[row, :, :before] = torch.nan
        y = torch.ops.ladder.decode_attention(q, keys, values, positions, window)
        exact = attention(q, keys, values, positions, window)
        assert y.shape == q.shape and y.dtype == torch.bfloat16
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("G, H", [(1, 64), (2, 192), (7, 64)])
def test_attention_of_a_few_positions_in_unequal_rows(G, H, threads):
    check_attention(G, H)


def test_attention_of_large_scores_and_of_wrong_shapes():
    few_rows.build()
    q, keys, values = (scale * numbers(1, 2, 5, 64) for scale in (100, 100, 1))
    q, position = q[:, :, None], torch.tensor([[4]])
    y = torch.ops.ladder.decode_attention(q, keys, values, position, 5)  # of scores up to 1e5, one weight is all
    assert (y - attention(q, keys, values, position, 5)).abs().max() <= 2**-7
    torch.library.opcheck(torch.ops.ladder.decode_attention.default, (q, keys, values, position, 5))
    for spoilt in (q[:, 1], keys[:, 1, 3]):  # not a number stays that, for its own head
        spoilt[..., 7] = torch.nan
        y = torch.ops.ladder.decode_attention(q, keys, values, position, 5)
        assert y[:, 1].isnan().all() and y[:, 0].isfinite().all()
        spoilt[..., 7] = 1
    with pytest.raises(RuntimeError, match="decode_attention takes q"):
        torch.ops.ladder.decode_attention(q, keys, values.float(), position, 5)


def test_a_linear_takes_few_rows_or_many(monkeypatch):
    few_rows.build()
    linear = torch.nn.Linear(40, 12).bfloat16()
    linear.__class__ = few_rows.FewRowsLinear
    called = []
    real = torch.ops.ladder.few_rows
    monkeypatch.setattr(torch.ops.ladder, "few_rows", lambda *args: called.append(1) or real(*args))
    with torch.no_grad():
        for rows, few in ((1, True), (few_rows.FEW, True), (few_rows.FEW + 1, False)):
            x = numbers(rows, 1, 40)
            expected = x.double() @ linear.weight.double().T + linear.bias.double()
            assert (linear(x) - expected).abs().max() < 0.02
            assert called == [1] * few
            called.clear()


def test_a_compiled_model_with_few_rows():
    changes = {"head_dim": 64, "sliding_window": 3, "window_layers": (1,), "qkv_bias": True, "qk_norm": True}
    config = dataclasses.replace(BASE, wiring="ladder", n_layers=2, **changes)
    net = random_model(config)
    reference = Reference(config, net.state_dict())
    for weight in net.parameters():  # not .to(): the rope frequencies stay float32
        weight.data = weight.data.bfloat16()
    tokens, lengths = unequal_rows(config)
    eager = last_logits(net, tokens, lengths)
    logits = last_logits(net, tokens, lengths, compile=True)
    assert all(type(m) is few_rows.FewRowsLinear for m in net.modules() if isinstance(m, torch.nn.Linear))
    decodes = [isinstance(m, compiling.DecodeAttention) for m in net.modules() if isinstance(m, Attention)]
    assert decodes == [True] * config.n_layers
    for row, length in enumerate(lengths):
        expected = torch.from_numpy(reference.logits(tokens[row, :length]))[-4:]
        assert (logits[row] - expected).abs().max() < 0.05 * expected.abs().max()
        assert (logits[row] - expected).abs().mean() < 1.2 * (eager[row] - expected).abs().mean()


def test_attention_in_a_window_without_a_cache():
    """There v is a view, with strides that the kernel does not take."""
    net = random_model(dataclasses.replace(BASE, head_dim=64, sliding_window=3, window_layers=(0, 2))).bfloat16()
    tokens, _ = unequal_rows(BASE)
    with torch.inference_mode():
        expected = net(tokens[:, :8])
        compiling.use_fast_modules(net)
        logits = net(tokens[:, :8])
    assert isinstance(net.layers[0].attention, compiling.DecodeAttention)
    assert (logits - expected).norm() < 0.03 * expected.norm()


def test_other_dtypes_keep_their_linears():
    net = random_model(dataclasses.replace(BASE, head_dim=64))
    compiling.use_fast_modules(net)
    assert not any(isinstance(m, few_rows.FewRowsLinear | compiling.DecodeAttention) for m in net.modules())


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)
def test_large_tensors_ask_for_huge_pages():
    tensor = cpu.empty((3, 2**20), torch.float32)
    assert tensor.shape == (3, 2**20) and tensor.dtype == torch.float32 and tensor.data_ptr() % cpu.HUGE == 0
    assert cpu.empty((3, 2**20 + 1), torch.bfloat16).data_ptr() % cpu.HUGE == 0
    tensor.fill_(1)
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for entry in filter(None, entries):
        start, stop = (int(x, 16) for x in entry.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            assert " hg" in entry.partition("VmFlags:")[2]
            return
    pytest.fail("the tensor is nowhere in memory")


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in bfloat16."""
    (tmp_path / "half").mkdir()
    write_model(tmp_path / "half", BASE, random_model(BASE).state_dict(), torch.bfloat16)
    return tmp_path / "half"


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"CXX": "g++ -O1"}, "--compile needs a C++ compiler: install g++, or name one in $CXX, no options: 'g++ -O1'"),
        ({"CXX": "false"}, "false cannot compile few_rows.cpp: it ends with code 1"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "cannot use /dev/null/ladder-fast: Not a directory"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_one_clear_line(environment, message, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.ops, "ladder", type("", (), {"few_rows_int": None})())  # as if nothing had been built
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as error:
        generate.main(["--checkpoint", str(folder), "--prompt", "ids:1", "--compile"])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert list(tmp_path.rglob("*.so")) == []


def test_without_a_home_folder_it_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(torch.ops, "ladder", types.SimpleNamespace())
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(InputError, match="^--compile: no home folder to keep compiled code in: name a folder in .XDG"):
        compiling.use_fast_modules(random_model(BASE).bfloat16())


def test_two_clones_compile_once_and_what_is_damaged_again(tmp_path):
    """At the same time, too: then the last one replaces an equal file."""
    few_rows.build()
    [built] = [path for path in torch.ops.loaded_libraries if "few_rows" in str(path)]
    compiler = tmp_path / "compiler"  # takes some time and leaves a real one's file
    lines = "#!/bin/sh", 'for last in "$@"; do true; done', f"sleep 1; cp {built} $last; echo >> {tmp_path}/calls"
    compiler.write_text("\n".join(lines))
    compiler.chmod(0o755)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(compiler)}
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "kernels", clone / "kernels")
    command = [sys.executable, "-c", "from kernels import few_rows as f; f.build(); f.torch.ops.ladder.few_rows"]

    def calls(*folders):
        processes = [subprocess.Popen(command, cwd=folder, env=environment) for folder in folders]
        assert [p.wait() for p in processes] == [0] * len(folders)
        [library] = (tmp_path / "cache").rglob("few_rows-*.so")
        assert library.read_bytes() == Path(built).read_bytes() and list((tmp_path / "cache").rglob("tmp*")) == []
        return len((tmp_path / "calls").read_text()), library

    n, library = calls(ROOT)
    assert n == 1 and calls(clone)[0] == 1
    library.write_bytes(b"junk")
    assert calls(ROOT, clone)[0] == 3


@pytest.mark.slow  # builds few_rows.cpp once more
def test_processors_without_bfloat16_instructions(tmp_path):
    """The portable forms of the functions that have two."""
    compiler = tmp_path / "plain"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -U__AVX512BF16__ -U__AVX512VNNI__ -U__AVX512F__\n')
    compiler.chmod(0o755)
    source = """
import sys
sys.path.insert(0, "tests")
import test_cpu, test_quantize
for N, K in ((7, 5), (33, 2731), (21, 4100)):
    test_cpu.check_few_rows(N, K)
test_cpu.check_attention(3, 64)
test_quantize.check_few_rows_int((1, 5))
"""
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", source], check=True, cwd=ROOT, env=environment)
    [library] = tmp_path.rglob("few_rows-*.so")
    if shutil.which("objdump"):
        code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
        assert "vdpbf16ps" not in code and "vpdpbusd" not in code and "mul" in code


@pytest.mark.parametrize("ranges", [None, [(0, 3000)], [(5, 17), (2990, 3000)], [(7, 7)]], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_filling_joins_ranges_in_parts(dim, ranges, tmp_path):
    """The tensor is larger than what is copied at a time."""
    values = numbers(3000, 3000)
    checkpoint.save_file({"w": values}, tmp_path / "model.safetensors")
    expected = torch.cat([values.narrow(dim, a, b - a) for a, b in ranges or [(0, 3000)]], dim)
    target = torch.full(expected.shape, torch.nan)
    checkpoint.Weights(tmp_path).fill(target, "w", dim, ranges)
    assert values.nbytes > 2**24 and torch.equal(target, expected.float())
