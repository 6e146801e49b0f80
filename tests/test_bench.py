"""bench.sh and sweep.py with scripts that only pretend to measure, plot.py on lines that are known; all of it once."""

import json
import os
import signal
import subprocess
import sys
import time

import plot
import pytest
import sweep
from helpers import HANGS, ROOT, script

from model import InputError

# A python that is one for sweep.py, but whose generate.py and probe.py write down a line instead of measuring, and that
# knows $GPUS. $TROUBLE: what happens to commands that hold $WHEN, as a text to print before failing or an exit code.
PRETEND = """#!/usr/bin/env bash
case "$*" in
    -c*) printf '%s\\n' "$GPUS 2 1b 8b" "standard ladder hybrid parallel desync upper-bound" "real no-p2p pcie"; exit ;;
    *sweep.py*) exec "$REAL" "$@" ;;
esac
echo "$*" >> calls
if [[ -n ${WHEN-} && "$*" == *"$WHEN"* ]]; then
    [[ ! $TROUBLE =~ ^[0-9]+$ ]] || exit "$TROUBLE"
    echo "$TROUBLE" >&2
    exit 1
fi
exec "$REAL" - "$@" << 'PY'
import json, os, sys

words = sys.argv[1:]
value = lambda flag, default=None: words[words.index(flag) + 1] if flag in words else default
given = dict(w.split("=", 1) for w in words if w.startswith("--") and "=" in w)
ranks = int(given.get("--nproc_per_node", 1)) * int(given.get("--nnodes", 1))
line = {
    "tp": ranks, "simulated": False, "device": value("--device"), "hardware": "pretended", "torch": "2", "commit": "c",
    "threads": 1, "settings": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
}
if any(w.endswith("probe.py") for w in words):
    rates = [{"bytes": 1024, "us": 20.0, "gbps": 0.4}] if ranks > 1 else []
    line |= {"probe": {"bandwidth": [1e10] * ranks, "all_reduce": rates}, "topology": None}
else:
    report = {"step_ms": 4.0, "silent_ms": 3.0, "exposed_ms": 1.0, "all_reduces": 2, "all_reduce_ms": 1.0,
              "hidden": 0.5, "limit_ms": 4.0}
    new, batch = int(value("--max-new-tokens")), int(value("--batch"))
    line |= {
        "model": value("--model", "demo"), "n_layers": 2, "wiring": value("--wiring"), "link": None,
        "ladder_layers": value("--ladder-layers"), "desync_period": value("--desync-period"),
        "dtype": "bfloat16", "quant": value("--quant"), "batch": batch, "new_tokens": new,
        "prompt_tokens": int(value("--prompt-length")), "prefill_s": 0.5, "ttft_ms": 500.0, "decode_s": 1.0,
        "tpot_ms": 1e3 / (new - 1), "tok_s": batch * (new - 1), "tok_s_user": new - 1, "mbu": 0.9,
        "exposed": {"decode": report} if "--exposed" in words else None, "tokens": [[1, 2]], "texts": None,
    }
    print("then 4 ms per token")
if given.get("--node_rank", "0") == "0":
    open(value("--json"), "a").write(json.dumps(line) + "\\n")
PY
"""
SETTINGS = """PYTHON DEVICE CHECKPOINT MODEL N_LAYERS QUANT WIRINGS BATCHES TPS SIMULATE LINKS PROMPT NEW_TOKENS REPEATS
    EXPOSED FLAGS OUT FIGURES DRY_RUN NNODES NODE_RANK MASTER_ADDR MASTER_PORT"""


def clean_environment(**settings):
    """The environment without what a developer may have set for bench.sh, and with these settings."""
    return {k: v for k, v in os.environ.items() if k not in SETTINGS.split()} | {k: str(v) for k, v in settings.items()}


@pytest.fixture
def bench(tmp_path):
    """A function that runs bench.sh in a folder of its own, on two GPUs that are pretended; NAME=value settings."""
    python = tmp_path / "python"
    python.write_text(PRETEND)
    python.chmod(0o755)

    def run(**settings):
        environment = clean_environment(**{"PYTHON": python, "REAL": sys.executable, "GPUS": 2, **settings})
        command = ["bash", ROOT / "bench.sh"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS)

    run.folder = tmp_path
    return run


SMALL = {
    "MODEL": "1b", "NEW_TOKENS": "32", "BATCHES": "1 4", "WIRINGS": "standard ladder", "TPS": "1 2", "LINKS": "real",
    "REPEATS": "2",
}  # fmt: skip


