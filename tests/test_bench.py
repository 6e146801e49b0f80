"""bench.sh and measure/sweep.py with scripts that only pretend to measure; tables and figures of known lines."""

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
from measure import plot, results, sweep
from model import InputError


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """A function that runs bench.sh's sweep in this process, in a folder of its own; GPUs, commands and figures are
    pretended. NAME=value settings; when, trouble: what happens to commands that hold `when`, as a text that they print
    before they fail or as an exit code; gpus. It returns what a finished process has."""
    calls, handler = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    for name in (*sweep.NAMES, "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sweep, "ROOT", ".")

    def run(words=(), when=None, trouble="", gpus=2, **settings):
        def pretended(command, environment, place):
            calls.append(command)
            if when and when in command:
                return (int(trouble), "", None) if trouble.isdecimal() else (1, trouble, None)
            words, around = shlex.split(os.path.expandvars(command)), dict(environment)
            command = command.replace("$NODE_RANK", environment["NODE_RANK"])
            words = shlex.split(command)
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
    yield run
    signal.signal(signal.SIGTERM, handler)


SMALL = {
    "MODEL": "1b", "NEW_TOKENS": "32", "BATCHES": "1 4", "WIRINGS": "standard ladder", "TPS": "1 2", "LINKS": "real",
    "REPEATS": "2",
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


def is_probe(command):
    return "measure.probe" in shlex.split(command)


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def test_what_two_gpus_measure_without_any_setting(bench):
    commands = dry_run(bench)
    probes, runs = [c for c in commands if is_probe(c)], [c for c in commands if flag(c, "--wiring")]
    assert len(probes) == 3 and len(runs) == 3 * (4 + 4 * 2 * 4) + 4 * 2 * 3 == len(commands) - 3
    assert all("--model 8b" in c and "--prompt-length 1024 --max-new-tokens 512" in c for c in runs)
    two = [c for c in runs if "--nproc_per_node=2" in c]
    assert len([c for c in two if c.startswith("NCCL_P2P_DISABLE=1 ")]) == len(two) / 2
    assert [c for c in runs if c not in two] == [c for c in runs if "nproc" not in c and "--wiring standard" in c]


def test_a_command_in_full(bench):
    [probe, first, *_] = dry_run(
        bench, PYTHON="a b/python", WIRINGS="hybrid:8", TPS="2", LINKS="no-p2p", FLAGS="-x 'y z'"
    )
    assert probe == "'a b/python' -m measure.probe --device cuda"
    _, _, second, *_ = dry_run(bench, PYTHON="py", WIRINGS="hybrid:8", TPS="2", LINKS="no-p2p", FLAGS="-x 'y z'")
    assert second == (
        "NCCL_P2P_DISABLE=1 py -m torch.distributed.run --nproc_per_node=2 --standalone ./generate.py --device cuda "
        "--model 8b --random-weights --wiring hybrid --batch 1 --prompt-length 1024 --max-new-tokens 512 --ignore-eos "
        "--temperature 0 --compile --ladder-layers 8 -x 'y z'"
    )


def test_repeats_are_far_apart_and_wirings_next_to_one_another(bench):
    commands = [c for c in dry_run(bench, **SMALL, EXPOSED="0") if flag(c, "--wiring")]
    assert len(commands) == 12 and commands[:6] == commands[6:]
    assert [(flag(c, "--wiring"), flag(c, "--batch"), "--nproc_per_node=2" in c) for c in commands[:6]] == [
        ("standard", "1", False), ("standard", "4", False),
        ("standard", "1", True), ("ladder", "1", True), ("standard", "4", True), ("ladder", "4", True),
    ]  # fmt: skip


def test_wirings_with_a_number_emulated_links_and_one_rank_alone(bench):
    settings = {"BATCHES": "1", "REPEATS": "1", "EXPOSED": "0", "QUANT": "none int8", "MODEL": "8b", "N_LAYERS": "4"}
    probe, *commands = dry_run(bench, WIRINGS="hybrid:2 desync:4", LINKS="pcie", TPS="8", SIMULATE="1", **settings)
    assert is_probe(probe)  # what the machine reads is of use for a prediction too
    assert len(commands) == 4 and all(c.endswith("--link pcie --simulate-tp 8") for c in commands)
    assert "--wiring hybrid " in commands[0] and "--ladder-layers 2" in commands[0] and "--n-layers 4" in commands[0]
    assert "--wiring desync " in commands[1] and "--desync-period 4" in commands[1]
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
        "REPEATS": "1", "WIRINGS": "standard hybrid:2 parallel upper-bound",
        "SPECULATE": "none ngram@4 wiring:hybrid:2@auto wiring:parallel@1 'its drafts/a small one'@2",
    }  # fmt: skip


def test_drafts_are_run_where_they_can_propose(bench, drafting):
    commands = [c for c in dry_run(bench, **drafting) if flag(c, "--wiring")]
    found = {}
    for c in commands:
        how = "exposed" if "--exposed" in c else flag(c, "--speculate")
        where = "--nproc_per_node=2" in c, flag(c, "--wiring")
        found.setdefault(where, []).append((flag(c, "--draft"), how))
    plain, ngram, small, exposed = (None, None), ("ngram", "4"), ("its drafts/a small one", "2"), (None, "exposed")
    hybrid, parallel = ("wiring:hybrid:2", "auto"), ("wiring:parallel", "1")
    assert found == {
        (False, "standard"): [plain, ngram, small],  # alone nothing is cheaper
        (True, "standard"): [plain, ngram, hybrid, parallel, small, exposed],
        (True, "hybrid"): [plain, ngram, parallel, small, exposed],  # no draft of itself
        (True, "parallel"): [plain, ngram, small, exposed],  # which has not all of the other's norms
        (True, "upper-bound"): [plain],
    }
    assert all(flag(c, "--prompt") == "@prompt.txt" and "--prompt-length" not in c for c in commands)


def test_the_layers_of_a_draft_may_be_listed(bench, drafting):
    commands = dry_run(bench, **{**drafting, "TPS": "2", "EXPOSED": "0", "SPECULATE": "wiring:spd:0,2@auto"})
    assert [(flag(c, "--wiring"), flag(c, "--draft")) for c in commands[1:]] == [
        ("standard", "wiring:spd:0,2"),
        ("hybrid", "wiring:spd:0,2"),
    ]


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


def test_a_new_wiring_is_planned_ordered_and_coloured(bench, monkeypatch):
    monkeypatch.setitem(
        model.WIRINGS, "mine", model.Wiring("of a reader's own", stale=True, parameter="my_period", optional=False)
    )
    looks = {name: plot.look(name)["color"] for name in model.WIRINGS}
    assert len(set(looks.values())) == len(looks) and plot.look("mine:3")["color"] == looks["mine"]
    n = len(model.WIRINGS) - 1
    assert [results.wiring_order(w)[0] for w in ("standard", "ladder", "mine:2", "unheard-of")] == [0, 1, n, n + 1]
    commands = dry_run(bench, **{**SMALL, "WIRINGS": "mine:3 ladder"})
    assert sum("--wiring mine" in c and "--my-period 3" in c for c in commands) == 2 * 2 + 2
    assert "mine without a number" in bench(WIRINGS="mine").stderr
    line = result("mine", 12.0, my_period=3)
    [found] = results.sweeps([{**line, "file": "f"}, {**result("standard", 10.0), "file": "f"}])
    assert found.cases == [(2, "real", "standard", 1), (2, "real", "mine:3", 1)]
    lines = (
        sweep.out_of_memory(case, some_settings(WIRINGS="mine:3"))
        for case in sweep.plan(some_settings(WIRINGS="mine:3"))
        if case.wiring == "mine"
    )
    assert {results.case(line)[2] for line in lines} == {"mine:3"}


def some_settings(gpus=2, **given):
    return sweep.check(sweep.complete(given, gpus, 2), given, gpus, 2)


# ---------------------------------------------------------------------------------------------------------------------
# What is run, kept and told


def test_each_node_runs_the_same_commands_and_the_first_has_the_results(bench):
    for node in "10":
        done = bench(**TWO_NODES, NODE_RANK=node, OUT=f"{node}.jsonl")
        assert done.returncode == 0, done.stderr
        assert len(calls_of(bench)) == 2
    first, second = lines_of(bench, "0.jsonl"), lines_of(bench, "1.jsonl")
    assert [line["command"] for line in first] == [line["command"] for line in second]  # so a copy of it resumes there
    assert first[1]["tp"] == 4 and all(line.keys() == {"repeat", "command"} for line in second)
    assert "| 4 | real | standard | 511 |" in done.stdout
    assert bench(**TWO_NODES, NODE_RANK="1", OUT="1.jsonl").returncode == 0 and not calls_of(bench)


def test_a_sweep_writes_each_run_its_tables_and_its_figures(bench, monkeypatch):
    monkeypatch.setattr(plot, "figures", bench.draw)
    done = bench(**{**SMALL, "WIRINGS": "standard ladder upper-bound"})
    assert done.returncode == 0, done.stderr
    lines = lines_of(bench)
    assert len(lines) == 2 + 2 * (2 + 6) + 4 == len(calls_of(bench))
    assert all("tokens" not in line for line in lines) and 'MODEL="1b"' in done.stderr
    assert [line["repeat"] for line in lines] == [0] * 2 + [1] * 8 + [2] * 8 + [0] * 4
    assert "[22/22, about 0 min left]" in done.stderr
    assert "| 2 | real | ladder | 31 (31-31) ~1.00x | 124 (124-124) ~1.00x |" in done.stdout
    assert "`~`: within noise" in done.stdout
    made = {path.name for path in (bench.folder / "bench-figures").iterdir()}
    assert {"tables.md", "1b-2-bfloat16-cuda-by-batch.png", "1b-2-bfloat16-cuda-breakdown.png"} <= made
    assert not any(name.endswith((".tmp", ".svg")) for name in made)


def test_an_interrupted_sweep_goes_on_where_it_stopped(bench):
    done = bench(**SMALL, when="--wiring ladder", trouble="130")
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
    settings = {**SMALL, "LINKS": "real no-p2p", "WIRINGS": "standard desync:2"}
    done = bench(**settings, when="--wiring desync --batch 4", trouble=trouble)
    assert done.returncode == 0, done.stderr
    errors = [line for line in lines_of(bench) if "error" in line]
    # with P2P and without, timed and with --exposed, but not their repeats
    assert len(errors) == 4 and all(line["error"] == "out of memory" for line in errors)
    assert "| 2 | real | desync:2 | 31 (31-31) ~1.00x | out of memory |" in done.stdout
    assert "| 2 | no-p2p | desync:2 | 31 (31-31) ~1.00x | out of memory |" in done.stdout
    calls_of(bench)
    assert bench(**settings).returncode == 0 and not calls_of(bench)


def test_a_sweep_with_drafts_goes_on_and_shows_them(bench, drafting):
    drafting["EXPOSED"] = "0"
    done = bench(**drafting, when="--draft 'its drafts/a small one'", trouble="137")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(bench)) == 2 + 3 + 5 + 4 + 3 + 1 == len(calls_of(bench))
    rates = table(done.stdout, "Decode, tok/s")
    assert rates["2", "real", "standard", "ngram@4"] == ["511 1.00x"]
    assert rates["2", "real", "hybrid:2", "a small one@2"] == ["out of memory"]
    assert rates["2", "real", "standard", "none"] == ["511"] and len(rates) == 16
    stood = table(done.stdout, "Proposals that stood")
    assert len(stood) == 7 and {*map(tuple, stood.values())} == {("0.75",)}
    assert bench(**drafting).returncode == 0 and not calls_of(bench)
    assert bench(**{**drafting, "SPECULATE": "none ngram@4 ngram@2"}).returncode == 0
    assert all(flag(c, "--speculate") == "2" for c in bench.calls) and len(calls_of(bench)) == 4


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: ...", "DefaultCPUAllocator: can't allocate memory: you tried", "std::bad_alloc",
        "OSError: [Errno 12] Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Signal 9 (SIGKILL) received by",
    ],
)  # fmt: skip
def test_what_memory_is_short_of_says(text):
    assert sweep.NO_MEMORY.search(text) and not sweep.NO_MEMORY.search("Signal 15 (SIGTERM) received by PID")


