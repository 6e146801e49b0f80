"""How long it takes to read a tensor, to convert and to load, by the number of tensors in a file.

python -m benchmarks.loading --checkpoint checkpoints/smollm2 --experts 2 16 128 --json loading.jsonl

The checkpoint is loaded. A made mixture of 48 layers with so many tiny experts, which has three tensors for each, is
converted and loaded.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

import convert_hf_checkpoint
import generate
from extras.export.to_hf import convert_to_hf
from ladder import outputs
from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture
from ladder.benchmarking import environment, timed
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.ranks import launch
from ladder.ranks.world import World
from model import Config, build

LAYERS = 48
WORLD = World(0, 1, torch.device("cpu"))


def make_mixture(folder, n_experts):
    """Write a Hugging Face folder of a tiny Qwen3-MoE with random weights."""
    architecture = Heads(qk_norm=True), Mixture(n_experts, experts_per_token=2, expert_size=8)
    config = Config(LAYERS, 2, 1, 16, 32, 32, 64, 64, tie_embeddings=True, architecture=architecture)
    weights = {name: torch.randn(each.shape) for name, each in build(config).named_parameters()}
    convert_to_hf(SimpleNamespace(read=weights.get), config, folder, torch.bfloat16, shard_bytes=2**30)


def measure(folder, n_experts):
    """Return the result of a case: the checkpoint in the folder, or a mixture that is made in it."""
    seconds = {}
    checkpoint_folder = folder
    if n_experts:
        make_mixture(folder, n_experts)
        checkpoint_folder = folder / "converted"
        words = [str(folder), "--out", str(checkpoint_folder)]
        seconds["convert_s"] = timed("cpu", lambda: convert_hf_checkpoint.main(words))
    seconds["open_s"] = timed("cpu", lambda: checkpoint.Weights(folder))
    weights = checkpoint.Weights(folder)
    names = weights.names()[:1000]

    def read():
        for name in names:
            weights.read(name)

    def load():
        generate.load_model(checkpoint.read_config(checkpoint_folder), checkpoint_folder, None, WORLD)

    seconds["ms_per_read"] = 1e3 * timed("cpu", read) / len(names)
    return {"tensors": len(weights.names())} | seconds | {"load_s": timed("cpu", load)}


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("--checkpoint", metavar="DIR", required=True, help="what is loaded first")
    p.add_argument("--experts", type=flags.count, nargs="*", default=[], metavar="N", help="of each layer of mixtures")
    p.add_argument("--json", metavar="FILE", default="loading.jsonl", help="append the results here")
    args = p.parse_args(argv)
    for n_experts in [0, *args.experts]:
        name = f"mixture of {n_experts}" if n_experts else args.checkpoint
        with tempfile.TemporaryDirectory() as made:
            result = measure(Path(made if n_experts else args.checkpoint), n_experts)
        print(name, result, flush=True)
        line = {"case": "loading", "model": name} | result | environment(WORLD)
        outputs.append_line(args.json, line)


if __name__ == "__main__":
    launch.run(main)