def lines_of(bench, out="bench.jsonl"):
    return [json.loads(line) for line in (bench.folder / out).read_text().splitlines()]


def calls_of(bench):
    calls = bench.folder / "calls"
    text = calls.read_text() if calls.exists() else ""
    calls.unlink(missing_ok=True)
    return text.splitlines()


def dry_run(bench, **settings):
    done = bench(DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    assert not (bench.folder / "bench.jsonl").exists() and not calls_of(bench)
    return done.stdout.splitlines()


def test_what_two_gpus_measure_without_any_setting(bench):
    commands = dry_run(bench)
    probes, runs = [c for c in commands if "probe.py" in c], [c for c in commands if "generate.py" in c]
    assert len(probes) == 3 and len(runs) == 3 * (4 + 4 * 2 * 4) + 4 * 2 * 3
    assert all("--model 8b" in c and "--prompt-length 1024 --max-new-tokens 512" in c for c in runs)
    two = [c for c in runs if "--nproc_per_node=2" in c]
    assert len([c for c in two if c.startswith("NCCL_P2P_DISABLE=1 ")]) == len(two) / 2
    assert [c for c in runs if c not in two] == [c for c in runs if "nproc" not in c and "--wiring standard" in c]


def test_repeats_are_far_apart_and_wirings_next_to_one_another(bench):
    commands = [c for c in dry_run(bench, **SMALL, EXPOSED="0") if "generate.py" in c]
    assert len(commands) == 12 and commands[:6] == commands[6:]
    assert [("ladder" in c, "--batch 4" in c, "nproc" in c) for c in commands[:6]] == [
        (False, False, False), (False, True, False),
        (False, False, True), (True, False, True), (False, True, True), (True, True, True),
    ]  # fmt: skip


def test_wirings_with_a_number_emulated_links_and_one_rank_alone(bench):
    settings = {"BATCHES": "1", "REPEATS": "1", "EXPOSED": "0", "QUANT": "none int8", "MODEL": "8b", "N_LAYERS": "4"}
    probe, *commands = dry_run(bench, WIRINGS="hybrid:2 desync:4", LINKS="pcie", TPS="8", SIMULATE="1", **settings)
    assert "probe.py" in probe  # what the machine reads is of use for a prediction too
    assert len(commands) == 4 and all(c.endswith("--link pcie --simulate-tp 8") for c in commands)
    assert "--wiring hybrid " in commands[0] and "--ladder-layers 2" in commands[0] and "--n-layers 4" in commands[0]
    assert "--wiring desync " in commands[1] and "--desync-period 4" in commands[1]
    assert ["--quant int8" in c for c in commands] == [False, False, True, True]
    assert not any("torch.distributed" in c or "OMP" in c for c in commands)


def test_a_cpu_s_ranks_share_its_cores(bench):
    commands = dry_run(bench, GPUS="0", **SMALL)
    assert all(c.startswith(f"OMP_NUM_THREADS={1 if 'nproc' in c else 2} ") for c in commands)
    assert all("--device cpu" in c for c in commands)


TWO_NODES = {
    "NNODES": "2", "MASTER_ADDR": "10.0.0.1", "TPS": "4", "BATCHES": "1", "REPEATS": "1", "WIRINGS": "standard",
    "LINKS": "real", "EXPOSED": "0",
}  # fmt: skip


def test_two_nodes_get_a_line_each_and_a_port_for_each_command(bench):
    commands = dry_run(bench, **TWO_NODES)
    assert all("--nnodes=2" in c and "--nproc_per_node=2" in c and "--master_addr=10.0.0.1" in c for c in commands)
    for first, second in zip(commands[::2], commands[1::2], strict=True):
        assert "--node_rank=0" in first and second == first.replace("--node_rank=0", "--node_rank=1")
    assert [c.partition("--master_port=")[2].split()[0] for c in commands[::2]] == ["29500", "29501"]


def test_each_node_runs_the_same_commands_and_the_first_has_the_results(bench):
    for node in "10":
        done = bench(**TWO_NODES, NODE_RANK=node, OUT=f"{node}.jsonl")
        assert done.returncode == 0, done.stderr
        assert [f"--node_rank={node}" in call for call in calls_of(bench)] == [True, True]
    first, second = lines_of(bench, "0.jsonl"), lines_of(bench, "1.jsonl")
    assert [line["command"] for line in first] == [line["command"] for line in second]  # so a copy of it resumes there
    assert first[1]["tp"] == 4 and all(line.keys() == {"repeat", "command"} for line in second)
    assert "| 4 | real | standard | 511 |" in done.stdout
    assert bench(**TWO_NODES, NODE_RANK="1", OUT="1.jsonl").returncode == 0 and not calls_of(bench)


def test_a_sweep_writes_each_run_its_tables_and_its_figures(bench):
    done = bench(**SMALL)
    assert done.returncode == 0, done.stderr
    lines = lines_of(bench)
    assert len(lines) == 2 + 2 * (2 + 4) + 4 == len(calls_of(bench))
    assert all("tokens" not in line for line in lines) and 'MODEL="1b"' in done.stderr
    assert [line["repeat"] for line in lines] == [0] * 2 + [1] * 6 + [2] * 6 + [0] * 4
    assert "[18/18, about 0 min left]" in done.stderr
    assert "| 2 | real | ladder | 31 (31-31) **1.00x** | 124 (124-124) **1.00x** |" in done.stdout
    made = {path.name for path in (bench.folder / "bench-figures").iterdir()}
    assert {"tables.md", "1b-2-bfloat16-cuda-by-batch.png", "1b-2-bfloat16-cuda-breakdown.svg"} <= made
    assert not any(name.endswith(".tmp") for name in made)


def test_an_interrupted_sweep_goes_on_where_it_stopped(bench):
    done = bench(**SMALL, WHEN="--wiring ladder", TROUBLE="130")
    assert done.returncode == 130 and len(lines_of(bench)) == 2 + 2 + 1
    calls_of(bench)
    done = bench(**SMALL)
    assert done.returncode == 0 and len(lines_of(bench)) == 18
    assert len(calls_of(bench)) == 13
    assert "5 of 18 are in bench.jsonl already\n[1/13]" in done.stderr
    done = bench(**SMALL)
    assert done.returncode == 0 and not calls_of(bench) and "18 of 18 are in bench.jsonl already" in done.stderr
    assert len(lines_of(bench)) == 18
    assert bench(**{**SMALL, "BATCHES": "1 4 16 16"}).returncode == 0
    assert len(calls_of(bench)) == 2 * 3 + 2


@pytest.mark.parametrize("trouble", ["CUDA out of memory. Tried", "137"])
def test_out_of_memory_is_a_result_and_the_sweep_goes_on(bench, trouble):
    when = "--wiring desync --batch 4"
    settings = {**SMALL, "LINKS": "real no-p2p", "WIRINGS": "standard desync:2"}
    done = bench(**settings, WHEN=when, TROUBLE=trouble)
    assert done.returncode == 0, done.stderr
    errors = [line for line in lines_of(bench) if "error" in line]
    # with P2P and without, timed and with --exposed, but not their repeats
    assert len(errors) == 4 and all(line["error"] == "out of memory" for line in errors)
    assert "| 2 | real | desync:2 | 31 (31-31) **1.00x** | out of memory |" in done.stdout
    assert "| 2 | no-p2p | desync:2 | 31 (31-31) **1.00x** | out of memory |" in done.stdout
    calls_of(bench)
    assert bench(**settings).returncode == 0 and not calls_of(bench)


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: ...", "DefaultCPUAllocator: can't allocate memory: you tried", "std::bad_alloc",
        "OSError: [Errno 12] Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Signal 9 (SIGKILL) received by",
    ],
)  # fmt: skip
def test_what_memory_is_short_of_says(text):
    assert sweep.NO_MEMORY.search(text) and not sweep.NO_MEMORY.search("Signal 15 (SIGTERM) received by PID")


