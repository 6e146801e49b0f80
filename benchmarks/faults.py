"""Injects faults into runs of several ranks, one a run, and records how each of them ended.

python -m benchmarks.faults --json results/faults.jsonl                           # all of them
python -m benchmarks.faults --only decode,SIGKILL --ranks 2 --json FILE           # those whose name has all the words
python -m benchmarks.faults --list

The faults: a rank harms itself (benchmarks/victim.py) in each phase of a run; the launcher dies, or the terminal sends
a signal; the ranks are not started alike. Each runs in a temporary folder, with its name in the environment of all its
processes, by which they are found again.

A run is well ended, `wrong` is empty, if
- all its processes are gone within 10 s of the fault, or of --timeout where a rank only stalls, with an exit code that
  is not 0; and no process, port, shared memory or temporary file is left;
- of a rank that died or stalled exactly one line speaks, with the rank, the cause, the phase and the step; an exception
  prints one traceback before it, and nothing else any, but Python for Ctrl-C while it imports. At SIGTERM and Ctrl-C
  adapt.py saves first, and says that instead;
- of ranks that were not started alike a line names each difference, they end with exit code 2, and print no text.
"""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import quantize
from benchmarks.lines import command
from formats import checkpoint
from measure import report
from model import Config, InputError, Transformer
from runtime import cli, launch, writing
from training.data import train_tokenizer

ROOT = Path(__file__).parent.parent
SOON = 10  # seconds in which a run should end after a fault, or after the time limit of a stall
TIMEOUT = 4  # --timeout of the runs that stall, in seconds
HANGS = 45  # seconds after a fault until a run counts as hanging
STARTS = 150  # seconds until the fault should have happened
MOST = 20  # lines kept of a run
KEPT = 8000  # characters of stderr kept of one that did not end well
TORCHS = r"\[[EWF]\d{4} |[EWI]\d{4} |frame #\d|Exception raised from |<omitting "  # warnings, and frames behind them
PROGRESS = re.compile(r"^(loading|decoding|scoring|training): .*?(?=\w+\.py: |Traceback \(|$)", re.MULTILINE)
CHAINED = re.compile("During handling of the above|The above exception was the direct cause")
MARK = "LADDER_FAULT_RUN"

DEATHS = "SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV"
ERRORS = "exception", "no memory"
STALLS = "SIGSTOP", "hang"  # the whole process, or its main thread alone
OUTSIDE = "terminal SIGINT", "terminal SIGHUP", "launcher SIGKILL", "launcher SIGTERM"

GENERATE = (
    "generate",
    "--checkpoint",
    "{a}",
    "--prompt",
    "Once upon a time",
    "--max-new-tokens",
    "40",
    "--temperature=0",
)
CHAT = "generate", "--checkpoint", "{a}", "--interactive", "--max-new-tokens", "4"
ADAPT = (
    "adapt", "--text", "{text}", "--valid", "{text}", "--out", "{out}", "--dim", "32", "--n-layers", "2", "--n-heads",
    "4", "--n-kv-heads", "2", "--intermediate-size", "64", "--vocab-size", "300", "--seq-len", "32", "--steps", "30",
    "--batch", "6",
)  # fmt: skip
EVAL = "eval", "--checkpoint", "{a}", "--text", "{text}", "--window", "32", "--batch", "1"
PHASES = {  # (phase of victim.py, step): (the command, what a line should say of the phase)
    ("join", 1): (GENERATE, r"\bjoin|\bstart|\bmeet"),
    ("load", 3): (GENERATE, r"\bload|\bpreparation"),
    ("compile", 1): ((*GENERATE, "--compile"), r"\bcompil"),
    ("prefill", 1): (GENERATE, r"\bprefill"),
    ("decode", 7): (GENERATE, r"\bdecode step 7\b"),
    ("decode", 8): ((*GENERATE, "--compile"), r"\bdecode step 7\b"),  # compiling took the first call
    ("chat", 1): (CHAT, r"\buser|\bchat"),
    ("chat", 2): (CHAT, r"\buser|\bchat"),  # between two turns
    ("window", 3): (EVAL, r"\bscoring of batch 2\b"),
    ("step", 3): (ADAPT, r"\bstep 3\b"),
}
NOBODY_KNOWS = (
    "join",
    "compile",
)  # of a main thread that hangs: it may import or compile; nor of rank 0's user, who thinks
CAUSES = {
    **{name: rf"\bsignal {int(signal.Signals[name])}\b|{name}" for name in DEATHS},
    "exception": r"RuntimeError: something broke",
    "no memory": r"memory|allocate",
    **dict.fromkeys(STALLS, r"--timeout"),
}