def test_out_of_memory_says_what_the_case_was():
    s = some_settings(gpus=0, CHECKPOINT=f"{ROOT}/tests/../demo", TPS="4", NNODES="2", MASTER_ADDR="h", LINKS="pcie")
    line = sweep.out_of_memory(sweep.Case(1, 4, "pcie", batch=4, wiring="hybrid", parameter=2), s)
    assert results.case(line) == (4, "pcie", "hybrid:2", 4) and line["model"] == "demo" and "quant" not in line
    s = some_settings(MODEL="8b", QUANT="int8", SIMULATE="1", TPS="8", LINKS="pcie", N_LAYERS="4")
    line = sweep.out_of_memory(sweep.Case(1, 8, "pcie", "int8", 4, "ladder"), s)
    assert (line["tp"], line["simulated"], line["model"], line["quant"], line["n_layers"]) == (8, True, "8b", "int8", 4)
    line = sweep.out_of_memory(sweep.Case(1, 2, "no-p2p", batch=64, wiring="standard"), some_settings())
    assert results.case(line) == (2, "no-p2p", "standard", 64) and line["quant"] is None and "n_layers" not in line


def test_a_command_that_fails_is_told_skipped_and_tried_again_next_time(bench):
    done = bench(**SMALL, when="--wiring ladder --batch 4", trouble="generate.py: tp 2 cannot shard n_heads 1")
    assert done.returncode == 1
    assert "failed: generate.py: tp 2 cannot shard n_heads 1 (more in bench.jsonl.log)" in done.stderr
    assert "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert len(lines_of(bench)) == 15 and len(calls_of(bench)) == 17  # the second repeat was not tried
    assert "cannot shard" in (bench.folder / "bench.jsonl.log").read_text()
    assert bench(**SMALL).returncode == 0 and len(calls_of(bench)) == 3