def test_what_a_command_says_of_itself():
    command = "OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc_per_node=2 --node_rank=$NODE_RANK --nnodes=2 "
    command += "generate.py --device cpu --checkpoint a/../demo --wiring hybrid --batch 4 --prompt-length 8 "
    command += "--max-new-tokens 3 --ladder-layers 2 --link pcie"
    line = sweep.about(command)
    assert plot.case(line) == (4, "pcie", "hybrid:2", 4) and line["model"] == "demo" and "quant" not in line
    line = sweep.about(command.replace("--checkpoint a/../demo", "--model 8b --quant int8") + " --simulate-tp 8")
    assert (line["tp"], line["simulated"], line["model"], line["quant"]) == (8, True, "8b", "int8")


def test_a_command_that_fails_is_told_skipped_and_tried_again_next_time(bench):
    done = bench(**SMALL, WHEN="--wiring ladder --batch 4", TROUBLE="generate.py: tp 2 cannot shard n_heads 1")
    assert done.returncode == 1
    assert "failed: generate.py: tp 2 cannot shard n_heads 1 (more in bench.jsonl.log)" in done.stderr
    assert "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert len(lines_of(bench)) == 15 and len(calls_of(bench)) == 17  # the second repeat was not tried
    assert "cannot shard" in (bench.folder / "bench.jsonl.log").read_text()
    assert bench(**SMALL).returncode == 0 and len(calls_of(bench)) == 3


