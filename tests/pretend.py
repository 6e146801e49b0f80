"""A generate.py and a probe.py that measure nothing: what they would say, as their command lines have it."""

REPORT = {
    "step_ms": 4.0, "quartiles_ms": [3.9, 4.1], "silent_ms": 3.0, "exposed_ms": 1.0, "all_reduces": 2,
    "all_reduce_ms": 1.0, "hidden": 0.5, "limit_ms": 4.0,
}  # fmt: skip


def result(words, environment):
    """The line that a command's words append; words: of the command, after its environment."""

    def value(flag, default=None):
        return words[words.index(flag) + 1] if flag in words else default

    given = dict(w.split("=", 1) for w in words if w.startswith("--") and "=" in w)
    ranks = int(given.get("--nproc_per_node", 1)) * int(given.get("--nnodes", 1))
    line = {
        "tp": ranks, "simulated": False, "device": value("--device"), "hardware": "pretended", "torch": "2",
        "commit": "c", "threads": 1, "settings": {k: v for k, v in environment.items() if k.startswith("NCCL_")},
    }  # fmt: skip
    if "extras.measure.probe" in words:
        rates = [{"bytes": 1024, "us": 20.0, "gbps": 0.4}] if ranks > 1 else []
        return line | {"probe": {"bandwidth": [1e10] * ranks, "all_reduce": rates}}
    new, batch, draft = int(value("--max-new-tokens")), int(value("--batch")), value("--draft")
    draft, _, count = draft.rpartition("@") if draft else (None, "", None)
    return line | {
        "model": value("--model", "demo").partition(":")[0], "n_layers": 2, "wiring": value("--wiring"), "link": None,
        "dtype": "bfloat16", "quant": value("--quant"), "batch": batch, "new_tokens": new,
        "prompt_tokens": int(value("--prompt-length", 7)), "draft": draft and draft.split("/")[-1],
        "speculate": int(count) if count and count.isdecimal() else count, "accepted": [1, 3] if draft else None,
        "prefill_s": 0.5, "ttft_ms": 500.0, "decode_s": 1.0,
        "tpot_ms": 1e3 / (new - 1), "tok_s": batch * (new - 1), "tok_s_user": new - 1, "mbu": 0.9,
        "exposed": {"decode": REPORT} if "--exposed" in words else None, "tokens": [[1, 2]], "texts": None,
    }  # fmt: skip
