"""Write a corpus that every machine has: the Python files of the standard library and of PyTorch, a document each.

python -m extras.research.corpus --out corpus  # train.txt, retrain.txt, valid.txt and test.txt
"""

import hashlib
import sysconfig
from pathlib import Path

import torch

from evaluation.score import SEPARATOR
from runtime import cli, launch, writing

PARTS = "train", "retrain", "valid", "test"
ROOTS = {"python": Path(sysconfig.get_path("stdlib")), "torch": Path(torch.__file__).parent}


def digest(name):
    return hashlib.sha256(name.encode()).digest()


def part_of(name):
    """Return the part of a file "python/..." or "torch/...", by its hash: one in 20 is held out, four are retrain."""
    drawn = digest(name)[0] % 20
    if drawn == 0:
        return "test" if name.startswith("torch/") else "valid"
    return "retrain" if drawn < 5 else "train"


def documents(roots):
    """Return {"python/..." or "torch/...": text} in the order of their hashes, without site-packages."""
    texts = {}
    for source, root in roots.items():
        for path in root.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            text = path.read_bytes().decode(errors="ignore").strip()  # some test other encodings
            if text and "site-packages/" not in name:
                texts[f"{source}/{name}"] = text
    return {name: texts[name] for name in sorted(texts, key=digest)}


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("--out", required=True, metavar="DIR", help="the new folder for its parts")
    args, texts = p.parse_args(argv), documents(ROOTS)
    with writing.new_folder(args.out) as folder:
        for part in PARTS:
            text = f"\n{SEPARATOR}\n".join(text for name, text in texts.items() if part_of(name) == part)
            (folder / f"{part}.txt").write_text(text)
            print(f"{part}.txt: {len(text):,} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    launch.run(main)