def test_when_everything_fails_that_is_said(bench):
    done = bench(**SMALL, when="--device", trouble="CUDA out of memory, says a probe too")
    assert done.returncode == 1 and "2 of the commands failed" in done.stderr.splitlines()[-1]
    assert "out of memory" in done.stdout  # the tables are of nothing else
    (bench.folder / "bench.jsonl").unlink()
    done = bench(**SMALL, when="--device", trouble="no")
    assert done.returncode == 1 and "12 of the commands failed" in done.stderr.splitlines()[-1] and not done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


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
        "WIRINGS=ladder:2": "WIRINGS names ladder:2; known: standard ladder",
        "WIRINGS=": "WIRINGS is empty; known: standard ladder",
        "WIRINGS=hybrid": "WIRINGS names hybrid without a number",
        "WIRINGS=desync": "WIRINGS names desync without a number",
        "WIRINGS=hybrid:x": "WIRINGS names hybrid:x without a number",
        "LINKS=nvlink9": "LINKS names nvlink9; known: real no-p2p free nvlink",
        "LINKS= ": "LINKS is empty; known: real",
        "LINKS=no-p2p;DEVICE=cpu": "LINKS names no-p2p, which is for GPUs",
        "QUANT=int3": "QUANT names int3; known: none int8 int4",
        "MODEL=7b": "MODEL is '7b' but must be one of: 1b 3b 8b",
        "MODEL=1b 8b": "MODEL is '1b 8b' but must be one of: 1b 3b 8b",
        "MODEL=": "MODEL is '' but must be one of: 1b 3b 8b",
        "DEVICE=tpu": "DEVICE is 'tpu' but must be one of: cpu cuda",
        "DEVICE=cuda;gpus=0": "DEVICE is cuda, but there is no GPU",
        "SPECULATE=": "SPECULATE is empty: it takes none, or DRAFT@K such as ngram@4",
        "SPECULATE=ngram": "SPECULATE names ngram, which is neither none nor DRAFT@K",
        "SPECULATE=@4": "SPECULATE names @4, which is neither none nor DRAFT@K",
        "SPECULATE=none ngram@0": "SPECULATE names ngram@0, but K must be a whole number from 1 on, or auto: ngram@4",
        "SPECULATE=ngram@": "SPECULATE names ngram@, but K must be",
        "SPECULATE=/nosuch@4": "SPECULATE names /nosuch@4, but /nosuch is neither ngram nor wiring:NAME, and no folder",
        "SPECULATE=wiring:spds@4": "SPECULATE names wiring:spds@4; known: standard ladder",
        "SPECULATE=wiring:hybrid@4": "SPECULATE names wiring:hybrid@4 without a number: hybrid:4 is ladder_layers 4",
        "SPECULATE=wiring:desync:2,3@4": "SPECULATE names wiring:desync:2,3@4 without a number",
        "SPECULATE='a@4": "SPECULATE is \"'a@4\": No closing quotation",
        "SPECULATE=ngram@4": "SPECULATE needs a CHECKPOINT: what a draft guesses",
        "SPECULATE=ngram@4;CHECKPOINT=.": "SPECULATE needs PROMPT=FILE, of one prompt a line",
        "SPECULATE=ngram@4;SIMULATE=1": "SIMULATE predicts plain decode steps: it does not go with SPECULATE",
        "PROMPT=text": "PROMPT text is text, which needs a CHECKPOINT",
        "PROMPT=/nosuch": "PROMPT is '/nosuch' but must be one whole number from 1 on, or a file of one prompt a line",
        "PROMPT=text;CHECKPOINT=.;BATCHES=2 3": "BATCHES names 3, no multiple of the 2 prompts in text",
        "PROMPT=blank;CHECKPOINT=.": "PROMPT blank is empty: it takes one prompt a line",
        "SIMULATE=yes": "SIMULATE is 'yes' but must be one of: 0 1",
        "SIMULATE=1": "SIMULATE needs LINKS to emulate: free nvlink",
        "SIMULATE=1;LINKS=pcie;TPS=1 2": "SIMULATE needs TPS from 2 on",
        "SIMULATE=1;NNODES=2": "SIMULATE is one rank alone, but NNODES is 2",
        "NNODES=0": "NNODES is '0' but must be one whole number",
        "NNODES=2": "NNODES is 2, so MASTER_ADDR must be the address of node 0",
        "NNODES=2;NODE_RANK=2": "NODE_RANK is '2' but must be 0 to 1",
        "NNODES=2;TPS=3": "TPS names 3, which is no multiple of NNODES 2",
        "MASTER_PORT=http": "MASTER_PORT is 'http' but must be one whole number",
        "FLAGS=--prompt 'a": "FLAGS is \"--prompt 'a\": No closing quotation",
        "CHECKPOINT=.;QUANT=int8": "QUANT and N_LAYERS are for MODEL: a checkpoint is as it is",
        "OUT=/dev/null/x.jsonl": "OUT: /dev/null cannot be made: File exists",
        "OUT=/proc/x.jsonl": "OUT: /proc/x.jsonl cannot be written: No such file or directory",
        "OUT=calls.d": "FIGURES: calls.d-figures is a file: name a folder",
        "CHECKPOINT=calls.d;MODEL=1b": "give either CHECKPOINT or MODEL",
        "CHECKPOINT=calls.d": "CHECKPOINT calls.d is no folder",
        "OUT=text": "text line 1 was not written by bench.sh",
        "WIRING=ladder": "WIRING is not a setting: did you mean WIRINGS?",
        "BATCH=1": "BATCH is not a setting: did you mean BATCHES?",
        "TP=2": "TP is not a setting: did you mean TPS?",
        "LINK=pcie": "LINK is not a setting: did you mean LINKS?",
        "REPEAT=1": "REPEAT is not a setting: did you mean REPEATS?",
        "MODELS=1b": "MODELS is not a setting: did you mean MODEL?",
        "DRYRUN=1": "DRYRUN is not a setting: did you mean DRY_RUN?",
    }.items(),
)  # fmt: skip
def test_bad_settings_are_one_line(bench, settings, message):
    (bench.folder / "calls.d-figures").touch()
    (bench.folder / "text").write_text("text\n\nmore\n")
    (bench.folder / "blank").write_text(" \n")
    settings = dict(pair.split("=", 1) for pair in settings.split(";"))
    done = bench(gpus=int(settings.pop("gpus", 2)), **settings)
    assert done.returncode == 2 and not calls_of(bench)
    last = done.stderr.splitlines()[-1]
    assert message in last and done.stderr.count("bench.sh: ") == 1


