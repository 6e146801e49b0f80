"""The scripts in benchmarks/: each of them once, in small, and their tables."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from helpers import BASE, RANKS, ROOT, main_on_ranks, random_model, run_ranks

import generate
import model
from adapt import Trainee, losses
from benchmarks import (
    acceptance,
    adapt,
    adapt_tables,
    decode,
    engines,
    few_rows,
    gpu,
    overlap,
    paper,
    ratio,
    reliability_tables,
    speculation,
    speculation_tables,
    zeroshot,
    zeroshot_tables,
)
from decoding.speculative import expected
from formats import checkpoint
from formats.checkpoint import SIZES
from formats.tokenizer import load_tokenizer
from kernels import cpu, int_linear
from measure import report
from model import WIRINGS, Config, InputError
from runtime import cli, launch
from training import data

TINY = Config(2, 8, 8, 8, 64, 128, 256, 512)


@pytest.fixture
def tiny(monkeypatch):
    """The named sizes are small ones."""
    for name in ("1b", "8b", "70b"):
        monkeypatch.setitem(SIZES, name, dataclasses.replace(TINY, n_layers=SIZES[name].n_layers // 8))


@pytest.fixture
def own_wiring(monkeypatch):
    """A wiring that nobody has told the scripts of."""
    monkeypatch.setitem(WIRINGS, "own-wiring", dataclasses.replace(WIRINGS["parallel"], stale=True))


@pytest.fixture
def printed(capsys):
    """A function that runs main() of a script with these flags and returns what it printed."""

    def run(script, *flags):
        capsys.readouterr()
        script.main([*map(str, flags)])
        return capsys.readouterr().out

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# overlap.py


def test_overlap_writes_a_line_for_each_wiring_and_link_and_a_trace(tiny, printed, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--model", "1b", "--simulate-tp", "2", "--links", "0,5000", "--wirings", "standard,ladder,hybrid"]
    flags += ["--rounds", "3", "--eager", "--json", out, "--profile", tmp_path / "traces"]
    shown = printed(overlap, *flags)
    lines = read(out)
    cases = [*itertools.product(["0", "5000"], ["standard", "ladder", "hybrid"])]
    assert [(line["link"]["name"], line["wiring"]) for line in lines] == cases
    assert lines[3]["step_ms"] >= 4 * 5  # over the slow link
    assert lines[0]["command"].endswith(f"python -m benchmarks.overlap {' '.join(map(str, flags))}")
    assert {f"{link}-{wiring}" for link, wiring in cases} == {path.name for path in (tmp_path / "traces").iterdir()}
    assert json.loads((tmp_path / "traces" / "5000-ladder" / "rank0.json").read_text())["traceEvents"]
    assert printed(overlap, "--show", out) == shown
    write(out, [*lines[1:], {**lines[0], "batch": 2}])
    tables = printed(overlap, "--show", out).split("\n\n")
    assert tables[1].splitlines()[0] == "| link | one all-reduce, ms | ladder | hybrid | standard |"
    assert tables[1].splitlines()[2].endswith("|  |")  # the line that is in a table of its own now
    assert "batch 2" in "".join(tables[2:])


def test_overlap_on_real_ranks_names_their_link(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--wirings", "standard", "--links", "free", "--label", "veth", "--command", "netns.sh x"]
    shown, *others = main_on_ranks(RANKS, _small_overlap, "--rounds", 3, "--eager", "--json", out, *flags)
    [line] = read(out)
    assert (line["link"], line["command"], line["tp"]) == ({"name": "veth"}, "netns.sh x", RANKS)
    assert "| veth | " in shown[0] and not any(text for text, _ in others)


def _small_overlap(argv):
    overlap.SMALL = TINY
    overlap.main(argv)


def line(wiring, step_ms, quartiles_ms, **changes):
    return {
        "model": "small", "n_layers": 8, "dtype": "bfloat16", "device": "cpu", "threads": 1, "tp": 2, "batch": 1,
        "simulated": False, "tokens": 64, "kind": "decode", "compiled": True, "link": {"name": "0"}, "wiring": wiring,
        "step_ms": step_ms, "quartiles_ms": quartiles_ms, "all_reduce_ms": 0.5, "limit_ms": 10.0, **changes,
    }  # fmt: skip


def test_overlap_s_cells_say_what_is_noise():
    lines = [
        line("standard", 20.0, [19.0, 21.0]), line("ladder", 10.0, [9.5, 10.5]), line("parallel", 19.0, [18.0, 19.5]),
        line("desync-2", 8.0, [7.0, 9.0]), line("upper-bound", 9.0, [8.9, 9.1]),
    ]  # fmt: skip
    row, legend = overlap.tables(lines).split("\n")[4], overlap.tables(lines).split("\n")[-1]
    assert row == "| 0 | 0.50 | 20.0 (+100 %) | 10.0 (+0 %, 2.00x) | 19.0 (+90 %, ~1.05x) | 8.0 (-20 %, 2.50x^) | " + (
        "9.0 (-10 %, 2.22x) |"
    )
    assert "within noise" in legend and "above the upper bound" in legend
    assert "noise" not in overlap.tables(lines[:2])


def test_overlap_s_wirings_are_those_of_the_model(own_wiring):
    found = overlap.variants(8)
    assert {changes["wiring"] for changes in found.values()} == {*WIRINGS}
    assert found["hybrid"] == {"wiring": "hybrid", "ladder_layers": 4}
    assert found["desync-4"] == {"wiring": "desync", "desync_period": 4}
    assert found["own-wiring"] == {"wiring": "own-wiring"}
    for n_layers in (2, 3):
        for changes in overlap.variants(n_layers).values():
            dataclasses.replace(TINY, n_layers=n_layers, **changes)  # is a Config


def test_overlap_takes_the_last_layers_of_a_wiring():
    found = overlap.chosen(["standard", "spd:1", "delayed:4", "hybrid:8"], 8)
    assert found == {
        "standard": {"wiring": "standard"}, "spd:1": {"wiring": "spd", "ladder_layers": 1},
        "delayed:4": {"wiring": "delayed", "ladder_layers": 4}, "hybrid:8": {"wiring": "hybrid", "ladder_layers": 8},
    }  # fmt: skip
    assert dataclasses.replace(SIZES["1b"], n_layers=8, **found["delayed:4"]).wired_layers == (4, 5, 6, 7)
    for bad in ("spd:0", "spd:9", "spd:", "spd:+1", "ladder:2", "standard:2", "desync:2", "x:2", ""):
        with pytest.raises(InputError, match=f"unknown wiring '{re.escape(bad)}'; known: .* from 1 to 8"):
            overlap.chosen([bad], 8)


def test_a_new_wiring_is_measured(own_wiring, tiny, printed, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--simulate-tp", 2, "--batch", 4, "--links", "1000", "--eager", "--rounds", 3, "--json", out]
    for n_layers in (2, 4):
        wirings = ["--wirings", "standard,own-wiring"]
        assert "| own-wiring |" in printed(overlap, "--model", "8b", "--n-layers", n_layers, *wirings, *flags)


# ---------------------------------------------------------------------------------------------------------------------
# ratio.py


def test_the_papers_ratios_and_what_it_recovered():
    found = ratio.ratios()
    assert len(found) == 8 and found["NVLink", 1] == pytest.approx(110.59 / 77.39 - 1)
    assert found["no P2P", 1] == pytest.approx(1.14, abs=0.005)
    assert ratio.recovered(1 / 101.22, 1 / 77.39, 1 / 110.59) == pytest.approx((101.22 - 77.39) / (110.59 - 77.39))


def test_links_of_the_papers_ratios(tiny, printed, tmp_path):
    out, png = tmp_path / "out.jsonl", tmp_path / "out.png"
    shown, *_ = main_on_ranks(RANKS, _small_ratio, "--rounds", 3, "--n-layers", 2, "--eager", "--json", out)
    lines = read(out)
    assert len(lines) == 8 * 5
    latencies = {(x["paper"]["link"], x["paper"]["batch"]): x["link"]["latency_us"] for x in lines}
    sublayers = {latencies[key] / x for key, x in ratio.ratios().items()}  # the same one of this machine
    assert max(sublayers) == pytest.approx(min(sublayers))
    assert printed(ratio, "--show", out, "--figure", png) == shown[0] and png.read_bytes().startswith(b"\x89PNG")
    [row] = [x for x in shown[0].splitlines() if x.startswith("| no P2P | 16 | ") and "| ladder |" in x]
    assert "(1.03)" in row and "(1.35)" in row and "(34%)" in row
    for flags, line in (["--wirings", "ladder"], "standard and upper-bound"), (["--figure", png], "--figure draws"):
        with pytest.raises(InputError, match=line):
            ratio.main([*map(str, flags)])


def _small_ratio(argv):
    overlap.SMALL = TINY
    ratio.main(argv)


# ---------------------------------------------------------------------------------------------------------------------
# paper.py


def test_the_paper_s_own_figures(printed):
    rows = printed(paper).splitlines()
    [row] = [row for row in rows if row.startswith("| no P2P | 1 | ladder | 64.5 | ")]
    assert " | 82.6 | 96.4 | " in row and " | 1.60 | 1.87 | " in row


# ---------------------------------------------------------------------------------------------------------------------
# decode.py and its engines


def test_decode_asks_its_engines_in_turns(monkeypatch, printed, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\n"
        "for line in sys.stdin:\n"
        "    print('something else')\n"
        "    print('times', [0.25] * int(line.split()[2]), flush=True)\n"
    )
    monkeypatch.setattr(decode, "WORKER", worker)
    monkeypatch.setattr(decode, "read_bandwidth", lambda *args, **kwargs: 1e10)
    out = tmp_path / "out.jsonl"
    flags = ["--engines", "ours,transformers", "--cases", "decode:1,prefill:8", "--rounds", "3", "--json", out]
    threads = torch.get_num_threads()
    try:
        shown = printed(decode, *flags)
    finally:
        torch.set_num_threads(threads)
    assert [(x["engine"], x["kind"], x["n"], x["ms"]) for x in read(out)] == [
        (engine, kind, n, 250.0) for kind, n in (("decode", 1), ("prefill", 8)) for engine in ("ours", "transformers")
    ]
    assert read(out)[0]["mbu"] == pytest.approx(decode.step_bytes(1, "ours") / 0.25 / 1e10)
    assert "| prefill, 8 tokens | 10.0 | 250.0 (250.0-250.0) | 250.0 (250.0-250.0; 1.00x) |" in shown
    assert printed(decode, "--show", out) == shown
    worker.write_text("raise SystemExit('no such thing')")
    with pytest.raises(InputError, match="engine ours ended: give a file to --log"):
        decode.main(["--engines", "ours", "--cases", "decode:1"])


def make_small(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setitem(SIZES, "1b", dataclasses.replace(TINY, n_layers=2))
    names = ["DIM", "LAYERS", "HEADS", "KV_HEADS", "HIDDEN", "VOCABULARY"]
    for name, value in zip(names, [64, 2, 8, 8, 128, 256], strict=True):
        monkeypatch.setattr(engines, name, value)


@pytest.mark.parametrize("kind, n", [("decode", 2), ("prefill", 4), ("cache", 300)])
def test_our_engine(kind, n, monkeypatch, capsys):
    make_small(monkeypatch)
    engines.answer(engines.engine("ours:int8", 1), [f"{kind} {n} 1\n", f"{kind} {n} 3\n"])
    first, second = capsys.readouterr().out.splitlines()
    assert len(json.loads(first.removeprefix("times"))) == 1 and len(json.loads(second.removeprefix("times"))) == 3
    torch.compiler.set_stance("default")


def answer_on_two_ranks(world):
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(out):
        make_small(m)
        m.setattr(launch, "join", lambda device, flags=None: world)
        m.setattr(sys, "stdin", io.StringIO("decode 2 1\nprefill 4 3\n"))
        engines.answer_on_ranks("ours@2:int8", 1)
        torch.compiler.set_stance("default")
    return out.getvalue().splitlines()


def test_our_engine_on_two_ranks(monkeypatch):
    first, second = run_ranks(2, answer_on_two_ranks)
    assert [len(json.loads(line.removeprefix("times"))) for line in first] == [1, 3] and second == []
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, env, **_: commands.append((words, env["OMP_NUM_THREADS"])))
    decode.start("ours@2:int4", decode.parse(["--threads", "6", "--engines", "ours@2:int4"]))
    [(words, threads)] = commands
    assert "--nproc_per_node=2" in words and words[-2:] == ["ours@2:int4", "3"] and threads == "3"


def test_the_engines_of_others_have_a_process_and_modules_of_their_own(tmp_path):
    (tmp_path / "model.py").write_text("raise SystemExit('not the model.py of gpt-fast')")
    args = decode.parse(["--gpt-fast", str(tmp_path), "--engines", "gpt-fast", "--log", str(tmp_path / "log")])
    worker = decode.start("gpt-fast", args)
    with pytest.raises(InputError, match="engine gpt-fast ended"):
        decode.ask("gpt-fast", worker, "decode", 1, 1)
    assert "not the model.py of gpt-fast" in (tmp_path / "log").read_text()


def test_decode_knows_the_bytes_of_a_step():
    for quant, size in ((None, None), ("int8", None), ("int4", 64)):
        config = dataclasses.replace(SIZES["1b"], tie_embeddings=False, quant=quant, group_size=size)
        net = int_linear.skeleton(config).bfloat16()
        expected = report.step_bytes(net, net.new_cache(4, 160), engines.FILLED + 1)
        scales = [p.nbytes for n, p in net.named_parameters() if n.endswith("scales") and "embeddings" not in n]
        uncounted = sum(scales) if quant == "int8" else 0  # two bytes a row
        assert decode.step_bytes(4, f"ours:{quant}" if quant else "ours") == expected - uncounted


# ---------------------------------------------------------------------------------------------------------------------
# few_rows.py


def test_few_rows(monkeypatch, printed, tmp_path):
    monkeypatch.setattr(few_rows, "SHAPES", [(128, 64)])
    monkeypatch.setattr(few_rows, "ROWS", [1, 8])
    monkeypatch.setattr(few_rows, "WEIGHTS", 3 * 128 * 64)
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: None)  # of this process
    out = tmp_path / "out.jsonl"
    shown = printed(few_rows, "--json", out)
    assert [x["rows"] for x in read(out)] == [1, 8] and all(rate > 0 for rate in read(out)[0]["gb_s"].values())
    assert "| W | rows of x | few_rows | oneDNN | sum | int8 | int8 as floats | int4 | int4 as floats |" in shown


# ---------------------------------------------------------------------------------------------------------------------
# gpu.py


def in_process(command, log, seconds):
    """What gpu.run does, by these very functions, in this process."""
    out = log + ".part"
    script, flags = (overlap, command[2:]) if command[:2] == ["-m", "benchmarks.overlap"] else (generate, command[1:])
    try:
        script.main([*flags, "--json", out])
    except InputError as e:
        return [], str(e)
    with open(out) as f:
        lines = [json.loads(line) for line in f]
    os.unlink(out)
    return lines, None


def test_gpu_takes_all_its_cases(tiny, monkeypatch, printed, tmp_path):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(gpu, "run", in_process)
    monkeypatch.setattr(report, "free_bytes", lambda device: 2**28)
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 2**28)
    monkeypatch.setitem(SIZES, "1b", dataclasses.replace(TINY, n_layers=2))
    flags = ["--device", "cpu", "--tiny", "--json", out, "--traces", tmp_path / "traces"]
    shown = printed(gpu, *flags)
    lines = read(out)
    assert [*dict.fromkeys(x["case"] for x in lines)] == ["copy", *gpu.cases("cpu", True, "")]
    assert not [x for x in lines if "error" in x]
    assert {x["wiring"] for x in lines if "limit_ms" in x} == {*overlap.variants(2)}
    assert len([*(tmp_path / "traces" / "1b").glob("pcie-*/rank0.json")]) == len(overlap.variants(2))
    assert "| 1b | 1 | int4 | 16 |" in shown and "| pcie | " in shown and "Without" not in shown
    assert shown.endswith(printed(gpu, "--show", out))


def test_gpu_measures_full_sizes_over_every_link():
    found = gpu.cases("cuda:0", False, "traces")
    text = [" ".join(command) for command in found.values()]
    assert sum("--compile" in command and "--model 8b" in command for command in text) == 8
    assert sum(f"--simulate-tp {gpu.RANKS}" in command for command in text) == 2 * (len(gpu.LINKS) - 1)
    assert [*found][:2] == ["decode, batch 1", "8b, 8 ranks, pcie"]
    for command in found.values():  # are flags that the scripts know
        if command[0] == "generate.py":
            generate.parse(command[1:])
        else:
            overlap.parse(command[2:])


def test_gpu_s_cases_end_with_the_time_and_leave_a_word(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 2**28)
    log = str(tmp_path / "log")
    code = (
        "import sys; open(sys.argv[2], 'w').write('{\"a\": 1}\\n'); sys.stdout.write('hello\\n'); sys.stdout.flush(); "
    )
    assert gpu.run(["-c", code], log, 20) == ([{"a": 1}], None)
    assert gpu.run(["-c", code + "import time; time.sleep(60)"], log, 1) == ([{"a": 1}], "no time left")
    trouble = "raise RuntimeError('CUDA out of memory. Tried'); "
    assert gpu.run(["-c", trouble], log, 20) == ([], "RuntimeError: CUDA out of memory. Tried")
    assert "hello" in (tmp_path / "log").read_text()
    args = gpu.parse(["--tiny", "--seconds", "0", "--json", str(tmp_path / "out")])
    first, *rest = gpu.measure(launch.World(0, 1, torch.device("cpu")), args)
    assert first["copy"] > 0 and {x["error"] for x in rest} == {"no time left"}
    assert "| decode, batch 1 | no time left |" in gpu.tables([first, *rest])


# ---------------------------------------------------------------------------------------------------------------------
# adapt.py: what a ladder costs


def run_of(**key):
    return {"plan": "rates", "layers": "all", "method": "plain", "share": 0.2, "seed": 0, "lr": 1e-3, "nats": 2.0} | key


def test_each_kind_of_run_has_the_best_rate_of_its_own():
    lines = [run_of(lr=1e-3), run_of(lr=3e-3, nats=1.5), run_of(lr=1e-2, nats=1.0, share=0.05)]
    lines += [run_of(layers="last half", method="distilled", lr=1e-4)]
    assert adapt.chosen_rate(lines, {"layers": "all", "method": "plain", "share": 0.2}) == 3e-3
    key = {"layers": "auto half", "method": "blended and distilled", "share": 0.2}
    assert adapt.chosen_rate(lines, key) == 1e-4
    with pytest.raises(InputError, match="--rates has no line of distilled, all, 0.2"):
        adapt.chosen_rate(lines, {"layers": "all", "method": "distilled", "share": 0.2})


@pytest.mark.slow
def test_a_plan_skips_what_its_file_has_and_the_tables_show_it(printed, tmp_path, monkeypatch):
    text = "\n<|endoftext|>\n".join(["Once upon a time there was a little dog. It ran to the park."] * 20)
    (tmp_path / "t.txt").write_text(text)
    monkeypatch.setattr(adapt, "WINDOW", ["--seq-len", "16", "--batch", "4", "--dtype", "float32"])
    monkeypatch.setattr(adapt, "SHARES", (0.2,))
    monkeypatch.setattr(adapt, "RATES", (1e-3,))
    monkeypatch.setattr(adapt, "SEEDS", (0, 1))
    monkeypatch.setattr(adapt, "STEP", 64)
    monkeypatch.setattr(adapt, "layers_of", lambda n: {"none": [], "all": ["--ladder"]})
    folder = tmp_path / "model"
    folder.mkdir()
    data.train_tokenizer([text], 300, folder / "tokenizer.model")
    config = dataclasses.replace(BASE, n_layers=4, vocab_size=300)
    checkpoint.write_model(folder, config, random_model(config).state_dict(), torch.float32)
    files = ["--checkpoint", folder, "--text", tmp_path / "t.txt", "--valid", tmp_path / "t.txt"]
    assert printed(adapt, "--plan", "rates", *files, "--json", tmp_path / "rates").count("\n") == 3
    assert printed(adapt, "--plan", "rates", *files, "--json", tmp_path / "rates") == ""
    more = ["--rates", tmp_path / "rates", "--json", tmp_path / "out"]
    assert printed(adapt, "--plan", "retrain", *files, *more).count("\n") == 8  # of four kinds, two seeds
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {line["wiring"] for line in lines if line["layers"] == "all"} == {"ladder"}
    (tmp_path / "scratch").write_text(json.dumps({"model": "m", "nats": 1.25}) + "\n")
    tables = printed(adapt_tables, tmp_path / "out", tmp_path / "scratch", "--figure", tmp_path / "f.png")
    nats = [line["nats"] for line in lines if (line["layers"], line["method"]) == ("all", "plain")]
    control = [line["nats"] for line in lines if line["layers"] == "none"]
    mean = f"{sum(nats) / 2:.3f} ({min(nats):.3f}-{max(nats):.3f})"
    assert f"{mean}, {100 * (sum(nats) / sum(control) - 1):+.1f} %" in tables and "| m | 1.250 |" in tables
    assert (tmp_path / "f.png").stat().st_size > 10_000


# ---------------------------------------------------------------------------------------------------------------------
# zeroshot.py: what other wirings cost without retraining


def test_each_wiring_runs_on_the_ranks_that_it_is_a_function_of(own_wiring):
    one, several = [*zeroshot.cases(1)], [*zeroshot.cases(2)]
    both = ["all", zeroshot.HALF]
    whole = ["ladder", "parallel", "parallel-ladder", "own-wiring"]
    assert one == [("standard", "all"), *itertools.product(whole, both)]
    bound = [*itertools.product(["spd", "spd-ladder", "delayed"], both)]
    assert several == [("standard", "all"), *bound, ("desync", "all")]


def test_zeroshot_has_adapt_s_losses_and_those_of_each_wiring_alone(monkeypatch, printed, tmp_path):
    story = "Once upon a time there was a little dog. It ran to the park."
    stories = [" ".join([story] * (i % 5 + 1)) for i in range(20)]  # of unequal lengths
    texts = {"valid": stories, "select": [story.replace("dog", "park").replace("It", "Once") for story in stories]}
    for name, some in texts.items():
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(some))
    folder, out = tmp_path / "model", tmp_path / "out.jsonl"
    folder.mkdir()
    data.train_tokenizer(stories, 300, folder / "tokenizer.model")
    config = dataclasses.replace(BASE, n_layers=4, n_kv_heads=3, vocab_size=300)
    net = random_model(config)
    checkpoint.write_model(folder, config, net.state_dict(), torch.float32)
    flags = ["--checkpoint", folder, "--valid", tmp_path / "valid", "--select", tmp_path / "select", "--batch", "3"]
    flags += ["--valid-tokens", "200", "--select-tokens", "100", "--json", out]
    monkeypatch.setattr(zeroshot, "WINDOW", 16)
    assert printed(zeroshot, *flags).count("\n") == 7
    assert printed(zeroshot, *flags) == ""  # all are there
    with pytest.raises(InputError, match="^--select /nosuch: No such file"):
        printed(zeroshot, *flags, "--select", "/nosuch")
    (shown, _), (nothing, _) = main_on_ranks(2, _small_zeroshot, *flags)
    assert shown.count("\n") == 8 and nothing == ""
    one, two = read(out)[:7], read(out)[7:]
    wired = [cli.rewired(config, x["wiring"], ladder_layers=half(x)) for x in one + two]

    trainee = Trainee(config).eval()
    trainee.load_state_dict(net.state_dict())

    def packed_loss(name, at_most, config):
        """As adapt.py validates: whole windows, in which documents do not attend to one another."""
        data.tokenize([tmp_path / name], load_tokenizer(folder), 2, tmp_path / "tokens", show=False)
        windows = data.Windows(tmp_path / "tokens", 16, at_most=at_most)
        batch = windows.batch(range(windows.n))
        trainee.config = config
        with torch.no_grad():
            return losses(trainee, batch)[1].item() / batch.counts.sum().item()

    assert [x["nats"] for x in one] == pytest.approx([packed_loss("valid", 200, c) for c in wired[:7]], rel=1e-5)
    ladder_alone = [packed_loss("select", 100, cli.rewired(config, "ladder", ladder_layers=(i,))) for i in range(4)]
    assert one[2]["sensitivity"] == pytest.approx(ladder_alone, rel=1e-5)
    assert one[0]["select_nats"] == pytest.approx(packed_loss("select", 100, config), rel=1e-5)
    alone, _ = run_ranks(2, _loaded_so, folder, tmp_path / "valid", wired[7:])
    assert [x["nats"] for x in two] == pytest.approx(alone, rel=1e-6)
    assert two[0]["nats"] == pytest.approx(one[0]["nats"], rel=1e-5)
    for line in one + two:
        chosen = half(line) or ()
        left = [line["sensitivity"][i] for i in range(4) if i not in chosen] if chosen else []
        assert len(chosen) == 2 * bool(line["sensitivity"])
        assert not chosen or max(line["sensitivity"][i] for i in chosen) <= min(left)


def half(line):
    return tuple(line["wired_layers"]) if line["layers"] == zeroshot.HALF else None


def _small_zeroshot(argv):
    zeroshot.WINDOW = 16
    zeroshot.main(argv)


def _loaded_so(world, folder, text, configs):
    """The losses of models that are loaded in their wiring."""
    zeroshot.WINDOW = 16
    documents = zeroshot.documents(text, "--valid", 200, load_tokenizer(folder), 2)
    nets = [generate.load_model(config, folder, None, world) for config in configs]
    return [zeroshot.nats_per_token(net, documents, 4) for net in nets]


def zero(wiring, nats, layers="all", tp=1, **changes):
    return {
        "model": "m", "tp": tp, "wiring": wiring, "layers": layers, "nats": nats, "wired_layers": [0, 1, 2, 3],
        "desync_period": 2, "sensitivity": None, "n_layers": 4, **changes,
    }  # fmt: skip


ALONE = {"wired_layers": [0, 3], "sensitivity": [1.25, 1.5, 1.625, 1.125]}
ZEROSHOT = [
    zero("standard", 1.0, select_nats=1.125), zero("ladder", 2.5), zero("ladder", 1.5, zeroshot.HALF, **ALONE),
    zero("standard", 1.0, tp=2, select_nats=1.0), zero("spd", 1.75, tp=2), zero("spd", 1.2, zeroshot.HALF, 2, **ALONE),
    zero("desync", 3.0, tp=2), zero("standard", 1.0, tp=4), zero("spd", 2.0, tp=4),
]  # fmt: skip


def test_the_tables_and_the_points_of_zeroshot(printed, tmp_path):
    shown = printed(zeroshot_tables, write(tmp_path / "lines", ZEROSHOT)).splitlines()
    assert shown[:5] == [
        "m", "", "| wiring | layers | any number of ranks | 2 ranks | 4 ranks |", "| --- | --- | --- | --- | --- |",
        "| standard | all | 1.000 | 1.000 | 1.000 |",
    ]  # fmt: skip
    assert "| ladder | all | 2.500, +150.0 % |  |  |" in shown
    assert "| ladder | least sensitive half | 1.500, +50.0 % (0, 3) |  |  |" in shown
    assert "| spd | all |  | 1.750, +75.0 % | 2.000, +100.0 % |" in shown
    assert "| desync:2 | all |  | 3.000, +200.0 % |  |" in shown
    assert "| ladder | any | +0.125 | +0.375 | +0.500 | +0.000 |" in shown
    assert "| spd | 2 | +0.250 | +0.500 | +0.625 | +0.125 |" in shown
    retrained = [run_of(method="distilled", nats=nats, seed=i) for i, nats in enumerate((1.5, 2.0))]
    retrained += [run_of(nats=9.0), run_of(method="distilled", layers="last half", share=1.0, nats=1.25)]
    found = zeroshot_tables.points(ZEROSHOT, retrained)
    assert found == {
        "standard": {0: 1.0}, "ladder": {0: 2.5, 0.2: 1.75}, "ladder, half": {0: 1.5, 1.0: 1.25}, "spd": {0: 1.75},
        "spd, half": {0: 1.2}, "desync:2": {0: 3.0},
    }  # fmt: skip
    lines = [
        line(wiring, ms, [ms, ms], link={"name": name, "latency_us": us})
        for name, us in (("1000", 1000.0), ("0", 0.0)) for wiring, ms in
        (("standard", 20.0), ("ladder", 10.0), ("hybrid", 16.0), ("spd:4", 8.0), ("desync-2", 5.0))
    ]  # fmt: skip
    timed = zeroshot_tables.speeds(write(tmp_path / "speeds", lines))
    assert [name for _, name, _ in timed] == ["0", "1000"]
    ratios = {name: ratio for name, (ratio, _, _) in timed[0.0, "0", 0.5].items()}
    assert ratios == {"standard": 1.0, "ladder": 2.0, "ladder, half": 1.25, "spd, half": 2.5, "desync:2": 4.0}
    more = ["--speeds", tmp_path / "speeds", "--retrained", write(tmp_path / "retrained", retrained), "--model", "m"]
    printed(zeroshot_tables, tmp_path / "lines", *more, "--figure", tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    real, other = line("standard", 1.0, [1, 1]), {**lines[0], "n_layers": 4}
    for bad, message in (
        (lines[1:], "has no standard wiring over the link 1000"), ([real], "compiled decode steps of one model"),
        ([*lines, other], "has not compiled decode steps of one model"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"--speeds: .* {message}"):
            printed(zeroshot_tables, write(tmp_path / "lines", ZEROSHOT), "--speeds", write(tmp_path / "speeds", bad))
    for bad in (["--figure", "x"], more):
        with pytest.raises(InputError, match="--figure goes with --speeds and --model"):
            write(tmp_path / "speeds", lines)
            printed(zeroshot_tables, tmp_path / "lines", *bad)


# ---------------------------------------------------------------------------------------------------------------------
# acceptance.py, speculation.py and their tables


def test_acceptance_counts_what_stood(printed, tmp_path):
    """Of the demo, on the beginnings of stories and on what quotes them."""
    story = "Once upon a time, there was a little girl named Lily. She liked to play in the park with her mom. "
    text, out = tmp_path / "text", tmp_path / "out.jsonl"
    text.write_text("short\n<|endoftext|>\n" + "\n<|endoftext|>\n".join([5 * story, 4 * f"One day, {story}"]))
    flags = ["--checkpoint", ROOT / "demo", "--valid", text, "--stories", 2, "--max-new-tokens", 40, "--batch", 1]
    drafts = ["--drafts", "ngram", "wiring:standard"]
    printed(acceptance, *flags, *drafts, "--temperatures", 0, "--quote", "--json", out)
    printed(acceptance, *flags, "--drafts", "wiring:standard", "--temperatures", 0.5, 0, "--batch", 2, "--json", out)
    lines = read(out)
    found = [(x["draft"], x["temperature"], x["quote"], x["batch"], x["prompt_tokens"]) for x in lines]
    assert found == [
        ("ngram", 0, True, 1, 87), ("wiring:standard", 0, True, 1, 87),
        ("wiring:standard", 0.5, False, 2, 16), ("wiring:standard", 0, False, 2, 16),
    ]  # fmt: skip
    for x in lines[:2]:  # of single rows: all that passes yield, but what the last of each has too much
        yielded = x["passes"] + sum(n * count for n, count in enumerate(x["accepted"]))
        assert x["longest_rows"] <= yielded <= x["longest_rows"] + 2 * 4 and x["longest_rows"] <= 2 * 39
        assert len(x["accepted"]) == 5 and x["passes"] < x["longest_rows"]
    assert sum(lines[0]["accepted"]) <= lines[0]["passes"] and sum(lines[1]["accepted"]) == lines[1]["passes"]
    assert lines[2]["passes"] <= sum(lines[2]["accepted"]) <= 2 * lines[2]["passes"]
    tokenizer = load_tokenizer(ROOT / "demo", 1024)
    one, two = acceptance.beginnings(text, tokenizer, 2, False)
    assert len(one) == len(two) == 16 and (5 * story).startswith(tokenizer.decode(one))
    assert tokenizer.decode(two).startswith("One day, Once")
    quoted, _ = acceptance.beginnings(text, tokenizer, 2, True)
    assert quoted[:16] == one and quoted[72:] == one[1:]
    for more, message in (
        (["--stories", 3, "--batch", 3], "has 2 stories of more than 72 tokens, fewer than 3"),
        (["--stories", 3, "--batch", 2], "--stories 3 is no multiple of --batch 2"),
        (["--max-new-tokens", 241], "--max-new-tokens: 257 tokens do not fit in the context of 256"),
        (["--valid", "/nosuch"], "--valid /nosuch: No such file"),
    ):
        with pytest.raises(InputError, match=message):
            acceptance.main([*map(str, [*flags, *drafts, "--json", out, *more])])


def _small_speculation(argv):
    with pytest.MonkeyPatch.context() as m:
        m.setitem(SIZES, "1b", dataclasses.replace(TINY, n_layers=2))
        speculation.main(argv)


def test_speculation_times_its_parts_and_imposes_what_stands(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--drafts", "wiring:spd", "wiring:hybrid:1", "--counts", "3,1", "--links", "2000,0", "--eager"]
    flags += ["--rounds", 3, "--generate", 11, "--rates", "0,1", "--repeats", 1, "--json", out]
    (shown, _), *others = main_on_ranks(RANKS, _small_speculation, *flags)
    assert len(shown.splitlines()) == len(lines := read(out)) and not any(text for text, _ in others)
    timed = [("step", None, 0), ("verification", None, 3), ("verification", None, 1)]
    for name in "wiring:spd", "wiring:hybrid:1":
        timed += [("draft step", name, 1), ("pass", name, 3)]
    parts = [x for x in lines if x["part"] != "generation"]
    found = [(x["link"]["name"], x["part"], x["draft"], x["speculate"]) for x in parts]
    assert found == [(name, *part) for name in ("2000", "0") for part in timed]
    links = speculation_tables.by_link(lines)
    assert [*links] == ["0", "2000"]
    # over the slow link: 4 all-reduces and a gathering, of the drafts 2 and 4 of them, and all of 3 steps and a pass
    slow = links["2000"]
    assert slow.step >= 10 and slow.verification[1] >= 10 and slow.verification[3] >= 10
    assert slow.draft["wiring:spd"] >= 6 and slow.whole["wiring:spd", 3] >= 3 * 6 + 10
    whole = [x for x in lines if x["part"] == "generation"]
    ways = [(None, None, 10), ("wiring:spd", 0, 10), ("wiring:spd", 1, 3), ("wiring:hybrid:1", 0, 10)]
    assert [(x["draft"], x["rate"], x["passes"]) for x in whole] == 2 * [*ways, ("wiring:hybrid:1", 1, 3)]
    assert {x["tokens"] for x in whole} == {11} and whole[0]["ms_per_token"] >= 10


def part(link_us, part, ms, draft=None, speculate=0):
    link = {"name": f"{link_us}", "latency_us": link_us}
    return {"link": link, "part": part, "draft": draft, "speculate": speculate, "ms": ms}


def of_draft(draft, accepted, temperature=0.0, model="stories260K", **changes):
    return {
        "model": model, "wiring": "standard", "layers": [0, 1, 2, 3], "draft": draft, "accepted": accepted, "tp": 2,
        "temperature": temperature, "quote": False, "passes": 20, "longest_rows": 30, **changes,
    }  # fmt: skip


def test_the_tables_and_the_figure_of_speculation(printed, tmp_path):
    assert speculation.seconds_per_token(2.0, 6.0, 0.5, 2) == pytest.approx((2 * 2 + 6) / (1 + 0.5 + 0.25))
    assert speculation_tables.rate([1, 1, 2]) == pytest.approx((1 + 2 * 2) / (1 + 2 + 2 * 2))
    lines = [of_draft(name, [2, 2, 4], t) for name in ("wiring:spd", "wiring:ladder") for t in (0.0, 0.8)]
    lines += [of_draft("wiring:hybrid:2", [0, 0, 5], 0.8), of_draft("ngram", [6, 2, 2], quote=True)]
    lines += [of_draft("wiring:upper-bound", [4, 4, 2], wiring="hybrid", layers=[1, 3])]
    speeds = [
        part(us, *rest) for us, ar in ((1000, 1.0), (0, 0.0)) for rest in (
            ("step", 10 + 10 * ar), ("verification", 14 + 10 * ar, None, 2), ("verification", 12 + 10 * ar, None, 1),
            *(("draft step", 10 + n * ar, name, 1) for name, n in (("wiring:spd", 5), ("wiring:ladder", 1))),
            ("draft step", 10 + 5 * ar, "wiring:hybrid:8", 1), ("pass", 37.0 + 20 * ar, "wiring:spd", 2),
        )
    ]  # fmt: skip
    one = part(1000, "generation", None) | {"tokens": 11, "passes": 10, "ms_per_token": 21.0, "rate": None}
    two = one | {"draft": "wiring:spd", "speculate": 2, "passes": 5, "ms_per_token": 14.0, "rate": 0.5}
    files = write(tmp_path / "a", lines), write(tmp_path / "s", [*speeds, one, two])
    shown = printed(speculation_tables, *files, "--figure", tmp_path / "f.png").splitlines()
    assert {"stories260K, standard", "stories260K, layers 1, 3 as ladder"} <= {*shown}
    both = "1.25 | 0.71 | 25 / 25 / 50"
    assert f"| wiring:spd | 2 | {both} | {both} |" in shown and f"| wiring:ladder | any | {both} | {both} |" in shown
    assert "| wiring:hybrid:2 | any |  |  |  | 2.00 | 1.00 | 0 / 0 / 100 |" in shown
    assert "| stories260K | begin a story that they have quoted | greedy | 50 % | 0.60 | 0.43 | 1.50 |" in shown
    assert "| 0 | 10.0 | 10.0 | 10.0 | 10.0 | 12.0 | 14.0 |" in shown
    assert "| 1000 | 20.0 | 15.0 | 11.0 | 15.0 | 22.0 | 24.0 |" in shown
    assert "| 0 | 37.0 (+8.8 %) |" in shown and "| 1000 | 57.0 (+5.6 %) |" in shown
    # 2 of 15 and 24 ms for 1.75 tokens, against 20 ms for one
    assert "| 1000 | wiring:spd | 2 | 0.5 | 2.00 | 14.0 | 30.9 | 1.50 | 0.65 |" in shown
    # of 11 and 22 ms 1.9 tokens, of 2 x 11 and 24 ms 2.71
    assert [row for row in shown if row.startswith("| 1000 | wiring:ladder | 11.0 |") and " 1.18 (2) |" in row]
    assert [row for row in shown if row.startswith("| 1000 | one that takes no time | 0 |") and " 2.26 (2) |" in row]
    rates = [
        speculation_tables.measured(lines, "stories260K", f"wiring:{name}") for name in ("spd", "hybrid:8", "delayed")
    ]
    assert rates == [pytest.approx(5 / 7), 1.0, None] and (tmp_path / "f.png").stat().st_size > 10_000


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


README, DEMO = (shlex.quote(str(ROOT / name)) for name in ("README.md", "demo"))


@pytest.mark.parametrize(
    "script, flags, message",
    [
        (overlap, "--show missing", "--show: missing: No such file or directory"),
        (overlap, f"--show {README}", f"--show: {README} has lines that this script did not write"),
        (overlap, "--n-layers 1", "--n-layers: '1' is not a whole number from 2"),
        (overlap, "--n-layers 9", "--n-layers is 9 but small has 8"),
        (overlap, "--seconds nan", "--seconds: 'nan' is not a number above 0 to 1e+06"),
        (overlap, "--rounds 2", "--rounds: '2' is not a whole number from 3"),
        (overlap, "--prompt-length 4096", "--prompt-length is 4096 but must be below 4096"),
        (overlap, "--json /proc/x/y", "--json: /proc/x/y cannot be written: "),
        (overlap, "--label x", "--label (or netns.sh) says that there is a real link: it goes with --links free"),
        (overlap, "--links 0,x", "--links: 'x' is neither a number of microseconds nor one of free, nvlink,"),
        (
            overlap,
            "--wirings x",
            "unknown wiring 'x'; known: standard, ladder, hybrid, parallel,",
        ),
        (overlap, "--model x", "unknown --model 'x'; known: small, 1b"),
        (overlap, "", "one rank has no link"),
        (overlap, "--simulate-tp 2 --profile /proc/x", "--profile /proc/x/0-standard cannot be made: "),
        (decode, "--rounds 2", "--rounds: '2' is not a whole number from 3"),
        (decode, "--threads 0", "--threads: '0' is not a whole number from 1"),
        (decode, "--engines nosuch", "--engines: unknown 'nosuch'; known: ours, transformers, gpt-fast, llama.cpp,"),
        (decode, "--engines llama.cpp", "--engines llama.cpp needs --gpt-fast, --llama-python, or"),
        (decode, "--threads 3 --engines ours@2", "--engines ours@2: two ranks need an even number of --threads"),
        (decode, "--cases decode", "--cases: 'decode' is none of decode:BATCH"),
        (decode, "--cases cache:257", "--cases: 'cache:257' is none of"),
        (decode, "--cases cache:300 --engines transformers", "--cases cache:SLOTS is for --engines ours"),
        (decode, "--gpt-fast /nosuch", "--gpt-fast /nosuch is no checkout of gpt-fast"),
        (decode, "--llama-python /nosuch", "--llama-python /nosuch is no program"),
        (decode, "--show /nosuch.jsonl", "--show: /nosuch.jsonl: No such file"),
        (decode, f"--show {README}", f"--show: {README} has lines that this script did not write"),
        (decode, "--log /nosuch/x", "--log: /nosuch/x cannot be written"),
        (paper, "x", "unrecognized arguments: x"),
        (few_rows, "--json /nosuch/x", "--json: /nosuch/x cannot be written"),
        (adapt, "--plan rates --text x --valid x --json y", "--plan rates needs --checkpoint"),
        (adapt, "--plan long --checkpoint c --text x --valid x --json y", "--plan long needs --checkpoint, --rates"),
        (adapt, "--plan scratch --text x --valid x --json /nosuch/x", "--json: /nosuch/x cannot be written"),
        (
            adapt_tables,
            f"{README} x",
            f"retrained: {README} has lines that the plan retrain did not write",
        ),
        (zeroshot, "--checkpoint x --valid x --select x", "the following arguments are required: --json"),
        (zeroshot, f"--checkpoint {DEMO} --valid x --select x --json y", f"--checkpoint {DEMO} is ladder, but must be"),
        (
            zeroshot,
            f"--checkpoint x --valid x --select x --json {README}",
            f"--json: {README} has lines that this script",
        ),
        (zeroshot, "--checkpoint /nosuch --valid x --select x --json y", "/nosuch is not a checkpoint folder"),
        (zeroshot_tables, README, f"lines: {README} has lines that benchmarks/zeroshot.py did not write"),
        (speculation, "--model x", "--model: invalid choice: 'x'"),
        (speculation, "--n-layers 17", "--n-layers is 17 but 1b has 16"),
        (speculation, "--rates 2", "--rates: '2' is not a number from 0 to 1"),
        (speculation, "--drafts ngram", "--drafts ngram is not of the model's own weights: give wiring:NAME"),
        (speculation, "--drafts wiring:standard", "--draft wiring:standard is the wiring that the model runs in"),
        (speculation, "", "one rank has no link"),
        (acceptance, "--checkpoint x --valid x --drafts ngram", "the following arguments are required: --json"),
        (speculation_tables, f"{README} x", f"acceptance: {README} has lines that benchmarks/acceptance.py did not"),
        (gpu, "--device cpu", "there is no GPU: on a CPU this takes --tiny"),
        (gpu, "--seconds x", "--seconds: 'x' is not a number from 0"),
        (gpu, f"--show {README}", f"--show: {README} has lines that this script did not write"),
    ],
)
def test_bad_flags(script, flags, message):
    with pytest.raises(InputError) as e:
        script.main(shlex.split(flags))
    message = message.replace(README, shlex.split(README)[0]).replace(DEMO, shlex.split(DEMO)[0])
    assert str(e.value).startswith(message) and "\n" not in str(e.value)


def test_a_script_runs_as_a_module():
    """And says in one line what is wrong."""
    command = [sys.executable, "-m", "benchmarks.overlap", "--model", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("overlap.py: unknown --model 'x'")
    assert done.stderr.count("\n") == 1


def shell(name, *args, **environment):
    command = ["bash", ROOT / "benchmarks" / name, *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "give the rates first"), (["--batch", "4"], "give the rates first"), ([" "], "no rate given"),
        (["20mbit 5"], "5 is no rate such as 20mbit"), (["x"], "x is no rate such as 20mbit"),
    ],
)  # fmt: skip
def test_netns_refuses(args, message):
    done = shell("netns.sh", *args)
    assert done.returncode == 2 and done.stderr.startswith(f"netns.sh: {message}") and done.stderr.count("\n") == 1


def test_netns_runs_a_rank_in_each_namespace(tmp_path):
    """With a Python that only says what it was asked."""
    rank = tmp_path / "python"
    rank.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE at $GLOO_SOCKET_IFNAME: $*"\n')
    rank.chmod(0o755)
    done = shell("netns.sh", "20mbit", "--rounds", "3", PYTHON=str(rank))
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    if done.returncode:
        pytest.skip(f"network namespaces do not work here: {done.stderr.strip()}")
    flags = "-m benchmarks.overlap --device cpu --links free --label veth 20mbit"
    for i in (0, 1):
        assert f"{i} of 2 at veth{i}: {flags} --command benchmarks/netns.sh '20mbit' --rounds 3" in done.stdout


def test_the_pages_raw_lines_are_there_and_shown_as_they_are(printed):
    """Every table that --show prints is on its page, and every file of raw lines is read by one."""
    folder, text = ROOT / "benchmarks" / "results", ""
    for page in (*(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text += page.read_text()
    for path in folder.glob("*.jsonl"):
        assert path.name in text, path.name
    page = (ROOT / "benchmarks" / "overlap.md").read_text()
    for name in ("cpu", "alone", "netns", "tp8"):
        for part in printed(overlap, "--show", folder / f"overlap-{name}.jsonl").strip().split("\n\n"):
            assert not part.startswith("|") or part in page
    page = (ROOT / "docs" / "reliability.md").read_text()
    files = [folder / f"{name}.jsonl" for name in ("faults", "kills", "fuzz", "soak")]
    tables = [part.strip() for part in printed(reliability_tables, *files).split("\n\n") if part.strip()[:1] == "|"]
    assert len(tables) == 6 and not [table for table in tables if table not in page]
    page = (ROOT / "benchmarks" / "zeroshot.md").read_text()
    tables = printed(zeroshot_tables, folder / "zeroshot.jsonl").strip().split("\n\n")
    assert len(tables) == 6 and not [table for table in tables if table not in page]
    page = (ROOT / "docs" / "speculation.md").read_text()
    files = [folder / f"speculation-{name}.jsonl" for name in ("acceptance", "speed")]
    tables = [part.strip() for part in printed(speculation_tables, *files).split("\n\n") if part.strip()[:1] == "|"]
    assert len(tables) == 10 and not [table for table in tables if table not in page]
    for x in read(files[0]):  # "within 3 %"
        formula = expected(speculation_tables.rate(x["accepted"]), x["speculate"])
        assert x["draft"] == "ngram" or abs((1 + report.mean_accepted(x["accepted"])) / formula - 1) < 0.03


def test_model_is_the_project_s():
    """The module that benchmarks import, whatever a worker's is."""
    assert model.__file__ == str(ROOT / "model.py")