def faults(sizes):
    """[{a fault}] on so many ranks: of rank 0 and the last in turn; beyond the first size only the commonest kinds."""
    found = []
    for size in sizes:
        kinds = DEATHS + ERRORS + STALLS + OUTSIDE if size == sizes[0] else ("SIGKILL", "exception", "SIGSTOP")
        for (i, (phase, step)), (j, kind) in itertools.product(enumerate(PHASES), enumerate(kinds)):
            first = kind in OUTSIDE or (i + j) % 2
            if kind != "hang" or (phase not in NOBODY_KNOWS and not (phase == "chat" and first)):
                rank = 0 if first else size - 1
                found.append({"phase": phase, "step": step, "kind": kind, "rank": rank, "ranks": size})
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that are not started alike

FILES = {"same.txt": "Once upon a time\n", "other.txt": "The dog ran to\n"}
UNLIKE = {  # name: (what only the last rank has: flags, environment or script; what the lines should say)
    "other weights": (["--checkpoint", "{b}"], "checkpoint"),
    "other shapes": (["--checkpoint", "{wide}"], "checkpoint|config"),
    "another tokenizer": (["--checkpoint", "{spoken}"], "tokenizer|checkpoint"),
    "--wiring": (["--wiring", "standard"], "wiring"),
    "--layers": (["--wiring", "ladder", "--layers", "1"], "layers"),
    "--prompt": (["--prompt", "The dog"], "prompt"),
    "number of prompts": (["--prompt", "Once upon a time", "--prompt", "The dog"], "prompt"),
    "--prompt-ids": (["--prompt-ids", "1,5,6"], "prompt"),
    "--prompt-length": (["--prompt-length", "5"], "prompt"),
    "--prompt @": (["--prompt", "@{files}/other.txt"], "prompt"),
    "--batch": (["--batch", "2"], "--batch"),
    "--max-new-tokens": (["--max-new-tokens", "9"], "--max-new-tokens"),
    "--seed": (["--seed", "2"], "--seed 2.*--seed 1"),
    "--temperature": (["--temperature", "0.5"], r"--temperature 0\.5.*--temperature 1"),
    "--top-k": (["--top-k", "3"], "--top-k"),
    "--top-p": (["--top-p", "0.5"], "--top-p"),
    "--ignore-eos": (["--ignore-eos"], "--ignore-eos"),
    "--dtype": (["--dtype", "bfloat16"], "dtype"),
    "--compile": (["--compile"], "--compile"),
    "--compile-prefill": (["--compile-prefill"], "--compile-prefill"),
    "--prefill-chunk": (["--prefill-chunk", "3"], "--prefill-chunk"),
    "--quant": (["--checkpoint", "{int8}"], "quant|checkpoint"),
    "--device": (["--device", "cuda"], "device"),
    "--interactive": (["--interactive"], "--interactive|prompt"),
    "--chat": (["--chat"], "--chat|chat template"),
    "--link": (["--link", "pcie"], "--link"),
    "--exposed": (["--exposed"], "--exposed"),
    "--timeout": (["--timeout", "9"], "--timeout"),
    "WORLD_SIZE": ({"WORLD_SIZE": "3"}, r"WORLD_SIZE|ranks"),
    "RANK": ({"RANK": "1"}, "RANK"),  # of three ranks
    "another script": ("eval.py", "eval.py"),
    "another version of the code": ("{code}/generate.py", "code|version"),
    "another version of torch": ({"PYTHONPATH": "{torch}"}, "torch"),
}
ALL_UNLIKE = "each rank another --seed"