def test_arguments_are_settings_and_go_before_the_environment(bench):
    done = bench(["MODEL=3b", "BATCHES=1 8"], DRY_RUN="1", MODEL="1b", TPS="1", REPEATS="1")
    assert done.returncode == 0, done.stderr
    assert [(flag(c, "--model"), flag(c, "--batch")) for c in done.stdout.splitlines()[1:]] == [
        ("3b", "1"),
        ("3b", "8"),
    ]
    for word, message in (
        ("WIRING=ladder", "WIRING is not a setting: did you mean WIRINGS?"),
        ("model=3b", "model is not a setting: did you mean MODEL?"),
        ("--dry-run", "--dry-run is no argument: give NAME=VALUE, of PYTHON DEVICE"),
        ("3b", "3b is no argument"),
        ("COLOUR=red", "COLOUR=red is no argument"),
    ):
        done = bench([word], DRY_RUN="1")
        assert done.returncode == 2 and done.stderr.startswith(f"bench.sh: {message}"), done.stderr


def test_names_that_are_no_setting_s_are_left_alone(bench):
    others = {
        "CFLAGS": "-O2",
        "MFLAGS": "x",
        "LINES": "40",
        "HOME_DIR": "x",
        "link": "pcie",
        "Tps": "9",
        "TERM": "dumb",
        "OUTPUT": "x",
    }
    assert dry_run(bench, **others, **SMALL)
    assert not sweep.one_letter_off("TPS", "TPS") and sweep.one_letter_off("TPS", "TPX")
    assert sweep.one_letter_off("TPS", "TP") and sweep.one_letter_off("TPS", "XTPS")
    assert not sweep.one_letter_off("TPS", "TXX") and not sweep.one_letter_off("TPS", "T")


# ---------------------------------------------------------------------------------------------------------------------
# bench.sh itself


# A python that is one for measure/sweep.py, but whose generate.py and probe.py only pretend
PYTHON = """#!/usr/bin/env bash
case "$*" in
    -c*) exit ;;
    *measure.sweep*) exec {real} "$@" ;;
esac
echo $$ >> calls
{pretend}
"""


@pytest.fixture
def shell(tmp_path):
    """A function that starts bench.sh in a folder of its own, a link to this one whose name is hard to quote, from a
    folder where a model.py and a matplotlib.py lie that are not ours; NAME=value settings."""
    clone = tmp_path / 'ladder-fast\'s "standard" $HOME'
    clone.symlink_to(ROOT)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("model.py", "launch.py", "matplotlib.py"):
        (work / name).write_text("raise ImportError('not ours')\n")
    python = tmp_path / "a python"

    measuring = shlex.join([sys.executable, str(ROOT / "tests" / "pretend.py")])

    def start(*words, pretend=f'exec {measuring} "$@"', **settings):
        python.write_text(PYTHON.format(real=shlex.quote(sys.executable), pretend=pretend))
        python.chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if k not in sweep.NAMES} | {
            "PYTHON": str(python),
            **settings,
        }
        return subprocess.Popen(
            ["bash", clone / "bench.sh", *words], cwd=work, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by what runs in the background
        )  # fmt: skip

    start.folder, start.clone = work, clone
    return start


