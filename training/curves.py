"""Learning curves of runs, from the lines of their logs."""

from runtime import writing


def draw(runs, path):
    """A figure of the losses by tokens: validation as a line with marks, training as a faint one.

    runs: {label: lines of a log.jsonl}.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=120)
    for label, lines in runs.items():
        valid = [line for line in lines if "valid" in line]
        [drawn] = axes.plot([x["tokens"] for x in valid], [x["valid"] for x in valid], marker="o", ms=3, label=label)
        trained = [line for line in lines if line.get("alpha") == 0]  # while it blends it is another model
        axes.plot(
            [x["tokens"] for x in trained], [x["train"] for x in trained], color=drawn.get_color(), alpha=0.25, lw=1
        )
        if "original" in lines[0]:
            axes.axhline(lines[0]["original"], color=drawn.get_color(), ls="--", lw=1)
    axes.set(
        xlabel="tokens trained on",
        ylabel="nats per token (marks: validation; faint: training; dashed: the original)",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with writing.new_file(path) as unfinished:
        figure.savefig(unfinished, format="png")
    plt.close(figure)
