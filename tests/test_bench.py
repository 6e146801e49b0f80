"""bench.sh with scripts that only pretend to measure, plot.py on lines that are known, and both for real once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, script

import plot
from model import InputError

# A python that is one for bench.sh's own small programs and for plot.py, but "measures" by writing down a line, with
# seconds of its own; it knows two GPUs. $TROUBLE: what happens to commands that match $WHEN.
PRETEND = """#!/usr/bin/env bash
case "$1 $2" in
    "-c "*) printf '%s\\n' "$GPUS 1b 8b" "standard ladder hybrid parallel desync upper-bound" "real no-p2p pcie"; exit ;;
    "- "* | *plot.py*) exec "$REAL" "$@" ;;
esac
echo "$*" >> calls
if [[ -n ${WHEN-} && "$*" == *"$WHEN"* ]]; then
    echo "$TROUBLE" >&2
    [[ $TROUBLE != interrupt ]] || exit 130
    exit 1
fi
"$REAL" - "$@" << 'PY'
import json, os, sys

words = sys.argv[1:]
value = lambda flag, default=None: words[words.index(flag) + 1] if flag in words else default
ranks = next((int(w.partition("=")[2]) for w in words if w.startswith("--nproc_per_node")), 1)
line = {
    "tp": ranks, "simulated": False, "device": value("--device"), "hardware": "pretended", "torch": "2", "commit": "c",
    "threads": 1, "settings": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}, "link": None,
}
if any(w.endswith("probe.py") for w in words):
    rates = [{"bytes": 1024, "us": 20.0, "gbps": 0.4}] if ranks > 1 else []
    line["probe"] = {"bandwidth": [1e10] * ranks, "all_reduce": rates}
else:
    report = {"step_ms": 4.0, "silent_ms": 3.0, "exposed_ms": 1.0, "all_reduces": 2, "all_reduce_ms": 1.0,
              "hidden": 0.5, "limit_ms": 4.0}
    new, batch = int(value("--max-new-tokens")), int(value("--batch"))
    line |= {
        "model": value("--model"), "n_layers": 2, "wiring": value("--wiring"),
        "ladder_layers": value("--ladder-layers"), "desync_period": value("--desync-period"),
        "dtype": "bfloat16", "quant": value("--quant"), "batch": batch, "new_tokens": new,
        "prompt_tokens": int(value("--prompt-length")), "prefill_s": 0.5, "ttft_ms": 500.0, "decode_s": 1.0,
        "tpot_ms": 1e3 / (new - 1), "tok_s": batch * (new - 1), "tok_s_user": new - 1, "mbu": 0.9,
        "exposed": {"decode": report} if "--exposed" in words else None, "tokens": [[1, 2]], "texts": None,
    }
    print("then 4 ms per token")
