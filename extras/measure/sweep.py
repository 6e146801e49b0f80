"""./bench.sh [NAME=VALUE ...]: quantizations x ranks x batch sizes x links x wirings x drafts, each generating, all of
them in turns; then tables and figures. Started again with the same settings, it goes on where it was interrupted.

  ./bench.sh                                                      what this machine can do
  ./bench.sh MODEL=3b BATCHES="1 8" LINKS="real ethernet-10g"     some of it, and an emulated link
  SIMULATE=1 MODEL=70b TPS=8 LINKS="nvlink pcie" ./bench.sh       one rank alone predicts eight
  DRY_RUN=1 ./bench.sh                                            only print the commands
"""

# A command's result becomes a line of OUT, with command, repeat and the machine's load. A command that ran out of
# memory gets a line that says so, one that failed otherwise none. Neither is repeated, the output of both goes to
# OUT.log, and the rest goes on, unless the very first run fails: then a setting is wrong. Each of several nodes has a
# file of its own: node 0 the results, the others only the commands.

import argparse
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

from extras.measure import plot, results
from extras.measure.link import parse as parse_link
from formats.wiring_text import wiring_name
from model import WIRINGS, parse_wiring
from runtime import cli, launch, writing
from runtime.errors import InputError

NO_MEMORY = re.compile(
    r"out ?of ?memory|can('t|not) allocate memory|MemoryError|bad_alloc|ALLOC_FAILED|Signal 9 ", re.IGNORECASE
)
REAL = ("real", "no-p2p")  # the machine's own links, all others are emulated
ROOT = os.environ.get("BENCH_ROOT", ".")  # the folder of generate.py, spelled as bench.sh was called

# ---- The settings. Only what no command would refuse, or not in time, is refused here --------------------------------


def several(parse):
    """Return a parser of words that are quoted as in a shell."""
    return lambda text: [parse(word) for word in shlex.split(text)]


def flag(text):
    return text != "0"


def wiring(text):
    return wiring_name(*parse_wiring(text))


def link(text):
    return text if text in REAL else parse_link(text).name


def draft(text):
    """Return what --draft takes, or None for "none"."""
    return None if text == "none" else text


def prompt(text):
    return text if os.path.isfile(text) else cli.count(text)


def table(given, gpus, cores):
    """Return {NAME: (default, its parser, help)} of all settings, for a machine with so many GPUs and cores."""
    device, nodes = given.get("DEVICE"), given.get("NNODES", "1")
    on_cpu = device == "cpu" or not (device or gpus)
    tps = [tp for tp in (1, 2, 4, 8) if tp <= (cores if on_cpu else gpus)]
    size = "" if given.get("CHECKPOINT") else "1b" if on_cpu else "8b"
    nodes = int(nodes) if nodes.isdecimal() else 1
    wirings, links = "standard ladder parallel upper-bound", "real" if on_cpu or gpus == 1 else "real no-p2p"
    return {
        "MODEL": (size, str, "a named size, or layers of it: 8b:4, with random weights"),
        "QUANT": ("none", several(str), "of MODEL: none, int8, int4, or several"),
        "CHECKPOINT": ("", str, "a folder of weights, in place of those two"),
        "WIRINGS": (wirings, several(wiring), 'such as "standard spd ladder:8 desync:4"'),
        "SPECULATE": ("none", several(draft), 'none or DRAFT@K, such as "none ngram@4 wiring:spd@auto"'),
        "BATCHES": ("1 4 16 64", several(cli.count), "batch sizes"),
        "TPS": (" ".join(str(tp * nodes) for tp in tps), several(cli.count), "ranks, of all nodes"),
        "LINKS": (links, several(link), "real ones, or as --link takes them"),
        "SIMULATE": ("0", flag, "1: one rank alone predicts TPS over LINKS"),
        "PROMPT": ("64" if on_cpu else "1024", prompt, "random tokens in each row, or a file with a prompt a line"),
        "NEW_TOKENS": ("32" if on_cpu else "512", cli.number(int, 2), "to generate; the first is the prefill's"),
        "REPEATS": ("3", cli.count, "runs of each case, far apart in time"),
        "EXPOSED": ("1", flag, "1: also a run of each with --exposed"),
        "FLAGS": ("", shlex.split, 'more flags of generate.py, such as "--seed 1"'),
        "OUT": ("bench.jsonl", str, "the results, a line each; a log, tables and figures beside it"),
        "DEVICE": ("cpu" if on_cpu else "cuda", str, "what to measure on"),
        "PYTHON": (sys.executable, str, "one that has torch"),
        "DRY_RUN": ("0", flag, "1: only print the commands"),
        "NNODES": ("1", cli.count, "nodes; each runs this, with its NODE_RANK"),
        "NODE_RANK": ("0", cli.number(int, 0), "which of them this is"),
        "MASTER_ADDR": ("", str, "the address of node 0, of several"),
        "MASTER_PORT": ("29500", cli.count, "its first port; each command takes the next"),
    }