def test_when_everything_fails_that_is_said(bench):
    done = bench(**SMALL, WHEN="py", TROUBLE="CUDA out of memory, says a probe too")
    assert done.returncode == 1 and "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert "out of memory" in done.stdout  # the tables are of nothing else
    (bench.folder / "bench.jsonl").unlink()
    done = bench(**SMALL, WHEN="py", TROUBLE="no")
    assert done.returncode == 1 and "12 of the commands failed" in done.stderr.splitlines()[-1] and not done.stdout


@pytest.mark.parametrize(
    "settings, message",
    {
        "BATCHES=1,4": "BATCHES is '1,4' but must be whole numbers from 1 on",
        "BATCHES=": "BATCHES is '' but must be whole numbers from 1 on",
        "TPS=0": "TPS is '0' but must be whole numbers from 1 on",
        "TPS=4": "TPS names 4, but there are 2 GPUs on each node",
        "REPEATS=two": "REPEATS is 'two' but must be one whole number from 1 on",
        "PROMPT=1 2": "PROMPT is '1 2' but must be one whole number",
        "N_LAYERS=4 8": "N_LAYERS is '4 8' but must be one whole number",
        "NEW_TOKENS=1": "NEW_TOKENS is 1 but must be at least 2",
        "WIRINGS=ladders": "WIRINGS names ladders; known: standard ladder",
        "WIRINGS=": "WIRINGS is empty; known: standard ladder",
        "WIRINGS=hybrid": "WIRINGS names hybrid without a number",
        "WIRINGS=desync": "WIRINGS names desync without a number",
        "LINKS=nvlink9": "LINKS names nvlink9; known: real no-p2p pcie",
        "LINKS=no-p2p;DEVICE=cpu": "LINKS names no-p2p, which is for GPUs",
        "QUANT=int3": "QUANT names int3; known: none int8 int4",
        "MODEL=7b": "MODEL is '7b' but must be one of: 1b 8b",
        "MODEL=1b 8b": "MODEL is '1b 8b' but must be one of: 1b 8b",
        "DEVICE=tpu": "DEVICE is 'tpu' but must be one of: cpu cuda",
        "DEVICE=cuda;GPUS=0": "DEVICE is cuda, but there is no GPU",
        "SIMULATE=yes": "SIMULATE is 'yes' but must be one of: 0 1",
        "SIMULATE=1": "SIMULATE needs LINKS to emulate",
        "SIMULATE=1;LINKS=pcie;TPS=1 2": "SIMULATE needs TPS from 2 on",
        "NNODES=0": "NNODES is '0' but must be one whole number",
        "NNODES=2": "NNODES is 2, so MASTER_ADDR must be the address of node 0",
        "NNODES=2;NODE_RANK=2": "NODE_RANK is '2' but must be 0 to 1",
        "NNODES=2;TPS=3": "TPS names 3, which is no multiple of NNODES 2",
        "PYTHON=ls": "ls cannot import torch: run make .venv/installed first, or set PYTHON",
        "CHECKPOINT=.;QUANT=int8": "QUANT and N_LAYERS are for MODEL: a checkpoint is as it is",
        "OUT=/dev/null/x.jsonl": "OUT: /dev/null cannot be made: File exists",
        "OUT=calls.d": "FIGURES: calls.d-figures is a file: name a folder",
        "CHECKPOINT=calls.d;MODEL=1b": "give either CHECKPOINT or MODEL",
        "CHECKPOINT=calls.d": "CHECKPOINT calls.d is no folder",
        "OUT=python": "python line 1 is none of bench.sh's",
    }.items(),
)  # fmt: skip
def test_bad_settings_are_one_line(bench, settings, message):
    (bench.folder / "calls.d-figures").touch()
    done = bench(**dict(pair.split("=", 1) for pair in settings.split(";")))
    assert done.returncode == 2 and not calls_of(bench)
    told = [line for line in done.stderr.splitlines() if line.startswith(("bench.sh: ", "sweep.py: "))]
    assert len(told) == 1 and message in told[0] and done.stderr.endswith(told[0] + "\n")


