"""How large the project is, and whether it has grown: make size.

benchmarks/size.json holds the numbers that were last agreed on. Where one has grown, the exit code is 1: look first
for what the new thing makes superfluous. `python -m benchmarks.size --agree` writes today's numbers; numbers that grow
are a commit of their own, which gives the reason.
"""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import generate

ROOT = Path(__file__).parents[1]
AGREED = ROOT / "benchmarks" / "size.json"


def count(paths, split=str.splitlines):
    return sum(len(split(Path(ROOT, path).read_text())) for path in paths)


def sizes():
    """Return {what: number}."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    code = {name for name in listed if name.endswith((".py", ".cpp", ".h", ".sh"))}
    places = {place: {n for n in code if n.startswith(f"{place}/")} for place in ("extras", "benchmarks", "tests")}
    shown = subprocess.check_output([sys.executable, "generate.py", "--help"], cwd=ROOT, text=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        generate.main(["--checkpoint", str(ROOT / "demo"), "--prompt", "Once", "--max-new-tokens", "2"])
    files = {Path(getattr(module, "__file__", None) or "/") for module in [*sys.modules.values()]}
    own = {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)} & code
    imported = {name for name in own - places["benchmarks"] if not name.endswith("__init__.py")}
    return {
        "lines of model.py, tp.py and generate.py": count(["model.py", "tp.py", "generate.py"]),
        "lines of the core": count(code.difference(*places.values())),
        "lines that a plain prompt imports": count(imported),
        "files that a plain prompt imports": len(imported),
        "lines of extras": count(places["extras"]),
        "lines of benchmarks": count(places["benchmarks"]),
        "lines that are no test": count(code - places["tests"]),
        "lines of tests": count(places["tests"]),
        "flags of generate.py": shown.count("\n  --"),
    }


def main():
    now, agreed = sizes(), json.loads(AGREED.read_text()) if AGREED.is_file() else {}
    if "--agree" in sys.argv:
        AGREED.write_text(json.dumps(now, indent=2) + "\n")
    for what, number in now.items():
        print(f"{what:42} {number:7,} {number - agreed.get(what, 0):+7,}")
    grown = [what for what, number in now.items() if number > agreed.get(what, 0)]
    if grown and "--agree" not in sys.argv:
        sys.exit(f"grown: {', '.join(grown)}. See benchmarks/size.py for what to do.")


if __name__ == "__main__":
    main()
