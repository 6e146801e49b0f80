"""The sweep behind bench.sh, whose --help lists the settings: plan the cases, run their commands, keep the results.

Each command is run with --json FILE behind it; its result becomes a line of OUT, with the command and the repeat. What
is there already is not run again. A case that ran out of memory gets a line that says so; one that failed otherwise
gets none. Neither is repeated, the output of both goes to the end of OUT.log, and the rest goes on.

Of several nodes each runs this on a file of its own: node 0 has the results, the others note that they were there.
"""

import ctypes
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch

from formats import checkpoint
from formats.checkpoint import SIZES
from measure import plot, results
from measure.link import LINKS
from model import WIRINGS, InputError, parse_wiring, wiring_name
from runtime import launch, writing

NO_MEMORY = re.compile(
    r"out ?of ?memory|can('t|not) allocate memory|MemoryError|bad_alloc|ALLOC_FAILED|Signal 9 ", re.IGNORECASE
)
REAL = ("real", "no-p2p")  # the machine's own links, all others are emulated
ROOT = os.environ.get("BENCH_ROOT", ".")  # the folder of generate.py, spelled as bench.sh was called

# ---------------------------------------------------------------------------------------------------------------------
# The settings


@dataclasses.dataclass(frozen=True)
class Settings:
    """What bench.sh is told, read.

    Links and wirings are names; a draft is (generate.py's --draft, its --speculate), or
    None for none. prompt: a number of tokens, or a file.
    """

    python: str
    device: str
    checkpoint: str
    model: str
    n_layers: int | None
    quant: tuple[str, ...]
    wirings: tuple[str, ...]
    speculate: tuple[tuple[str, str] | None, ...]
    batches: tuple[int, ...]
    tps: tuple[int, ...]
    simulate: bool
    links: tuple[str, ...]
    prompt: int | str
    new_tokens: int
    repeats: int
    exposed: bool
    flags: tuple[str, ...]
    out: str
    figures: str
    dry_run: bool
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    cores: int  # of this machine


NAMES = [field.name.upper() for field in dataclasses.fields(Settings) if field.name != "cores"]


def one_letter_off(a, b):
    """Whether one letter more, less or other makes b of a."""
    a, b = sorted((a, b), key=len)
    same = len(os.path.commonprefix([a, b]))
    return a != b and b[same + 1 :] in (a[same:], a[same + 1 :])


def meant(name):
    """The setting that this is almost the name of, or None: one letter off, in lower case, a singular or a plural."""
    upper = name.upper()
    for known in NAMES:
        if one_letter_off(known, upper) or known == f"{upper}ES" or (known == upper != name):
            return known
    return None


def is_slip(name):
    """Whether a variable of the environment means a setting, and is not another program's, as MFLAGS and LINES are."""
    known = meant(name)
    near_enough = known and (len(known) > 5 or known in (f"{name}S", name.removesuffix("S")))
    return near_enough and name not in NAMES and re.fullmatch("[A-Z_]+", name)


def gather(words, environ):
    """{NAME: text} of the words NAME=VALUE, and of the environment where no word says otherwise.

    A name that is almost a setting's is refused: its sweep would run for hours and measure something else.
    """
    found = {name: environ[name] for name in NAMES if name in environ}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in NAMES:
            if not equals or not meant(name):
                raise InputError(f"{word} is no argument: give NAME=VALUE, of {' '.join(NAMES)}")
            raise InputError(f"{name} is not a setting: did you mean {meant(name)}?")
        found[name] = text
    for name in sorted(environ):
        if is_slip(name):
            raise InputError(f"{name} is not a setting: did you mean {meant(name)}?")
    return found


