"""Change a Python file in one place, run the tests that cover it, and repeat: which changes does no test notice?

python tests/mutate.py tp.py tests/test_tp.py -k plan  # FILE, then pytest's arguments; until Ctrl-C

Swaps operators and comparisons, changes numbers and negates conditions, in a copy of the project.
"""

import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAIRS = "Add Sub, Mult Div, FloorDiv Mult, Mod FloorDiv, And Or, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn"
PAIRS = [[getattr(ast, name) for name in pair.split()] for pair in PAIRS.split(", ")]
SWAPS = {b: a for a, b in PAIRS} | dict(PAIRS)


def mutations(tree):
    """Yield (node, field, its new value) for every change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            yield node, "op", SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare):
            yield node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, "value", not node.value if isinstance(node.value, bool) else node.value + 1
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node, "test", ast.UnaryOp(ast.Not(), node.test)


def passes(folder, tests, seconds):
    """Return whether the tests pass within so many seconds; the processes that they started end with them."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # else two changes within a second may look alike
    process = subprocess.Popen(pytest, cwd=folder, env=env, stdout=subprocess.DEVNULL, process_group=0)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:  # and at a Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main(file, *tests):
    tree = ast.parse((ROOT / file).read_bytes())
    with tempfile.TemporaryDirectory() as parent:
        copy, start = Path(parent, "copy"), time.monotonic()
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "checkpoints"))
        if not passes(copy, tests, 3600):
            sys.exit("the tests fail without any change")
        limit = 30 + 4 * (time.monotonic() - start)
        for node, field, value in sorted(mutations(tree), key=lambda _: random.random()):
            old, before = getattr(node, field), ast.unparse(node).split("\n")[0]
            setattr(node, field, value)
            (copy / file).write_text(ast.unparse(tree))
            after = ast.unparse(node).split("\n")[0]
            setattr(node, field, old)
            result = "SURVIVED" if passes(copy, tests, limit) else "noticed"
            print(f"{file}:{node.lineno}: {result}: {before} -> {after}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