NAMES = [*table({}, 0, 1)]


def gather(words, environ):
    """Return {NAME: text} of the words NAME=VALUE, and of the environment where no word says otherwise."""
    found = {name: environ[name] for name in NAMES if name in environ}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in NAMES or not equals:
            raise InputError(f"{word} is not a setting: give NAME=VALUE, of {' '.join(NAMES)}")
        found[name] = text
    for name in environ.keys() - NAMES:  # a singular or a plural, which would cost hours
        if meant := {f"{name}S", f"{name}ES", name.removesuffix("S")} & {*NAMES}:
            raise InputError(f"{name} is not a setting: did you mean {meant.pop()}?")
    return found


def read_settings(given, gpus, cores):
    """Return the settings of {NAME: text}, as attributes in lower case. Raises InputError that names a wrong one."""
    s = types.SimpleNamespace(cores=cores)
    for name, (default, parse, _) in table(given, gpus, cores).items():
        text = given.get(name, default)
        try:
            setattr(s, name.lower(), parse(text) if text or default else None)
        except (ValueError, argparse.ArgumentTypeError) as e:  # an InputError is a ValueError
            raise InputError(f"{name}: {e}") from None
    if s.checkpoint and not os.path.isdir(s.checkpoint):  # now, before minutes of probing
        raise InputError(f"CHECKPOINT: {s.checkpoint} is no folder")
    if any(s.speculate) and not (s.checkpoint and isinstance(s.prompt, str)):
        raise InputError("SPECULATE needs CHECKPOINT and PROMPT=FILE: a draft's guesses at random text mean nothing")
    if uneven := [tp for tp in s.tps if tp % s.nnodes]:
        raise InputError(f"TPS: {uneven[0]} is no multiple of NNODES {s.nnodes}")
    if s.nnodes > 1 and not (s.master_addr and s.node_rank < s.nnodes):
        raise InputError(f"NNODES is {s.nnodes}: give MASTER_ADDR, and a NODE_RANK from 0 to {s.nnodes - 1}")
    s.node_rank = s.node_rank if s.nnodes > 1 else 0  # a cluster may set it for a single node
    return s


# ---- The commands ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Command:
    """extras/measure/probe.py where wiring is None, else a run of generate.py.

    repeat: from 1 on, or 0 for what is run once. tp: ranks of all nodes, or of which one is simulated.
    """

    repeat: int
    tp: int
    link: str
    quant: str = "none"
    batch: int = 1
    wiring: str | None = None
    draft: str | None = None
    exposed: bool = False


def plan(s):
    """Return the Commands of the settings, in their order: wirings and drafts side by side, repeats far apart.

    One rank has no link, and all wirings cost it about the same: there only standard is run.
    """
    places = [(tp, link) for tp in s.tps for link in (s.links if tp > 1 else ["real"])]
    here = [] if "real" in s.links else [(s.nnodes, "real")]  # the machine's bandwidth helps to read emulated links too
    probes = [Command(0, tp, link) for tp, link in here + places if link in REAL]
    runs = [
        Command(0, tp, link, quant, batch, name, draft)
        for quant in s.quant
        for tp, link in places
        for batch in s.batches
        for name in (s.wirings if tp > 1 else ["standard"])
        for draft in s.speculate
        if draft is None or proposes(draft, tp, name)
    ]
    timed = [dataclasses.replace(run, repeat=i) for i in range(1, s.repeats + 1) for run in runs]
    exposed = [  # apart from the timed ones: it slows a step, if little
        dataclasses.replace(run, exposed=True)
        for run in runs * s.exposed
        if run.tp > 1 and run.wiring != "upper-bound" and run.draft is None
    ]
    return list(dict.fromkeys(probes + timed + exposed))  # a batch size, say, may have been named twice


