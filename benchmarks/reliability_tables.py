"""The tables of docs/reliability.md, from the lines that benchmarks/faults.py, kills.py, fuzz.py and soak.py wrote.

cd benchmarks/results && python -m benchmarks.reliability_tables faults.jsonl kills.jsonl fuzz.jsonl soak.jsonl
"""

import statistics

from benchmarks.faults import PHASES, of_script
from benchmarks.lines import grouped, written_by
from measure.results import markdown
from runtime import cli, launch

PLACES = {  # (phase, step) of faults.py, in words
    ("join", 1): "joining", ("load", 3): "loading", ("compile", 1): "compiling", ("prefill", 1): "prefill",
    ("decode", 7): "decoding", ("decode", 8): "compiled decoding", ("chat", 1): "chat, first line",
    ("chat", 2): "chat, between turns", ("window", 3): "eval.py", ("step", 3): "adapt.py",
}  # fmt: skip
KINDS = {
    "launcher SIGKILL": "SIGKILL to torchrun", "launcher SIGTERM": "SIGTERM to torchrun",
    "terminal SIGINT": "Ctrl-C in the terminal", "terminal SIGHUP": "the terminal closes",
    "SIGSTOP": "SIGSTOP: the whole rank stalls", "hang": "the rank's main thread hangs",
}  # fmt: skip


def seconds(lines):
    """The least and the most that runs took to end, in words."""
    known = [line["seconds"] for line in lines if line["seconds"] is not None]
    ever = " or never" * (len(known) < len(lines))
    return (f"{min(known):.1f} to {max(known):.1f}" if known else "") + ever


def by_kind(lines):
    """A row for each kind of fault: how many runs, how many ended well, in how many seconds."""
    rows = []
    for (kind,), same in grouped(lines, "kind").items():
        well = sum(not line["wrong"] for line in same)
        rows.append([KINDS.get(kind, kind), str(len(same)), str(well), seconds(same)])
    return markdown(["fault", "runs", "ended well", "seconds until all processes were gone"], rows)


def by_phase(lines):
    """A row for each kind of fault, a column for each phase: how many ended well, of how many."""
    cells = grouped(lines, "kind", "phase", "step")

    def cell(kind, place):
        same = cells.get((kind, *place), [])
        return f"{sum(not line['wrong'] for line in same)}/{len(same)}" if same else ""

    rows = [[KINDS.get(kind, kind), *(cell(kind, place) for place in PHASES)] for (kind,) in grouped(lines, "kind")]
    return markdown(["fault", *(PLACES[place] for place in PHASES)], rows)


def unlike(lines):
    """A row for each way in which ranks were not started alike: what is said of it."""
    rows = []
    for line in lines:
        said = " ".join(of_script(line)).replace("|", "\\|") or "nothing"
        rows.append([line["unlike"], "ok" if not line["wrong"] else "; ".join(line["wrong"]), said])
    return markdown(["what only one rank has", "", "what is said"], rows)


def soaked(lines):
    """A row for each soak: its first stretch, the one in the middle and its last."""
    rows = []
    for (kind, model, dtype), same in grouped(lines, "kind", "model", "dtype").items():
        for line in same[0], same[len(same) // 2], same[-1]:
            ranks, median = line["ranks"], statistics.median(line["ms_per_token"].values())
            resident = " and ".join(f"{rank['resident'] / 1e6:.0f}" for rank in ranks)
            most = (str(max(rank[name] for rank in ranks)) for name in ("graphs", "files", "threads"))
            launcher = f"{line['launcher_resident'] / 1e6:.0f}"
            rows.append([f"{kind}, {model}, {dtype}", str(line["done"]), f"{median:.2f}", resident, launcher, *most])
    head = ["", "requests or turns so far", "ms per token", "MB of each rank", "MB of torchrun"]
    return markdown([*head, "graphs", "open files", "threads"], rows)


def killed(lines):
    """A row for each writer and signal: how many moments, and what was found at them."""
    columns = {
        "complete": "complete", "absent": "absent", "torn": "a last line cut off", "incomplete": "incomplete",
        "left": "something beside it", "differ": "after the next run anything else than without the kill",
    }  # fmt: skip
    rows = [[line[key] for key in ("writer", "signal", "moments", *columns)] for line in lines]
    return markdown(["writer", "signal", "moments", *columns.values()], [list(map(str, row)) for row in rows])


def fuzzed(lines):
    """A row for each kind of file: how many cases, and what became of them."""
    rows = [[line["target"], *(f"{line[key]:,}" for key in ("cases", "works", "refused", "unclean"))] for line in lines]
    return markdown(["target", "cases", "work", "refused in one line", "anything else"], rows)


KEYS = {  # of the lines of each
    "faults": ("wrong", "seconds"),
    "kills": ("writer", "moments", "differ"),
    "fuzz": ("target", "unclean"),
    "soak": ("done", "ms_per_token", "ranks", "launcher_resident"),
}


def parse(argv):
    p = cli.Parser(__doc__)
    for name, keys in KEYS.items():
        script = f"benchmarks/{name}.py"
        p.add_argument(name, type=written_by(script, *keys), help=f"lines of {script}")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    injected = [line for line in args.faults if "kind" in line]
    print(by_kind(injected), by_phase(injected), sep="\n\n")
    for line in injected:
        if line["wrong"]:
            wrong = "; ".join(line["wrong"])
            where = f"{line['phase']}, rank {line['rank']} of {line['ranks']}, commit {line['commit']}"
            print(f"\n{KINDS.get(line['kind'], line['kind'])} in {where}: {wrong}")
    rest = unlike([line for line in args.faults if "unlike" in line]), killed(args.kills), fuzzed(args.fuzz)
    print("", *rest, soaked(args.soak), sep="\n\n")


if __name__ == "__main__":
    launch.run(main)
