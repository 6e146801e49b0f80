"""extras/research: the corpus, the trainings and their tables, and what each layer alone costs in another wiring."""

import dataclasses
import hashlib
import json
import math
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import BASE, ROOT, random_model, unequal_rows
from test_eval import TEXT, evaluated, naive, picked

import eval as evaluate
from evaluation import score
from extras.measure import results
from extras.research import corpus, quality, sensitivity
from extras.training import adapt, affinity
from formats.wiring_text import wiring_name
from model import parse_wiring, rewired
from runtime.errors import InputError


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def printed(capsys):
    """A function that runs main() of a script with these flags and returns what it printed."""

    def run(script, *flags):
        capsys.readouterr()
        script.main([*map(str, flags)])
        return capsys.readouterr().out

    return run


@pytest.fixture
def sources(tmp_path):
    """Flags of extras.research.corpus for two folders of Python files, and the texts that it should take."""
    texts = {}
    for source in "python", "torch":
        for i in range(30):
            path = tmp_path / source / f"{i % 3}" / f"{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts.setdefault(f"{source}/{i % 3}/{i}.py", f"def {source}{i}(x):\n    return x + {i}\n"))
    others = {"python/empty.py": b"\n", "python/latin.py": b"# \xe9\n", "python/site-packages/a.py": b"a = 1\n"}
    (tmp_path / "python/site-packages").mkdir()
    for name, text in others.items():
        (tmp_path / name).write_bytes(text)
    return ["--python", tmp_path / "python", "--torch", tmp_path / "torch"], texts


def test_a_corpus_has_each_file_once_and_is_split_by_name(sources, printed, tmp_path):
    flags, texts = sources
    stdout = printed(corpus, *flags, "--out", tmp_path / "a")
    parts = {part: [line["text"] for line in results.read(tmp_path / "a" / f"{part}.jsonl")] for part in corpus.PARTS}
    assert sorted(sum(parts.values(), [])) == sorted(texts.values()) and all(parts.values())
    assert all(corpus.part_of(name) == part for name, text in texts.items() for part in parts if text in parts[part])
    test = (tmp_path / "a" / "test.txt").read_text().split("\n<|endoftext|>\n")
    assert sorted(test) == sorted(text for text in parts["valid"] if text.startswith("def torch")) and len(test) > 1
    digests = [hashlib.sha256((tmp_path / "a" / name).read_bytes()).hexdigest() for name in corpus.FILES]
    assert all(digest in stdout for digest in digests)
    (tmp_path / "torch/0/0.py").unlink()
    printed(corpus, *flags, "--out", tmp_path / "b")
    assert {line["text"] for line in results.read(tmp_path / "b/valid.jsonl")} <= {*parts["valid"]}  # others stay