def proposes(draft, tp, wiring):
    """Return whether a draft proposes for a wiring on so many ranks.

    Another wiring of the same weights does so only where it can be cheaper, on several ranks, is not that very wiring,
    and finds all its norms there. No guess at the upper bound's text means anything.
    """
    kind, _, other = draft.partition("@")[0].partition(":")
    if wiring == "upper-bound" or kind != "wiring":
        return wiring != "upper-bound"
    theirs, own = parse_wiring(other), parse_wiring(wiring)
    norms = [{*WIRINGS[named.name].norms} for named in (theirs, own)]
    fits = (theirs.lanes or own.lanes or tp) == (own.lanes or tp)  # a draft has the lanes of the weights
    return tp > 1 and fits and theirs._replace(lanes=own.lanes) != own and norms[0] <= norms[1]


def command_line(c, s):
    """Return a Command as a line for bash, the same on all nodes: $NODE_RANK and $MASTER_PORT are filled in later."""
    local_ranks = 1 if s.simulate else max(1, c.tp // s.nnodes)
    before = [f"OMP_NUM_THREADS={max(1, s.cores // local_ranks)}"] if s.device == "cpu" else []
    before += ["NCCL_P2P_DISABLE=1"] if c.link == "no-p2p" else []
    words = [shlex.quote(s.python)]
    if local_ranks * s.nnodes > 1:
        words += ["-m", "torch.distributed.run", f"--nproc_per_node={local_ranks}"]
        nodes = ["--node_rank=$NODE_RANK", "--master_port=$MASTER_PORT", f"--nnodes={s.nnodes}"]
        words += [*nodes, shlex.quote(f"--master_addr={s.master_addr}")] if s.nnodes > 1 else ["--standalone"]
    words += [shlex.quote(os.path.join(ROOT, "generate.py"))] if c.wiring else ["-m", "extras.measure.probe"]
    flags = generate_flags(c, s) if c.wiring else []
    return " ".join([*before, *words, *map(shlex.quote, ["--device", s.device, *flags])])


def generate_flags(c, s):
    """Return the flags of generate.py for a Command, but --device."""
    flags = ["--checkpoint", s.checkpoint] if s.checkpoint else []
    flags += ["--model", s.model] if s.model else []
    flags += ["--quant", c.quant] if c.quant != "none" else []
    flags += ["--wiring", c.wiring, "--batch", str(c.batch)]
    flags += ["--prompt-length", str(s.prompt)] if isinstance(s.prompt, int) else ["--prompt", f"@{s.prompt}"]
    flags += ["--max-new-tokens", str(s.new_tokens), "--ignore-eos", "--temperature", "0", "--compile"]
    flags += ["--draft", c.draft] if c.draft else []
    flags += ["--link", c.link] if c.link not in REAL else []
    flags += ["--simulate-tp", str(c.tp)] if s.simulate else []
    return [*flags, *(s.flags or []), *(["--exposed"] if c.exposed else [])]


# ---- Running them ----------------------------------------------------------------------------------------------------


def run(command, environment):
    """Return (exit code, what it printed, its result or None) of a command."""
    with tempfile.TemporaryDirectory() as folder:
        part, log = Path(folder) / "result", Path(folder) / "log"
        full = ["bash", "-c", f"{command} --json {shlex.quote(str(part))}"]
        with open(log, "wb") as f:
            process = subprocess.Popen(full, env=environment, stdin=subprocess.DEVNULL, stdout=f, stderr=f)
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # after a Ctrl-C it has begun to end already
                process.wait()
                raise
        result = json.loads(part.read_text()) if part.exists() else None
        return code, log.read_text(errors="replace"), result


def reason(code, log):
    """Return the line of a failed command's output that says why."""
    lines = [line for line in log.splitlines() if line.strip()]
    ours, others = ([line for line in lines if re.search(how, line)] for how in (r"^[a-z_]+\.py: ", "Error: "))
    return (ours + others + lines[-1:] + [f"it ended with code {code}"])[0]


def sweep(s):
    """Run the commands of the plan that have no line in the file OUT; return how many failed."""
    environment = {k: v for k, v in os.environ.items() if k != "NCCL_P2P_DISABLE"}  # or the real link were another
    environment.setdefault("GOMP_SPINCOUNT", "1000")  # as in the Makefile: threads that spin on hold up the others
    planned = [(c, command_line(c, s)) for c in plan(s)]
    lines = results.read(s.out) if os.path.exists(s.out) else []
    done = {(line["repeat"], line["command"]) for line in lines}
    ended = {line["command"] for line in lines if "error" in line}  # not to be repeated
    todo = [i for i, (c, text) in enumerate(planned) if (c.repeat, text) not in done and text not in ended]
    if len(todo) < len(planned):
        print(f"{len(planned) - len(todo)} of {len(planned)} are in {s.out} already", file=sys.stderr)
    failed, any_ran, start = 0, any("probe" not in line for line in lines), time.monotonic()
    for n, i in enumerate(todo):
        c, text = planned[i]
        if text in ended:
            continue
        left = f", about {(time.monotonic() - start) / n * (len(todo) - n) / 60:.0f} min left" if n else ""
        print(f"[{n + 1}/{len(todo)}{left}] {text}", file=sys.stderr, flush=True)
        line = {"repeat": c.repeat, "command": text, "load": round(os.getloadavg()[0], 2), "cores": s.cores}
        # a port for each command, so that nodes which are not at the same one do not meet
        node = {"NODE_RANK": str(s.node_rank), "MASTER_PORT": str(s.master_port + i)}
        code, log, result = run(text, environment | node)
        if code == 130:
            raise KeyboardInterrupt
        if code == 0 and (result or s.node_rank > 0):
            line |= {k: v for k, v in (result or {}).items() if k not in ("tokens", "texts")}
            print(*[x for x in log.splitlines() if "per token" in x][:1], sep="\n", file=sys.stderr)
        else:
            ended.add(text)
            with open(f"{s.out}.log", "a") as f:
                f.write(f"$ {text}\n{log}\n")
            if c.wiring is None or not (code == 137 or NO_MEMORY.search(log)):
                if c.wiring and not any_ran:
                    raise InputError(f"the first run failed: {reason(code, log)} (more in {s.out}.log)")
                failed += 1
                print(f"failed: {reason(code, log)} (more in {s.out}.log)", file=sys.stderr)
                continue
            line["error"] = "out of memory"
            print("out of memory", file=sys.stderr)
        any_ran |= c.wiring is not None
        writing.append_line(s.out, line)
    return failed


def machine():
    """Return (GPUs, cores) that this process may use."""
    return torch.cuda.device_count(), len(os.sched_getaffinity(0))


def main(words=None):
    words, found = sys.argv[1:] if words is None else words, machine()
    if {"-h", "--help"} & {*words}:
        print(__doc__, "Settings, of the environment or after the script's name, and their defaults:", sep="\n")
        return print(*(f"  {name:12}{row[0]:39} {row[2]}" for name, row in table({}, *found).items()), sep="\n")
    s = read_settings(gather(words, os.environ), *found)
    if s.dry_run:
        return print(*(command_line(c, s) for c in plan(s)), sep="\n")
    with writing.reserved(s.out):
        failed = sweep(s)
    if s.node_rank == 0 and os.path.exists(s.out):
        plot.main([s.out, "--out", f"{s.out.removesuffix('.jsonl')}-figures"])
    if failed:
        print(f"{failed} of the commands failed; the next sweep tries them again", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    sys.argv[0] = "bench.sh"  # whose user reads the errors
    launch.run(main)
