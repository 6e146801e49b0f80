"""How large the project is, the core and the extras apart: make size."""

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
    tests = [name for name in code if name.startswith("tests/")]
    pages = [name for name in listed if name.endswith(".md") and "results/" not in name]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        generate.main(["--checkpoint", str(ROOT / "demo"), "--prompt", "Once", "--max-new-tokens", "2"])
        shown = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            generate.main(["--help"])
    flags = sum(line.startswith("  --") for line in shown.getvalue().splitlines())
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    imported = [f for f in files if f.startswith(f"{ROOT}/") and "/.venv/" not in f and f != __file__]
    rooms = [f for f in imported if f.endswith("__init__.py")]
    core = [name for name in code if not name.startswith(("extras/", "benchmarks/", "tests/"))]
    readme, raw = (ROOT / "README.md").read_text(), [name for name in listed if "results/" in name]
    print(f"the core, kernels included       {lines(core):6,} lines")
    print(f"model.py + tp.py + generate.py   {lines(['model.py', 'tp.py', 'generate.py']):6,} lines")
    print(f"what a plain prompt imports      {lines(imported):6,} lines in {len(imported) - len(rooms)} files")
    print(f"extras                           {lines([name for name in code if name.startswith('extras/')]):6,} lines")
    print(f"all that is no test              {lines({*code} - {*tests}):6,} lines")
    print(f"tests                            {lines(tests):6,} lines")
    print(f"pages                            {sum(len((ROOT / p).read_text().split()) for p in pages):6,} words")
    print(f"README.md                        {len(readme.splitlines()):6,} lines, {len(readme.split())} words")
    print(f"flags of generate.py             {flags:6}")
    print(f"raw result files                 {len(raw):6} of {sum((ROOT / p).stat().st_size for p in raw):,} bytes")


if __name__ == "__main__":
    main()
