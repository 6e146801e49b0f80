"""The scripts in benchmarks/: each of them once, in small, and their tables."""

import contextlib
import dataclasses
import itertools
import re
import shlex
import sys
from collections import Counter

import pytest
import torch
from cases import refused, slow_case
from configs import change
from file_edits import read_json, read_lines, write_json, write_lines
from helpers import ROOT
from running import RANKS, main_on_ranks, run_main, run_python, script

import bench
from benchmarks import decode, gpu, int4_libraries, step_kernels
from extras.measure import plot, sweep
from ladder.sources import sizes
from ladder.sources.sizes import named_size
from model import WIRINGS, Config, build

TINY = Config(2, 8, 8, 8, 64, 128, 256, 512)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The named sizes are small ones."""
    values = read_json(sizes.SIZES)
    for each in values.values():
        each |= {"num_hidden_layers": each["num_hidden_layers"] // 8, "vocab_size": 256, "head_dim": 8}
        each |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    write_json(tmp_path / "sizes.json", values)
    monkeypatch.setattr(sizes, "SIZES", tmp_path / "sizes.json")


@pytest.fixture
def printed(capsys):
    """A function that runs main() of a script with these flags and returns what it printed."""

    def run(script, *flags):
        capsys.readouterr()
        with contextlib.suppress(SystemExit):  # in which --show ends, as --help does
            run_main(script, *flags)
        return capsys.readouterr().out

    return run


# ---- extras/measure/sweep.py and plot.py -----------------------------------------------------------------------------


def test_a_sweep_writes_a_line_for_each_wiring_and_link_and_a_trace(small, printed, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--model", "1b", "--simulate-tp", 2, "--link", "free", "5000us", "--wiring", "standard", "ladder:1,"]
    flags += ["--batch", 1, 2, "--seconds", 0, "--eager", "--json", out, "--profile", tmp_path / "traces"]
    shown = printed(sweep, *flags)
    lines = read_lines(out)
    cases = {*itertools.product(["free", "5000us"], ["standard", "ladder:1,"], [1, 2])}
    assert {(line["link"]["name"], line["wiring"], line["batch"]) for line in lines} == cases and len(lines) == 8
    assert all(line["step_ms"] >= 4 * 5 for line in lines if line["link"]["name"] == "5000us")
    assert lines[0].keys() >= {"torch", "commit", "hardware", "threads", "command"}
    assert {"-".join(map(str, case)) for case in cases} == {path.name for path in (tmp_path / "traces").iterdir()}
    trace = tmp_path / "traces" / "5000us-ladder:1,-2" / "rank0.json"
    assert read_json(trace)["traceEvents"]
    out.write_text(out.read_text() + '{"case": "another script\'s"}\n{"limit_ms": null}\n{"cut off": ')
    assert printed(sweep, "--show", out) == shown and shown.count("| link |") == 2
    assert "| link | one all-reduce, ms | ladder:1, |" in printed(sweep, "--wiring", "ladder:1,", "--show", out)


def test_a_sweep_compares_a_prefill_in_chunks(small, printed, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--model", "1b", "--simulate-tp", "2", "--prompt-length", "7", "--eager", "--seconds", 0, "--json", out]
    shown = printed(sweep, *flags, "--wiring", "standard", "ladder", "--link", "tcp+2000us", "--prefill", 1, 2)
    lines = read_lines(out)
    names = ["standard", "standard in 2 parts", "ladder", "ladder in 2 parts"]
    assert [line["wiring"] for line in lines] == names and {line["kind"] for line in lines} == {"prefill"}
    assert [(line["all_reduces"], line["all_reduce_bytes"]) for line in lines[:2]] == [(4, 7 * 128), (8, 4 * 128)]
    assert lines[0]["link"]["tcp"] and f"| {' | '.join(names)} |" in shown


@pytest.mark.parametrize("how", [[], slow_case(["--compile"])])
def test_a_sweep_of_a_checkpoint_on_real_ranks_names_their_link(how, tmp_path, tiny):
    out = tmp_path / "out.jsonl"
    flags = ["--checkpoint", tiny, "--wiring", "standard", "--link", "2000us", "--label", "veth"]
    flags += ["--prompt-length", 8]
    shown, *others = main_on_ranks(RANKS, sweep.main, "--seconds", 0, *how, "--json", out, *flags)
    [line] = read_lines(out)
    assert (line["link"]["name"], line["tp"], line["model"]) == ("veth", RANKS, tiny.name)
    assert line["all_reduces"] == 6 and line["step_ms"] >= 6 * 2 and line["limit_ms"] >= line["silent_ms"]
    assert "| veth | " in shown[0] and not any(text for text, _ in others)


def line(wiring, step_ms, quartiles_ms, **changes):
    return {
        "model": "small", "n_layers": 8, "dtype": "bfloat16", "device": "cpu", "threads": 1, "tp": 2, "batch": 1,
        "simulated": False, "tokens": 64, "kind": "decode", "compiled": True, "link": {"name": "0"}, "wiring": wiring,
        "step_ms": step_ms, "quartiles_ms": quartiles_ms, "all_reduce_ms": 0.5, "limit_ms": 10.0, **changes,
    }  # fmt: skip


def shown_by_sweep(capsys, *lines):
    sweep.show(lines, None)
    return capsys.readouterr().out


def test_cells_of_a_sweep_say_what_is_noise(capsys):
    lines = [
        line("standard", 20.0, [19.0, 21.0]), line("ladder", 10.0, [9.5, 10.5]), line("parallel", 19.0, [18.0, 19.5]),
        line("desync:2", 8.0, [7.0, 9.0]), line("upper-bound", 9.0, [8.9, 9.1]),
    ]  # fmt: skip
    row = shown_by_sweep(capsys, *lines).split("\n")[4]
    assert row == "| 0 | 0.50 | 20.0 (+100%) | 10.0 (+0%, 2.00x) | 19.0 (+90%, ~1.05x) | 8.0 (-20%, 2.50x) | " + (
        "9.0 (-10%, 2.22x) |"
    )
    both = shown_by_sweep(capsys, *lines, line("standard", 12.0, [11.0, 13.0], comm="one-shot"))
    assert row in both and "one-shot sums" in both
    on_gpu = shown_by_sweep(capsys, line("standard", 0.1234, [0.1, 0.2], limit_ms=0.1234, device="cuda"))
    assert "| 0 | 0.500 | 0.123 (+0%) |" in on_gpu


def test_a_new_wiring_is_measured(small, printed, monkeypatch):
    """One that nobody has told the scripts of."""
    monkeypatch.setitem(WIRINGS, "own-wiring", dataclasses.replace(WIRINGS["parallel"], stale=True))
    assert "own-wiring" in sweep.parse(["--model", "8b"]).wiring  # without being named
    flags = ["--model", "8b:2", "--simulate-tp", 2, "--batch", 4, "--link", "1000us", "--eager"]
    shown = printed(sweep, *flags, "--seconds", 0, "--wiring", "standard", "own-wiring", "own-wiring:1")
    assert "| standard | own-wiring | own-wiring:1 |" in shown


def test_the_figure(tmp_path, printed):
    lines = [line(w, ms, [ms, ms + 1], link={"name": n}, all_reduce_ms=x) for n, x in (("a", 2.0), ("b", 1.0))
             for w, ms in (("standard", 20.0), ("ladder", 10.0))]  # fmt: skip
    assert plot.by_link(lines)["ladder"] == [(ms, 2.0, 2 - 20 / 11, 0.0) for ms in (2.0, 1.0)]
    out = tmp_path / "x.jsonl"
    other = line("spd", 1.0, [1.0, 2.0], batch=2)
    write_lines(out, [*lines, other])
    printed(sweep, "--show", out, "--wiring", "standard", "ladder", "--plot", tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
    for wirings, message in (
        ([], "draws lines of one setting; these have 2"),
        (["spd"], "no line of standard over the link 0"),
    ):
        refused(message, run_main, sweep, "--show", out, "--plot", "x.svg", *["--wiring"] * bool(wirings), *wirings)


# ---- decode.py -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_decode_runs_its_engines_in_turns(monkeypatch, small, printed, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(decode, "read_bandwidth", lambda *args, **kwargs: 1e10)
    out = tmp_path / "out.jsonl"
    flags = ["--decode", 2, "--prefill", 8, "--rounds", 3, "--engines"]
    shown = printed(decode, *flags, "ours", "ours:int8", "--json", out)
    torch.compiler.set_stance("default")
    lines = read_lines(out)
    assert [(x["engine"], x["kind"], x["n"]) for x in lines] == [
        (engine, kind, n) for kind, n in (("decode", 2), ("prefill", 8)) for engine in ("ours", "ours:int8")
    ]
    assert 0 < lines[0]["mbu"] < 1 and lines[0]["quartiles_ms"][0] <= lines[0]["ms"] and "mbu" not in lines[2]
    assert shown.count("| 10.0 |") == 2 and printed(decode, "--show", out) == shown
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    refused("llama.cpp: .*llama_cpp.*; pip install llama-cpp-python gguf", run_main, decode, *flags, "llama.cpp")


def test_llama_cpp_s_file_of_a_mixture_with_latents_has_all_parameters(tmp_path):
    gguf = pytest.importorskip("gguf")
    latents = {"query_rank": 24, "latent_dim": 32, "key_dim": 16, "rope_dim": 8, "value_dim": 16}
    config = change(
        named_size("deepseek-v2-lite:3"), dim=64, n_heads=2, n_kv_heads=2, head_dim=24, rotary_dim=8, vocab_size=96,
        latent=latents, intermediate_size=96,
        mixture={"n_experts": 4, "expert_size": 32, "shared_expert_size": 64, "experts_per_token": 2},
    )  # fmt: skip
    decode.write_gguf(tmp_path / "a.gguf", config, "")
    tensors = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert sum(int(t.n_elements) for t in tensors) == sum(p.numel() for p in build(config).parameters())


# ---- gpu.py ----------------------------------------------------------------------------------------------------------


def test_gpu_measures_full_sizes_over_six_links_and_its_flags_are_known():
    commands = gpu.cases("cuda:0", "traces")
    assert commands[0].endswith("--batch 1 16 --model 8b:4:fp8") and commands[3].endswith("--batch 1 --model 8b")
    assert commands[1] == "-m benchmarks.int4_libraries --device cuda:0" and len(commands) == 12
    assert sum("--link nvlink roce ib pcie pcie-host ethernet-100g --" in command for command in commands) == 4
    for command in commands + gpu.cases("cpu", "traces"):
        script, *flags = shlex.split(command.removeprefix("-m "))
        if script not in ("benchmarks.int4_libraries", "benchmarks.step_kernels"):
            (bench if script == "bench.py" else sweep).parse(flags)


def test_libraries_for_int4_are_compared_and_those_that_fail_are_skipped(printed, tmp_path, monkeypatch):
    monkeypatch.setattr(int4_libraries, "ROWS", (1, 3))
    ways = {**int4_libraries.WAYS, "wrong": lambda linear: lambda x: -linear(x), "absent": lambda linear: 1 / 0}
    monkeypatch.setattr(int4_libraries, "WAYS", ways)
    printed(int4_libraries, "--device", "cpu", "--json", tmp_path / "out")
    rows = {(line["way"], line["rows"]) for line in read_lines(tmp_path / "out")}
    assert rows >= {(way, n) for way in ("ours", "bfloat16", "floats each time") for n in (1, 3)}
    assert not {way for way, _ in rows} & {"wrong", "absent"}


def test_gpu_s_cases_end_with_the_time_and_leave_a_word(monkeypatch, tmp_path, printed):
    assert [gpu.run("-c 'raise SystemExit(3)'", 20), gpu.run("-c pass", 20)] == ["it ended with code 3", None]
    assert gpu.run("-c 'import time; time.sleep(60)'", 1) == "killed, for want of time or memory"
    errors = iter([None, "broke", *[None] * 7])
    monkeypatch.setattr(gpu, "run", lambda command, seconds: next(errors))
    printed(gpu, "--device", "cpu", "--json", tmp_path / "out")
    assert [line["error"] for line in read_lines(tmp_path / "out")] == ["broke"] and not [*errors]
    printed(gpu, "--device", "cpu", "--seconds", 0, "--json", tmp_path / "late")
    assert [line["error"] for line in read_lines(tmp_path / "late")] == ["no time left"] * 9


def test_kernels_of_a_step_are_what_a_longer_run_has_more(printed, tmp_path, monkeypatch):
    runs = [
        ({"a": 5, "once": 1}, {"a": 10.0, "once": 7.0}),
        ({"a": 37, "b": 16, "once": 1}, {"a": 42.0, "b": 16 * 9.0, "once": 7}),
    ]
    step = step_kernels.step_of(*([Counter(part) for part in run] for run in runs))
    assert list(step.items()) == [("b", (1, 9)), ("a", (2, 2))]
    monkeypatch.setattr(step_kernels, "SHOWN", 1)
    rows = "| b | 1 | 9.0 | 45.0% |", "| 1 others | 2 | 2.0 | 10.0% |", "| between kernels | 0 | 9.0 | 45.0% |"
    assert all(row in step_kernels.table(step, 20) for row in rows)
    text = printed(step_kernels, "--device", "cpu", "--model", "1b:1", "--prompt-length", 4, "--json", tmp_path / "out")
    (line,) = read_lines(tmp_path / "out")
    assert "| the step |" in text and line["kernels"]["ladder::attention_step"][0] == 1 == line["n_layers"]


@pytest.mark.slow
def test_gpu_s_cases_run_on_a_cpu_in_small(tmp_path):
    script("benchmarks/gpu.py", "--device", "cpu", "--json", tmp_path / "out", "--traces", tmp_path / "traces",
           PYTHONPATH=str(ROOT))  # fmt: skip
    lines = read_lines(tmp_path / "out")
    assert not [line for line in lines if "error" in line]
    assert {line.get("quant") for line in lines if "tpot_ms" in line} == {None, "int8", "int4", "fp8"}
    assert {line["wiring"] for line in lines if "limit_ms" in line} == {
        "standard", "ladder", "parallel-ladder", "upper-bound"
    }  # fmt: skip


# ---- Bad input, and the pages ----------------------------------------------------------------------------------------


README = str(ROOT / "README.md")


@pytest.mark.parametrize("script, flags, message", [
    (sweep, "--link 1ms ''", "--link: '' is none of free,"),
    (sweep, "--link free x", "--link: 'x' is none of free,"),
    (sweep, f"--profile '{README}'", f"--profile {README} is a file: give a folder"),
    (sweep, "--prefill 1 99 --prompt-length 8 --eager", "--prefill is 99: several parts need no --compile"),
    (sweep, "--prefill 2 --compile", "--prefill is 2: several parts need no --compile"),
    (sweep, "--simulate-tp 2 --wiring x", "--wiring: unknown wiring 'x'; known: standard, ladder, parallel,"),
    (sweep, "--simulate-tp 8 --wiring spd/4", "the 4 lanes of wiring spd/4 do not fit 8 ranks: use 1, 2, 4 ranks of"),
    (sweep, f"--show '{README}'", f"{README} has no line of this script's, with 'limit_ms'"),
    (decode, "--engines nosuch", "--engines: unknown 'nosuch'; known: ours, ours:eager,"),
    (decode, "--engines llama.cpp --gguf x", "--checkpoint and --gguf: llama.cpp needs both or neither"),
    (decode, "--engines ours llama.cpp --model 30b-a3b:1", "--model 30b-a3b:1 is a mixture without latent"),
    (decode, f"--show '{README}'", f"{README} has no line of this script's, with 'engine'"),
    (gpu, "--json x", "there is no GPU: --device cpu tries the script"),
])  # fmt: skip
def test_bad_flags(script, flags, message):
    refused(f"^{re.escape(message)}", script.main, shlex.split(flags))


def test_a_script_runs_as_a_module():
    """And says in one line what is wrong."""
    done = run_python("-m", "extras.measure.sweep", "--wiring", "x")
    assert done.returncode == 2 and done.stderr.startswith("sweep.py: --wiring: unknown wiring 'x'")
    assert done.stderr.count("\n") == 1


RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("extras/*/*.md")]
SHOWN = [  # (page, script, flags before --show, file, tables on the page)
    ("overlap.md", sweep, "standard ladder parallel parallel-ladder spd upper-bound", "overlap-memory.jsonl", 1),
    ("overlap.md", sweep, "standard ladder parallel upper-bound", "overlap-netns.jsonl", 1),
    ("experts.md", sweep, "", "overlap-experts-h100.jsonl", 1),
    ("overlap.md", sweep, "", "overlap-eager.jsonl", 1),
    ("smollm2.md", decode, "", "smollm2.jsonl", 1),
    ("decode.md", decode, "", "decode.jsonl", 2),
    ("decode.md", decode, "", "decode-calls.jsonl", 1),
    ("decode.md", decode, "", "decode-panels.jsonl", 1),
    ("decode.md", decode, "", "decode-memory.jsonl", 1),
    ("decode.md", decode, "ours transformers gpt-fast llama.cpp", "decode-amx.jsonl", 1),
]


def test_every_file_of_raw_lines_is_named_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert not [path.name for path in RESULTS.glob("*.jsonl") if path.name not in text]


@pytest.mark.parametrize("page, script, some, file, tables", SHOWN, ids=[f"{row[0]} {row[3]}" for row in SHOWN])
def test_the_rows_on_the_pages_are_those_that_their_command_prints(page, script, some, file, tables, printed):
    """In the same order. A page may leave rows out."""
    on_page = [block.strip().split("\n") for block in (RESULTS.parent / page).read_text().split("\n\n")]
    flags = ["--engines" if script is decode else "--wiring", *some.split()] if some else []
    shown = printed(script, *flags, "--show", RESULTS / file)
    blocks = [block.strip().split("\n") for block in shown.split("\n\n") if block.startswith("|")]
    pairs = itertools.product(on_page, blocks)
    agree = [mine for mine, block in pairs if mine == [row for row in block if row in mine]]
    assert sum(len(mine) > 2 for mine in agree) == tables