def alike(name):
    """[(flags, environment, script) of each rank] of a case of UNLIKE; {names} stand for the files of write_files."""
    own = ["--checkpoint", "{a}", "--max-new-tokens", "8", "--temperature", "1", "--seed", "1"]
    prompted = [*own, "--prompt", "Once upon a time"]
    if name == ALL_UNLIKE:
        return [([*prompted, "--seed", str(seed)], {}, "generate.py") for seed in (1, 2, 3)]
    if name == "--prompt @":
        own = prompted = [*own, "--prompt", "@{files}/same.txt"]
    change, _ = UNLIKE[name]
    first = prompted, {}, "generate.py"
    if isinstance(change, dict):
        return [first] * (1 + (name == "RANK")) + [(prompted, change, "generate.py")]
    if isinstance(change, str):
        flags = ["--checkpoint", "{a}", "--text", "{text}"] if change == "eval.py" else prompted
        return [first, (flags, {}, change)]
    base = own if any("prompt" in flag or flag == "--interactive" for flag in change) else prompted
    return [first, ([*base, *change], {}, "generate.py")]


NAMES = "a", "b", "wide", "spoken", "int8", "text", "out", "files", "code", "torch"


def write_files(folder):
    """What the runs take, in a folder; {name: path}."""
    paths = {name: folder / name for name in NAMES}
    text = "Once upon a time there was a little dog. The dog ran to the park. "
    paths["text"].write_text(text * 40)
    for name in "a", "b", "wide", "spoken":
        paths[name].mkdir()
        width = 64 if name == "wide" else 32
        config = Config(2, 4, 2, width // 4, width, 64, 300, 512, bos_id=1, eos_ids=(2,), wiring="ladder")
        generator = torch.Generator().manual_seed(int(name == "b"))
        state = {
            key: torch.rand(t.shape, generator=generator) - 0.5 for key, t in Transformer(config).state_dict().items()
        }
        checkpoint.write_model(paths[name], config, state, torch.float32)
        train_tokenizer([text + "Zebra! " * (name == "spoken")] * 30, 300, paths[name] / "tokenizer.model")
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        quantize.main(["--checkpoint", str(paths["a"]), "--mode", "int8", "--out", str(paths["int8"])])
    paths["files"].mkdir()
    for name, lines in FILES.items():
        (paths["files"] / name).write_text(lines)
    shutil.copytree(ROOT, paths["code"], ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "tests"))
    changed = paths["code"] / "tp.py"
    changed.write_text(changed.read_text() + "# a line more\n")
    paths["torch"].mkdir()
    (paths["torch"] / "sitecustomize.py").write_text(OTHER_TORCH)
    return paths


OTHER_TORCH = """
import importlib.metadata, torch
torch.__version__ = torch.version.__version__ = "2.0.1"
"""


# ---------------------------------------------------------------------------------------------------------------------
# Running one


def of_run(mark):
    """{pid: name} of the processes that live and have the mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():  # a zombie has none
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def has_listener(port):
    """Whether a local port is taken."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def wait_for_end(mark, since, limit):
    """Seconds until no process of a run was left, or None when that took longer than the limit."""
    while of_run(mark):
        if time.time() - since > limit:
            return None
        time.sleep(0.05)
    return time.time() - since


def end_all(mark):
    """Kill what is left of a run; {pid: name}."""
    left = of_run(mark)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return left


