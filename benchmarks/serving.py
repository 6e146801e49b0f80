"""How fast servers of OpenAI's API answer streams that come at once, beside generate.py with as large a batch.

python serve.py --checkpoint checkpoints/smollm2 --rows 16 --port 8000
python -m benchmarks.serving --checkpoint checkpoints/smollm2 --servers serve.py=8000 llama-server=8001 \
    --streams 1 4 16 --json serving.jsonl

They take turns. A result has the medians of the tokens per second of all streams, and in milliseconds of the first
token's time and of the time between two tokens once all streams have begun.
"""

import functools
import http.client
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ladder import outputs
from ladder.benchmarking import environment, in_turns
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.ranks import launch
from ladder.ranks.world import World

TEXT = "the a dog cat girl boy park big small red ran saw said then they happy sad house tree water"


def ask(port, body):
    """Send a request that streams; return (the time at which each event came, its number of tokens)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    times = []
    last = "{}"
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            last = line.removeprefix(b"data: ")
    connection.close()
    usage = json.loads(last).get("usage")
    return times, usage and usage["completion_tokens"]


def measure(args, streams, seeds, port):
    """Return the result of one round of a server. Raises InputError if it refuses."""
    choose = random.Random(next(seeds))
    body = {"max_tokens": args.new_tokens, "temperature": args.temperature, "stream": True} | json.loads(args.body)
    body["stream_options"] = {"include_usage": True}
    prompts = [" ".join(choose.choices(TEXT.split(), k=args.words)) for _ in range(streams)]  # which no server has seen
    bodies = [body | {"prompt": prompt, "seed": i} for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(streams) as pool:
        start = time.perf_counter()
        try:
            times, tokens = zip(*pool.map(functools.partial(ask, port), bodies), strict=True)
        except OSError as e:
            raise InputError(f"--servers: the one at port {port}: {e}") from None
        seconds = time.perf_counter() - start
    if not all(tokens):
        raise InputError(f"--servers: the one at port {port} answers without tokens")
    begun = max(first for first, *_ in times)
    gaps = [b - a for *each, _ in times for a, b in itertools.pairwise(each) if a >= begun]
    return {
        "tok_s": sum(tokens) / seconds,
        "ttft_ms": 1e3 * statistics.median(first - start for first, *_ in times),
        "step_ms": 1e3 * statistics.median(gaps) if gaps else None,
    }


def measure_generate(args, streams, seeds):
    """Return what measure does, of generate.py with a batch."""
    prompt = " ".join(random.Random(next(seeds)).choices(TEXT.split(), k=args.words))
    with tempfile.NamedTemporaryFile() as file:
        words = ["--checkpoint", args.checkpoint, "--prompt", prompt, "--batch", streams, "--json", file.name]
        words += ["--max-new-tokens", args.new_tokens, "--temperature", args.temperature]
        command = [sys.executable, "generate.py", *map(str, words)]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True)
        result = json.loads(file.read())
    seconds = result["prefill_s"] + result["decode_s"]
    tokens = sum(map(len, result["tokens"])) + result["finish"].count("stop")
    return {"tok_s": tokens / seconds, "ttft_ms": result["ttft_ms"], "step_ms": result["tpot_ms"]}


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("--servers", nargs="+", default=["serve.py=8000"], metavar="NAME=PORT", help="on this machine")
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="that generate.py runs")
    p.add_argument("--streams", type=flags.count, nargs="+", default=[1, 4, 16], metavar="N", help="that come at once")
    p.add_argument("--words", type=flags.count, default=80, metavar="N", help="of a prompt")
    p.add_argument("--new-tokens", type=flags.count, default=64, metavar="N", help="of an answer")
    p.add_argument("--temperature", type=flags.number(float, 0), default=0.8, metavar="T")
    p.add_argument("--body", default="{}", metavar="JSON", help="more of a request, e.g. '{\"ignore_eos\": true}'")
    p.add_argument("--rounds", type=flags.count, default=5, metavar="N", help="the result is their median")
    p.add_argument("--json", metavar="FILE", default="serving.jsonl", help="append the results here")
    args = p.parse_args(argv)
    ports = dict(server.split("=") for server in args.servers)
    seeds = itertools.count()
    for streams in args.streams:
        given = args, streams, seeds
        ways = {name: functools.partial(measure, *given, port) for name, port in ports.items()}
        ways["generate.py --batch"] = functools.partial(measure_generate, *given)
        in_turns(ways, 1)  # not measured: memory is allocated, and shapes are met
        for engine, rounds in in_turns(ways, args.rounds).items():
            medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            print(f"{engine}, {streams} streams:", {name: round(value, 2) for name, value in medians.items()})
            line = {"case": "serving", "engine": engine, "streams": streams, "words": args.words, "rounds": rounds}
            line |= {"new_tokens": args.new_tokens} | medians | environment(World(0, 1, torch.device("cpu")))
            outputs.append_line(args.json, line)


if __name__ == "__main__":
    launch.run(main)
