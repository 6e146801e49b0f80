"""How long it takes to read a tensor, to convert and to load, by the number of tensors in a file.

python -m benchmarks.loading --checkpoint checkpoints/smollm2 --experts 2 16 128 --json loading.jsonl

The checkpoint is loaded. A made mixture of 48 layers with so many tiny experts, which has three tensors for each, is
converted and loaded.
"""

import json
import tempfile
import time
from pathlib import Path

import ladder.openmp  # noqa: F401 (before torch loads)

import torch
from safetensors.torch import save_file

import convert_hf_checkpoint
import generate
from ladder import outputs
from ladder.benchmarking import environment
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.ranks import launch
from ladder.ranks.world import World

LAYERS, DIM, HEAD_DIM, VOCAB = 48, 32, 16, 64


def make_mixture(folder, n_experts):
    """Write a Hugging Face folder of a tiny Qwen3-MoE with random weights."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": DIM, "intermediate_size": DIM, "moe_intermediate_size": 8,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "num_experts": n_experts, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {"model.embed_tokens": (VOCAB, DIM), "model.norm": (DIM,)}
    layer = {"input_layernorm": (DIM,), "post_attention_layernorm": (DIM,), "mlp.gate": (n_experts, DIM)}
    layer |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,), "self_attn.q_proj": (2 * HEAD_DIM, DIM)}
    layer |= {f"self_attn.{name}_proj": (HEAD_DIM, DIM) for name in "kv"} | {"self_attn.o_proj": (DIM, 2 * HEAD_DIM)}
    for expert in range(n_experts):
        layer |= {f"mlp.experts.{expert}.{name}_proj": (8, DIM) for name in ("gate", "up")}
        layer[f"mlp.experts.{expert}.down_proj"] = DIM, 8
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder, n_experts):
    """Return the result of a case: the checkpoint in the folder, or a mixture that is made in it."""
    seconds, source, checkpoint_folder = {}, folder, folder
    if n_experts:
        make_mixture(folder, n_experts)
        checkpoint_folder = folder / "converted"
        start = time.perf_counter()
        convert_hf_checkpoint.main([str(folder), "--out", str(checkpoint_folder)])
        seconds["convert_s"] = time.perf_counter() - start
    start = time.perf_counter()
    weights = checkpoint.Weights(source)
    seconds["open_s"] = time.perf_counter() - start
    names = weights.names()[:1000]
    start = time.perf_counter()
    for name in names:
        weights.read(name)
    seconds["ms_per_read"] = 1e3 * (time.perf_counter() - start) / len(names)
    start = time.perf_counter()
    config = checkpoint.read_config(checkpoint_folder)
    generate.load_model(config, checkpoint_folder, None, World(0, 1, torch.device("cpu")))
    seconds["load_s"] = time.perf_counter() - start
    return {"tensors": len(weights.names())} | seconds


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
        line = {"case": "loading", "model": name} | result | environment(World(0, 1, torch.device("cpu")))
        outputs.append_line(args.json, line)


if __name__ == "__main__":
    launch.run(main)