def complete(given, gpus, cores):
    """{NAME: text} of all settings, with the defaults for a machine of so many GPUs and cores."""
    device = given.get("DEVICE", "cuda" if gpus else "cpu")
    on_cpu = device == "cpu"
    most = cores if on_cpu else gpus
    nodes = given.get("NNODES", "1")
    nodes = int(nodes) if re.fullmatch("[1-9][0-9]{0,8}", nodes) else 1  # a bad one is refused later
    out = given.get("OUT", "bench.jsonl")
    defaults = {
        "PYTHON": sys.executable, "DEVICE": device, "CHECKPOINT": "", "MODEL": "1b" if on_cpu else "8b",
        "N_LAYERS": "", "QUANT": "none", "WIRINGS": "standard ladder parallel upper-bound", "SPECULATE": "none",
        "BATCHES": "1 4 16 64", "TPS": " ".join(str(tp * nodes) for tp in (1, 2, 4, 8) if tp <= most), "SIMULATE": "0",
        "LINKS": "real" if on_cpu or most == 1 else "real no-p2p", "PROMPT": "64" if on_cpu else "1024",
        "NEW_TOKENS": "32" if on_cpu else "512", "REPEATS": "3", "EXPOSED": "1", "FLAGS": "", "OUT": out,
        "FIGURES": f"{out.removesuffix('.jsonl')}-figures", "DRY_RUN": "0",
        "NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": "29500",
    }  # fmt: skip
    return defaults | given