def test_a_sweep_from_a_folder_of_any_name(shell):
    settings = {"TPS": "2", "BATCHES": "1", "REPEATS": "1", "DEVICE": "cpu", "EXPOSED": "0"}
    process = shell("WIRINGS=standard ladder", **settings)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert "| 2 | real | ladder | 31 1.00x |" in out and "Each number is of one run" in out
    lines = [json.loads(line) for line in (shell.folder / "bench.jsonl").read_text().splitlines()]
    assert ["probe" in line for line in lines] == [True, False, False]
    assert str(shell.clone / "generate.py") in shlex.split(lines[2]["command"])
    assert [line.get("wiring") for line in lines] == [None, "standard", "ladder"]


def test_a_dry_run_needs_no_matplotlib(shell):
    process = shell("DRY_RUN=1", "TPS=1", "REPEATS=1", "DEVICE=cpu", PYTHONPATH=str(shell.folder))
    out, err = process.communicate(timeout=HANGS)
    # the launch.py and the model.py of that folder lie behind ours in the path, but its matplotlib.py before any other
    assert process.returncode == 0 and len(out.splitlines()) == 1 + 4, err
    assert not (shell.folder / "calls").exists()


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_setting_and_starts_nothing(shell, word):
    process = shell(word, PYTHON="ls")
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and not err
    listed = out.partition("Settings")[2].splitlines()[1:]
    assert sorted(line.split()[0] for line in listed) == sorted(sweep.NAMES)
    assert all(f" {line.split()[0]}=" in line for line in listed)  # an example
    assert not list(shell.folder.glob("bench*"))


def test_a_python_without_torch_is_named(shell):
    process = shell("PYTHON=ls")
    _, err = process.communicate(timeout=HANGS)
    message = "bench.sh: ls cannot import torch: run make .venv/installed first, or set PYTHON\n"
    assert process.returncode == 2 and err == message