open(value("--json"), "a").write(json.dumps(line) + "\\n")
PY
"""


@pytest.fixture
def bench(tmp_path):
    """A function that runs bench.sh in a folder of its own, on two GPUs that are pretended; NAME=value settings."""
    python = tmp_path / "python"
    python.write_text(PRETEND)
    python.chmod(0o755)

    def run(**settings):
        settings = {"PYTHON": str(python), "REAL": sys.executable, "GPUS": "2", **settings}
        command = ["bash", str(ROOT / "bench.sh")]
        environment = {**os.environ, **{k: str(v) for k, v in settings.items()}}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    run.folder = tmp_path
    return run


SMALL = {
    "MODEL": "1b",
    "NEW_TOKENS": "32",
    "BATCHES": "1 4",
    "WIRINGS": "standard ladder",
    "TPS": "1 2",
    "LINKS": "real",
    "REPEATS": "2",
}


def lines_of(bench):
    return [json.loads(line) for line in (bench.folder / "bench.jsonl").read_text().splitlines()]


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
    commands = dry_run(bench, WIRINGS="hybrid:2 desync:4", LINKS="pcie", TPS="8", SIMULATE="1", **settings)
    assert len(commands) == 4 and all(c.endswith("--link pcie --simulate-tp 8") for c in commands)
    assert "--wiring hybrid " in commands[0] and "--ladder-layers 2" in commands[0] and "--n-layers 4" in commands[0]
    assert "--wiring desync " in commands[1] and "--desync-period 4" in commands[1]
    assert ["--quant int8" in c for c in commands] == [False, False, True, True]
    assert not any("torch.distributed" in c or "OMP" in c for c in commands)


def test_a_cpu_s_ranks_share_its_cores(bench):
    commands = dry_run(bench, GPUS="0", **{**SMALL, "TPS": "1 2"})
    cores = int(subprocess.check_output(["env", "-u", "OMP_NUM_THREADS", "nproc"]))
    assert all(c.startswith(f"OMP_NUM_THREADS={cores // (2 if 'nproc' in c else 1)} ") for c in commands)
    assert all("--device cpu" in c for c in commands)


def test_two_nodes_get_a_line_each_and_a_port_for_each_command(bench):
    commands = dry_run(bench, NNODES="2", MASTER_ADDR="10.0.0.1", TPS="4", **{"BATCHES": "1", "REPEATS": "1"})
    runs = [c for c in commands if not c.startswith("#")]
    assert all("--nnodes=2 --nproc_per_node=2" in c and "--master_addr=10.0.0.1" in c for c in runs)
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert "--node_rank=0" in first and second == first.replace("--node_rank=0", "--node_rank=1")
    ports = [c.partition("--master_port=")[2].split()[0] for c in runs[::2]]
    assert len(set(ports)) == len(ports)


def test_a_sweep_writes_each_run_its_tables_and_its_figures(bench):
    done = bench(**SMALL)
    assert done.returncode == 0, done.stderr
    lines = lines_of(bench)
    assert len(lines) == 2 + 2 * (2 + 4) + 4 == len(calls_of(bench))
    assert all("tokens" not in line for line in lines) and all("MODEL=1b" in done.stderr for line in lines)
    assert [line["repeat"] for line in lines] == [0] * 2 + [1] * 6 + [2] * 6 + [0] * 4
    assert "[18/18, about 1 min left]" in done.stderr
    assert "| 2 | real | ladder | 31 (31-31) **1.00x** | 124 (124-124) **1.00x** |" in done.stdout
    made = {path.name for path in (bench.folder / "bench").iterdir()}
    assert {"tables.md", "1b-2-bfloat16-cuda-by-batch.png", "1b-2-bfloat16-cuda-breakdown.svg"} <= made
    assert not any(name.endswith(".tmp") for name in made)


def test_an_interrupted_sweep_goes_on_where_it_stopped(bench):
    when = (
        "--nproc_per_node=2 " + str(ROOT / "generate.py") + " --device cuda --model 1b --random-weights --wiring ladder"
    )
    done = bench(**SMALL, WHEN=when, TROUBLE="interrupt")
    assert done.returncode == 130 and len(lines_of(bench)) == 5
    calls_of(bench)
    done = bench(**SMALL)
    assert done.returncode == 0 and len(lines_of(bench)) == 18
    assert len(calls_of(bench)) == 13
    assert bench(**SMALL).returncode == 0 and not calls_of(bench)
    assert len(lines_of(bench)) == 18
    assert bench(**{**SMALL, "BATCHES": "1 4 16"}).returncode == 0
    assert len(calls_of(bench)) == 2 * 3 + 2


@pytest.mark.parametrize(
    "trouble", ["CUDA out of memory. Tried", "DefaultCPUAllocator: can't allocate memory: you tried"]
)
def test_out_of_memory_is_a_result_and_the_sweep_goes_on(bench, trouble):
    done = bench(**SMALL, WHEN="--wiring ladder --batch 4", TROUBLE=trouble)
    assert done.returncode == 0, done.stderr
    errors = [line for line in lines_of(bench) if "error" in line]
    # the timed command and the one with --exposed, not their repeats
    assert len(errors) == 2 and all(line["error"] == "out of memory" for line in errors)
    assert "| 2 | real | ladder | 31 (31-31) **1.00x** | out of memory |" in done.stdout
    calls_of(bench)
    assert bench(**SMALL).returncode == 0 and not calls_of(bench)


def test_a_command_that_fails_is_told_skipped_and_tried_again_next_time(bench):
    done = bench(**SMALL, WHEN="--wiring ladder --batch 4", TROUBLE="generate.py: tp 2 cannot shard n_heads 1")
    assert done.returncode == 1
    assert "failed: generate.py: tp 2 cannot shard n_heads 1" in done.stderr
    assert "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert len(lines_of(bench)) == 15 and len(calls_of(bench)) == 17  # the second repeat was not tried
    assert "cannot shard" in (bench.folder / "bench.jsonl.log").read_text()
    assert bench(**SMALL).returncode == 0 and len(calls_of(bench)) == 3


@pytest.mark.parametrize(
    "settings, message",
    {
        "BATCHES=1,4": "BATCHES is '1,4' but must be whole numbers from 1 on",
        "BATCHES=": "BATCHES is '' but must be whole numbers from 1 on",
        "TPS=0": "TPS is '0' but must be whole numbers from 1 on",
        "TPS=4": "TPS names 4, but there are 2 GPUs",
        "REPEATS=two": "REPEATS is 'two' but must be",
        "PROMPT=1 2": "PROMPT is '1 2' but must be one number",
        "NEW_TOKENS=1": "NEW_TOKENS is 1 but must be at least 2",
        "WIRINGS=ladders": "WIRINGS names ladders; known: standard ladder",
        "WIRINGS=hybrid": "WIRINGS names hybrid without its ladder layers",
        "LINKS=nvlink9": "LINKS names nvlink9; known: real no-p2p pcie",
        "QUANT=int3": "QUANT names int3; known: none int8 int4",
        "MODEL=7b": "MODEL names 7b; known: 1b 8b",
        "DEVICE=tpu": "DEVICE names tpu; known: cpu cuda",
        "SIMULATE=1": "SIMULATE needs",
        "OUT=nowhere/x.jsonl": "OUT: cannot write nowhere/x.jsonl",
        "NNODES=2 NODE_RANK=2": "NODE_RANK is 2 but must be 0 to 1",
        "NNODES=2 TPS=3": "TPS names 3, which is no multiple of NNODES 2",
        "PYTHON=false": "false cannot import torch: run make .venv/installed first, or set PYTHON",
        "CHECKPOINT=x QUANT=int8": "QUANT and N_LAYERS are for MODEL: a checkpoint is as it is",
    }.items(),
)  # fmt: skip
def test_bad_settings_are_one_line(bench, settings, message):
    pairs = settings.split(" ") if settings.count("=") > 1 else [settings]
    done = bench(**dict(pair.split("=", 1) for pair in pairs))
    assert done.returncode == 2 and not calls_of(bench)
    assert f"bench.sh: {message}" in done.stderr.splitlines()[-1]
    assert sum(line.startswith("bench.sh: ") for line in done.stderr.splitlines()) == 1


def test_a_signal_ends_the_sweep_without_a_line_of_what_it_stopped(bench):
    slow = bench.folder / "python"
    slow.write_text(PRETEND.replace('echo "$*" >> calls', 'echo "$*" >> calls; sleep 60'))
    settings = {**SMALL, "PYTHON": str(slow), "REAL": sys.executable, "GPUS": "2"}
    process = subprocess.Popen(
        ["bash", str(ROOT / "bench.sh")], cwd=bench.folder, env={**os.environ, **settings}, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while not (bench.folder / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    assert process.wait(20) == 130
    assert lines_of(bench) == []


def test_a_real_sweep_of_the_demo(tmp_path):
    settings = {
        "CHECKPOINT": ROOT / "demo", "TPS": "2", "BATCHES": "2", "WIRINGS": "standard ladder", "REPEATS": "1",
        "PROMPT": "5", "NEW_TOKENS": "3", "LINKS": "real", "PYTHON": sys.executable, "DEVICE": "cpu",
        "OUT": tmp_path / "demo.jsonl", "EXPOSED": "0",
    }  # fmt: skip
    environment = {**os.environ, **{k: str(v) for k, v in settings.items()}}
    done = subprocess.run(["bash", ROOT / "bench.sh"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    probe, standard, ladder = map(json.loads, (tmp_path / "demo.jsonl").read_text().splitlines())
    assert probe["tp"] == 2 and len(probe["probe"]["bandwidth"]) == 2
    assert [r["bytes"] for r in probe["probe"]["all_reduce"]] == [4**n for n in range(5, 14)]
    assert all(r["us"] > 0 for r in probe["probe"]["all_reduce"])
    assert (standard["wiring"], ladder["wiring"], ladder["batch"], ladder["new_tokens"]) == ("standard", "ladder", 2, 3)
    assert probe["hardware"] == ladder["hardware"] and ladder["command"] != standard["command"]
    assert (tmp_path / "demo" / "tables.md").read_text() in done.stdout


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


def table(text, name):
    """{first cells of a row: the rest} of the table whose caption begins so."""
    rows = text.partition(f"\n{name}")[2].partition("|")[2].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {tuple(row[:3]): row[3:] for row in cells}


def test_cells_are_medians_and_speedups_are_paired_by_repeat():
    # the machine was twice as fast in the third repeat, and ladder missed the second
    lines = [result("standard", rate, repeat=i) for i, rate in enumerate([10, 11, 20], 1)]
    lines += [result("ladder", rate, repeat=i) for i, rate in ((1, 12), (3, 26))]
    lines += [result("standard", 30, batch=4), result("desync", 60, batch=4), result("standard", 6, tp=1)]
    [sweep] = plot.sweeps(lines)
    text = plot.tables(sweep)
    rates = table(text, "Decode, tok/s")
    assert rates["2", "real", "standard"] == ["11 (10-20)", "30"]
    assert rates["2", "real", "ladder"] == ["19 (12-26) **1.25x**", ""]  # the median of 1.2 and 1.3
    assert rates["2", "real", "desync:2"] == ["", "60 **2.00x**"]
    assert rates["1", "none", "standard"] == ["6", ""]
    assert table(text, "Decode: time per token")["2", "real", "standard"] == [
        "90.9 ms, 11 tok/s, 50 %",
        "133 ms, 7.5 tok/s, 50 %",
    ]
    assert table(text, "Prefill")["2", "real", "ladder"][0] == "1,000 (1,000-1,000) **1.00x**"
    # 44 tokens in 1 s of prefill and 40/30 s of decode
    assert table(text, "Whole requests")["2", "real", "standard"][1] == f"{44 / (1 + 40 / 30):.3g}"


def test_settings_links_and_errors_are_told_apart():
    lines = [result("standard", 10), result("standard", 5, settings={"NCCL_P2P_DISABLE": "1"})]
    lines += [
        result("standard", 4, link="pcie"),
        result("standard", 40, quant="int8"),
        result("ladder", 6, link="pcie"),
    ]
    error = {"command": "c", "repeat": 1, "error": "out of memory", "model": "8b", "quant": None, "wiring": "ladder"}
    lines.append({**error, "tp": 2, "batch": 64, "link": None, "prompt_tokens": 8})
    first, second = plot.sweeps(lines)
    rates = table(plot.tables(first), "Decode, tok/s")
    assert {key[1]: row[0] for key, row in rates.items() if key[2] == "standard"} == {
        "real": "10", "no-p2p": "5", "pcie": "4"
    }  # fmt: skip
    assert rates["2", "real", "ladder"] == ["", "out of memory"] and rates["2", "pcie", "ladder"][0] == "6 **1.50x**"
    assert list(table(plot.tables(second), "Decode, tok/s").values()) == [["40"]]


def test_series_of_the_figures():
    links = [(10, 15, "pcie"), (20, 22, "ib")]
    lines = [result(w, x, link=link) for a, b, link in links for w, x in (("standard", a), ("ladder", b))]
    lines += [result("standard", 4, tp=1), result("standard", 8, tp=4, link="ib")]
    [sweep] = plot.sweeps(lines)
    by_link = plot.speedups(sweep, lambda c: f"{c[0]} ranks", plot.latency)
    assert by_link["2 ranks"]["ladder"] == {57.0: 1.5, 46.0: 1.1}
    assert plot.scaling(sweep)["ib, batch 1"] == {"standard": {1: 1.0, 2: 5.0, 4: 2.0}, "ladder": {1: 1.0, 2: 5.5}}


def test_a_breakdown_adds_up_to_the_step(monkeypatch):
    report = {"step_ms": 10.0, "silent_ms": 7.0, "exposed_ms": 3.0, "all_reduces": 4, "all_reduce_ms": 1.25}
    [sweep] = plot.sweeps([result("standard", 1), result("ladder", 1, repeat=0, exposed={"decode": report})])
    figure = plot.breakdown(sweep)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [5.0, 2.0, 3.0]  # computing, of that with the 5 - 3 ms of communication hidden, waiting
    plot.plt.close(figure)


def test_compare(tmp_path):
    before = [result("standard", 10), result("ladder", 12), result("ladder", 99, batch=4)]
    after = [result("standard", 15, hardware="H2"), result("ladder", 6, hardware="H2", ttft_ms=500.0)]
    for name, lines in (("a", before), ("b", after)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = script("plot.py", "--compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("before: H1; after: H2\n")
    rows = done.stdout.splitlines()[4:]
    assert rows == [
        "| 8b bfloat16 | 2 | real | standard | 1 | 10 | 15 | 1.50x | 1,000 | 1,000 | 1.00x |",
        "| 8b bfloat16 | 2 | real | ladder | 1 | 12 | 6 | 0.50x | 1,000 | 500 | 2.00x |",
    ]


def test_the_paper_s_figures_agree_with_themselves():
    rates = {(r["link"], r["wiring"], r["batch"]): r["tok_s"] for r in plot.published() if r["tok_s"]}
    ratios = {
        link: [rates[link, "ladder", b] / rates[link, "standard", b] for b in (1, 4, 16, 64)] for link, _, _ in rates
    }
    assert ratios["NVLink"] == pytest.approx([1.308, 1.282, 1.190, 1.155], abs=6e-4)
    assert ratios["no P2P"] == pytest.approx([1.599, 1.566, 1.351, 1.282], abs=6e-4)


@pytest.mark.parametrize(
    "text",
    ["", "no json\n", "[1]\n", '{"command": "c", "repeat": 1, "a": 2}\n', '{"wiring": "ladder", "link": 1, "tp": 2}\n'],
)
def test_plot_refuses_other_files(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(InputError, match="holds something else than lines of bench.sh"):
        plot.read(tmp_path / "x")


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give either files of bench.sh or --compare BEFORE AFTER"),
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["--compare", "a", "b", "--out", "c"], "--compare prints one table: it does not go with --out"),
    ],
)
def test_plot_s_bad_flags(flags, message):
    with pytest.raises(InputError, match=message):
        plot.main(flags)


def test_plot_says_when_it_cannot_write(tmp_path):
    (tmp_path / "x").write_text(json.dumps(result("standard", 1)) + "\n")
    with pytest.raises(InputError, match="cannot be written"):
        plot.main([str(tmp_path / "x"), "--out", str(tmp_path / "x")])


# ---------------------------------------------------------------------------------------------------------------------
# predict.py


def test_a_whole_step_is_some_of_its_layers_and_more_of_the_same(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict

    line = {
        "model": "8b", "wiring": "ladder", "tp": 8, "simulated": True, "batch": 4, "dtype": "bfloat16", "device": "cpu",
        "threads": 2, "link": {"name": "pcie", "latency_us": 57.0}, "torch": "2", "commit": "c", "tokens": 1024,
    }  # fmt: skip
    lines = [{**line, "n_layers": n, "step_ms": 5.0 + 3.0 * n} for n in (8, 2)]
    [found] = predict.predictions(lines).values()
    assert (found["n_layers"], found["tpot_ms"], found["tok_s"]) == (32, 101.0, 4e3 / 101)
    with pytest.raises(InputError, match="8b, 4, pcie, ladder has not two numbers of layers"):
        predict.predictions(lines[:1])
    [sweep] = plot.sweeps([found])
    assert "PREDICTED" in plot.tables(sweep)
