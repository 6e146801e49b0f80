"""The tables and the figure of benchmarks/adapt.md, from the lines that benchmarks/adapt.py wrote.

python -m benchmarks.adapt_tables results/adapt.jsonl results/scratch.jsonl --figure adapt.png
"""

from benchmarks.lines import written_by
from measure.results import markdown
from runtime import cli, launch

METHODS = {"plain": ":", "distilled": "--", "blended and distilled": "-"}


def grouped(lines, *keys):
    """{the values of the keys: the lines that share them}, in the order of the lines."""
    groups = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    return groups


def spread(values):
    """A mean, and where there are several values the least and the greatest."""
    mean = sum(values) / len(values)
    return f"{mean:.3f}" + (f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else "")


def retraining(lines):
    """The rows of the table of retraining: losses by share of the tokens, and their excess over the control's."""
    groups = grouped(lines, "layers", "method", "share")
    shares = sorted({share for _, _, share in groups})
    control = {s: [line["nats"] for line in groups["none", "plain", s]] for s in shares}
    rows = []
    for layers, method in dict.fromkeys(key[:2] for key in groups):
        row = [layers, method, f"{groups[layers, method, shares[0]][0]['before']:.3f}"]
        for share in shares:
            nats = [line["nats"] for line in groups.get((layers, method, share), [])]
            standard = sum(control[share]) / len(control[share])
            excess = f", {100 * (sum(nats) / len(nats) / standard - 1):+.1f} %" if nats and layers != "none" else ""
            row.append(spread(nats) + excess if nats else "")
        rows.append(row)
    return ["ladder layers", "how", "without retraining", *(f"{100 * share:g} %" for share in shares)], rows


def scratch(lines):
    """The rows of the table of models from scratch."""
    rows = [[model, spread([x["nats"] for x in same])] for (model,), same in grouped(lines, "model").items()]
    return ["model", "nats per token"], rows


def draw(lines, share, path):
    """Learning curves of the runs on a share of the tokens: the mean over seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    colors = {layers: f"C{i}" for i, layers in enumerate(dict.fromkeys(line["layers"] for line in lines))}
    for (layers, method), same in grouped([x for x in lines if x["share"] == share], "layers", "method").items():
        tokens = [t for t, _ in same[0]["curve"]]
        curves = list(zip(*([nats for _, nats in line["curve"]] for line in same), strict=True))
        mean = [sum(values) / len(values) for values in curves]
        axes.plot(tokens, mean, METHODS[method], color=colors[layers], marker="o", ms=3)
        axes.fill_between(tokens, [min(v) for v in curves], [max(v) for v in curves], color=colors[layers], alpha=0.15)
    for layers, color in colors.items():
        axes.plot([], [], color=color, label={"none": "standard (control)"}.get(layers, f"ladder: {layers}"))
    for method, style in METHODS.items():
        axes.plot([], [], style, color="gray", label=method)
    axes.set(xlabel="tokens of retraining", ylabel="validation loss, nats per token")
    axes.legend(frameon=False, ncols=2, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def parse(argv):
    p = cli.Parser(__doc__)
    keys = "layers", "method", "share", "nats", "before", "curve"
    p.add_argument("retrained", type=written_by("the plan retrain", *keys), help="lines of the plans retrain and long")
    p.add_argument("scratch", type=written_by("the plan scratch", "model", "nats"), help="lines of the plan scratch")
    p.add_argument("--figure", metavar="FILE", help="draw the learning curves into this file")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    print(markdown(*retraining(args.retrained)))
    print()
    print(markdown(*scratch(args.scratch)))
    if args.figure:
        draw(args.retrained, 0.2, args.figure)


if __name__ == "__main__":
    launch.run(main)
