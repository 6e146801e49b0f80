"""bench.sh and extras/measure/sweep.py with scripts that only pretend to measure; tables and figures of known lines."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types

import pretend
import pytest
from helpers import HANGS, ROOT

import model
from extras.measure import plot, results, sweep
from extras.measure.probe import fitting_shares
from model import parse_wiring
from runtime import timing
from runtime.errors import InputError


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """A function that runs bench.sh's sweep in this process, in a folder of its own; GPUs, commands and figures are
    pretended. NAME=value settings; when, trouble: what happens to commands that hold `when`, as a text that they print
    before they fail or as an exit code; gpus. It returns what a finished process has."""
    calls = []
    monkeypatch.chdir(tmp_path)
    for name in (*sweep.NAMES, "NCCL_P2P_DISABLE", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sweep, "ROOT", ".")

    def run(words=(), when=None, trouble="", gpus=2, **settings):
        def pretended(command, environment):
            calls.append(command)
            assert environment["GOMP_SPINCOUNT"] == "1000"
            if when and when in command:
                return (int(trouble), "", None) if trouble.isdecimal() else (1, trouble, None)
            words, around = shlex.split(command.replace("$NODE_RANK", environment["NODE_RANK"])), dict(environment)
            while "=" in words[0] and "/" not in words[0].partition("=")[0]:
                name, _, value = words.pop(0).partition("=")
                around[name] = value
            first = "--node_rank=1" not in words
            return 0, "then 4 ms per token", pretend.result(words, around) if first else None

        monkeypatch.setattr(sweep, "machine", lambda: (gpus, 2))
        monkeypatch.setattr(sweep, "run", pretended)
        code, refused = 0, ""
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, str(value))
            try:
                sweep.main(list(words))
            except InputError as e:
                code, refused = 2, f"bench.sh: {e}\n"
            except SystemExit as e:
                code = e.code
            except KeyboardInterrupt:
                code = 130
        printed = capsys.readouterr()
        return types.SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err + refused)

    run.folder, run.calls = tmp_path, calls
    run.draw = plot.figures
    monkeypatch.setattr(plot, "figures", lambda found: [])
    return run


SMALL = {
    "MODEL": "1b", "NEW_TOKENS": "32", "BATCHES": "1 4", "WIRINGS": "standard ladder", "TPS": "1 2", "LINKS": "real",
    "REPEATS": "2",
}  # fmt: skip
TWO_NODES = {
    "NNODES": "2", "MASTER_ADDR": "10.0.0.1", "TPS": "4", "BATCHES": "1", "REPEATS": "1", "WIRINGS": "standard",
    "LINKS": "real", "EXPOSED": "0",
}  # fmt: skip


def lines_of(bench, out="bench.jsonl"):
    return [json.loads(line) for line in (bench.folder / out).read_text().splitlines()]


def calls_of(bench):
    calls = list(bench.calls)
    bench.calls.clear()
    return calls


def dry_run(bench, **settings):
    done = bench(DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    assert not (bench.folder / "bench.jsonl").exists() and not calls_of(bench)
    return done.stdout.splitlines()


def flag(command, name):
    """The value of a flag of a command, or None."""
    words = shlex.split(command)
    return words[words.index(name) + 1] if name in words else None


def test_the_default_of_two_gpus(bench):
    commands = dry_run(bench)
    probes, runs = [c for c in commands if "extras.measure.probe" in c], [c for c in commands if flag(c, "--wiring")]
    assert len(probes) == 3 and len(runs) == 3 * (4 + 4 * 2 * 4) + 4 * 2 * 3 == len(commands) - 3
    assert all("--model 8b" in c and "--prompt-length 1024 --max-new-tokens 512" in c for c in runs)
    two = [c for c in runs if "--nproc_per_node=2" in c]
    assert len([c for c in two if c.startswith("NCCL_P2P_DISABLE=1 ")]) == len(two) / 2
    assert [c for c in runs if c not in two] == [c for c in runs if "nproc" not in c and "--wiring standard" in c]


def test_a_command_in_full(bench):
    settings = {"WIRINGS": "ladder:8", "TPS": "2", "LINKS": "no-p2p", "FLAGS": "-x 'y z'"}
    assert dry_run(bench, PYTHON="a b/python", **settings)[0] == "'a b/python' -m extras.measure.probe --device cuda"
    assert dry_run(bench, PYTHON="py", **settings)[2] == (
        "NCCL_P2P_DISABLE=1 py -m torch.distributed.run --nproc_per_node=2 --standalone ./generate.py --device cuda "
        "--model 8b --wiring ladder:8 --batch 1 --prompt-length 1024 --max-new-tokens 512 "
        "--ignore-eos --temperature 0 --compile -x 'y z'"
    )


def test_repeats_are_far_apart_and_wirings_next_to_one_another(bench):
    commands = [c for c in dry_run(bench, **SMALL, EXPOSED="0") if flag(c, "--wiring")]
    assert len(commands) == 12 and commands[:6] == commands[6:]
    assert [(flag(c, "--wiring"), flag(c, "--batch"), "--nproc_per_node=2" in c) for c in commands[:6]] == [
        ("standard", "1", False), ("standard", "4", False),
        ("standard", "1", True), ("ladder", "1", True), ("standard", "4", True), ("ladder", "4", True),
    ]  # fmt: skip


def test_wirings_with_a_number_emulated_links_and_one_rank_alone(bench):
    settings = {"BATCHES": "1", "REPEATS": "1", "EXPOSED": "0", "QUANT": "none int8", "MODEL": "8b:4"}
    probe, *commands = dry_run(bench, WIRINGS="ladder:2 desync:4", LINKS="pcie", TPS="8", SIMULATE="1", **settings)
    assert "extras.measure.probe" in probe  # a prediction is read beside the machine's bandwidth, too
    assert len(commands) == 4 and all("--model 8b:4 " in c for c in commands)
    assert all(c.endswith("--link pcie --simulate-tp 8") for c in commands)
    assert [flag(c, "--wiring") for c in commands] == ["ladder:2", "desync:4"] * 2
    assert ["--quant int8" in c for c in commands] == [False, False, True, True]
    assert not any("torch.distributed" in c or "OMP" in c for c in commands)


def test_a_cpu_s_ranks_share_its_cores(bench):
    commands = dry_run(bench, gpus=0, **SMALL)
    assert all(c.startswith(f"OMP_NUM_THREADS={1 if 'nproc_per' in c else 2} ") for c in commands)
    assert all(flag(c, "--device") == "cpu" for c in commands)


@pytest.fixture
def drafting(bench):
    """Settings of a sweep with drafts: a checkpoint, a smaller one, and a prompt that is text."""
    (bench.folder / "its drafts" / "a small one").mkdir(parents=True)
    (bench.folder / "prompt.txt").write_text("Once upon a time\n\n")
    return {
        "CHECKPOINT": str(ROOT / "demo"), "PROMPT": "prompt.txt", "TPS": "1 2", "BATCHES": "1", "LINKS": "real",
        "REPEATS": "1", "WIRINGS": "standard ladder:2 parallel upper-bound",
        "SPECULATE": "none ngram@4 wiring:ladder:2@auto wiring:parallel@1 'its drafts/a small one'@2",
    }  # fmt: skip


def test_drafts_are_run_where_they_can_propose(bench, drafting):
    commands = [c for c in dry_run(bench, **drafting) if flag(c, "--wiring")]
    found = {}
    for c in commands:
        where = "--nproc_per_node=2" in c, flag(c, "--wiring")
        found.setdefault(where, []).append("exposed" if "--exposed" in c else flag(c, "--draft"))
    ngram, small = "ngram@4", "its drafts/a small one@2"
    ladder, parallel = "wiring:ladder:2@auto", "wiring:parallel@1"
    assert found == {
        (False, "standard"): [None, ngram, small],  # alone nothing is cheaper
        (True, "standard"): [None, ngram, ladder, parallel, small, "exposed"],
        (True, "ladder:2"): [None, ngram, parallel, small, "exposed"],  # no draft of itself
        (True, "parallel"): [None, ngram, small, "exposed"],  # which has not all of the other's norms
        (True, "upper-bound"): [None],
    }
    assert all(flag(c, "--prompt") == "@prompt.txt" and "--prompt-length" not in c for c in commands)
    commands = dry_run(bench, **{**drafting, "TPS": "2", "EXPOSED": "0", "SPECULATE": "wiring:spd:0,2@auto"})[1:]
    assert [(flag(c, "--wiring"), flag(c, "--draft")) for c in commands] == [
        ("standard", "wiring:spd:0,2@auto"),
        ("ladder:2", "wiring:spd:0,2@auto"),
    ]


def test_a_new_wiring_is_planned_ordered_and_coloured(bench, monkeypatch):
    known = [*model.WIRINGS]
    monkeypatch.setitem(model.WIRINGS, "mine", model.Wiring("of a reader's own", stale=True, parameter="period"))
    looks = {name: plot.look(name)["color"] for name in model.WIRINGS}
    assert len(set(looks.values())) == len(looks) and plot.look("mine:3")["color"] == looks["mine"]
    assert sorted(["unheard-of", "mine:2", *known], key=results.wiring_order) == [*known, "mine:2", "unheard-of"]
    commands = dry_run(bench, **{**SMALL, "WIRINGS": "mine:3 ladder"})
    assert sum("--wiring mine:3 " in c for c in commands) == 2 * 2 + 2
    lines = [{**result("mine:3", 12.0), "file": "f"}, {**result("standard", 10.0), "file": "f"}]
    assert [c.wiring for c in results.sweeps(lines)[0].cases] == ["standard", "mine:3"]


@pytest.mark.parametrize(
    "draft, wiring, fits",
    [
        ("wiring:spd@4", "spd/2", False), ("wiring:delayed@4", "spd/4", True), ("wiring:spd/4@4", "standard", False),
        ("wiring:spd/2@4", "standard", True), ("wiring:spd", "spd", False), ("wiring:standard", "spd/2", True),
    ],
)  # fmt: skip
def test_a_draft_proposes_in_the_lanes_of_the_weights(draft, wiring, fits):
    assert sweep.proposes(draft, 2, wiring) == fits


def test_each_node_runs_the_same_commands_and_the_first_has_the_results(bench):
    command = dry_run(bench, **TWO_NODES)[-1]
    assert "--nproc_per_node=2 --node_rank=$NODE_RANK --master_port=$MASTER_PORT --nnodes=2" in command
    assert flag(command.replace("=", " "), "--master_addr") == "10.0.0.1"
    for node in "10":
        done = bench(**TWO_NODES, NODE_RANK=node, OUT=f"{node}.jsonl")
        assert done.returncode == 0, done.stderr
        assert len(calls_of(bench)) == 2
    first, second = lines_of(bench, "0.jsonl"), lines_of(bench, "1.jsonl")
    assert [line["command"] for line in first] == [line["command"] for line in second]  # so a copy of it resumes there
    assert first[1]["tp"] == 4 and all(line.keys() == {"repeat", "command", "load", "cores"} for line in second)
    assert "| 4 | real | standard | 511 |" in done.stdout
    assert bench(**TWO_NODES, NODE_RANK="1", OUT="1.jsonl").returncode == 0 and not calls_of(bench)


def test_a_sweep_writes_each_run_its_tables_and_its_figures(bench, monkeypatch):
    monkeypatch.setattr(plot, "figures", bench.draw)
    loads = iter([2.5] * 22 + [7.25] * 22)  # of 2 cores
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0, 0))
    done = bench(**{**SMALL, "WIRINGS": "standard ladder:2 upper-bound"})
    assert done.returncode == 0, done.stderr
    lines = lines_of(bench)
    assert len(lines) == 2 + 2 * (2 + 6) + 4 == len(calls_of(bench))
    assert not any({"tokens", "ladder_layers", "desync_period"} & line.keys() for line in lines)
    assert [line["repeat"] for line in lines] == [0] * 2 + [1] * 8 + [2] * 8 + [0] * 4
    assert {(line["load"], line["cores"]) for line in lines} == {(2.5, 2)} and "Expect noise" not in done.stdout
    assert "[22/22, about 0 min left]" in done.stderr
    assert "| 2 | real | ladder:2 | 31 (31-31) ~1.00x | 124 (124-124) ~1.00x |" in done.stdout
    assert "`~`: within noise" in done.stdout
    made = {path.name for path in (bench.folder / "bench-figures").iterdir()}
    assert {"tables.md", "1b-2-bfloat16-cuda-by-batch.png", "1b-2-bfloat16-cuda-by-ranks.png"} <= made
    assert not any(name.endswith(".tmp") for name in made)
    done = bench(**{**SMALL, "WIRINGS": "standard ladder:2 upper-bound"}, OUT="busy.jsonl")
    said = "Expect noise: other programs used the cores when 22 of 22 commands began (load average up to 7.25)."
    assert done.stdout.startswith(said) and done.stdout.count("xpect noise") == 1


def test_an_interrupted_sweep_goes_on_where_it_stopped(bench):
    done = bench(**SMALL, when="--wiring ladder", trouble="130")
    assert done.returncode == 130 and len(lines_of(bench)) == 2 + 2 + 1
    calls_of(bench)
    with open("bench.jsonl", "a") as f:
        f.write('{"repeat": 1, "comm')  # of a process that was killed
    done = bench(**SMALL)
    assert done.returncode == 0 and len(results.read("bench.jsonl")) == 18
    assert len(calls_of(bench)) == 13
    assert "line 6 was cut off" in done.stderr
    assert "5 of 18 are in bench.jsonl already\n[1/13]" in done.stderr
    done = bench(**SMALL)
    assert done.returncode == 0 and not calls_of(bench) and "18 of 18 are in bench.jsonl already" in done.stderr
    assert bench(**{**SMALL, "BATCHES": "1 4 16 16"}).returncode == 0
    assert len(calls_of(bench)) == 2 * 3 + 2


@pytest.mark.parametrize("trouble", ["CUDA out of memory. Tried", "137"])
def test_out_of_memory_is_a_result_and_the_sweep_goes_on(bench, trouble):
    settings = {**SMALL, "LINKS": "real no-p2p", "WIRINGS": "standard desync:2"}
    done = bench(**settings, when="--wiring desync:2 --batch 4", trouble=trouble)
    assert done.returncode == 0, done.stderr
    errors = [line["error"] for line in lines_of(bench) if "error" in line]
    # with P2P and without, timed and with --exposed, but not their repeats
    assert errors == ["out of memory"] * 4 and done.stdout.count("\n- out of memory: `") == 4
    assert "| 2 | no-p2p | desync:2 | 31 (31-31) ~1.00x |  |" in done.stdout
    calls_of(bench)
    assert bench(**settings).returncode == 0 and not calls_of(bench)


def test_a_sweep_with_drafts_goes_on_and_shows_them(bench, drafting):
    drafting["EXPOSED"] = "0"
    done = bench(**drafting, when="a small one@2", trouble="137")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(bench)) == 2 + 3 + 5 + 4 + 3 + 1 == len(calls_of(bench))
    rates = table(done.stdout, "Decode, tok/s")
    assert rates["2", "real", "standard + ngram@4"] == ["511 1.00x (one run)"]
    assert rates["2", "real", "standard"] == ["511"] and len(rates) == 12
    assert f"- out of memory: `{shlex.quote(sys.executable)} " in done.stdout
    accepted = table(done.stdout, "Accepted proposals")
    assert len(accepted) == 7 and {*map(tuple, accepted.values())} == {("0.75",)}
    assert bench(**drafting).returncode == 0 and not calls_of(bench)
    assert bench(**{**drafting, "SPECULATE": "none ngram@4 ngram@2"}).returncode == 0
    assert all(flag(c, "--draft") == "ngram@2" for c in bench.calls) and len(calls_of(bench)) == 4


@pytest.mark.parametrize(
    "text",
    ["torch.OutOfMemoryError: ...", "DefaultCPUAllocator: can't allocate memory", "bad_alloc", "Signal 9 (SIGKILL)"],
)
def test_words_for_too_little_memory(text):
    assert sweep.NO_MEMORY.search(text) and not sweep.NO_MEMORY.search("Signal 15 (SIGTERM) received by PID")


def test_a_command_that_fails_is_told_skipped_and_tried_again_next_time(bench):
    done = bench(**SMALL, when="--wiring ladder --batch 4", trouble="generate.py: tp 2 cannot shard n_heads 1")
    assert done.returncode == 1
    assert "failed: generate.py: tp 2 cannot shard n_heads 1 (more in bench.jsonl.log)" in done.stderr
    assert "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert len(lines_of(bench)) == 15 and len(calls_of(bench)) == 17  # the second repeat was not tried
    assert "cannot shard" in (bench.folder / "bench.jsonl.log").read_text()
    assert bench(**SMALL).returncode == 0 and len(calls_of(bench)) == 3


def test_a_sweep_whose_first_run_fails_ends_with_its_line(bench):
    done = bench(**SMALL, when="--wiring", trouble="Traceback\ngenerate.py: give either --checkpoint\nmore")
    assert done.returncode == 2 and len(calls_of(bench)) == 3  # two probes before it
    assert "bench.sh: the first run failed: generate.py: give either --checkpoint (more in " in done.stderr
    done = bench(**SMALL, OUT="new.jsonl", when="--device", trouble="CUDA out of memory, says a probe too")
    assert done.returncode == 1 and "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert done.stdout.count("- out of memory") == 10


@pytest.mark.parametrize(
    "settings, message",
    {
        "BATCHES=1,4": "BATCHES: '1,4' is not a whole number from 1",
        "NEW_TOKENS=1": "NEW_TOKENS: '1' is not a whole number from 2",
        "WIRINGS=ladders": "WIRINGS: unknown wiring 'ladders'; known: standard, ladder",
        "LINKS=nvlink9": "LINKS: --link 'nvlink9' is none of free, nvlink",
        "CHECKPOINT=demoo": "CHECKPOINT: demoo is no folder",
        "SPECULATE=ngram@4": "SPECULATE needs CHECKPOINT and PROMPT=FILE",
        "NNODES=2": "NNODES is 2: give MASTER_ADDR, and a NODE_RANK from 0 to 1",
        "NNODES=2;TPS=3": "TPS: 3 is no multiple of NNODES 2",
        "OUT=/dev/null/x.jsonl": "/dev/null/x.jsonl",
        "OUT=text": "text line 1 was not written by bench.sh",
        "WIRING=ladder": "WIRING is not a setting: did you mean WIRINGS?",
        "BATCH=1": "BATCH is not a setting: did you mean BATCHES?",
    }.items(),
)  # fmt: skip
def test_bad_settings_are_one_line(bench, settings, message):
    (bench.folder / "text").write_text("text\n\nmore\n")
    done = bench(**dict(pair.split("=", 1) for pair in settings.split(";")))
    assert done.returncode == 2 and not calls_of(bench)
    assert message in done.stderr.splitlines()[-1] and done.stderr.count("bench.sh: ") == 1


def test_arguments_are_settings_and_go_before_the_environment(bench):
    done = bench(["MODEL=3b", "BATCHES=1 8"], DRY_RUN="1", MODEL="1b", TPS="1", REPEATS="1", LINES="40", CFLAGS="-O2")
    assert done.returncode == 0, done.stderr
    found = [(flag(c, "--model"), flag(c, "--batch")) for c in done.stdout.splitlines()[1:]]
    assert found == [("3b", "1"), ("3b", "8")]
    for word in "WIRING=ladder", "model=3b", "--dry-run", "3b", "OUT":
        done = bench([word], DRY_RUN="1")
        assert done.returncode == 2 and done.stderr.startswith(f"bench.sh: {word} is not a setting: give NAME=VALUE")


def shell(folder, *words, **settings):
    """bench.sh started in a folder, through a link to this one whose name is hard to quote."""
    clone = folder.parent / 'ladder-fast\'s "standard" $HOME'
    clone.symlink_to(ROOT)
    folder.mkdir()
    (folder / "model.py").write_text("raise ImportError('not ours')\n")
    around = {k: v for k, v in os.environ.items() if k not in sweep.NAMES}
    return subprocess.Popen(
        ["bash", clone / "bench.sh", *words], cwd=folder, env=around | {k: str(v) for k, v in settings.items()},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by what runs in the background
    )  # fmt: skip


@pytest.mark.parametrize(
    "word, code, said",
    [
        ("--help", 0, f"  {sweep.NAMES[0]}"),
        ("PYTHON=ls", 2, "bench.sh: ls cannot import torch: run make .venv/installed first, or set PYTHON\n"),
    ],
)
def test_help_and_a_python_without_torch(tmp_path, word, code, said):
    process = shell(tmp_path / "work", word, PYTHON=sys.executable)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == code and said in out + err
    assert code or [line.split()[0] for line in out.partition("Settings")[2].splitlines()[1:]] == sweep.NAMES


@pytest.mark.parametrize("stop, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_without_a_line_of_what_it_stopped(tmp_path, stop, code):
    python, pid = tmp_path / "a python", tmp_path / "work" / "pid"
    real = f'case "$*" in -c*|*extras.measure.sweep*) exec {shlex.quote(sys.executable)} "$@" ;; esac'
    python.write_text(f"#!/bin/sh\n{real}\necho $$ > pid.new; mv pid.new pid; exec sleep 600\n")
    python.chmod(0o755)
    process = shell(tmp_path / "work", **{**SMALL, "DEVICE": "cpu", "PYTHON": python})
    deadline = time.monotonic() + HANGS
    while not pid.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does it
    else:
        process.send_signal(stop)
    assert process.wait(HANGS) == code, process.stderr.read()
    assert not os.path.exists(f"/proc/{pid.read_text().strip()}")
    assert not (tmp_path / "work" / "bench.jsonl").exists()


@pytest.mark.slow
def test_a_real_sweep_of_the_demo(tmp_path):
    settings = {
        "CHECKPOINT": ROOT / "demo", "TPS": "2", "BATCHES": "2", "WIRINGS": "ladder", "REPEATS": "1", "PROMPT": "5",
        "NEW_TOKENS": "3", "LINKS": "real", "PYTHON": sys.executable, "DEVICE": "cpu", "EXPOSED": "0",
        "OUT": "new/demo.jsonl", "NCCL_SOMETHING": "1", "NCCL_P2P_DISABLE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # --compile is test_generate.py's
    }  # fmt: skip
    process = shell(tmp_path / "work", "WIRINGS=standard ladder:2", **settings)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    probe, _, ladder = map(json.loads, (tmp_path / "work" / "new" / "demo.jsonl").read_text().splitlines())
    assert probe["tp"] == 2 and len(probe["probe"]["bandwidth"]) == 2
    assert [r["bytes"] for r in probe["probe"]["all_reduce"]] == [4**n for n in range(5, 14)]
    assert all(r["us"] > 0 for r in probe["probe"]["all_reduce"])
    assert (ladder["wiring"], ladder["batch"], ladder["new_tokens"], ladder["tp"]) == ("ladder:2", 2, 3, 2)
    assert probe["hardware"] == ladder["hardware"] and ladder["command"] != probe["command"]
    set_by_torchrun = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert ladder["settings"] == {"NCCL_SOMETHING": "1"} | set_by_torchrun  # without what makes the link another
    assert (tmp_path / "work" / "new" / "demo-figures" / "tables.md").read_text() in out


# ---------------------------------------------------------------------------------------------------------------------
# extras/measure/results.py and extras/measure/plot.py

LATENCY = {"pcie": 57.0, "ib": 46.0}


def result(wiring, tok_s, batch=1, tp=2, link=None, repeat=1, **more):
    """A line of a run whose prefill takes a second and whose 11 tokens take as long as they must."""
    return {
        "command": f"{wiring} {batch} {tp} {link}", "repeat": repeat, "model": "8b", "n_layers": 32, "wiring": wiring,
        "dtype": "bfloat16", "quant": None, "tp": tp,
        "link": {"name": link, "latency_us": LATENCY[link], "gbps": None} if isinstance(link, str) else link,
        "simulated": False, "device": "cuda", "hardware": "H1", "threads": 1, "settings": {}, "batch": batch,
        "prompt_tokens": 8, "new_tokens": 11, "prefill_s": 1.0, "ttft_ms": 1000.0, "decode_s": batch * 10 / tok_s,
        "tpot_ms": 1e3 * batch / tok_s, "tok_s": tok_s, "tok_s_user": tok_s / batch, "mbu": 0.5, "exposed": None,
        **more,
    }  # fmt: skip


def drafted(wiring, draft, rate, accepted=(1, 1), count=4, **more):
    return result(wiring, rate, draft=draft, speculate=count, accepted=list(accepted), **more)


@pytest.fixture
def sweeps(tmp_path):
    """A function that writes lines into a file, and reads and groups them as extras/measure/results.py does."""

    def read(lines, name="bench.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return results.sweeps(results.read(tmp_path / name))

    read.folder = tmp_path
    return read


def table(text, name):
    """{first cells of a row: those of the batches} of the table whose caption begins so."""
    rows = text.partition(f"\n{name}")[2].partition("|")[2].split("\n\n")[0].splitlines()
    _, _, *cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {tuple(row[:3]): row[3:] for row in cells}


def test_cells_are_medians_and_speedups_are_paired_by_repeat(sweeps):
    # the machine was twice as fast in the third repeat, and ladder missed the second
    lines = [result("standard", rate, repeat=i) for i, rate in enumerate([10, 11, 20], 1)]
    lines += [result("ladder", rate, repeat=i) for i, rate in ((1, 12), (3, 26))]
    lines += [result("parallel", rate, repeat=i) for i, rate in enumerate([11, 22, 200], 1)]
    lines += [result("standard", 30, batch=4), result("desync:2", 60, batch=4), result("standard", 6, tp=1)]
    text = results.tables(*sweeps(lines))
    rates = table(text, "Decode, tok/s")
    assert rates["2", "real", "standard"] == ["11 (10-20)", "30"]
    assert rates["2", "real", "ladder"] == ["19 (12-26) ~1.25x", ""]  # the median of 1.2 and 1.3
    assert rates["2", "real", "parallel"][0] == "22 (11-200) ~2.00x"  # of 1.1, 2 and 10: no mean
    assert rates["2", "real", "desync:2"] == ["", "60 2.00x (one run)"]
    assert rates["1", "none", "standard"] == ["6", ""]
    each = table(text, "Decode: time per token")
    assert each["2", "real", "standard"] == ["90.9 ms, 11 tok/s, 50 %", "133 ms, 7.5 tok/s, 50 %"]
    assert table(text, "Prefill")["2", "real", "ladder"][0] == "1,000 (1,000-1,000) ~1.00x"


@pytest.mark.parametrize(
    "rates, shares",
    [
        ([3e9, 1e9], (3, 1)), ([1e9, 3.1e9], (1, 3)), ([1.2e9, 1e9], None), ([4e9, 4e9, 2e9], (2, 2, 1)), ([1e9], None),
        ([50e9, 1e9], (8, 1)), ([1e9] * 2, None), ([1.34e9, 1e9], (4, 3)),
    ],
)  # fmt: skip
def test_the_shares_that_a_probe_proposes(rates, shares):
    assert fitting_shares(rates) == shares


def test_settings_and_links_are_told_apart(sweeps):
    lines = [result("standard", 10), result("standard", 5, settings={"NCCL_P2P_DISABLE": "1"})]
    lines += [result(w, rate, link="pcie") for w, rate in (("standard", 4), ("ladder", 6))]
    for rate, name in (3, "100us+50gbps"), (2, "100us"):
        lines.append(result("standard", rate, link={"name": name, "latency_us": 100.0}))
    lines.append(result("standard", 40, quant="int8"))
    lines.append({"repeat": 1, "command": "c", "error": "out of memory"})
    first, second = sweeps(lines)
    rates = table(results.tables(first), "Decode, tok/s")
    assert {key[1]: row[0] for key, row in rates.items() if key[2] == "standard"} == {
        "real": "10", "no-p2p": "5", "pcie": "4", "100us+50gbps": "3", "100us": "2"
    }  # fmt: skip
    assert rates["2", "pcie", "ladder"][0] == "6 1.50x (one run)"
    assert list(table(results.tables(second), "Decode, tok/s").values()) == [["40"]]


@pytest.mark.parametrize(
    "name, line",
    [
        ("ladder:3,", {"wiring": "ladder:3,"}), ("ladder:4", {"wiring": "hybrid", "n_layers": 8}),
        ("ladder:8", {"wiring": "hybrid", "ladder_layers": 8}), ("desync:2", {"wiring": "desync-2"}),
        ("ladder:3,4", {"wiring": "hybrid", "ladder_layers": [3, 4]}),
        ("desync:4", {"wiring": "desync", "desync_period": 4}), ("delayed-4:1-2/8", {"wiring": "delayed-4:1-2/8"}),
    ],
)  # fmt: skip
def test_wirings_of_older_lines(name, line):
    assert results.wired(line) == name and parse_wiring(name)


def test_repeats_of_several_files_are_repeats_and_pair_within_a_file(sweeps):
    sweeps([result("standard", 20), result("ladder", 22)], "fast")
    sweeps([result("standard", 10), result("ladder", 13)], "slow")
    [found] = results.sweeps([line for name in ("fast", "slow") for line in results.read(sweeps.folder / name)])
    assert table(results.tables(found), "Decode, tok/s")["2", "real", "ladder"] == ["17.5 (13-22) ~1.20x"]
    with pytest.raises(InputError, match="two results of 2, real, ladder, 1 in repeat 1: give each file once"):
        sweeps([result("ladder", 20), result("ladder", 20, command="with another flag")])


def test_communication_and_machine(sweeps):
    report = {"step_ms": 10.0, "quartiles_ms": [9.9, 10.2], "silent_ms": 7.0, "exposed_ms": 3.0, "all_reduces": 4}
    report["all_reduce_ms"] = 1.25
    both = {"prefill": {**report, "hidden": -1, "limit_ms": 8}, "decode": {**report, "hidden": 0.4, "limit_ms": 9}}
    probe = {"tp": 2, "hardware": "H1", "torch": "2", "commit": "c", "settings": {"NCCL_P2P_DISABLE": "1"}}
    probe["probe"] = {"bandwidth": [2e9, 3e9], "all_reduce": [{"bytes": 1024, "us": 20.0, "gbps": 0.5}]}
    lines = [probe, result("ladder", 1, exposed=both)]
    text = results.tables(*sweeps(lines))
    assert "| 2 | real | ladder | 1 | prefill | 10.00 (9.90-10.20) | 7.00 | 4 | 1.250 | 3.00 | none | 8.00 |" in text
    assert "| 2 | real | ladder | 1 | decode | 10.00 (9.90-10.20) | 7.00 | 4 | 1.250 | 3.00 | 40 % | 9.00 |" in text
    text = results.machine(lines[:1])
    assert "2 ranks, link no-p2p. Each reads so many GB/s from memory: 2.0, 3.0." in text
    assert "| 1,024 | 20.0 | 0.50 |" in text


@pytest.mark.parametrize(
    "exposed, quartiles, words",
    [
        (3.0, [9.9, 10.2], "40 %"),
        (-0.1, [9.9, 10.2], "100 %"),  # a step that waits for nothing
        (3.0, [8.0, 14.0], "within noise"),  # wider than all of the communication
        (60.7, [9.9, 10.2], "none"),  # once printed as -1114 %
    ],
)
def test_what_is_hidden_is_told_from_noise(exposed, quartiles, words):
    report = {"exposed_ms": exposed, "quartiles_ms": quartiles, "all_reduces": 4, "all_reduce_ms": 1.25}
    assert timing.hidden_share({**report, "hidden": 1 - exposed / 5}) == words


def test_speedups_are_told_from_noise(sweeps):
    rates = {
        "standard": [10, 11, 12], "ladder": [13, 14, 15], "parallel": [11.9, 12, 12.1],
        "upper-bound": [13.5, 13.6, 13.7],
    }  # fmt: skip
    lines = [result(w, rate, repeat=i) for w, some in rates.items() for i, rate in enumerate(some, 1)]
    text = results.tables(*sweeps([*lines, *(result(w, 20, batch=4) for w in rates)]))
    cells = {key[2]: row for key, row in table(text, "Decode, tok/s").items()}
    assert cells["upper-bound"] == ["13.6 (13.5-13.7) **1.24x**", "20 1.00x (one run)"]
    assert cells["ladder"][0] == "14 (13-15) 1.27x^" and cells["parallel"][0] == "12 (11.9-12.1) ~1.09x"
    legend = text.partition("Decode: time")[0]
    assert all(results.LEGEND[mark] in legend for mark in ("~", "^", "(one run)"))


def test_drafts_have_rows_and_are_compared_with_plain_standard(sweeps):
    lines = [result("standard", 10), result("upper-bound", 20), drafted("standard", "ngram", 12, (3, 0, 1))]
    lines += [drafted("ladder", "wiring:spd:2", 30, (0,), "auto"), drafted("ladder:2", "ngram", 15)]
    lines += [result("standard", 20, repeat=2), drafted("standard", "ngram", 28, (0, 0, 1), repeat=2)]
    text = results.tables(*sweeps(lines))
    rates = {key[2]: cells for key, [cells] in table(text, "Decode, tok/s").items()}
    assert rates == {
        "standard": "15 (10-20)", "standard + ngram@4": "20 (12-28) ~1.30x",
        "ladder + wiring:spd:2@auto": "30 3.00x (one run)",  # a draft may pass the bound
        "ladder:2 + ngram@4": "15 1.50x (one run)", "upper-bound": "20 2.00x (one run)",
    }  # fmt: skip
    assert list(rates)[0] == "standard" and list(rates)[-1] == "upper-bound"
    accepted = {key[2]: cells for key, [cells] in table(text, "Accepted proposals").items()}
    assert accepted == {
        "standard + ngram@4": "1.25 (0.5-2)", "ladder + wiring:spd:2@auto": "0", "ladder:2 + ngram@4": "0.5"
    }  # fmt: skip
    plain = results.tables(*sweeps([line for line in lines if "draft" not in line]))
    assert "ngram" not in plain and "proposals" not in plain


def test_figures_name_the_drafts(sweeps):
    lines = [result(w, rate, batch=b) for w, rate in (("standard", 10), ("upper-bound", 20)) for b in (1, 4)]
    lines += [drafted("standard", draft, 15, batch=b) for draft in ("ngram", "wiring:spd") for b in (1, 4)]
    lines += [result("standard", 5, tp=1), drafted("standard", "ngram", 7, tp=1)]
    [found] = sweeps(lines)
    [panel] = plot.speedups(found, lambda c: "", lambda c: c.batch).values()
    assert panel["standard + ngram@4"] == {1: (1.5, 1.5, 1.5), 4: (1.5, 1.5, 1.5)}
    drafts = "standard + ngram@4", "standard + wiring:spd@4"
    looks = [plot.look(w, panel) for w in ("standard", *drafts)]
    assert {look["color"] for look in looks} == {"black"} and len({look["linestyle"] for look in looks}) == 3
    lines = plot.scaling(found)["link real, batch 1"]
    middles = [{x: y[0] for x, y in lines[w].items()} for w in ("standard", "upper-bound", *drafts)]
    assert middles == [{1: 1.0, 2: 2.0}, {1: 1.0, 2: 4.0}, {1: 1.4, 2: 3.0}, {2: 3.0}]
    figure = plot.draw({"": panel}, plot.caption(found), "batch", "")
    assert {box.get_label() for box in figure.axes[0].containers} == {"standard", "upper-bound", *drafts}
    figure.draw_without_rendering()
    for part in figure.legends[0], figure._suptitle:  # neither is cut at the edges of the only panel
        box = part.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_series_of_the_figures(sweeps):
    links = [(10, 15, "pcie"), (20, 22, "ib")]
    lines = [result(w, x, link=link) for a, b, link in links for w, x in (("standard", a), ("ladder", b))]
    lines += [result("standard", 8, tp=4, link="ib")]
    [found] = sweeps(lines)
    by_link = plot.speedups(found, lambda c: f"{c.ranks} ranks", lambda c: found.latencies[c[:2]])
    assert by_link["2 ranks"]["ladder"] == {57.0: (1.5, 1.5, 1.5), 46.0: (1.1, 1.1, 1.1)}
    figure = dict(plot.figures([found]))["8b-32-bfloat16-cuda-by-link"]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["ib\n46", "pcie\n57"]

    def middles(panels):
        return {w: {x: y[0] for x, y in points.items()} for w, points in panels["link ib, batch 1"].items()}

    # each link on its own, and no point that was not measured
    assert middles(plot.scaling(found)) == {"standard": {2: 1.0, 4: 0.4}, "ladder": {2: 1.1}}
    [found] = sweeps([*lines, result("standard", 4, tp=1)])
    assert middles(plot.scaling(found)) == {"standard": {1: 1.0, 2: 5.0, 4: 2.0}, "ladder": {1: 1.0, 2: 5.5}}


def test_the_first_page_s_figure_keeps_cpus_and_h100s_apart():
    cpu, alone, paper = plot.front_page().axes
    assert {box.get_label() for box in cpu.containers} >= {"ladder", "ladder:4", "parallel-ladder", "upper-bound"}
    assert len(alone.containers) == 4 and "H100s" in paper.get_title() and "H100" not in cpu.get_title()
    assert not cpu.get_shared_y_axes().joined(cpu, paper)
    ticks = [float(tick.get_text().split("\n")[-1]) for tick in alone.get_xticklabels()]
    assert len(ticks) == 7 and ticks == sorted(ticks)  # by the measured time, not by the nominal one


@pytest.mark.parametrize(
    "flags, message",
    [
        (["NONE"], "line 2 was not written by bench.sh"), (["OTHER"], "OTHER was not written by bench.sh"),
        ([], "give files of bench.sh "),
        (["MISSING"], "No such file or directory"), (["GOOD", "--out", "GOOD"], "cannot write|be written"),
    ],
)  # fmt: skip
def test_plot_refuses(sweeps, flags, message):
    good = json.dumps(result("ladder", 1))
    bad = {"NONE": "no json", "OTHER": '{"wiring": "ladder", "tp": 2}', "GOOD": ""}
    for name, text in bad.items():
        (sweeps.folder / name).write_text(f"{good}\n{text}\n" if text else f"{good}\n")
    with pytest.raises(InputError, match=message):
        plot.main([str(sweeps.folder / flag) if flag.isupper() else flag for flag in flags])


def test_a_wirings_numbers_do_not_hide_its_name():
    names = ["delayed-4/8", "parallel-ladder-2:3", "spd:1,2/4 + wiring:spd@2", "desync:2", "standard"]
    assert [results.base(name) for name in names] == ["delayed", "parallel-ladder", "spd", "desync", "standard"]
