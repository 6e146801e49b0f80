"""The rooms: arrows between files go one way, importing does nothing, and the README's code is what is there."""

import ast
import dataclasses
import graphlib
import inspect
import os
import re

import pytest
from configs import BASE, variants
from helpers import ROOT
from running import run_python

import model

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for pattern in ("*.py", "ladder/**/*.py", "extras/*/*.py", "benchmarks/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "__init__.py"
}
# adapt.py and serve.py start what lies in extras/
CORE = {name for name in FILES if not name.startswith(("extras.", "benchmarks.")) and name not in ("adapt", "serve")}

# These import, inside of functions, what extends them: layers and wirings; a chat and drafts; formats of tokenizers.
EXTENDED = "model", "ladder.config_check", "generate", "ladder.text.tokenizer"


def imported(path, anywhere=True):
    """Return the names of the modules that a file imports: anywhere in it, or only at its top."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_core_names_no_extras(name):
    assert not [other for other in imported(FILES[name]) if other.startswith(("extras", "benchmarks"))]
    assert not re.search(r"\bextras\b", FILES[name].read_text())  # nor does a string, such as a hint to a user


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.startswith("ladder.")))
def test_the_package_imports_no_scripts_but_three(name):
    scripts = {other for other in FILES if "." not in other} - {"model", "tp", "generate"}
    assert not imported(FILES[name]) & scripts


def test_no_imports_go_in_circles():
    """Nor those inside of functions, but for EXTENDED."""
    imports = {name: imported(path, anywhere=name not in EXTENDED) for name, path in FILES.items()}
    graph = {name: names & FILES.keys() for name, names in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_edits_the_module_path(name):
    assert not re.search(r"sys\.path\b(?!_)", FILES[name].read_text())


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/**/*.py")), ids=lambda path: path.name)
def test_no_tests_import_other_tests(path):
    """What several need lies in a module that says what it is for."""
    assert not [name for name in imported(path) if name and name.split(".")[0].startswith("test_")]


def test_importing_everything_does_nothing():
    # all but those whose libraries not everyone has
    names = ", ".join(
        sorted(FILES.keys() - {"extras.measure.spin", "ladder.kernels.gpu.int8_rows", "extras.serve.server"})
    )
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
    done = run_python("-c", source, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


COMPUTING = [name for name in FILES if "." not in name and name not in ("model", "tp")] + [
    f"extras.{name}" for name in ("export", "export.verify", "measure.advise", "measure.probe", "measure.sweep")
]


@pytest.mark.parametrize("name", sorted([*COMPUTING, "benchmarks.decode"]))
def test_openmp_is_told_to_spin_briefly_before_torch_loads(name, tmp_path):
    """A file in place of torch says what torch would read, and ends the process."""
    source = 'import os\nos.write(1, os.environ.get("GOMP_SPINCOUNT", "unset").encode())\nos._exit(0)\n'
    (tmp_path / "torch.py").write_text(source)
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment["PYTHONPATH"] = str(tmp_path)
    done = run_python("-m", name, env=environment)
    assert done.stdout == "1000", done.stderr


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_shows_the_loop_that_is_there():
    """Without what is there for the compiler, pin and newer, and for chunks, yield."""
    source = inspect.getsource(model.residual_loop).replace(", newer=in_flight", "")
    lines = [line for line in source.splitlines() if not re.search(r"comm\.pin|if in_flight|yield", line)]
    loop, *_ = readme_blocks()
    assert "".join(f"    {line}\n" for line in loop.splitlines()) in "\n".join([*lines, ""])


PAGES = [path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "extras/*/*.md") for path in ROOT.glob(pattern)]


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in sorted(PAGES)])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_each_line_of_what_surrounds_a_run_has_a_test():
    page = (ROOT / "docs/reliability.md").read_text()
    [table] = re.findall(r"\n\| assumption .*?\n\n", page, re.DOTALL)
    for line in table.strip().splitlines()[2:]:
        named = re.findall(r"`(\w+)::(\w+)`", line)
        assert named or line.endswith(" | | |"), line
        for file, words in named:
            [path] = ROOT.glob(f"tests/**/test_{file}.py")
            assert len(re.findall(rf"^def test_\w*{words}", path.read_text(), re.MULTILINE)) == 1, (file, words)


def test_the_readmes_example_runs():
    done = run_python("-c", readme_blocks()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time") and len(done.stdout) > 100


def test_the_readmes_wiring_is_one(monkeypatch):
    monkeypatch.setitem(model.WIRINGS, "triple-ladder", None)  # and without it afterwards
    exec(readme_blocks()[1], vars(model).copy())
    assert [dataclasses.replace(BASE, **changes) for changes in variants("triple-ladder")]  # as other tests take it
    config = dataclasses.replace(BASE, n_layers=4, wiring="triple-ladder")  # the last three of them
    assert [len(h.args[1]) for h, _ in model.list_sublayers(config, [None] * 4)] == [1, 1, 3, 3]