@pytest.mark.parametrize("stop, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_without_a_line_of_what_it_stopped(bench, stop, code):
    slow = bench.folder / "python"
    slow.write_text(PRETEND.replace('echo "$*" >> calls', "echo $$ >> calls; exec sleep 600"))
    environment = clean_environment(**SMALL, PYTHON=slow, REAL=sys.executable, GPUS=2)
    process = subprocess.Popen(
        ["bash", ROOT / "bench.sh"], cwd=bench.folder, env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by what runs in the background
    )  # fmt: skip
    deadline = time.monotonic() + HANGS
    while not (bench.folder / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does it
    else:
        process.send_signal(stop)
    assert process.wait(HANGS) == code
    [child] = calls_of(bench)
    assert not os.path.exists(f"/proc/{child}")
    assert not (bench.folder / "bench.jsonl").exists()


def test_a_real_sweep_of_the_demo(tmp_path):
    settings = {
        "CHECKPOINT": ROOT / "demo", "TPS": "2", "BATCHES": "2", "WIRINGS": "standard ladder", "REPEATS": "1",
        "PROMPT": "5", "NEW_TOKENS": "3", "LINKS": "real", "PYTHON": sys.executable, "DEVICE": "cpu",
        "OUT": tmp_path / "new" / "demo.jsonl", "EXPOSED": "0", "NCCL_SOMETHING": "1",
    }  # fmt: skip
    environment = clean_environment(**settings)
    done = subprocess.run(["bash", ROOT / "bench.sh"], env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    probe, standard, ladder = map(json.loads, (tmp_path / "new" / "demo.jsonl").read_text().splitlines())
    assert probe["tp"] == 2 and len(probe["probe"]["bandwidth"]) == 2
    assert [r["bytes"] for r in probe["probe"]["all_reduce"]] == [4**n for n in range(5, 14)]
    assert all(r["us"] > 0 for r in probe["probe"]["all_reduce"])
    assert (standard["wiring"], ladder["wiring"], ladder["batch"], ladder["new_tokens"]) == ("standard", "ladder", 2, 3)
    assert probe["hardware"] == ladder["hardware"] and ladder["command"] != standard["command"]
    assert ladder["settings"] == {"NCCL_SOMETHING": "1"}
    assert (tmp_path / "new" / "demo-figures" / "tables.md").read_text() in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# plot.py


def result(wiring, tok_s, batch=1, tp=2, link=None, repeat=1, **more):
    """A line of a run whose prefill takes a second and whose 11 tokens take as long as they must."""
    return {
        "command": f"{wiring} {batch} {tp} {link}", "repeat": repeat, "model": "8b", "n_layers": 32, "wiring": wiring,
        "ladder_layers": None, "desync_period": 2 if wiring == "desync" else None, "dtype": "bfloat16", "quant": None,
        "link": link and {"name": link, "latency_us": {"pcie": 57.0, "ib": 46.0}[link], "gbps": None}, "tp": tp,
        "simulated": False, "device": "cuda", "hardware": "H1", "threads": 1, "settings": {}, "batch": batch,
        "prompt_tokens": 8, "new_tokens": 11, "prefill_s": 1.0, "ttft_ms": 1000.0, "decode_s": batch * 10 / tok_s,
        "tpot_ms": 1e3 * batch / tok_s, "tok_s": tok_s, "tok_s_user": tok_s / batch, "mbu": 0.5, "exposed": None,
        **more,
    }  # fmt: skip


def error(wiring, **more):
    line = {"command": "c", "repeat": 1, "error": "out of memory", "model": "8b", "quant": None, "wiring": wiring}
    line |= {"tp": 2, "batch": 64, "link": None, "prompt_tokens": 8, "new_tokens": 11, "device": "cuda"}
    return {**line, "simulated": False, **more}


@pytest.fixture
def written(tmp_path):
    """A function that writes lines into a file, and one that reads files as plot.py does."""

    def write(lines, name="bench.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    return write


def table(text, name):
    """{first cells of a row: the rest} of the table whose caption begins so."""
    rows = text.partition(f"\n{name}")[2].partition("|")[2].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {tuple(row[:3]): row[3:] for row in cells}


def test_cells_are_medians_and_speedups_are_paired_by_repeat(written):
    # the machine was twice as fast in the third repeat, and ladder missed the second
    lines = [result("standard", rate, repeat=i) for i, rate in enumerate([10, 11, 20], 1)]
    lines += [result("ladder", rate, repeat=i) for i, rate in ((1, 12), (3, 26))]
    lines += [result("parallel", rate, repeat=i) for i, rate in enumerate([11, 22, 200], 1)]
    lines += [result("standard", 30, batch=4), result("desync", 60, batch=4), result("standard", 6, tp=1)]
    [found] = plot.sweeps(plot.read(written(lines)))
    text = plot.tables(found)
    rates = table(text, "Decode, tok/s")
    assert rates["2", "real", "standard"] == ["11 (10-20)", "30"]
    assert rates["2", "real", "ladder"] == ["19 (12-26) **1.25x**", ""]  # the median of 1.2 and 1.3
    assert rates["2", "real", "parallel"][0] == "22 (11-200) **2.00x**"  # of 1.1, 2 and 10: no mean
    assert rates["2", "real", "desync:2"] == ["", "60 **2.00x**"]
    assert rates["1", "none", "standard"] == ["6", ""]
    each = table(text, "Decode: time per token")
    assert each["2", "real", "standard"] == ["90.9 ms, 11 tok/s, 50 %", "133 ms, 7.5 tok/s, 50 %"]
    assert table(text, "Prefill")["2", "real", "ladder"][0] == "1,000 (1,000-1,000) **1.00x**"
    # 44 tokens in 1 s of prefill and 40/30 s of decode
    assert table(text, "Whole requests")["2", "real", "standard"][1] == f"{44 / (1 + 40 / 30):.3g}"


def test_settings_links_and_errors_are_told_apart(written):
    lines = [result("standard", 10), result("standard", 5, settings={"NCCL_P2P_DISABLE": "1"})]
    lines += [
        result("standard", 4, link="pcie"),
        result("ladder", 6, link="pcie"),
        result("standard", 40, quant="int8"),
    ]
    lines += [error("ladder"), error("ladder", settings={"NCCL_P2P_DISABLE": "1"}), error("ladder", model="70b")]
    first, second, third = plot.sweeps(plot.read(written(lines)))
    rates = table(plot.tables(first), "Decode, tok/s")
    assert {key[1]: row[0] for key, row in rates.items() if key[2] == "standard"} == {
        "real": "10", "no-p2p": "5", "pcie": "4"
    }  # fmt: skip
    assert rates["2", "real", "ladder"] == ["", "out of memory"] == rates["2", "no-p2p", "ladder"]
    assert rates["2", "pcie", "ladder"][0] == "6 **1.50x**"
    assert list(table(plot.tables(second), "Decode, tok/s").values()) == [["40"]]
    assert list(table(plot.tables(third), "Decode, tok/s").values()) == [["out of memory"]]


def test_repeats_of_several_files_are_repeats_and_pair_within_a_file(written):
    fast = written([result("standard", 20), result("ladder", 22)], "fast")
    slow = written([result("standard", 10), result("ladder", 13)], "slow")
    [found] = plot.sweeps(plot.read(fast) + plot.read(slow))
    assert table(plot.tables(found), "Decode, tok/s")["2", "real", "ladder"] == ["17.5 (13-22) **1.20x**"]
    twice = written([result("ladder", 20), result("ladder", 20, command="with another flag")])
    with pytest.raises(InputError, match="two results of 2, real, ladder, 1 in repeat 1: give each file once"):
        plot.sweeps(plot.read(twice))


def test_communication_and_machine(written):
    report = {"step_ms": 10.0, "silent_ms": 7.0, "exposed_ms": 3.0, "all_reduces": 4, "all_reduce_ms": 1.25}
    reports = {
        "prefill": {**report, "hidden": None, "limit_ms": 8.0},
        "decode": {**report, "hidden": 0.4, "limit_ms": 9},
    }
    probe = {"tp": 2, "hardware": "H1", "torch": "2", "commit": "c", "settings": {"NCCL_P2P_DISABLE": "1"}}
    probe["probe"] = {"bandwidth": [2e9, 3e9], "all_reduce": [{"bytes": 1024, "us": 20.0, "gbps": 0.5}]}
    lines = plot.read(written([{**probe, "topology": "GPU0 PIX"}, result("ladder", 1, exposed=reports)]))
    [found] = plot.sweeps(lines)
    text = plot.tables(found)
    assert "| 2 | real | ladder | 1 | prefill | 10.00 | 7.00 | 4 | 1.250 | 3.00 |  | 8.00 |" in text
    assert "| 2 | real | ladder | 1 | decode | 10.00 | 7.00 | 4 | 1.250 | 3.00 | 40 % | 9.00 |" in text
    text = plot.machine(lines[:1])
    assert "2 ranks, link no-p2p. Each reads so many GB/s from memory: 2.0, 3.0." in text
    assert "| 1,024 | 20.0 | 0.50 |" in text and "GPU0 PIX" in text
    # computing, of that with the 5 - 3 ms of communication hidden, waiting
    figure = plot.breakdown(found)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [5.0, 2.0, 3.0]
    plot.plt.close(figure)
    assert found.latencies == {(2, "no-p2p"): 20.0}


def test_series_of_the_figures(written):
    links = [(10, 15, "pcie"), (20, 22, "ib")]
    lines = [result(w, x, link=link) for a, b, link in links for w, x in (("standard", a), ("ladder", b))]
    lines += [result("standard", 8, tp=4, link="ib")]
    [found] = plot.sweeps(plot.read(written(lines)))
    by_link = plot.speedups(found, lambda c: f"{c[0]} ranks", lambda c: found.latencies[c[:2]])
    assert by_link["2 ranks"]["ladder"] == {57.0: 1.5, 46.0: 1.1}
    # each link on its own, and no point that was not measured
    assert plot.scaling(found)["ib, batch 1"] == {"standard": {2: 1.0, 4: 0.4}, "ladder": {2: 1.1}}
    [found] = plot.sweeps(plot.read(written([*lines, result("standard", 4, tp=1)])))
    assert plot.scaling(found)["ib, batch 1"] == {"standard": {1: 1.0, 2: 5.0, 4: 2.0}, "ladder": {1: 1.0, 2: 5.5}}


def test_ours_stand_beside_the_paper_s_where_they_are_alike(written):
    def lines_of_axes(lines):
        figure = plot.beside_paper(plot.sweeps(plot.read(written(lines))))
        if figure is None:
            return None
        drawn = [{line.get_label(): list(line.get_ydata()) for line in axis.lines} for axis in figure.axes]
        plot.plt.close(figure)
        return drawn

    eight = [result("standard", 10, batch=4, tp=8), result("ladder", 15, batch=4, tp=8)]
    by_batch, by_size = lines_of_axes(eight)
    # 44 tokens in 1 + 4 and in 1 + 2.67 seconds
    assert by_size["measured, real, H1"] == pytest.approx([5 / (1 + 40 / 15)])
    assert by_size["paper, no P2P"] == [1.39, 1.50, 1.40, 1.47, 1.59, 1.54, 1.57]
    assert len(by_batch) == 2 and by_batch["paper, NVLink"][0] == pytest.approx(101.22 / 77.39)
    assert lines_of_axes([{**line, "n_layers": 4} for line in eight]) is None
    assert lines_of_axes([{**line, "quant": "int8"} for line in eight]) is None


def test_compare(written):
    before = [result("standard", 10), result("ladder", 12), result("ladder", 99, batch=4), error("ladder")]
    after = [result("standard", 15, hardware="H2"), result("ladder", 6, hardware="H2", ttft_ms=500.0)]
    after.append(result("ladder", 7, batch=64, hardware="H2"))
    done = script("plot.py", "--compare", written(before, "a"), written(after, "b"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("before: H1; after: H2\n")
    what = "| 8b, 32 layers, bfloat16, prompt 8, 11 new tokens | 2 | real |"
    assert done.stdout.splitlines()[4:] == [
        f"{what} standard | 1 | 10 | 15 | 1.50x | 1,000 | 1,000 | 1.00x |",
        f"{what} ladder | 1 | 12 | 6 | 0.50x | 1,000 | 500 | 2.00x |",
        f"{what} ladder | 64 | out of memory | 7 |  | out of memory | 1,000 |  |",
    ]


def test_figures_of_settings_that_look_alike_have_names_of_their_own(written, tmp_path):
    rates = [("standard", 10, 1), ("ladder", 12, 1), ("standard", 30, 4), ("ladder", 32, 4)]
    lines = [result(w, rate, batch, hardware=name) for name in ("H1", "H2") for w, rate, batch in rates]
    plot.main([str(written(lines)), "--out", str(tmp_path / "figures")])
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"8b-32-bfloat16-cuda-by-batch.png", "8b-32-bfloat16-cuda-2-by-batch.svg"} <= names


def test_the_paper_s_figures_agree_with_themselves():
    rates = {(r["link"], r["wiring"], r["batch"]): r["tok_s"] for r in plot.published() if r["tok_s"]}
    for link, ratios in ("NVLink", [1.308, 1.282, 1.190, 1.155]), ("no P2P", [1.599, 1.566, 1.351, 1.282]):
        found = [rates[link, "ladder", b] / rates[link, "standard", b] for b in (1, 4, 16, 64)]
        assert found == pytest.approx(ratios, abs=6e-4)


@pytest.mark.parametrize(
    "text",
    [
        "no json", "[1]", '{"command": "c", "repeat": 1, "a": 2}', '{"wiring": "ladder", "link": 1, "tp": 2}',
        json.dumps({k: v for k, v in result("ladder", 1).items() if k != "hardware"}),
    ],
)  # fmt: skip
def test_plot_refuses_other_files(tmp_path, text):
    (tmp_path / "x").write_text(json.dumps(result("ladder", 1)) + "\n" + text + "\n")
    with pytest.raises(InputError, match="x line 2 is none of bench.sh's"):
        plot.read(tmp_path / "x")


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give either files of bench.sh or --compare BEFORE AFTER"),
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["/dev/null"], "/dev/null is empty: it takes lines of bench.sh"),
        (["--compare", "a", "b", "--out", "c"], "--compare prints one table: it does not go with --out"),
    ],
)
def test_plot_s_bad_flags(flags, message):
    with pytest.raises(InputError, match=message):
        plot.main(flags)


def test_plot_says_when_it_cannot_write(written):
    file = written([result("standard", 1)])
    with pytest.raises(InputError, match="cannot be written"):
        plot.main([str(file), "--out", str(file)])


# ---------------------------------------------------------------------------------------------------------------------
# predict.py


def test_a_whole_step_is_some_of_its_layers_and_more_of_the_same(monkeypatch, written):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict

    line = {
        "model": "8b", "tp": 8, "simulated": True, "batch": 4, "dtype": "bfloat16", "device": "cpu", "threads": 2,
        "torch": "2", "commit": "c", "tokens": 1024, "kind": "decode",
    }  # fmt: skip
    lines = [
        {**line, "wiring": w, "link": {"name": n, "latency_us": us}, "n_layers": layers, "all_reduce_ms": ms,
         "silent_ms": 5.0 + 3.0 * layers}
        for w in ("standard", "ladder", "upper-bound") for n, us, ms in (("pcie", 57.0, 0.1), ("ib", 46.0, 4.0))
        for layers in (8, 2)
    ]  # fmt: skip
    found = predict.predictions(lines)

    def step(link, wiring):
        return found["8b", 4, link, wiring]["tpot_ms"]

    # 32 layers of 3 ms and 5 of the rest; 64 all-reduces, all of them waited for, or of the fast ones the last
    assert step("pcie", "upper-bound") == pytest.approx(101) and step("pcie", "standard") == pytest.approx(101 + 6.4)
    assert step("pcie", "ladder") == pytest.approx(101 + 0.1)
    # the slow ones are longer than any sublayer: the first one's computing, 64 of them, and the rest
    attention = 3 * predict.attention_share(plot.SIZES["8b"], 8, 4, 1024)
    assert step("ib", "ladder") == pytest.approx(attention + 64 * 4 + 5)
    # 4096 x 6144 and 4096 x 4096 of weights and 4 x 1024 x 2 x 8 x 128 of the cache, beside 3 x 4096 x 14336
    assert attention == pytest.approx(3 * (41943040 + 8388608) / (41943040 + 8388608 + 176160768))
    assert "| 8b | 8 | ladder | 1.06 (1.40) | 1.36 |" in predict.tables(found)
    for some, message in (
        ([x for x in lines if x["n_layers"] == 2], "8b, batch 4 has not two numbers of layers"),
        ([x for x in lines if x["wiring"] != "standard"], "8b, 4, pcie, ladder has no standard wiring"),
        ([{**x, "kind": "prefill"} for x in lines], "8b, prefill, is no decode step of a named size"),
    ):
        with pytest.raises(InputError, match=message):
            predict.predictions(some)
    [sweep] = plot.sweeps(plot.read(written(found.values())))
    assert "PREDICTED" in plot.tables(sweep)
