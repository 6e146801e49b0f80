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


def main():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = [name for name in listed if name.endswith((".py", ".cpp", ".sh"))]
    places = {
        place: [name for name in code if name.startswith(f"{place}/")] for place in ("extras", "benchmarks", "tests")
    }
    core = {*code}.difference(*places.values())
    pages = [ROOT / name for name in listed if name.endswith(".md") and "results/" not in name]
    shown = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        generate.main(["--checkpoint", str(ROOT / "demo"), "--prompt", "Once", "--max-new-tokens", "2"])
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            generate.main(["--help"])
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    imported = [f for f in files if f.startswith(f"{ROOT}/") and "/.venv/" not in f and f != __file__]
    count = sum(not f.endswith("__init__.py") for f in imported)
    flags = sum(line.startswith("  --") for line in shown.getvalue().splitlines())
    print(f"the core                         {lines(core):6,} lines")
    print(f"model.py + tp.py + generate.py   {lines(['model.py', 'tp.py', 'generate.py']):6,} lines")
    print(f"what a plain prompt imports      {lines(imported):6,} lines in {count} files")
    for place, names in places.items():
        print(f"{place:32} {lines(names):6,} lines")
    print(f"all that is no test              {lines({*code} - {*places['tests']}):6,} lines")
    print(f"pages                            {sum(len(page.read_text().split()) for page in pages):6,} words")
    print(f"README.md                        {len((ROOT / 'README.md').read_text().split()):6,} words")
    print(f"flags of generate.py             {flags:6}")
    raw = [ROOT / name for name in listed if "results/" in name]
    print(f"raw result files                 {len(raw):6} of {sum(path.stat().st_size for path in raw):,} bytes")


if __name__ == "__main__":
    main()