@pytest.mark.parametrize("stop, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_without_a_line_of_what_it_stopped(shell, stop, code):
    process = shell(pretend="exec sleep 600", **{**SMALL, "DEVICE": "cpu"})
    deadline = time.monotonic() + HANGS
    while not (shell.folder / "calls").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does it
    else:
        process.send_signal(stop)
    assert process.wait(HANGS) == code, process.stderr.read()
    [child] = (shell.folder / "calls").read_text().split()
    assert not os.path.exists(f"/proc/{child}")
    assert not (shell.folder / "bench.jsonl").exists()


def test_a_real_sweep_of_the_demo(tmp_path):
    settings = {
        "CHECKPOINT": ROOT / "demo", "TPS": "2", "BATCHES": "2", "WIRINGS": "ladder", "REPEATS": "1", "PROMPT": "5",
        "NEW_TOKENS": "3", "LINKS": "real", "PYTHON": sys.executable, "DEVICE": "cpu", "EXPOSED": "0",
        "OUT": tmp_path / "new" / "demo.jsonl", "NCCL_SOMETHING": "1", "NCCL_P2P_DISABLE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # --compile is test_generate.py's
    }  # fmt: skip
    around = {k: v for k, v in os.environ.items() if k not in sweep.NAMES}
    environment = around | {k: str(v) for k, v in settings.items()}
    command = ["bash", ROOT / "bench.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    probe, ladder = map(json.loads, (tmp_path / "new" / "demo.jsonl").read_text().splitlines())
    assert probe["tp"] == 2 and len(probe["probe"]["bandwidth"]) == 2
    assert [r["bytes"] for r in probe["probe"]["all_reduce"]] == [4**n for n in range(5, 14)]
    assert all(r["us"] > 0 for r in probe["probe"]["all_reduce"])
    assert (ladder["wiring"], ladder["batch"], ladder["new_tokens"], ladder["tp"]) == ("ladder", 2, 3, 2)
    assert probe["hardware"] == ladder["hardware"] and ladder["command"] != probe["command"]
    assert ladder["settings"] == {"NCCL_SOMETHING": "1"}  # without the one that makes the link another
    assert (tmp_path / "new" / "demo-figures" / "tables.md").read_text() in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# measure/results.py and measure/plot.py


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
    """A function that writes lines into a file, and one that reads files as measure/results.py does."""

    def write(lines, name="bench.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    return write


def table(text, name):
    """{first cells of a row: those of the batches} of the table whose caption begins so."""
    rows = text.partition(f"\n{name}")[2].partition("|")[2].split("\n\n")[0].splitlines()
    head, _, *cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    first = 3 + ("draft" in head)
    return {tuple(row[:first]): row[first:] for row in cells}


def test_cells_are_medians_and_speedups_are_paired_by_repeat(written):
    # the machine was twice as fast in the third repeat, and ladder missed the second
    lines = [result("standard", rate, repeat=i) for i, rate in enumerate([10, 11, 20], 1)]
    lines += [result("ladder", rate, repeat=i) for i, rate in ((1, 12), (3, 26))]
    lines += [result("parallel", rate, repeat=i) for i, rate in enumerate([11, 22, 200], 1)]
    lines += [result("standard", 30, batch=4), result("desync", 60, batch=4), result("standard", 6, tp=1)]
    [found] = results.sweeps(results.read(written(lines)))
    text = results.tables(found)
    rates = table(text, "Decode, tok/s")
    assert rates["2", "real", "standard"] == ["11 (10-20)", "30"]
    assert rates["2", "real", "ladder"] == ["19 (12-26) ~1.25x", ""]  # the median of 1.2 and 1.3
    assert rates["2", "real", "parallel"][0] == "22 (11-200) ~2.00x"  # of 1.1, 2 and 10: no mean
    assert rates["2", "real", "desync:2"] == ["", "60 2.00x (one run)"]
    assert rates["1", "none", "standard"] == ["6", ""]
    each = table(text, "Decode: time per token")
    assert each["2", "real", "standard"] == ["90.9 ms, 11 tok/s, 50 %", "133 ms, 7.5 tok/s, 50 %"]
    assert table(text, "Prefill")["2", "real", "ladder"][0] == "1,000 (1,000-1,000) ~1.00x"
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
    first, second, third = results.sweeps(results.read(written(lines)))
    rates = table(results.tables(first), "Decode, tok/s")
    assert {key[1]: row[0] for key, row in rates.items() if key[2] == "standard"} == {
        "real": "10", "no-p2p": "5", "pcie": "4"
    }  # fmt: skip
    assert rates["2", "real", "ladder"] == ["", "out of memory"] == rates["2", "no-p2p", "ladder"]
    assert rates["2", "pcie", "ladder"][0] == "6 1.50x"
    assert list(table(results.tables(second), "Decode, tok/s").values()) == [["40"]]
    assert list(table(results.tables(third), "Decode, tok/s").values()) == [["out of memory"]]


def test_repeats_of_several_files_are_repeats_and_pair_within_a_file(written):
    fast = written([result("standard", 20), result("ladder", 22)], "fast")
    slow = written([result("standard", 10), result("ladder", 13)], "slow")
    [found] = results.sweeps(results.read(fast) + results.read(slow))
    assert table(results.tables(found), "Decode, tok/s")["2", "real", "ladder"] == ["17.5 (13-22) ~1.20x"]
    twice = written([result("ladder", 20), result("ladder", 20, command="with another flag")])
    with pytest.raises(InputError, match="two results of 2, real, ladder, 1 in repeat 1: give each file once"):
        results.sweeps(results.read(twice))


def test_communication_and_machine(written):
    report = {"step_ms": 10.0, "quartiles_ms": [9.9, 10.2], "silent_ms": 7.0, "exposed_ms": 3.0, "all_reduces": 4}
    report["all_reduce_ms"] = 1.25
    reports = {
        "prefill": {**report, "hidden": None, "limit_ms": 8.0},
        "decode": {**report, "hidden": 0.4, "limit_ms": 9},
    }
    probe = {"tp": 2, "hardware": "H1", "torch": "2", "commit": "c", "settings": {"NCCL_P2P_DISABLE": "1"}}
    probe["probe"] = {"bandwidth": [2e9, 3e9], "all_reduce": [{"bytes": 1024, "us": 20.0, "gbps": 0.5}]}
    lines = results.read(written([{**probe, "topology": "GPU0 PIX"}, result("ladder", 1, exposed=reports)]))
    [found] = results.sweeps(lines)
    text = results.tables(found)
    assert "| 2 | real | ladder | 1 | prefill | 10.00 (9.90-10.20) | 7.00 | 4 | 1.250 | 3.00 |  | 8.00 |" in text
    assert "| 2 | real | ladder | 1 | decode | 10.00 (9.90-10.20) | 7.00 | 4 | 1.250 | 3.00 | 40 % | 9.00 |" in text
    text = results.machine(lines[:1])
    assert "2 ranks, link no-p2p. Each reads so many GB/s from memory: 2.0, 3.0." in text
    assert "| 1,024 | 20.0 | 0.50 |" in text and "GPU0 PIX" in text
    assert found.latencies == {(2, "no-p2p"): 20.0}


@pytest.mark.parametrize(
    "wiring, exposed, quartiles, words",
    [
        ("ladder", 3.0, [9.9, 10.2], "40 %"),
        ("ladder", -0.1, [9.9, 10.2], "100 %"),  # a step that waits for nothing
        ("ladder", 5.2, [9.9, 10.2], "within noise"),
        ("ladder", 3.0, [8.0, 14.0], "within noise"),  # wider than all of the communication
        ("ladder", 60.7, [9.9, 10.2], "none"),  # once printed as -1114 %
        ("ladder", 60.7, [9.9, 80.2], "within noise"),
        ("parallel", 3.0, [9.9, 10.2], "-"),
        ("hybrid:2", 3.0, [9.9, 10.2], "40 %"),
    ],
)
def test_what_is_hidden_is_told_from_noise(wiring, exposed, quartiles, words):
    report = {"exposed_ms": exposed, "quartiles_ms": quartiles, "all_reduces": 4, "all_reduce_ms": 1.25}
    assert results.hidden({**report, "hidden": 1 - exposed / 5}, wiring) == words


def test_speedups_are_told_from_noise(written):
    rates = {
        "standard": [10, 11, 12], "ladder": [13, 14, 15], "parallel": [11.9, 12, 12.1],
        "upper-bound": [13.5, 13.6, 13.7],
    }  # fmt: skip
    lines = [result(w, rate, repeat=i) for w, some in rates.items() for i, rate in enumerate(some, 1)]
    lines += [result(w, 20, batch=4) for w in rates]
    [found] = results.sweeps(results.read(written(lines)))
    text = results.tables(found)
    cells = {key[2]: row for key, row in table(text, "Decode, tok/s").items()}
    assert cells["upper-bound"] == ["13.6 (13.5-13.7) **1.24x**", "20 1.00x (one run)"]
    assert cells["ladder"][0] == "14 (13-15) 1.27x^" and cells["parallel"][0] == "12 (11.9-12.1) ~1.09x"
    legend = text.partition("Decode: time")[0]
    assert all(results.LEGEND[mark] in legend for mark in ("~", "^", "(one run)"))
    one = [{**line, "repeat": 1} for line in lines if line["batch"] == 4]
    text = results.tables(results.sweeps(results.read(written(one)))[0])
    assert "Each number is of one run" in text and "(one run)" not in text and "| 20 1.00x |" in text


def drafted(wiring, draft, rate, accepted=(1, 1), count=4, **more):
    return result(wiring, rate, draft=draft, speculate=count, accepted=list(accepted), **more)


def test_drafts_have_a_column_and_are_compared_with_plain_standard(written):
    lines = [
        result(w, rate, tp=tp) for w, rate, tp in (("standard", 10, 2), ("upper-bound", 20, 2), ("standard", 8, 1))
    ]
    lines += [drafted("standard", "ngram", 12, (3, 0, 1)), drafted("standard", "ngram", 16, (0, 9), tp=1)]
    lines += [drafted("ladder", "wiring:hybrid:2", 30, (0,), "auto"), drafted("hybrid", "ngram", 15, ladder_layers=2)]
    lines += [result("standard", 20, repeat=2), drafted("standard", "ngram", 28, (0, 0, 1), repeat=2)]
    [found] = results.sweeps(results.read(written(lines)))
    text = results.tables(found)
    rates = table(text, "Decode, tok/s")
    assert list(rates) == [
        ("1", "none", "standard", "none"), ("1", "none", "standard", "ngram@4"),
        ("2", "real", "standard", "none"), ("2", "real", "standard", "ngram@4"),
        ("2", "real", "ladder", "wiring:hybrid:2@auto"), ("2", "real", "hybrid:2", "ngram@4"),
        ("2", "real", "upper-bound", "none"),
    ]  # fmt: skip
    assert rates["1", "none", "standard", "ngram@4"] == ["16 2.00x (one run)"]
    assert rates["2", "real", "standard", "ngram@4"] == ["20 (12-28) ~1.30x"]
    assert rates["2", "real", "ladder", "wiring:hybrid:2@auto"] == ["30 3.00x (one run)"]  # a draft may pass the bound
    assert table(text, "Proposals that stood") == {
        ("1", "none", "standard", "ngram@4"): ["1"], ("2", "real", "standard", "ngram@4"): ["1.25 (0.5-2)"],
        ("2", "real", "ladder", "wiring:hybrid:2@auto"): ["0"], ("2", "real", "hybrid:2", "ngram@4"): ["0.5"],
    }  # fmt: skip
    plain = results.tables(results.sweeps(results.read(written([line for line in lines if "draft" not in line])))[0])
    assert "draft" not in plain and "Proposals" not in plain


def test_figures_name_the_drafts(written):
    lines = [result(w, rate, batch=b) for w, rate in (("standard", 10), ("upper-bound", 20)) for b in (1, 4)]
    lines += [drafted("standard", draft, 15, batch=b) for draft in ("ngram", "wiring:spd") for b in (1, 4)]
    lines += [result("standard", 5, tp=1), drafted("standard", "ngram", 7, tp=1)]
    [found] = results.sweeps(results.read(written(lines)))
    [panel] = plot.speedups(found, lambda c: "", lambda c: c[3]).values()
    assert panel["standard + ngram@4"] == {1: (1.5, 1.5, 1.5), 4: (1.5, 1.5, 1.5)}
    drafts = "standard + ngram@4", "standard + wiring:spd@4"
    looks = [plot.look(w, panel) for w in ("standard", *drafts)]
    assert {look["color"] for look in looks} == {"black"} and len({look["linestyle"] for look in looks}) == 3
    assert [list(bars) for bars in plot.breakdown(found).values()] == [["standard", "upper-bound"]] * 2
    lines = plot.scaling(found)["link real, batch 1"]
    middles = [{x: y[0] for x, y in lines[w].items()} for w in ("standard", "upper-bound", *drafts)]
    assert middles == [{1: 1.0, 2: 2.0}, {1: 1.0, 2: 4.0}, {1: 1.4, 2: 3.0}, {2: 3.0}]
    figure = plot.draw({"": panel}, "title", "batch", "")
    assert {box.get_label() for box in figure.axes[0].containers} == {"standard", "upper-bound", *drafts}
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1


def test_bars_say_what_the_timed_runs_say(written):
    steps = {"standard": 10, "ladder": 7, "parallel": 8, "upper-bound": 6}
    lines = [result(w, 1e3 / ms, repeat=i) for w, ms in steps.items() for i in (1, 2, 3)]
    [found] = results.sweeps(results.read(written(lines)))
    [bars] = plot.breakdown(found).values()
    # of the 4 ms that standard waits ladder hides 3, since its Wiring is stale; parallel has 2 less to wait for
    assert {w: [round(x, 6) for x in bar[:3]] for w, bar in bars.items()} == {
        "standard": [6, 0, 4], "ladder": [3, 3, 1], "parallel": [6, 0, 2], "upper-bound": [6, 0, 0]
    }  # fmt: skip
    [axis] = plot.draw_breakdown(plot.breakdown(found), "title").axes
    assert sum(bar.get_width() for bar in axis.patches) == pytest.approx(sum(steps.values()))
    [found] = results.sweeps(results.read(written([line for line in lines if line["wiring"] != "upper-bound"])))
    assert plot.breakdown(found) == {} and plot.draw_breakdown({}, "") is None


def test_series_of_the_figures(written):
    links = [(10, 15, "pcie"), (20, 22, "ib")]
    lines = [result(w, x, link=link) for a, b, link in links for w, x in (("standard", a), ("ladder", b))]
    lines += [result("standard", 8, tp=4, link="ib")]
    [found] = results.sweeps(results.read(written(lines)))
    by_link = plot.speedups(found, lambda c: f"{c[0]} ranks", lambda c: found.latencies[c[:2]])
    assert by_link["2 ranks"]["ladder"] == {57.0: (1.5, 1.5, 1.5), 46.0: (1.1, 1.1, 1.1)}

    def middles(panels):
        return {w: {x: y[0] for x, y in points.items()} for w, points in panels["link ib, batch 1"].items()}

    # each link on its own, and no point that was not measured
    assert middles(plot.scaling(found)) == {"standard": {2: 1.0, 4: 0.4}, "ladder": {2: 1.1}}
    [found] = results.sweeps(results.read(written([*lines, result("standard", 4, tp=1)])))
    assert middles(plot.scaling(found)) == {"standard": {1: 1.0, 2: 5.0, 4: 2.0}, "ladder": {1: 1.0, 2: 5.5}}


def test_ours_stand_beside_the_paper_s_where_they_are_alike(written):
    def drawn(lines):
        figure = plot.beside_paper(results.sweeps(results.read(written(lines))))
        return figure and [
            (axis.get_title(), {box.get_label(): list(box.lines[0].get_ydata()) for box in axis.containers})
            for axis in figure.axes
        ]

    eight = [result("standard", 10, batch=4, tp=8), result("ladder", 15, batch=4, tp=8)]
    (paper, theirs), (ours, found) = drawn(eight)
    # 44 tokens in 1 + 4 and in 1 + 2.67 seconds; on an axis of its own, which says what it ran on
    assert found == {"link real": pytest.approx([5 / (1 + 40 / 15)])} and "measured on H1" in ours
    assert theirs["link no P2P"] == [1.39, 1.50, 1.40, 1.47, 1.59, 1.54, 1.57] and "H100s" in paper
    (_, theirs), (_, found) = drawn([{**line, "tp": 2} for line in eight])
    assert theirs["link NVLink"][0] == pytest.approx(101.22 / 77.39) and list(found) == ["8b, 2 ranks, link real"]
    assert drawn([{**line, "n_layers": 4} for line in eight]) is None
    assert drawn([{**line, "quant": "int8"} for line in eight]) is None


def test_a_wiring_looks_the_same_everywhere():
    assert plot.look("standard")["color"] == "black" and plot.look("upper-bound")["color"] == "darkgrey"
    looks = [plot.look(w, ("desync:4", "desync:2", "ladder")) for w in ("desync:2", "desync:4")]
    assert looks[0]["color"] == looks[1]["color"] and looks[0]["linestyle"] != looks[1]["linestyle"]


def test_the_first_page_s_figure_keeps_cpus_and_h100s_apart():
    cpu, alone, paper = plot.front_page().axes
    assert {box.get_label() for box in cpu.containers} >= {"ladder", "hybrid", "parallel-ladder", "upper-bound"}
    assert len(alone.containers) == 4 and "H100s" in paper.get_title() and "H100" not in cpu.get_title()
    assert not cpu.get_shared_y_axes().joined(cpu, paper)


def test_tables_need_no_matplotlib(written, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot.main([str(written([result("standard", 10), result("ladder", 12)]))])
    assert "| 12 1.20x |" in capsys.readouterr().out
    with pytest.raises(ImportError):
        plot.panels(1, 1, 1, "")


def test_compare(written, capsys):
    before = [result("standard", 10), result("ladder", 12), result("ladder", 99, batch=4), error("ladder")]
    after = [result("standard", 15, hardware="H2"), result("ladder", 6, hardware="H2", ttft_ms=500.0)]
    after.append(result("ladder", 7, batch=64, hardware="H2"))
    plot.main(["--compare", str(written(before, "a")), str(written(after, "b"))])
    out = capsys.readouterr().out
    assert out.startswith("before: H1; after: H2\n")
    what = "| 8b, 32 layers, bfloat16, prompt 8, 11 new tokens | 2 | real |"
    assert out.splitlines()[4:] == [
        f"{what} standard | 1 | 10 | 15 | 1.50x (one run) | 1,000 | 1,000 | 1.00x (one run) |",
        f"{what} ladder | 1 | 12 | 6 | 0.50x (one run) | 1,000 | 500 | 2.00x (one run) |",
        f"{what} ladder | 64 | out of memory | 7 |  | out of memory | 1,000 |  |",
        "",
        "`(one run)`: no repeats that say how far it wanders.",
    ]


def test_drafts_are_compared_with_the_same_drafts(written, capsys):
    before = [result("standard", 10), drafted("standard", "ngram", 12), drafted("ladder", "ngram", 12, count="auto")]
    after = [result("standard", 15), drafted("standard", "ngram", 24), drafted("ladder", "ngram", 12)]
    plot.main(["--compare", str(written(before, "a")), str(written(after, "b"))])
    rows = [line.split(" | ")[1:8] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["ranks", "link", "wiring", "draft", "batch", "tok/s before", "after"]
    assert rows[2:] == [
        ["2", "real", "standard", "none", "1", "10", "15"],
        ["2", "real", "standard", "ngram@4", "1", "12", "24"],
    ]


def test_figures_of_settings_that_look_alike_have_names_of_their_own(written, tmp_path):
    rates = [("standard", 10, 1), ("ladder", 12, 1), ("standard", 30, 4), ("ladder", 32, 4)]
    lines = [result(w, rate, batch, hardware=name) for name in ("H1", "H2") for w, rate, batch in rates]
    plot.main([str(written(lines)), "--out", str(tmp_path / "figures")])
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"8b-32-bfloat16-cuda-by-batch.png", "8b-32-bfloat16-cuda-2-by-batch.png"} <= names


def test_the_paper_s_figures_agree_with_themselves():
    rates = {(r["link"], r["wiring"], r["batch"]): r["tok_s"] for r in results.published() if r["tok_s"]}
    for link, ratios in ("NVLink", [1.308, 1.282, 1.190, 1.155]), ("no P2P", [1.599, 1.566, 1.351, 1.282]):
        found = [rates[link, "ladder", b] / rates[link, "standard", b] for b in (1, 4, 16, 64)]
        assert found == pytest.approx(ratios, abs=6e-4)


@pytest.mark.parametrize(
    "text",
    [
        "no json", "[1]", '{"command": "c", "repeat": 1, "a": 2}', '{"wiring": "ladder", "link": 1, "tp": 2}',
        json.dumps({k: v for k, v in result("ladder", 1).items() if k != "hardware"}),
        json.dumps(result("ladder", 1, repeat=2, draft="ngram", speculate=4)),
        json.dumps(result("ladder", 1, repeat=2, draft="ngram", speculate=4, accepted=None)),
        json.dumps(result("ladder", 1, repeat=2, draft="ngram", accepted=[1])),
        json.dumps(result("ladder", 1, repeat=2, draft="ngram", speculate=4, accepted="1")),
    ],
)  # fmt: skip
def test_plot_refuses_other_files(tmp_path, text):
    (tmp_path / "x").write_text(json.dumps(result("ladder", 1)) + "\n" + text + "\n")
    with pytest.raises(InputError, match="x line 2 was not written by bench.sh"):
        results.read(tmp_path / "x")


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give files of bench.sh, --compare BEFORE AFTER or --front-page PNG"),
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["/dev/null"], "/dev/null: it is no regular file"),
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
