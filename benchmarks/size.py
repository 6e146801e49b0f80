"""How large the project is, as a table: make size."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import generate

ROOT = Path(__file__).parents[1]


def count(paths, split=str.splitlines):
    return sum(len(split(Path(ROOT, path).read_text())) for path in paths)


def main():
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    code = {name for name in listed if name.endswith((".py", ".cpp", ".h", ".sh"))}
    places = {place: {n for n in code if n.startswith(f"{place}/")} for place in ("extras", "benchmarks", "tests")}
    raw = [name for name in listed if "results/" in name]
    shown = subprocess.check_output([sys.executable, "generate.py", "--help"], cwd=ROOT, text=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        generate.main(["--checkpoint", str(ROOT / "demo"), "--prompt", "Once", "--max-new-tokens", "2"])
    files = {Path(getattr(module, "__file__", None) or "/") for module in [*sys.modules.values()]}
    own = {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)} & code
    imported = {name for name in own - places["benchmarks"] if not name.endswith("__init__.py")}
    for what, size, unit in (
        ("the core", count(code.difference(*places.values())), "lines"),
        ("model.py + tp.py + generate.py", count(["model.py", "tp.py", "generate.py"]), "lines"),
        ("what a plain prompt imports", count(imported), f"lines in {len(imported)} files"),
        *((place, count(names), "lines") for place, names in places.items()),
        ("all that is no test", count(code - places["tests"]), "lines"),
        ("pages", count([n for n in listed if n.endswith(".md") and n not in raw], str.split), "words"),
        ("README.md", count(["README.md"], str.split), "words"),
        ("flags of generate.py", shown.count("\n  --"), ""),
        (f"{len(raw)} raw result files", sum(Path(ROOT, name).stat().st_size for name in raw), "bytes"),
    ):
        print(f"{what:32} {size:9,} {unit}".rstrip())


if __name__ == "__main__":
    main()