def check(texts, given, gpus, cores):
    """The Settings of {NAME: text}. Raises InputError, with one line that names the setting, where one is wrong.

    given: the names that the user set.
    """

    def bad(name, must):
        return InputError(f"{name} is {texts[name]!r} but must be {must}")

    def number(name, text=None, must="one whole number from 1 on"):
        text = texts[name] if text is None else text
        if not re.fullmatch("[1-9][0-9]{0,8}", text):
            raise bad(name, must)
        return int(text)

    def numbers(name):
        must = "whole numbers from 1 on"
        found = tuple(number(name, text, must) for text in texts[name].split())
        if not found:
            raise bad(name, must)
        return found

    def words(name):
        try:
            return shlex.split(texts[name])
        except ValueError as e:
            raise InputError(f"{name} is {texts[name]!r}: {e}") from None

    def one_of(name, known):
        if texts[name] not in known:
            raise bad(name, f"one of: {' '.join(known)}")
        return texts[name]

    def some_of(name, known):
        found = tuple(texts[name].split())
        if not found:
            raise InputError(f"{name} is empty; known: {' '.join(known)}")
        for word in found:
            if word not in known:
                raise InputError(f"{name} names {word}; known: {' '.join(known)}")
        return found

    def wiring(word, where="WIRINGS"):
        try:
            return wiring_name(*parse_wiring(word))
        except InputError as e:
            raise InputError(f"{where}: {e}") from None

    def draft(word):
        if word == "none":
            return None
        name, _, count = word.rpartition("@")
        if not name:
            raise InputError(f"SPECULATE names {word}, which is neither none nor DRAFT@K, such as ngram@4")
        if not re.fullmatch("auto|[1-9][0-9]{0,8}", count):
            raise InputError(f"SPECULATE names {word}, but K must be a whole number from 1 on, or auto: {name}@4")
        kind, colon, other = name.partition(":")
        if kind == "wiring" and colon:
            wiring(other, f"SPECULATE names {word}")
        elif name != "ngram" and not os.path.isdir(name):
            raise InputError(f"SPECULATE names {word}, but {name} is neither ngram nor wiring:NAME, and no folder")
        return name, count

    def prompts():
        must = "one whole number from 1 on, or a file of one prompt a line"
        if texts["PROMPT"].isdecimal() or not os.path.isfile(texts["PROMPT"]):
            return number("PROMPT", must=must)
        if not texts["CHECKPOINT"]:
            raise InputError(f"PROMPT {texts['PROMPT']} is text, which needs a CHECKPOINT with its tokenizer")
        count = sum(bool(line.strip()) for line in checkpoint.read_text(texts["PROMPT"], "PROMPT ").splitlines())
        if not count:
            raise InputError(f"PROMPT {texts['PROMPT']} is empty: it takes one prompt a line")
        for batch in numbers("BATCHES"):
            if batch % count:
                raise InputError(f"BATCHES names {batch}, no multiple of the {count} prompts in {texts['PROMPT']}")
        return texts["PROMPT"]

    device, nnodes = one_of("DEVICE", ("cpu", "cuda")), number("NNODES")
    if device == "cuda" and not gpus:
        raise InputError("DEVICE is cuda, but there is no GPU")
    if texts["CHECKPOINT"] and "MODEL" in given and texts["MODEL"]:
        raise InputError("give either CHECKPOINT or MODEL")
    simulate, exposed, dry_run = (one_of(name, ("0", "1")) == "1" for name in ("SIMULATE", "EXPOSED", "DRY_RUN"))
    new_tokens, repeats, port = map(number, ("NEW_TOKENS", "REPEATS", "MASTER_PORT"))
    prompt = prompts()
    n_layers = number("N_LAYERS") if texts["N_LAYERS"] else None
    batches, tps = numbers("BATCHES"), numbers("TPS")
    if new_tokens == 1:
        raise InputError("NEW_TOKENS is 1 but must be at least 2: the first one comes from the prefill")
    quant = some_of("QUANT", ("none", "int8", "int4"))
    links = some_of("LINKS", (*REAL, *LINKS))
    if not texts["WIRINGS"].split():
        raise InputError(f"WIRINGS is empty; known: {' '.join(WIRINGS)}")
    wirings = tuple(map(wiring, texts["WIRINGS"].split()))
    if texts["CHECKPOINT"]:
        if not Path(texts["CHECKPOINT"]).is_dir():
            raise InputError(f"CHECKPOINT {texts['CHECKPOINT']} is no folder")
        if (quant, n_layers) != (("none",), None):
            raise InputError("QUANT and N_LAYERS are for MODEL: a checkpoint is as it is")
    else:
        one_of("MODEL", SIZES)
    drafts = tuple(map(draft, words("SPECULATE")))
    if not drafts:
        raise InputError("SPECULATE is empty: it takes none, or DRAFT@K such as ngram@4")
    if any(drafts):
        if simulate:
            raise InputError("SIMULATE predicts plain decode steps: it does not go with SPECULATE")
        if not texts["CHECKPOINT"]:
            raise InputError("SPECULATE needs a CHECKPOINT: what a draft guesses of random weights' text means nothing")
        if isinstance(prompt, int):
            raise InputError("SPECULATE needs PROMPT=FILE, of one prompt a line: random tokens lead to no usual text")
    if simulate:
        if nnodes > 1:
            raise InputError(f"SIMULATE is one rank alone, but NNODES is {nnodes}")
        if any(link in REAL for link in links):
            raise InputError(f"SIMULATE needs LINKS to emulate: {' '.join(LINKS)}")
        if 1 in tps:
            raise InputError("SIMULATE needs TPS from 2 on")
    if device == "cpu" and "no-p2p" in links:
        raise InputError("LINKS names no-p2p, which is for GPUs")
    for tp in tps:
        if tp % nnodes:
            raise InputError(f"TPS names {tp}, which is no multiple of NNODES {nnodes}")
        if tp > gpus * nnodes and device == "cuda" and not (simulate or dry_run):
            raise InputError(f"TPS names {tp}, but there are {gpus} GPUs on each node")
    rank = texts["NODE_RANK"]
    if nnodes > 1 and not (re.fullmatch("[0-9]{1,9}", rank) and int(rank) < nnodes):
        raise bad("NODE_RANK", f"0 to {nnodes - 1}")
    if nnodes > 1 and not texts["MASTER_ADDR"]:
        raise InputError(f"NNODES is {nnodes}, so MASTER_ADDR must be the address of node 0")
    flags = tuple(words("FLAGS"))
    if wrong := [word for word in flags if word.startswith(("--draft", "--speculate"))]:
        raise InputError(f"FLAGS has {wrong[0]}: the setting for it is SPECULATE")
    return Settings(
        python=texts["PYTHON"], device=device, checkpoint=texts["CHECKPOINT"], model=texts["MODEL"], n_layers=n_layers,
        quant=quant, wirings=wirings, speculate=drafts, batches=batches, tps=tps, simulate=simulate, links=links,
        prompt=prompt, new_tokens=new_tokens, repeats=repeats, exposed=exposed, flags=flags,
        out=texts["OUT"], figures=texts["FIGURES"], dry_run=dry_run, nnodes=nnodes,
        node_rank=int(rank) if nnodes > 1 else 0, master_addr=texts["MASTER_ADDR"], master_port=port, cores=cores,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The cases, and a command for each


@dataclasses.dataclass(frozen=True)
class Case:
    """One command: measure/probe.py where wiring is None, else a run of generate.py.

    repeat: from 1 on, or 0 for what is run once. tp: ranks of all nodes, or of which one is simulated.
    """

    repeat: int
    tp: int
    link: str
    quant: str = "none"
    batch: int = 1
    wiring: str | None = None
    draft: tuple[str, str] | None = None
    exposed: bool = False


def plan(s):
    """The Cases of the Settings, in their order: wirings and drafts next to one another, repeats far apart.

    One rank has no link, and all wirings cost it about the same: there only standard is run.
    """
    places = [(tp, link) for tp in s.tps for link in (s.links if tp > 1 else ("real",))]
    here = [] if "real" in s.links else [(s.nnodes, "real")]  # what the machine reads is of use beside emulated links
    cases = [Case(0, tp, link) for tp, link in here + places if link in REAL]

    def runs(repeat, exposed):
        return [
            Case(repeat, tp, link, quant, batch, name, draft, exposed)
            for quant in s.quant
            for tp, link in places
            for batch in s.batches
            for name in (s.wirings if tp > 1 else ["standard"])
            for draft in s.speculate
            if not exposed or (tp > 1 and name != "upper-bound" and draft is None)
            if draft is None or proposes(draft, tp, name)
        ]

    for repeat in range(1, s.repeats + 1):
        cases += runs(repeat, exposed=False)
    if s.exposed:  # apart: it slows a step, if little
        cases += runs(0, exposed=True)
    return list(dict.fromkeys(cases))  # a batch size, say, may have been named twice


def proposes(draft, tp, wiring):
    """Whether a draft proposes for a wiring on so many ranks.

    Another wiring of the same weights does it only where it can be cheaper, on several ranks, is not that very wiring,
    and finds all its norms there. Of the upper bound's text no guess means anything.
    """
    kind, _, other = draft[0].partition(":")
    if wiring == "upper-bound" or kind != "wiring":
        return wiring != "upper-bound"
    norms = [{*WIRINGS[parse_wiring(w)[0]].norms} for w in (other, wiring)]
    return tp > 1 and other != wiring and norms[0] <= norms[1]


def command(case, s):
    """The command of a case, a line for bash. $NODE_RANK and $MASTER_PORT are filled in when it is run: so it is the
    same on all nodes."""
    local_ranks = 1 if s.simulate else max(1, case.tp // s.nnodes)
    before = [f"OMP_NUM_THREADS={max(1, s.cores // local_ranks)}"] if s.device == "cpu" else []
    before += ["NCCL_P2P_DISABLE=1"] if case.link == "no-p2p" else []
    words, nodes = [s.python], []
    if local_ranks * s.nnodes > 1:
        words += ["-m", "torch.distributed.run", f"--nproc_per_node={local_ranks}"]
        if s.nnodes > 1:
            nodes = ["--node_rank=$NODE_RANK", "--master_port=$MASTER_PORT", f"--nnodes={s.nnodes}"]
            nodes += [shlex.quote(f"--master_addr={s.master_addr}")]
        else:
            words += ["--standalone"]
    script = [os.path.join(ROOT, "generate.py")] if case.wiring else ["-m", "measure.probe"]
    flags = ["--device", s.device, *(generate_flags(case, s) if case.wiring else [])]
    return " ".join([*before, *map(shlex.quote, words), *nodes, *map(shlex.quote, script + flags)])


def generate_flags(case, s):
    if s.checkpoint:
        flags = ["--checkpoint", s.checkpoint]
    else:
        flags = ["--model", s.model, "--random-weights"]
        flags += ["--n-layers", str(s.n_layers)] if s.n_layers else []
        flags += ["--quant", case.quant] if case.quant != "none" else []
    flags += ["--wiring", case.wiring, "--batch", str(case.batch)]
    flags += ["--prompt-length", str(s.prompt)] if isinstance(s.prompt, int) else ["--prompt", f"@{s.prompt}"]
    flags += ["--max-new-tokens", str(s.new_tokens), "--ignore-eos", "--temperature", "0", "--compile"]
    flags += ["--draft", case.draft[0], "--speculate", case.draft[1]] if case.draft else []
    flags += ["--link", case.link] if case.link not in REAL else []
    flags += ["--simulate-tp", str(case.tp)] if s.simulate else []
    return [*flags, *s.flags, *(["--exposed"] if case.exposed else [])]


def out_of_memory(case, s):
    """The result of a case that needs more memory than there is: what generate.py would have said of itself."""
    line = {
        "error": "out of memory", "wiring": case.wiring, "batch": case.batch, "new_tokens": s.new_tokens,
        "device": s.device, "link": None if case.link in REAL else {"name": case.link}, "simulated": s.simulate,
        "tp": case.tp, "settings": {"NCCL_P2P_DISABLE": "1"} if case.link == "no-p2p" else {},
    }  # fmt: skip
    if isinstance(s.prompt, int):  # how many tokens a file has only its runs say
        line["prompt_tokens"] = s.prompt
    if case.draft:
        name, count = case.draft
        line["draft"] = checkpoint.name(name) if os.path.isdir(name) else name
        line["speculate"] = count if count == "auto" else int(count)
    if s.checkpoint:
        return line | {"model": checkpoint.name(s.checkpoint)}
    layers = {"n_layers": s.n_layers} if s.n_layers else {}
    return line | {"model": s.model, "quant": None if case.quant == "none" else case.quant, **layers}


# ---------------------------------------------------------------------------------------------------------------------
# Running them


def read(out):
    """The lines that there are of an earlier sweep, or of this one."""
    return results.read(out) if Path(out).exists() and Path(out).stat().st_size else []


def run(command, environment, place):
    """(exit code, what it printed, its result or None) of a command, which ends when this process does.

    place: the folder where it may write.
    """
    system, parent = ctypes.CDLL(None), os.getpid()

    def tied():
        if hasattr(system, "prctl"):  # Linux
            system.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when this process is gone, torchrun is asked to end
        if os.getppid() != parent:  # which has happened already
            os._exit(1)

    with tempfile.TemporaryDirectory(dir=place) as folder:
        part, log = Path(folder) / "result", Path(folder) / "log"
        with open(log, "wb") as f:
            full = f"{command} --json {shlex.quote(str(part))}"
            process = subprocess.Popen(
                ["bash", "-c", full], env=environment, stdin=subprocess.DEVNULL, stdout=f, stderr=f, preexec_fn=tied
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # after a Ctrl-C it has begun to end already
                process.wait()
                raise
        result = json.loads(part.read_text()) if part.exists() else None
        return code, log.read_text(errors="replace"), result


def reason(code, log):
    """The line of a failed command's output that says why."""
    lines = [line for line in log.splitlines() if line.strip()]
    ours, others = ([line for line in lines if re.search(how, line)] for how in (r"^[a-z_]+\.py: ", "Error: "))
    return (ours + others + lines[-1:] + [f"it ended with code {code}"])[0]


def sweep(s, place):
    """Run what of the plan the file OUT has no line of; returns how many commands failed. place: as of run."""
    environment = {k: v for k, v in os.environ.items() if k != "NCCL_P2P_DISABLE"}  # or the real link were another
    planned = [(case, command(case, s)) for case in plan(s)]
    lines = read(s.out)
    done = {(line["repeat"], line["command"]) for line in lines}
    ended = {line["command"] for line in lines if "error" in line}  # not to be repeated
    todo = [i for i, (case, text) in enumerate(planned) if (case.repeat, text) not in done and text not in ended]
    if len(todo) < len(planned):
        print(f"{len(planned) - len(todo)} of {len(planned)} are in {s.out} already", file=sys.stderr)
    failed, start = 0, time.monotonic()
    for n, i in enumerate(todo):
        case, text = planned[i]
        if text in ended:
            continue
        left = f", about {(time.monotonic() - start) / n * (len(todo) - n) / 60:.0f} min left" if n else ""
        print(f"[{n + 1}/{len(todo)}{left}] {text}", file=sys.stderr, flush=True)
        # a port for each command, so that nodes which are not at the same one do not meet
        code, log, result = run(text, environment | {"NODE_RANK": str(s.node_rank), "MASTER_PORT": port(s, i)}, place)
        line = {"repeat": case.repeat, "command": text}
        if code == 130:
            raise KeyboardInterrupt
        if code == 0 and (result or s.node_rank > 0):
            line |= {k: v for k, v in (result or {}).items() if k not in ("tokens", "texts")}
            times = [text for text in log.splitlines() if "per token" in text]
            print(*times[:1], sep="\n", end="\n" * bool(times), file=sys.stderr)
        else:
            ended.add(text)
            writing.append(f"{s.out}.log", f"$ {text}\n{log}\n".encode())
            if case.wiring is None or not (code == 137 or NO_MEMORY.search(log)):
                failed += 1
                print(f"failed: {reason(code, log)} (more in {s.out}.log)", file=sys.stderr)
                continue
            line |= out_of_memory(case, s)
            print("out of memory", file=sys.stderr)
        writing.append_line(s.out, line)
    return failed


def port(s, i):
    """MASTER_PORT of the i-th command."""
    return str(s.master_port + i)


def prepare(s):
    """Make the folder of OUT; raise InputError, before anything is measured, where nothing could be written."""
    if Path(s.figures).exists() and not Path(s.figures).is_dir():
        raise InputError(f"FIGURES: {s.figures} is a file: name a folder")
    for file in s.out, f"{s.out}.log":
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            writing.check_appendable(file, "OUT: ")
            if Path(file).exists():
                writing.append(file, b"")
        except OSError as e:
            raise InputError(f"OUT: {Path(file).parent} cannot be made: {e.strerror}") from None


def machine():
    """(GPUs, cores) that this process may use."""
    return torch.cuda.device_count(), len(os.sched_getaffinity(0))


def main(words=None):
    gpus, cores = machine()
    given = gather(sys.argv[1:] if words is None else words, os.environ)
    texts = complete(given, gpus, cores)
    shown = " ".join(f'{name}="{text}"' for name, text in texts.items())
    print(*textwrap.wrap(shown, 120, break_long_words=False, break_on_hyphens=False), sep="\n", file=sys.stderr)
    s = check(texts, given, gpus, cores)
    if s.dry_run:
        for i, case in enumerate(plan(s)):
            text = command(case, s).replace("$MASTER_PORT", port(s, i))
            print(*(text.replace("$NODE_RANK", str(node)) for node in range(s.nnodes)), sep="\n")
        return
    prepare(s)
    with writing.reserved(s.out) as place:
        failed = sweep(s, place)
    if failed:
        print(f"{failed} of the commands failed; the next sweep tries them again", file=sys.stderr)
    if s.node_rank == 0 and any("wiring" in line for line in read(s.out)):
        plot.main([s.out, "--out", s.figures])
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    sys.argv[0] = "bench.sh"  # whose user reads the errors
    launch.run(main)
