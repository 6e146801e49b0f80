"""Write a corpus that every machine has: the Python files of the standard library and of PyTorch, one document each.

python -m extras.research.corpus --out corpus  # train.jsonl, retrain.jsonl, valid.jsonl and test.txt
"""

import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import torch

from evaluation.score import SEPARATOR
from runtime import cli, launch, writing
from runtime.errors import InputError

PARTS = "train", "retrain", "valid"
FILES = *(f"{part}.jsonl" for part in PARTS), "test.txt"


def documents(root):
    """Yield (path below root, text) of the Python files there, in the order of their paths, without site-packages."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:  # a test of other encodings
            continue
        if text.strip() and "site-packages/" not in name:
            yield name, text


def part_of(name):
    """Return the part that a document belongs to, by the hash of its name: one in 20 is valid, four are retrain."""
    drawn = hashlib.sha256(name.encode()).digest()[0] % 20
    return "valid" if drawn == 0 else "retrain" if drawn < 5 else "train"


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("--out", required=True, metavar="DIR", help="the new folder for its parts")
    p.add_argument("--python", type=Path, default=sysconfig.get_path("stdlib"), metavar="DIR", help="default: its own")
    p.add_argument("--torch", type=Path, default=Path(torch.__file__).parent, metavar="DIR", help="default: its own")
    args = p.parse_args(argv)
    parts = {part: [] for part in PARTS}
    for source in "python", "torch":
        root = getattr(args, source)
        files = [(f"{source}/{name}", text) for name, text in documents(root)]
        if not files:
            raise InputError(f"--{source} {root}: no Python files there")
        for name, text in files:
            parts[part_of(name)].append((name, text))
    texts = ["".join(json.dumps({"text": text}) + "\n" for _, text in part) for part in parts.values()]
    held_out = sorted(parts["valid"], key=lambda document: hashlib.sha256(document[0].encode()).digest())
    test = [text for name, text in held_out if name.startswith("torch/")]  # the first of valid.jsonl are Python's own
    with writing.new_folder(args.out) as folder:
        for name, text in zip(FILES, [*texts, f"\n{SEPARATOR}\n".join(test)], strict=True):
            writing.write_text(Path(folder) / name, text)
            print(f"{name}: {len(text):,} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()}")
    print(f"of Python {platform.python_version()} and torch {torch.__version__}")


if __name__ == "__main__":
    launch.run(main)
