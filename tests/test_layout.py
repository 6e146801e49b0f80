"""The rooms: arrows between files go one way, importing does nothing, and the README's code is what is there."""

import ast
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

import model

# each may import those above it; what stands in one line may not import one another
ORDER = """
model kernels.int8_rows kernels.cuda_graphs kernels.group measure.spin
formats.config
kernels.int_linear kernels.gloo kernels.cpu kernels.cxx
kernels.few_rows kernels.shared_memory kernels.one_shot
kernels.int8_sums kernels.one_hop
runtime.writing runtime.watch formats.sizes
formats.checkpoint runtime.cli
formats.sources
formats.laneformer
formats.tokenizer runtime.launch tp formats.huggingface
formats.export formats.verify training.data training.sharding training.lanes
runtime.terminal measure.timing measure.clock measure.link decoding.likely
measure.report decoding.sampling
decoding.speculative runtime.chat
measure.exposed measure.preflight measure.results
measure.advise
generate measure.plot measure.probe
measure.score measure.sweep
training.runs
measure.harness quantize convert_hf_checkpoint adapt complete
eval training.affinity
""".strip().splitlines()
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for room in (".", "runtime", "decoding", "kernels", "formats", "measure", "benchmarks", "training")
    for path in (ROOT / room).glob("*.py")
    if path.name != "__init__.py"
}


def imported(path):
    """The names of the project's modules that a file imports, at its top or later."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down(name):
    if name.startswith("benchmarks."):
        assert not [other for other in FILES if name in imported(FILES[other]) and not other.startswith("benchmarks.")]
        return
    assert name in LEVEL, f"{name} has no place in ORDER"
    for other in imported(FILES[name]):
        assert LEVEL[other] < LEVEL[name], f"{name} imports {other}, which stands no lower"


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_edits_the_module_path(name):
    assert not re.search(r"sys\.path\b(?!_)", FILES[name].read_text())


def test_importing_everything_does_nothing():
    # all but those whose libraries not everyone has
    names = ", ".join(sorted(FILES.keys() - {"measure.harness", "measure.spin", "kernels.int8_rows"}))
    source = f"""
import os, sys, torch
before = dict(os.environ), list(sys.path), torch.get_default_dtype(), torch.get_num_threads()
import {names}
assert before == (dict(os.environ), list(sys.path), torch.get_default_dtype(), torch.get_num_threads())
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
assert not ({{"matplotlib", "transformers", "pytest", "lm_eval"}} & sys.modules.keys()), "imported for nothing"
"""
    # torch's compiler puts such a variable there when it is imported, also in the process of other tests
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_shows_the_loop_that_is_there():
    loop, *_ = readme_blocks()
    assert "".join(f"    {line}\n" for line in loop.splitlines()) in (ROOT / "model.py").read_text()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_readmes_example_runs():
    done = subprocess.run([sys.executable, "-c", readme_blocks()[-1]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time") and len(done.stdout) > 100


def test_the_readmes_wiring_is_one(monkeypatch):
    monkeypatch.setattr(model, "WIRINGS", dict(model.WIRINGS))
    exec(readme_blocks()[1], vars(model).copy())
    assert "parallel-delayed" in model.WIRINGS
