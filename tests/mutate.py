"""Change a Python file in one place, run the tests that cover it, and repeat: which changes does no test notice?

python tests/mutate.py tp.py tests/test_tp.py -k plan -n 20 --seed 1
Swaps operators and comparisons, changes numbers, negates conditions and deletes statements; the seed chooses where.
All other arguments go to pytest. Works in a temporary copy, prints the changes that survive, exits with 1 if any do.
"""

import argparse
import ast
import difflib
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
DELETED = ast.Assign | ast.AugAssign | ast.Raise | ast.Break | ast.Expr


def mutations(tree):
    """Yield (node, field, its new value) for every change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            yield node, "op", SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare):
            yield node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.UnaryOp):
            yield node, "operand", ast.UnaryOp(ast.Not(), node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield node, "value", not node.value if isinstance(node.value, bool) else node.value + 1
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node, "test", ast.UnaryOp(ast.Not(), node.test)
        for field, block in ast.iter_fields(node):
            for i, statement in enumerate(block if isinstance(block, list) else []):
                if isinstance(statement, DELETED) and not isinstance(getattr(statement, "value", None), ast.Constant):
                    yield node, field, [*block[:i], ast.Pass(), *block[i + 1 :]]


def passes(tree, command, limit=None):
    """Return whether the tests pass within so many seconds; the processes that they started end with them."""
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    how["env"] = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # else two changes within a second may look alike
    tests = subprocess.Popen([sys.executable, *command], cwd=tree, **how)
    try:
        return tests.wait(limit) == 0
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        return False


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", help="the file to change, from the root of the project")
    p.add_argument("-n", type=int, default=20, help="how many changes")
    p.add_argument("--seed", type=int, default=0, help="which ones")
    args, tests = p.parse_known_args()
    command, survivors = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], 0
    tree = ast.parse((ROOT / args.file).read_bytes())
    before, places = ast.unparse(tree), [*mutations(tree)]
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "checkpoints"))
        start = time.monotonic()
        if not passes(copy, command):
            sys.exit("the tests fail without any change")
        limit = 30 + 4 * (time.monotonic() - start)  # seconds
        for node, field, value in random.Random(args.seed).sample(places, min(args.n, len(places))):
            old = getattr(node, field)
            setattr(node, field, value)
            after = ast.unparse(tree)
            setattr(node, field, old)
            (copy / args.file).write_text(after)
            survivors += (survived := passes(copy, command, limit))
            changed = [*difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")][3:]
            print(f"{args.file}:{getattr(node, 'lineno', 1)}: {'SURVIVED' if survived else 'noticed'}")
            print(*(changed if survived else ()), sep="\n", end="", flush=True)
    sys.exit(f"{survivors} changes survived; {len(places)} are possible" if survivors else 0)


if __name__ == "__main__":
    main()