@contextlib.contextmanager
def surroundings(mark):
    """(an environment, a folder) for a run; yields also a list, to be filled with what the run leaves behind."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="ladder-faults-") as folder:
        folder = Path(folder)
        (folder / "tmp").mkdir()
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        environment = {
            **os.environ, MARK: mark, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        left = []
        yield environment, folder, left
        new = sorted(set(os.listdir("/dev/shm")) - before)
        left += [f"/dev/shm/{name}" for name in new if not name.startswith("sem.mp-")]  # which Python unlinks at once
        names = sorted(path.name for path in (folder / "tmp").iterdir())
        # the compiler's cache, and what g++ leaves where it is killed
        left += [name for name in names if not re.match(r"torchinductor_|cc\w{6}\.", name)]


def placeless(text):
    """A text without the paths of this machine."""
    return text.replace(str(ROOT), ".").replace(sys.base_prefix, "python")


def spoken(errors):
    """(lines of ours, [the exception of each traceback]) of what ranks printed on stderr.

    Without progress, torch's warnings and their frames. Of chained tracebacks the last counts.
    """
    lines, raised, inside = [], [], False
    for line in PROGRESS.sub("", errors.replace("\r", "\n")).splitlines():
        line = re.sub(r"^\[rank\d+\]: ?", "", line)  # torch's hook for exceptions
        if line.startswith("Traceback (most recent call last):"):
            inside = True
        elif CHAINED.match(line):
            raised.pop()
        elif inside and line[:1] in (" ", ""):  # its frames
            pass
        elif inside:  # the exception itself
            inside = False
            raised.append(line[:200])
        elif line.strip() and not re.match(TORCHS, line):
            lines.append(line)
    return lines[:MOST], raised


def inject(fault, paths, mark):
    """Run with the fault; returns the line of what happened."""
    (script, *flags), _ = PHASES[fault["phase"], fault["step"]]
    flags = [flag.format(**paths) for flag in flags]
    flags += ["--timeout", str(TIMEOUT if fault["kind"] in STALLS else 60)]
    with surroundings(mark) as (environment, folder, left):
        note = folder / "note"
        environment["FAULT"] = json.dumps({**fault, "note": str(note)})
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={fault['ranks']}"]
        words += ["--redirects=3", f"--log-dir={folder / 'logs'}", "-m", "benchmarks.victim", script, *flags]
        start = time.time()
        launcher = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip
        for _ in range(fault["step"] - 1):
            with contextlib.suppress(BrokenPipeError):
                launcher.stdin.write("Once\n")
                launcher.stdin.flush()
        while not note.exists() and launcher.poll() is None and time.time() - start < STARTS:
            time.sleep(0.02)
        time.sleep(0.1)
        happened = json.loads(note.read_text()) if note.exists() else {"time": start, "port": 0}
        if fault["phase"] == "chat" and fault["kind"] == "hang":  # nobody needs that rank before the user has spoken
            launcher.stdin.write("Once\n")
            launcher.stdin.flush()
        seconds = wait_for_end(mark, happened["time"], HANGS) if note.exists() else None
        orphans = end_all(mark)
        launcher.stdin = None
        code = launcher.wait()
        logs = {p: p.read_text(errors="replace") for p in sorted((folder / "logs").rglob("std*.log"))}
        errors = placeless("".join(text for path, text in logs.items() if path.name == "stderr.log"))
        lines, raised = spoken(errors)
        found = {
            **fault, "script": f"{script}.py", "errors": errors[-KEPT:], "happened": note.exists(), "seconds": seconds,
            "code": code, "lines": lines, "raised": raised, "orphans": sorted(orphans.values()),
            "port_taken": bool(happened["port"]) and has_listener(happened["port"]),
        }  # fmt: skip
    # a launcher that was killed cannot remove its own
    found["left"] = [name for name in left if not name.startswith("torchelastic_")]
    out = paths["out"]
    for path in out.parent.glob(f"{out.name}*"):  # what an interrupted adapt.py goes on from
        shutil.rmtree(path)
    return found


def start_unlike(name, paths, mark):
    """Run ranks that are not started alike; returns the line of what happened."""
    ranks = alike(name)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with surroundings(mark) as (environment, folder, left):
        start, processes = time.time(), []
        for rank, (flags, own, script) in enumerate(ranks):
            words = [sys.executable, str(ROOT / script.format(**paths)), *(flag.format(**paths) for flag in flags)]
            if "--timeout" not in flags:
                words += ["--timeout", str(TIMEOUT)]
            of_rank = {
                **environment, "PYTHONPATH": "", "RANK": str(rank), "WORLD_SIZE": str(len(ranks)),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                **{key: value.format(**paths) for key, value in own.items()},
            }  # fmt: skip
            with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
                processes.append(subprocess.Popen(words, env=of_rank, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
        seconds = wait_for_end(mark, start, HANGS)
        orphans = end_all(mark)
        codes = [process.wait() for process in processes]
        printed, errors = (
            placeless("".join(path.read_text(errors="replace") for path in sorted(folder.glob(kind))))
            for kind in ("*.out", "*.err")
        )
        lines, raised = spoken(errors)
        found = {
            "unlike": name, "errors": errors[-KEPT:], "ranks": len(ranks), "seconds": seconds, "codes": codes,
            "lines": lines, "raised": raised, "printed": printed[:200], "orphans": sorted(orphans.values()),
            "port_taken": has_listener(port),
        }  # fmt: skip
    return {**found, "left": left}


# ---------------------------------------------------------------------------------------------------------------------
# Judging it


def wrong(line):
    """What is not as it should be with the end of a run, as this file's head says: a list of words."""
    found = []
    if line["orphans"]:
        found.append(f"{len(line['orphans'])} processes lived on")
    if line["port_taken"] or line["left"]:
        found.append("something was left behind")
    return found + (wrong_start(line) if "unlike" in line else wrong_end(line))


