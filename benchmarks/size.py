"""How large the project is, as a table: make size."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import generate

ROOT = Path(__file__).parents[1]


def lines(paths):
    return sum(len(Path(ROOT, path).read_text().splitlines()) for path in paths)


def words(paths):
    return sum(len(Path(ROOT, path).read_text().split()) for path in paths)


def main():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = {name for name in listed if name.endswith((".py", ".cpp", ".sh"))}
    places = {place: {n for n in code if n.startswith(f"{place}/")} for place in ("extras", "benchmarks", "tests")}
    raw = [name for name in listed if "results/" in name]
    shown, hidden = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
        generate.main(["--checkpoint", str(ROOT / "demo"), "--prompt", "Once", "--max-new-tokens", "2"])
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            generate.main(["--help"])
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    own = {Path(f).relative_to(ROOT).as_posix() for f in files if f.startswith(f"{ROOT}/")} & code
    imported = {name for name in own - places["benchmarks"] if not name.endswith("__init__.py")}
    for what, size, unit in (
        ("the core", lines(code.difference(*places.values())), "lines"),
        ("model.py + tp.py + generate.py", lines(["model.py", "tp.py", "generate.py"]), "lines"),
        ("what a plain prompt imports", lines(imported), f"lines in {len(imported)} files"),
        *((place, lines(names), "lines") for place, names in places.items()),
        ("all that is no test", lines(code - places["tests"]), "lines"),
        ("pages", words(name for name in listed if name.endswith(".md") and name not in raw), "words"),
        ("README.md", words(["README.md"]), "words"),
        ("flags of generate.py", shown.getvalue().count("\n  --"), ""),
        (f"{len(raw)} raw result files", sum(Path(ROOT, name).stat().st_size for name in raw), "bytes"),
    ):
        print(f"{what:32} {size:9,} {unit}".rstrip())


if __name__ == "__main__":
    main()
