"""extras/research: the corpus, the trainings and their tables."""

import hashlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval as evaluate
from extras.measure import results
from extras.research import quality
from extras.training import adapt


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """Two folders of Python files; returns {name: text} of those that belong to the corpus."""
    monkeypatch.setattr(quality, "ROOTS", {source: tmp_path / source for source in ("python", "torch")})
    (tmp_path / "python/site-packages").mkdir(parents=True)
    (tmp_path / "torch").mkdir()
    texts = {
        f"{source}/{i}.py": f"def {source}{i}(x):\n    return x + {i}" for source in quality.ROOTS for i in range(30)
    }
    for name, text in {**texts, "python/empty.py": "\n", "python/site-packages/a.py": "a = 1\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "python" / "0.py").write_bytes(texts["python/0.py"].encode() + b"\xe9\n")
    return texts


def test_a_corpus_has_each_file_once_and_is_split_by_name(roots, tmp_path):
    digests, parts = quality.write_corpus(tmp_path), {}
    for part in "train", "retrain", "valid", "test":
        text = (tmp_path / f"{part}.txt").read_text()
        parts[part] = text.split("\n<|endoftext|>\n")
        assert hashlib.sha256(text.encode()).hexdigest() == digests[f"{part}.txt"]
        assert all(text in parts[part] for name, text in roots.items() if quality.part_of(name) == part)
    assert sorted(sum(parts.values(), [])) == sorted(roots.values()) and all(parts.values())
    assert all(text.startswith("def torch") for text in parts["test"]) and "def torch" not in "".join(parts["valid"])


def test_a_plan_of_trainings_goes_on_and_its_tables_are_those_of_its_lines(roots, tmp_path, monkeypatch, capsys):
    ran = []

    def called(command, env, **_):
        """What adapt.py and eval.py leave, with losses that wiring and seed decide."""
        script, flags = command[1], command[2:]
        args = {"adapt.py": adapt, "eval.py": evaluate}[script].parse(flags)
        assert env["OMP_NUM_THREADS"] == "1" and Path(args.checkpoint).is_dir()
        if script == "eval.py":
            nats = 5 + len(args.wiring) if args.wiring else float((Path(args.checkpoint) / "nats").read_text())
            write(Path(args.json), {"nats_per_token": nats})
        else:
            if len(ran) == 4:
                raise KeyboardInterrupt
            ran.append(args)
            (out := Path(args.out)).mkdir()
            (out / "nats").write_text(f"{2.5 + len(args.wiring) / 100 + args.seed / 10}")
            Path(f"{out}.jsonl").touch()  # as an eval.py does that is killed
            steps = [{"step": i, "tokens": 2048 * i, "tokens_per_s": 7} for i in (1, 2)]
            write(out / "log.jsonl", {"step": 0, "tokens": 0, "valid": 9}, *steps, {**steps[1], "valid": args.lr})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(quality, "subprocess", SimpleNamespace(run=called))
    path, how = tmp_path / "quality.jsonl", ["--train", str(tmp_path), "--steps", "200"]
    with pytest.raises(KeyboardInterrupt):
        quality.main(how)
    assert len(results.read(path, "run")) == 4
    with open(path, "a") as f:
        f.write('{"run": "cut o')
    ran.append(None)
    quality.main(how)
    lines = results.read(path, "run")
    assert len({line["run"] for line in lines}) == len(lines) == len(ran) - 1
    assert {line["steps"] for line in lines if line["kind"] == "retrained"} == {2, 10, 40, 200}
    assert not any(args.plain or args.distill for args in ran if args)
    assert len([args for args in ran if args and args.fresh]) == 16
    write(path, *lines)
    capsys.readouterr()
    quality.main(["--show", str(path)])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()]
    [ladder] = [row for row in rows if row[0] == "| ladder"]
    assert ladder[1:4] == ["16", "2.610 (2.560-2.660), -0.8%", "11.000, -15.4%"]
