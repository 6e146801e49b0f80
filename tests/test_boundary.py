"""The core without the extras: in copies of the project that lack folders of extras/, it runs and passes its tests."""

import re
import shutil
import subprocess

import pytest
from cases import slow_case
from helpers import ROOT
from running import run_python

FOLDERS = sorted(path.parent.name for path in ROOT.glob("extras/*/__init__.py"))
DEMO = ["generate.py", "--checkpoint", "demo", "--prompt", "Once upon a time", "--max-new-tokens", "8"]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1", "--nproc_per_node=2"]
# Tests that start no ranks and compile nothing, 20 s
FILES = "test_model.py", "test_wiring.py", "test_tp.py", "text/test_tokenizer.py"
QUICK = f"({' or '.join(name.split('/')[-1] for name in FILES)}) and not (compiled or ranks or splits)"


def core_tests():
    """Return the test files that import, at their top, neither extras nor benchmarks nor a file of tests/ that does."""
    texts = {path: path.read_text() for path in ROOT.glob("tests/**/*.py") if path.stem != "test_boundary"}
    users = set()
    imports = "extras|benchmarks"
    while new := {n for n, text in texts.items() if re.search(rf"^(from|import) ({imports})\b", text, re.M)} - users:
        users = users | new
        imports = "|".join(path.stem for path in new)
    tests = sorted(path.relative_to(ROOT) for path in texts.keys() - users if path.stem.startswith("test_"))
    return [str(path) for path in tests]


@pytest.mark.parametrize("folder", [None, *(slow_case(name) for name in FOLDERS)])
def test_the_core_runs_without(folder, tmp_path):
    """Without the folder or, for None, without all of extras/."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    removed = f"extras/{folder}/" if folder else "extras/"
    for name in names:
        if (ROOT / name).is_file() and not name.startswith(removed):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)

    def run(*command):
        return run_python(*command, cwd=tmp_path)

    alone = run(*DEMO)
    ranks = run(*TWO_RANKS, *DEMO)
    assert (alone.returncode, ranks.returncode) == (0, 0), alone.stderr + ranks.stderr
    assert alone.stdout.startswith("Once upon a time,") and ranks.stdout.startswith("Once upon a time,")
    assert {f"tests/{name}" for name in FILES} <= {*core_tests()}
    # Only the copy without any extras runs tests: it lacks what each of the others lacks.
    which = ["-k", QUICK] if folder is None else ["--collect-only"]
    tests = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *core_tests(), *which)
    assert tests.returncode == 0, tests.stdout
