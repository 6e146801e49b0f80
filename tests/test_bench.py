"""bench.sh and bench.py: its cells compute what generate.py computes, and its tables say what is noise."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from cases import refused, slow_case
from decoding_runs import bench_flags, cell_texts
from file_edits import read_lines
from helpers import ALONE, ROOT
from running import HANGS, main_on_ranks, run_ranks

import bench
from ladder.checkpoints import checkpoint
from ladder.command_line import flags

WIRINGS = ["standard", "ladder", "parallel-ladder", "spd", "upper-bound"]


# ---- The cells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [[], slow_case(["--compile"], id="compiled")])
@pytest.mark.parametrize("ranks", [1, *(slow_case(ranks) for ranks in (2, 3))])
def test_cells_generate_what_a_model_of_their_wiring_generates(ranks, how, tiny):
    names = WIRINGS[:3] if how else WIRINGS
    words = bench_flags(tiny, "--batch", 1, 2, "--dtype", "float32", *how, "--wiring", *names)
    lists = run_ranks(ranks, cell_texts, words, timeout=5 * HANGS)
    assert lists[0] == lists[-1] and len(lists[0]) == 2 * 2 * len(names)
    for wiring, batch, mine, alone in lists[0]:
        assert mine == alone and len(mine) == batch, (wiring, batch)
    assert ranks == 1 or len({str(mine) for _, batch, mine, _ in lists[0] if batch == 2}) > 1  # wirings differ


def test_wirings_share_one_set_of_weights(tiny):
    names = ["parallel", "standard", "spd/2"]
    args = bench.parse(bench_flags(tiny, "--wiring", *names))
    world = ALONE
    models = bench.load_models(flags.read_config(args)[1], names, args, world)
    assert [(name, model.config.wiring) for name, model in models.items()] == [(name, name) for name in names]
    firsts = [getattr(model, "lanes", [model])[0] for model in models.values()]
    pointers = [model.layers[0].attention.wo.weight.data_ptr() for model in firsts]
    assert pointers[0] == pointers[1] != pointers[2]


def test_ranks_append_a_line_for_each_cell(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    words = bench_flags(tiny, "--batch", 2, 1, "--wiring", "standard", "ladder", "--eager", "--json", out)
    (shown, said), (nothing, _) = main_on_ranks(2, bench.main, *words)
    lines = read_lines(out)
    assert [(line["wiring"], line["batch"]) for line in lines] == [(w, b) for w in WIRINGS[:2] for b in (2, 1)]
    first, *_, last = lines
    assert first["tp"] == 2 and len(first["bandwidth"]) == 2 and first.keys() >= {"torch", "commit", "hardware"}
    assert [len(last[key]) for key in ("tpot_ms", "ttft_ms")] == [2] * 2
    assert "tp 2: 2 rounds of standard, ladder" in said and bench.tables(lines) in shown and nothing == ""


def test_on_one_rank_only_standard_runs(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    out = tmp_path / "out.jsonl"
    bench.main(bench_flags(tiny, "--batch", 1, "--wiring", "ladder", "standard", "--eager", "--json", out))
    [line] = map(json.loads, out.read_text().splitlines())
    assert (line["wiring"], line["tp"], len(line["tpot_ms"])) == ("standard", 1, 2)
    assert line["mbu"] == pytest.approx(line["step_bytes"] / (sum(line["tpot_ms"]) / 2e3) / line["bandwidth"][0])


# ---- The tables ------------------------------------------------------------------------------------------------------


def line(wiring, *ms, batch=1, **changes):
    return {
        "model": "8b", "n_layers": 32, "dtype": "bfloat16", "quant": None, "compiled": True, "hardware": "H1",
        "prompt_tokens": 8, "new_tokens": 9, "torch": "2", "commit": "c", "tp": 2, "wiring": wiring, "batch": batch,
        "tpot_ms": ms, "ttft_ms": ms, "tok_s": 1e3 * batch / sorted(ms)[len(ms) // 2],
        "step_bytes": 2e9, "mbu": 0.5, **changes,
    }  # fmt: skip


def rows(text):
    """{wiring: cells} of the first table."""
    cells = [row.strip("| ").split(" | ") for row in text.split("\n\n")[2].splitlines()[2:]]
    return {name: row for name, *row in cells}


def test_speedups_are_paired_by_round_and_told_from_noise():
    # the machine was half as fast in the third round, which slowed standard and ladder alike
    lines = [line("standard", 10, 10, 20, batch=b) for b in (1, 4)]
    lines += [line("ladder", 10 / 1.2, 10 / 1.3, 20 / 1.25, batch=4), line("parallel", 10 / 0.9, 10 / 1.1, 20 / 1.2)]
    lines += [line("spd", 10 / 1.5, 10 / 1.6, 20 / 1.7), line("upper-bound", 10 / 1.4, 10 / 1.4, 20 / 1.4)]
    cells = rows(bench.tables(lines))
    assert cells["ladder"] == ["", "8.33 (8.01-12.17) ms, 1.25x, 480 tok/s, 50 %"]
    ratios = [cells[name][0].split(", ")[1] for name in ("parallel", "spd", "upper-bound")]
    assert ratios == ["~1.10x", "1.60x", "1.40x"]
    assert cells["standard"][1].startswith("10.00 (10.00-15.00) ms, 400 tok/s, 50 %")
    assert "Medians (quartiles) of 3 rounds" in bench.tables(lines)
    small = line("ladder", 10, step_bytes=1e6)  # so small, it says nothing of the memory; and without standard
    assert rows(bench.tables([small]))["ladder"] == ["10.00 (10.00-10.00) ms, 100 tok/s"]


# ---- The command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, message", [
    ("--batch 1,4", "--batch: '1,4' is not a whole number from 1"),
    ("--wiring ladders", "--wiring ladders --tp 1: unknown wiring 'ladders'; known: standard, ladder"),
    ("--model 8b:2 --wiring ladder:3", "wiring ladder:3 does not fit 2 layers"),
    ("--prompt-length 130000 --new-tokens 2000 --model 8b", "--prompt-length 130000 and --new-tokens 2000 exceed"),
    ("--json /dev/null/x.jsonl", "--json: cannot write"), ("--tp 64", "64 ranks or lanes cannot shard n_heads"),
])  # fmt: skip
def test_bad_flags_are_one_line_before_any_rank_starts(words, message, monkeypatch):
    monkeypatch.setattr(bench, "start", lambda *_: pytest.fail("started"))
    monkeypatch.delenv("RANK", raising=False)
    refused(re.escape(message), bench.main, shlex.split(words))


def test_the_ranks_start_once_for_each_number(monkeypatch):
    started = []
    monkeypatch.setattr(bench, "start", lambda tp, *_: started.append(tp) or 3 * (tp == 4))
    monkeypatch.delenv("RANK", raising=False)
    bench.main(["--tp", "1", "2"])
    with pytest.raises(SystemExit, match="3"):
        bench.main(["--tp", "4", "8"])
    assert started == [1, 2, 4]


def shell(folder, *words, **environment):
    """bench.sh, started in a folder with a model.py of its own, by a path that is hard to quote."""
    clone = folder.parent / 'ladder-fast\'s "standard" $HOME'
    clone.symlink_to(ROOT)
    folder.mkdir()
    (folder / "model.py").write_text("raise ImportError('not ours')\n")
    around = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        ["bash", clone / "bench.sh", *map(str, words)], cwd=folder, env={**around, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by what runs in the background
    )  # fmt: skip


def test_a_python_without_torch(tmp_path):
    process = shell(tmp_path / "work", "--help", PYTHON="ls")
    said = process.communicate(timeout=HANGS)[1]
    assert process.returncode == 2
    assert said.startswith("bench.sh: ls cannot import torch: run make .venv/requirements.txt first")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_too(stop, tmp_path):
    words = ["--checkpoint", ROOT / "demo", "--tp", 2, "--batch", 1, "--repeats", 10**6, "--eager"]
    process = shell(tmp_path / "work", *words)
    ready = any("rounds of standard" in text for text in process.stderr)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does it
    else:
        process.send_signal(stop)
    said = process.communicate(timeout=HANGS)
    assert ready and process.returncode == 128 + stop, said
    assert not (tmp_path / "work" / "bench.jsonl").exists()
    deadline = time.monotonic() + HANGS
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_real_sweep_of_the_demo(tmp_path):
    words = ["--checkpoint", ROOT / "demo", "--tp", 1, 2, "--batch", 1, 2, "--wiring", "standard", "ladder:2"]
    words += ["--prompt-length", 5, "--new-tokens", 3, "--repeats", 2, "--device", "cpu"]
    process = shell(tmp_path / "work", *words, PYTHON=sys.executable)
    out, err = process.communicate(timeout=10 * HANGS)
    assert process.returncode == 0, err
    lines = read_lines(tmp_path / "work" / "bench.jsonl")
    assert [line["tp"] for line in lines] == [1, 1, 2, 2, 2, 2] and not lines[0]["compiled"]
    assert [line["threads"] for line in lines[1:3]] == [bench.available_cores(), max(1, bench.available_cores() // 2)]
    assert [" ".join(bench.tables(some).split()) in " ".join(out.split()) for some in (lines[:2], lines[2:])] == [
        True
    ] * 2
    assert checkpoint.read_config(ROOT / "demo").n_layers == lines[0]["n_layers"]
