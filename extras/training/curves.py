"""Draws how far retrained models are from their originals, against the tokens that they were retrained on.

python -m extras.training.curves OUT/log.jsonl benchmarks/results/retraining.jsonl --plot curve.png
"""

import json
from pathlib import Path

from extras.measure import plot
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.ranks import launch


def curves(path):
    """Return {name: [(tokens, KL divergence)]} of the validations in a log.jsonl, or in each line's "log" of a file."""
    lines = [json.loads(line) for line in checkpoint.read_text(path).splitlines()]
    logs = {line.get("name"): line["log"] for line in lines if "log" in line} or {str(Path(path).parent): lines}
    points = {name: [(line["tokens"], line["kl"]) for line in log if "kl" in line] for name, log in logs.items()}
    return {name: each for name, each in points.items() if name and len(each) > 4}


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("logs", nargs="+", metavar="FILE", help="log.jsonl of a retraining, or a file of lines with logs")
    p.add_argument("--plot", required=True, metavar="FILE", help="the .png or .svg to write")
    args = p.parse_args(argv)
    series = {name: points for path in args.logs for name, points in curves(path).items()}
    if not series:
        raise InputError(f"{', '.join(args.logs)}: no log has five validations with a teacher")
    from matplotlib.scale import SymmetricalLogScale

    axes = {"xlabel": "tokens of retraining", "ylabel": "KL divergence, nats per token", "yscale": "log"}
    axes["xscale"] = SymmetricalLogScale(linthresh=1000)  # the first validation is at 0 tokens
    plot.draw(args.plot, "retrained as ladders", series, **axes)


if __name__ == "__main__":
    launch.run(main)