def wrong_end(line):
    kind, seconds, said = line["kind"], line["seconds"], of_script(line)
    if not line["happened"]:
        return ["the fault did not happen"]
    found = []
    limit = SOON + TIMEOUT * (kind in STALLS)
    if seconds is None or seconds > limit:
        found.append(f"not gone in {limit} s")
    if line["code"] == 0:
        found.append("exit code 0")
    raised = [e for e in line["raised"] if line["phase"] != "join" or not e.startswith("KeyboardInterrupt")]
    if len(raised) != (kind == "exception"):
        found.append(f"{len(raised)} tracebacks")
    if kind in OUTSIDE or (line["script"], kind) == ("adapt.py", "SIGTERM"):
        return found + ["more than one line"] * (len(said) > 1)
    if len(said) != 1:
        return [*found, f"{len(said)} lines"]
    _, phase = PHASES[line["phase"], line["step"]]
    rank = rf"\brank {line['rank']} of {line['ranks']}\b"
    if (line["script"], kind) == ("adapt.py", "hang"):  # gloo does not say for whom it waits
        rank += rf"|\ball {line['ranks']} ranks\b"
    wanted = {"the rank": rank, "the cause": CAUSES[kind], "the phase": phase}
    return found + [f"the line does not name {what}" for what, words in wanted.items() if not re.search(words, said[0])]


def wrong_start(line):
    found, said = [], "\n".join(of_script(line))
    if line["seconds"] is None:
        return ["they hang"]
    if any(code != 2 for code in line["codes"]):
        found.append(f"exit codes {line['codes']}")
    if line["printed"]:
        found.append("a text was printed")
    if line["raised"]:
        found.append(f"{len(line['raised'])} tracebacks")
    wanted = ["--seed 1", "--seed 2", "--seed 3"] if line["unlike"] == ALL_UNLIKE else [UNLIKE[line["unlike"]][1]]
    return found + ["the difference is not named"] * (not all(re.search(words, said) for words in wanted))


def of_script(line):
    """The lines that say why a run ended."""
    return [text for text in line["lines"] if re.match(r"(generate|eval|adapt)\.py: ", text)]


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def name_of(case):
    """A case in words, for --only and --list."""
    if "unlike" in case:
        return f"unlike: {case['unlike']}"
    return f"{case['phase']} {case['step']}, {case['kind']}, rank {case['rank']} of {case['ranks']}"


def run(case, paths):
    """Run a case; returns its line."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        found = start_unlike(case["unlike"], paths, mark) if "unlike" in case else inject(case, paths, mark)
    finally:
        end_all(mark)
    found["wrong"] = wrong(found)
    if not found["wrong"]:
        del found["errors"]
    return found


def cases(sizes):
    return faults(sizes) + [{"unlike": name} for name in [*UNLIKE, ALL_UNLIKE]]


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--only", default="", metavar="WORD,...", help="cases whose name has all of these, e.g. decode,hang")
    p.add_argument("--ranks", default="2,3", metavar="N,...", help="numbers of ranks, e.g. 2")
    p.add_argument("--list", action="store_true", help="only print the names of the cases")
    cli.add_json_flag(p, "a line for each case")
    args = p.parse_args(argv)
    try:
        sizes = [int(size) for size in args.ranks.split(",")]
    except ValueError:
        raise InputError(f"--ranks {args.ranks!r} is not a list of numbers such as 2,3") from None
    words = [word for word in args.only.split(",") if word]
    args.cases = [case for case in cases(sizes) if all(word in name_of(case) for word in words)]
    if not args.cases:
        raise InputError(f"--only {args.only}: no case has all of these words; --list has their names")
    return args


def main(argv=None):
    args = parse(argv)
    if args.list:
        return print(*map(name_of, args.cases), sep="\n")
    world = launch.World(0, 1, torch.device("cpu"))
    about = {"command": command("faults", argv), **report.environment(world)}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder))
        for case in args.cases:
            line = run(case, paths)
            took = f"{line['seconds']:.1f} s" if line["seconds"] is not None else "never"
            print(f"{name_of(case)}: {took}; {'; '.join(line['wrong']) or 'ok'}", flush=True)
            for said in of_script(line):
                print(f"    {said}", flush=True)
            if args.json:
                writing.append_line(args.json, {**line, **about, "ranks": line["ranks"]})


if __name__ == "__main__":
    launch.run(main)
