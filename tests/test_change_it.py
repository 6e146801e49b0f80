"""docs/change-it.md: each of its changes, made in a copy of the project as it stands on the page, takes effect."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT
from running import HANGS

PAGE = (ROOT / "docs/change-it.md").read_text()
HEAD, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
USUAL = re.search(r"```bash\n(.*?)\n```", HEAD, re.DOTALL).group(1)
BLOCK = re.compile(r"```(diff|new|bash|python)(?: (\S+))?\n(.*?)```", re.DOTALL)
PARTS = "model.py", "tp.py", "generate.py", "complete.py", "convert_hf_checkpoint.py", "quantize.py", "ladder", "demo"


def edited(source, diff):
    """The source with a diff's lines put in; all others of its lines must be there once, in this order."""
    lines = diff.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -" and line or line == "")
    after = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +" and line or line == "")
    assert source.count(before) == 1, diff
    return source.replace(before, after)


def run(folder, words, **environment):
    """The standard output of a command in a copy of the project, and what it said on stderr."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def unedited():
    """What the demo writes without any change."""
    return run(ROOT, ["bash", "-c", USUAL])[0]


def common(a, b):
    """How many characters are alike."""
    return len(os.path.commonprefix([a, b]))


def apply(section, folder):
    """Copy the project into a folder, and make there the changes of a section; return its blocks of code."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    (folder / "checkpoints").mkdir()
    blocks = BLOCK.findall(section)
    for kind, name, text in blocks:
        path = folder / name
        if kind == "diff":
            path.write_text(edited(path.read_text(), text))
        if kind == "new":
            assert len(text.splitlines()) <= 60
            path.write_text(text)
    return blocks


FAST = "4. ", "6. "  # the others take as long, and run with the longer tests


@pytest.mark.parametrize("section", [
    pytest.param(section, id=section.splitlines()[0], marks=[] if section.startswith(FAST) else pytest.mark.slow)
    for section in SECTIONS
])  # fmt: skip
def test_a_change_takes_effect_as_it_stands_on_the_page(section, unedited, tmp_path):
    blocks = apply(section, tmp_path)
    commands = [[sys.executable, "-c", text] for kind, _, text in blocks if kind == "python"]
    commands += [["bash", "-ec", text] for kind, _, text in blocks if kind == "bash"]
    for command in commands or [["bash", "-c", USUAL]]:
        printed, said = run(tmp_path, command)
        if not printed or "convert" in command[-1]:  # it only wrote a checkpoint
            continue
        plain, _ = run(tmp_path, command, LADDER_PLAIN="1")
        if section.startswith(("6. ", "7. ")):  # these only look
            assert len(printed.splitlines()) == len(plain.splitlines()) > 1
        else:  # rounding may change what comes later
            assert printed != unedited and common(printed, plain) > common(printed, unedited) + 3, said
    expected = re.search(r"print\(.*?\).*?: (\d+)$", section, re.MULTILINE)
    assert not expected or printed.splitlines()[-1] == expected.group(1)


PEER = """
import torch, transformers
from ladder.checkpoints import checkpoint
from tp import load_shard

theirs = transformers.AutoModelForCausalLM.from_pretrained("checkpoints/arcee-hf", dtype=torch.float32)
tokens = torch.arange(40).view(2, 20)
for name, most in ("arcee", 1e-4), ("arcee-int8", 0.1):
    folder = f"checkpoints/{name}"
    config = checkpoint.read_config(folder)
    model = load_shard(config, checkpoint.Weights(folder), torch.float32, "cpu")
    with torch.no_grad():
        exact = theirs(tokens).logits
        assert (model(tokens) - exact).norm() < most * exact.norm(), name
"""


@pytest.mark.slow
def test_the_family_of_the_page_computes_what_transformers_does(tmp_path):
    """In floats, in int8, and on one rank and two."""
    pytest.importorskip("transformers")
    section = next(section for section in SECTIONS if section.startswith("12. "))
    blocks = apply(section, tmp_path)
    run(tmp_path, [sys.executable, "-c", next(text for kind, _, text in blocks if kind == "python")])
    bash = [text for kind, _, text in blocks if kind == "bash"]
    run(tmp_path, ["bash", "-ec", bash[0]])
    run(
        tmp_path,
        [
            "python",
            "quantize.py",
            "--checkpoint",
            "checkpoints/arcee",
            "--mode",
            "int8",
            "--out",
            "checkpoints/arcee-int8",
        ],
    )
    run(tmp_path, [sys.executable, "-c", PEER])
    for name in "arcee", "arcee-int8":
        two = bash[1].strip().replace("checkpoints/arcee", f"checkpoints/{name}") + " --dtype float32"
        one = "python generate.py" + two.partition("generate.py")[2]
        assert run(tmp_path, ["bash", "-ec", two])[0] == run(tmp_path, ["bash", "-ec", one])[0], name
