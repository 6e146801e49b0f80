"""How fast a server of OpenAI's API answers streams that come at once. It may be another engine's.

python serve.py --checkpoint checkpoints/smollm2 --rows 16 --port 8000
python -m benchmarks.serving --port 8000 --streams 1 4 16 --json serving.jsonl

A result has the tokens per second of all streams, and the medians of the first token's time and of the time between two
tokens once all streams have begun, in milliseconds.
"""

import http.client
import json
import random
import statistics
import threading
import time

import ladder.openmp  # noqa: F401 (before torch loads)

import torch

from ladder import outputs
from ladder.benchmarking import environment
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.ranks import launch
from ladder.ranks.world import World

TEXT = "the a dog cat girl boy park big small red ran saw said then they happy sad house tree water"


def ask(port, body, events):
    """Send a request that streams; append the time at which each event came, and at the end its number of tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    last = b""
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            events.append(time.perf_counter())
            last = line
    usage = json.loads(last.removeprefix(b"data: ") or "{}").get("usage")
    events.append(usage and usage["completion_tokens"])
    connection.close()


def measure(args, streams, seed):
    """Return the result of one round. Raises InputError if the server refuses."""
    choose, results = random.Random(seed), [[] for _ in range(streams)]
    body = {"max_tokens": args.new_tokens, "temperature": args.temperature, "stream": True} | json.loads(args.body)
    body["stream_options"] = {"include_usage": True}
    prompts = [" ".join(choose.choices(TEXT.split(), k=args.words)) for _ in results]
    threads = [
        threading.Thread(target=ask, args=(args.port, body | {"prompt": prompt, "seed": i}, events))
        for i, (prompt, events) in enumerate(zip(prompts, results, strict=True))
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if not all(events and events[-1] for events in results):
        raise InputError(f"--port {args.port}: the server answers without tokens")
    begun = max(events[0] for events in results)
    gaps = [b - a for *times, _, _ in results for a, b in zip(times, times[1:], strict=False) if a >= begun]
    return {
        "tok_s": sum(events[-1] for events in results) / seconds,
        "ttft_ms": 1e3 * statistics.median(events[0] - start for events in results),
        "step_ms": 1e3 * statistics.median(gaps) if gaps else None,
    }


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("--port", type=flags.number(int, 1, 65535), default=8000)
    p.add_argument("--engine", default="serve.py", metavar="NAME", help="what answers at the port")
    p.add_argument("--streams", type=flags.count, nargs="+", default=[1, 4, 16], metavar="N", help="that come at once")
    p.add_argument("--words", type=flags.count, default=80, metavar="N", help="of a prompt")
    p.add_argument("--new-tokens", type=flags.count, default=64, metavar="N", help="of an answer")
    p.add_argument("--temperature", type=flags.number(float, 0), default=0.8, metavar="T")
    p.add_argument("--body", default="{}", metavar="JSON", help="more of a request, e.g. '{\"ignore_eos\": true}'")
    p.add_argument("--rounds", type=flags.count, default=5, metavar="N", help="the result is their median")
    p.add_argument("--json", metavar="FILE", default="serving.jsonl", help="append the results here")
    args = p.parse_args(argv)
    for streams in args.streams:
        measure(args, streams, -1)  # not measured: memory is allocated, and shapes are met
        rounds = [measure(args, streams, seed) for seed in range(args.rounds)]
        medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        print(f"{args.engine}, {streams} streams:", {name: round(value, 2) for name, value in medians.items()})
        line = {"case": "serving", "engine": args.engine, "streams": streams, "words": args.words, "rounds": rounds}
        line |= {"new_tokens": args.new_tokens} | medians | environment(World(0, 1, torch.device("cpu")))
        outputs.append_line(args.json, line)


if __name__ == "__main__":
    launch.run(main)