def test_a_plan_of_trainings_goes_on_and_its_tables_are_those_of_its_lines(sources, printed, tmp_path, monkeypatch):
    printed(corpus, *sources[0], "--out", tmp_path / "corpus")
    ran = []

    def called(command, env, **_):
        """What adapt.py, affinity and eval.py leave, with losses that wiring and seed decide."""
        script, flags = command[1], command[2:]
        args = {"adapt.py": adapt, "eval.py": evaluate, "-m": affinity}[script].parse(flags[script == "-m" :])
        assert env["OMP_NUM_THREADS"] == "1" and (args.checkpoint is None or os.path.isdir(args.checkpoint))
        if script == "-m":
            os.makedirs(args.out)
        elif script == "eval.py":
            name = f"{args.checkpoint}-in-" if args.wiring else f"{args.checkpoint}.jsonl"
            assert Path(args.text).is_file() and args.json.startswith(name)
            nats = 5 + len(args.wiring) if args.wiring else float((Path(args.checkpoint) / "nats").read_text())
            write(Path(args.json), [{"nats_per_token": nats}])
        else:
            if len(ran) == 4:
                raise KeyboardInterrupt
            ran.append(args)
            for folder in args.out, f"{args.out}.run":
                os.makedirs(folder)
            (Path(args.out) / "nats").write_text(f"{2.5 + len(args.wiring) / 100 + args.seed / 10}")
            steps = {"tokens": 2048, "tokens_per_s": 9}, {"tokens": 4096, "tokens_per_s": 7}
            Path(f"{args.out}.jsonl").touch()  # as an eval.py does that is killed
            log = [{"tokens": 0, "valid": 9}, {"tokens": 0}, *steps, {**steps[1], "valid": args.lr}]
            write(Path(f"{args.out}.run/log.jsonl"), log)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(quality, "subprocess", SimpleNamespace(run=called))
    how = ["--corpus", tmp_path / "corpus", "--runs", tmp_path / "runs", "--json", tmp_path / "x.jsonl"]
    with pytest.raises(KeyboardInterrupt):
        printed(quality, *how, "--steps", "200")
    assert len(results.read(tmp_path / "x.jsonl")) == 4
    with open(tmp_path / "x.jsonl", "a") as f:
        f.write('{"run": "cut o')
    ran.append(None)
    printed(quality, *how, "--steps", "200")
    lines = results.read(tmp_path / "x.jsonl")
    assert {line["run"] for line in lines} == {run.name for run in quality.plan(200)} and len(lines) == len(ran) - 1
    assert {line["steps"] for line in lines if line["kind"] == "retrained"} == {2, 10, 40, 200}
    assert all(args.distill == args.checkpoint for args in ran if args and args.wiring == "spd:4/4")
    write(tmp_path / "x.jsonl", lines)
    rows = [row.split(" | ") for row in printed(quality, "--show", tmp_path / "x.jsonl").splitlines()]
    [ladder] = [row for row in rows if row[0] == "| ladder"]
    assert ladder[1:3] == ["16", "2.610 (2.560-2.660), -0.8%"] and ladder[3].startswith("11.000, ")
    [grouped] = [row for row in rows if row[0] == "| spd/4, grouped"]
    assert grouped[1:4:2] == ["8", "10.000, -23.1%"] and grouped[4].startswith("3.650 (3.550-3.750), -0.8%")
    printed(quality, "--show", tmp_path / "x.jsonl", "--figure", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_bad_flags():
    for script, flags, message in (
        (corpus, "--out x --torch /nosuch", "--torch /nosuch: no Python files"),
        (quality, "--json x.jsonl", "--corpus, --runs and --json .* --show"),
        (quality, "--corpus /nosuch --runs x --json x.jsonl", "--corpus /nosuch has no train.jsonl"),
        (quality, f"--show {shlex.quote(str(ROOT))}/README.md", f"--show: {ROOT}/README.md"),
    ):
        with pytest.raises(InputError, match=message):
            script.main(shlex.split(flags))


def test_the_rows_of_the_page_are_those_that_its_command_prints(printed):
    """A page may leave rows out."""
    benchmarks = ROOT / "benchmarks"
    on_page = [{*block.strip().split("\n")} for block in (benchmarks / "quality.md").read_text().split("\n\n")]
    shown = printed(quality, "--show", benchmarks / "results/quality.jsonl").split("\n\n")
    tables = [{*block.strip().split("\n")} for block in shown if block.startswith("|")]
    assert sum(any(len(mine) > 2 and mine <= table for table in tables) for mine in on_page) == 2


def test_sensitivity_against_the_reference():
    net, wiring = random_model(BASE), "parallel-ladder"
    ids = unequal_rows(BASE, 1, 40)[0][0].tolist()
    result = sensitivity.sensitivity(net, lambda m: score.total_nats(m, [ids], 40, 20, 1), wiring)
    assert net.config is BASE and len(result) == BASE.n_layers
    for i, nats in enumerate(result):
        alone = random_model(BASE)  # with the norms of a standard model
        alone.config = rewired(BASE, f"{wiring}:{i},")
        assert math.isclose(nats, -picked(*naive(alone, ids, 40, 20)).sum(), rel_tol=1e-5)
    assert sensitivity.sensitivity(net, lambda m: m.config.wiring, "pair") == ["pair:0,1", "pair:1,2"]
    with pytest.raises(InputError, match="not parallel and ladder"):
        sensitivity.alone(dataclasses.replace(BASE, wiring="parallel"), "ladder", 0)


@pytest.mark.parametrize("ranks, wiring", [(1, "ladder"), (3, "delayed")])
def test_the_table_of_layers_is_that_of_the_ranks_it_runs_on(ranks, wiring, tiny, tmp_path, capsys):
    """Layer by layer what a run with this layer alone gives, from unequal heads."""
    (tmp_path / "text").write_text(TEXT)
    flags = ["--checkpoint", tiny, "--text", tmp_path / "text", "--window", "32"]
    line, stderr = evaluated(capsys, *flags, "--sensitivity", "--wiring", wiring, ranks=ranks)
    layers, nats = line["sensitivity"], line["nats_per_token"]
    assert (line["wiring"], line["sensitivity_wiring"], line["tp"]) == ("standard", wiring, ranks)
    names = [wiring_name(*parse_wiring(wiring)._replace(parameter=(i,))) for i in range(BASE.n_layers)]
    alone = [evaluated(capsys, *flags, "--wiring", name, ranks=ranks)[0]["nats_per_token"] for name in names]
    assert layers == pytest.approx(alone, rel=1e-6) and min(abs(one - nats) for one in layers) > 1e-4
    rows = [row.split() for row in stderr.splitlines() if row.split()[0] in ("none", *map(str, range(len(layers))))]
    order = sorted(range(BASE.n_layers), key=lambda i: layers[i])
    expected = [[str(i), f"{layers[i]:.4f}", f"{layers[i] - nats:+.4f}"] for i in order]
    assert rows == [["none", f"{nats:.4f}"], *expected]
