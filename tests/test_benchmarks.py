"""The scripts in benchmarks/: each of them once, in small, and their tables."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import shlex
import subprocess
import sys

import pytest
import torch
from helpers import BASE, RANKS, ROOT, main_on_ranks, random_model, run_ranks

import generate
from adapt import Trainee, losses
from benchmarks import acceptance, adapt, decode, engines, gpu, overlap, paper, ratio, speculation, zeroshot
from decoding.speculative import expected, mean_accepted
from formats import checkpoint
from formats.sizes import SIZES
from formats.tokenizer import load_tokenizer
from kernels import int_linear
from measure import report
from model import WIRINGS, Config, InputError, rewired, wiring_name
from runtime import launch
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
        with contextlib.suppress(SystemExit):  # in which --show ends, as --help does
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
    flags = ["--model", "1b", "--simulate-tp", "2", "--links", "0,5000", "--wirings", "standard", "ladder", "ladder:1,"]
    flags += ["--rounds", "3", "--eager", "--json", out, "--profile", tmp_path / "traces"]
    shown = printed(overlap, *flags)
    lines = read(out)
    cases = [*itertools.product(["0", "5000"], ["standard", "ladder", "ladder:1,"])]
    assert [(line["link"]["name"], line["wiring"]) for line in lines] == cases
    assert lines[3]["step_ms"] >= 4 * 5  # over the slow link
    assert lines[0]["command"].endswith(f"python -m benchmarks.overlap {' '.join(map(str, flags))}")
    assert lines[0].keys() >= {"torch", "commit", "hardware", "threads"}
    assert {f"{link}-{wiring}" for link, wiring in cases} == {path.name for path in (tmp_path / "traces").iterdir()}
    assert json.loads((tmp_path / "traces" / "5000-ladder" / "rank0.json").read_text())["traceEvents"]
    assert printed(overlap, "--show", out) == shown
    write(out, [*lines[1:], {**lines[0], "batch": 2}])
    tables = printed(overlap, "--show", out).split("\n\n")
    assert tables[1].splitlines()[0] == "| link | one all-reduce, ms | ladder | ladder:1, | standard |"
    assert tables[1].splitlines()[2].endswith("|  |")  # the line that is in a table of its own now
    assert "batch 2" in "".join(tables[2:])
    assert "| link | one all-reduce, ms | ladder |" in printed(overlap, "--wirings", "ladder", "--show", out)


def test_overlap_on_real_ranks_names_their_link(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--wirings", "standard", "--links", "free", "--label", "veth"]
    shown, *others = main_on_ranks(RANKS, _small_overlap, "--rounds", 3, "--eager", "--json", out, *flags)
    [line] = read(out)
    assert (line["link"], line["tp"]) == ({"name": "veth"}, RANKS)
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
        line("desync:2", 8.0, [7.0, 9.0]), line("upper-bound", 9.0, [8.9, 9.1]),
    ]  # fmt: skip
    row, legend = overlap.tables(lines).split("\n")[4], overlap.tables(lines).split("\n")[-1]
    assert row == "| 0 | 0.50 | 20.0 (+100%) | 10.0 (+0%, 2.00x) | 19.0 (+90%, ~1.05x) | 8.0 (-20%, 2.50x^) | " + (
        "9.0 (-10%, 2.22x) |"
    )
    assert "within noise" in legend and "above the upper bound" in legend
    assert "noise" not in overlap.tables(lines[:2])


def test_a_new_wiring_is_measured(own_wiring, tiny, printed):
    assert "own-wiring" in overlap.parse(["--model", "8b"]).configs  # without being named
    flags = ["--model", "8b", "--n-layers", 2, "--simulate-tp", 2, "--batch", 4, "--links", "1000", "--eager"]
    shown = printed(overlap, *flags, "--rounds", 3, "--wirings", "standard", "own-wiring", "own-wiring:1")
    assert "| standard | own-wiring | own-wiring:1 |" in shown


# ---------------------------------------------------------------------------------------------------------------------
# ratio.py


def test_the_papers_ratios_and_what_it_recovered():
    found = ratio.ratios()
    assert len(found) == 8 and found["NVLink", 1] == pytest.approx(110.59 / 77.39 - 1)
    assert found["no P2P", 1] == pytest.approx(1.14, abs=0.005)
    assert ratio.recovered(1 / 101.22, 1 / 77.39, 1 / 110.59) == pytest.approx((101.22 - 77.39) / (110.59 - 77.39))


def test_links_of_the_papers_ratios(tiny, printed, tmp_path):
    out = tmp_path / "out.jsonl"
    shown, *_ = main_on_ranks(RANKS, _small_ratio, "--rounds", 3, "--n-layers", 2, "--eager", "--json", out)
    lines = read(out)
    assert len(lines) == 8 * 5
    latencies = {(x["paper"]["link"], x["paper"]["batch"]): x["link"]["latency_us"] for x in lines}
    sublayers = {latencies[key] / x for key, x in ratio.ratios().items()}  # the same one of this machine
    assert max(sublayers) == pytest.approx(min(sublayers))
    assert printed(ratio, "--show", out) == shown[0]
    [row] = [x for x in shown[0].splitlines() if x.startswith("| no P2P | 16 | ") and "| ladder |" in x]
    assert "(1.03)" in row and "(1.35)" in row and "(34%)" in row


def _small_ratio(argv):
    overlap.SMALL = TINY
    ratio.main(argv)


# ---------------------------------------------------------------------------------------------------------------------
# decode.py and its engines


def test_decode_asks_its_engines_in_turns(monkeypatch, printed, tmp_path):
    worker = tmp_path / "worker.py"
    answers = "print('something else'), print('times', [0.25] * int(line.split()[2]), flush=True)"
    worker.write_text(f"import sys\nfor line in sys.stdin: {answers}\n")
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
    wirings = {x["wiring"] for x in lines if "limit_ms" in x}
    assert wirings == {*overlap.variants(2)}
    assert {p.parent.name for p in (tmp_path / "traces").glob("1b/*/rank0.json")} == {f"pcie-{w}" for w in wirings}
    assert "| 1b | 1 | int4 | 16 |" in shown and "| pcie | " in shown and "Without" not in shown
    assert shown.endswith(printed(gpu, "--show", out))


def test_gpu_measures_full_sizes_over_every_link():
    found = gpu.cases("cuda:0", False, "traces")
    text = [" ".join(command) for command in found.values()]
    assert sum("--compile" in command and "--model 8b" in command for command in text) == 8
    assert sum(f"--simulate-tp {gpu.RANKS}" in command for command in text) == 2 * len({*gpu.LINKS} - {"free"})
    assert [*found][:2] == ["decode, batch 1", "8b, 8 ranks, pcie"]
    for command in found.values():  # are flags that the scripts know
        if command[0] == "generate.py":
            generate.parse(command[1:])
        else:
            overlap.parse(command[2:])


def test_gpu_s_cases_end_with_the_time_and_leave_a_word(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 2**28)
    log = str(tmp_path / "log")
    code = "import sys; open(sys.argv[2], 'w').write('{\"a\": 1}\\n'); print('hello', flush=True); "
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


# ---------------------------------------------------------------------------------------------------------------------
# zeroshot.py: what other wirings cost without retraining


def test_each_wiring_runs_on_the_ranks_that_it_is_a_function_of(own_wiring):
    one, several = [*zeroshot.cases(1)], [*zeroshot.cases(2)]
    assert one[0] == several[0] == ("standard", "all") and ("desync:2", "all") in several
    for name, wiring in WIRINGS.items():
        layers = [which for case, which in (several if wiring.tp_bound else one) if case == name]
        assert layers == (["all", zeroshot.HALF] if wiring.parameter == "layers" else ["all"] * (name == "standard"))


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
    alone = [*zeroshot.cases(1)]
    assert printed(zeroshot, *flags).count("\n") == len(alone)
    assert printed(zeroshot, *flags) == ""  # all are there
    with pytest.raises(InputError, match="^--select /nosuch: No such file"):
        printed(zeroshot, *flags, "--select", "/nosuch")
    (shown, _), (nothing, _) = main_on_ranks(2, _small_zeroshot, *flags)
    assert shown.count("\n") == len([*zeroshot.cases(2)]) and nothing == ""
    one, two = read(out)[: len(alone)], read(out)[len(alone) :]
    wired = [rewired(config, wiring_name(x["wiring"], half(x))) for x in one + two]

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

    assert [x["nats"] for x in one] == pytest.approx(
        [packed_loss("valid", 200, c) for c in wired[: len(one)]], rel=1e-5
    )
    assert one[2]["wiring"] == "ladder" and one[0]["wiring"] == "standard"
    ladder_alone = [packed_loss("select", 100, rewired(config, f"ladder:{i},")) for i in range(4)]
    assert one[2]["sensitivity"] == pytest.approx(ladder_alone, rel=1e-5)
    assert one[0]["select_nats"] == pytest.approx(packed_loss("select", 100, config), rel=1e-5)
    loaded, _ = run_ranks(2, _loaded_so, folder, tmp_path / "valid", wired[len(one) :])
    assert [x["nats"] for x in two] == pytest.approx(loaded, rel=1e-6)
    assert two[0]["nats"] == pytest.approx(one[0]["nats"], rel=1e-5)
    for line in one + two:
        chosen = half(line) or ()
        left = [line["sensitivity"][i] for i in range(4) if i not in chosen] if chosen else []
        assert len(chosen) == 2 * bool(line["sensitivity"])
        assert not chosen or max(line["sensitivity"][i] for i in chosen) <= min(left)
    shown = printed(zeroshot, "--show", out)
    spd = next(x for x in two if half(x) and x["wiring"] == "spd")
    excess = f"{100 * (spd['nats'] / two[0]['nats'] - 1):+.1f}%"
    assert f"| spd | {zeroshot.HALF} |  | {spd['nats']:.3f}, {excess} ({', '.join(map(str, half(spd)))}) |" in shown


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


# ---------------------------------------------------------------------------------------------------------------------
# acceptance.py and speculation.py


def test_acceptance_counts_what_was_accepted(printed, tmp_path):
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
        (["--stories", 3], "has 2 stories of more than 72 tokens, fewer than 3"),
        (["--max-new-tokens", 241], "--max-new-tokens: 257 tokens do not fit in the context of 256"),
        (["--valid", "/nosuch"], "--valid /nosuch: No such file"),
    ):
        with pytest.raises(InputError, match=message):
            acceptance.main([*map(str, [*flags, *drafts, "--json", out, *more])])


def _small_speculation(argv):
    with pytest.MonkeyPatch.context() as m:
        m.setitem(SIZES, "1b", dataclasses.replace(TINY, n_layers=2))
        speculation.main(argv)


def test_speculation_times_its_parts(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--drafts", "wiring:spd", "wiring:ladder:1", "--counts", "3,1", "--links", "2000,0", "--eager"]
    (shown, _), *others = main_on_ranks(RANKS, _small_speculation, *flags, "--rounds", 3, "--json", out)
    assert len(shown.splitlines()) == len(lines := read(out)) and not any(text for text, _ in others)
    timed = [("step", None, 0), ("verification", None, 3), ("verification", None, 1)]
    for name in "wiring:spd", "wiring:ladder:1":
        timed += [("draft step", name, 1), ("pass", name, 3)]
    found = [(x["link"]["name"], x["part"], x["draft"], x["speculate"]) for x in lines]
    assert found == [(name, *part) for name in ("2000", "0") for part in timed]
    links = speculation.by_link(lines)
    assert [*links] == ["0", "2000"]
    # over the slow link: 4 all-reduces and a gathering, of the drafts 2 and 4 of them, and all of 3 steps and a pass
    slow = links["2000"]
    assert slow.step >= 10 and slow.verification[1] >= 10 and slow.verification[3] >= 10
    assert slow.draft["wiring:spd"] >= 6 and slow.whole["wiring:spd", 3] >= 3 * 6 + 10


# ---------------------------------------------------------------------------------------------------------------------
# Bad input, and the pages


README, DEMO = (shlex.quote(str(ROOT / name)) for name in ("README.md", "demo"))


@pytest.mark.parametrize(
    "script, flags, message",
    [
        (overlap, "--links 0,x", "--links: 'x' is not a number"),
        (overlap, "--wirings x", "unknown wiring 'x'; known: standard, ladder, parallel,"),
        (overlap, "", "one rank has no link"),
        (ratio, "", "one rank has no link"),
        (decode, "--engines nosuch", "--engines: unknown 'nosuch'; known: ours, transformers, gpt-fast, llama.cpp,"),
        (decode, "--cases decode", "--cases: 'decode' is neither decode:BATCH nor prefill:TOKENS"),
        (decode, "--llama-python /nosuch", "--llama-python /nosuch is no program"),
        (decode, f"--show {README}", f"--show: {README} has lines that this script did not write"),
        (adapt, "--plan long --checkpoint c --text x --valid x --json y", "--plan long needs --checkpoint, --rates"),
        (zeroshot, f"--checkpoint {DEMO} --valid x --select x --json y", f"--checkpoint {DEMO} is ladder, but must be"),
        (speculation, "--drafts ngram", "--drafts ngram does not have the model's own weights: give wiring:NAME"),
        (gpu, "--device cpu", "there is no GPU: on a CPU this takes --tiny"),
    ],
)
def test_bad_flags(script, flags, message):
    with pytest.raises(InputError) as e:
        script.main(shlex.split(flags))
    message = message.replace(README, shlex.split(README)[0]).replace(DEMO, shlex.split(DEMO)[0])
    assert str(e.value).startswith(message) and "\n" not in str(e.value)


def test_a_script_runs_as_a_module():
    """And says in one line what is wrong."""
    command = [sys.executable, "-m", "benchmarks.overlap", "--wirings", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("overlap.py: unknown wiring 'x'")
    assert done.stderr.count("\n") == 1


def netns(*args, **environment):
    command = ["bash", ROOT / "benchmarks" / "netns.sh", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("args", [[], ["--batch", "4"], ["20mbit 5"]])
def test_netns_refuses(args):
    done = netns(*args)
    assert done.returncode == 2 and done.stderr.startswith("netns.sh: ") and done.stderr.count("\n") == 1


RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
SHOWN = [  # (page, script, flags before --show, files, tables on the page)
    ("overlap.md", overlap, "standard ladder parallel parallel-ladder spd upper-bound", "overlap-memory.jsonl", 1),
    ("overlap.md", overlap, "standard ladder parallel desync:4 upper-bound", "overlap-cpu.jsonl", 1),
    ("overlap.md", overlap, "standard ladder parallel upper-bound", "overlap-netns.jsonl", 1),
    ("overlap.md", overlap, "", "overlap-tp8.jsonl", 1),
    ("overlap.md", ratio, "", "ratio.jsonl", 1),
    ("bench.md", paper, "", "", 1),
    ("decode.md", decode, "", "decode.jsonl", 2),
    ("decode.md", decode, "", "decode-calls.jsonl", 1),
    ("decode.md", decode, "", "decode-panels.jsonl", 1),
    ("decode.md", decode, "", "decode-memory.jsonl", 1),
    ("decode.md", decode, "ours,transformers,gpt-fast,llama.cpp", "decode-amx.jsonl", 1),
    ("zeroshot.md", zeroshot, "", "zeroshot.jsonl", 2),
    ("adapt.md", adapt, "", "adapt.jsonl adapt-scratch.jsonl", 2),
    ("../docs/speculation.md", acceptance, "", "speculation-acceptance.jsonl", 1),
    ("../docs/speculation.md", speculation, "", "speculation-speed.jsonl", 2),
]


def test_every_file_of_raw_lines_is_named_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert not [path.name for path in RESULTS.glob("*.jsonl") if path.name not in text]


@pytest.mark.parametrize("page, script, some, files, tables", SHOWN, ids=[f"{row[0]} {row[3]}" for row in SHOWN])
def test_the_rows_on_the_pages_are_those_that_their_command_prints(page, script, some, files, tables, printed):
    """A page may leave rows out."""
    on_page = [{*block.strip().split("\n")} for block in (RESULTS.parent / page).read_text().split("\n\n")]
    flags = ["--engines" if script is decode else "--wirings", *some.split()] if some else []
    shown = printed(script, *flags, *(["--show", *(RESULTS / name for name in files.split())] if files else []))
    blocks = [{*block.strip().split("\n")} for block in shown.split("\n\n") if block.startswith("|")]
    assert sum(any(len(mine) > 2 and mine <= block for block in blocks) for mine in on_page) == tables


def test_the_formula_of_speculation_holds_on_the_raw_lines():
    """To 3 %: 1 + a + ... + a^K tokens of a pass, with the rate a of its run."""
    for x in read(RESULTS / "speculation-acceptance.jsonl"):
        formula = expected(acceptance.rate(x["accepted"]), x["speculate"])
        assert x["draft"] == "ngram" or abs((1 + mean_accepted(x["accepted"])) / formula - 1) < 0.03
