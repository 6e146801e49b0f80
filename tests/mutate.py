"""Change a Python file in one place, run the tests that cover it, and repeat: which changes does no test notice?

python tests/mutate.py tp.py tests/test_tp.py -k plan -n 20 --seed 1
Swaps operators and comparisons, changes numbers, negates conditions and deletes statements; the seed chooses where.
All other arguments go to pytest. Works in a temporary copy, prints the changes that survive, exits with 1 if any do.
"""

import argparse
import ast
import copy
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
PAIRS = [pair.split() for pair in PAIRS.split(", ")]
SWAPS = {a: getattr(ast, b) for b, a in PAIRS} | {a: getattr(ast, b) for a, b in PAIRS}
SKIPPED = "annotation", "returns", "decorator_list"  # fields of a node in which nothing is changed


def changed(node):
    """Return the source that replaces a node, or None where nothing is to be changed."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op).__name__ in SWAPS:
        other.op = SWAPS[type(node.op).__name__]()
    elif isinstance(node, ast.Compare):
        other.ops[0] = SWAPS[type(node.ops[0]).__name__]()
    elif isinstance(node, ast.UnaryOp):
        other = other.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        other.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        return "pass" if call or isinstance(node, ast.Assign | ast.AugAssign | ast.Raise | ast.Break) else None
    return ast.unparse(other) if isinstance(other, ast.Constant) else f"({ast.unparse(other)})"


def mutations(source):
    """Return [(node, its new source)] for every change of the file."""
    result, todo = [], [ast.parse(source)]
    while todo:
        node = todo.pop()
        result += [(node, text) for text in [changed(node)] if text]
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            result.append((node.test, f"(not ({ast.unparse(node.test)}))"))
        fields = [] if isinstance(node, ast.JoinedStr) else ast.iter_fields(node)  # an f-string's have no positions
        for values in [value if isinstance(value, list) else [value] for name, value in fields if name not in SKIPPED]:
            todo += [child for child in values if isinstance(child, ast.AST)]
    return result


def passes(tree, command, limit):
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
    for flag, default, words in ("-n", 20, "how many changes"), ("--seed", 0, "which ones"):
        p.add_argument(flag, type=int, default=default, help=words)
    args, tests = p.parse_known_args()
    command, survivors = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], 0
    source = (ROOT / args.file).read_bytes()
    lines, places = source.splitlines(keepends=True), mutations(source)
    chosen = random.Random(args.seed).sample(places, min(args.n, len(places)))
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "checkpoints"))
        start = time.monotonic()
        if not passes(tree, command, None):
            sys.exit("the tests fail without any change")
        limit = 30 + 4 * (time.monotonic() - start)  # seconds
        for node, text in sorted(chosen, key=lambda place: place[0].lineno):
            first, last = node.lineno - 1, node.end_lineno - 1
            new = lines[first][: node.col_offset] + text.encode() + lines[last][node.end_col_offset :]  # count bytes
            (tree / args.file).write_bytes(b"".join([*lines[:first], new, *lines[last + 1 :]]))
            survivors += (survived := passes(tree, command, limit))
            print(f"{args.file}:{node.lineno}: {'SURVIVED' if survived else 'noticed'}", flush=True)
            if survived:
                print(f"{b''.join(lines[first : last + 1]).decode()}  now\n{new.decode()}", end="", flush=True)
    sys.exit(f"{survivors} of {len(chosen)} changes survived; {len(places)} are possible" if survivors else 0)


if __name__ == "__main__":
    main()
