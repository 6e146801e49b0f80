"""Write a checkpoint as a Hugging Face folder, for transformers, TRL and PEFT.

python -m extras.export demo --out hf/demo
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path

import torch

from ladder import outputs
from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture
from ladder.checkpoints import checkpoint, writing
from ladder.checkpoints.checkpoint import dtype_name
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT, ROPE_KEYS
from ladder.sources.families import FAMILIES
from ladder.sources.huggingface import HF_ACTIVATIONS, ROPE_TYPES, hf_names, our_values, read_hf
from ladder.text.tokenizer import SentencePieceTokenizer, load_tokenizer

EXPORTED_CODE = Path(__file__).with_name("exported")  # copied into a folder if transformers does not have its model
WIRING_BLOCKS = {  # {a wiring that the exported code computes: its key "block"}
    "standard": "standard", "ladder": "standard", "parallel": "parallel", "parallel-ladder": "parallel",
    "pair": "pair", "pair-ladder": "pair",
}  # fmt: skip
HF_CLASSES = {  # {a family with the same tensors as ours: its class}; the first that reads back as the model is used
    "llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "smollm3": "SmolLM3", "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe",
    "ministral3": "Ministral3", "stablelm": "StableLm", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3",
    "olmo2": "Olmo2", "olmo3": "Olmo3",
}  # fmt: skip
MIXTRAL_NAMES = {  # {a part of Qwen's tensor names: Mixtral's}
    ".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3.",
}  # fmt: skip
OWN_FAMILY = {
    "model_type": "ladder_residual", "architectures": ["LadderForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ladder.LadderConfig",
        "AutoModel": "modeling_ladder.LadderModel",
        "AutoModelForCausalLM": "modeling_ladder.LadderForCausalLM",
    },
}  # fmt: skip
OWN_FAMILY_FIELDS = {  # the fields of Config and of Heads that the exported code computes
    "n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "intermediate_size", "vocab_size", "max_seq_len",
    "norm_eps", "rope_theta", "rope_scaling", "tie_embeddings", "qkv_bias", "wo_bias", "mlp_bias", "bos_id", "eos_ids",
    "wiring", "architecture", "qk_norm", "nope_layers",
}  # fmt: skip


def family_of(config, hf):
    """Return a config.json of the first family of transformers that reads back as this standard model, or None.

    hf: the keys that all families have.
    """
    c = config
    last = range(config.n_layers)
    heads = c.find(Heads) or Heads()
    kinds = ["sliding_attention" if i in heads.window_layers else "full_attention" for i in last]
    activation = next((theirs for theirs, ours in HF_ACTIVATIONS.items() if ours == c.activation), None)
    keys = {
        "attention_bias": c.qkv_bias, "attention_out_bias": c.wo_bias, "mlp_bias": c.mlp_bias, "qkv_bias": c.qkv_bias,
        "use_qkv_bias": c.qkv_bias, "hidden_act": activation, "hidden_activation": activation, "pad_token_id": None,
        "no_rope_layers": [int(i not in heads.nope_layers) for i in last], "attn_logit_softcapping": heads.score_cap,
        "final_logit_softcapping": c.logit_cap, "layer_norm_eps": c.norm_eps,
        "query_pre_attn_scalar": round(c.head_dim / (heads.query_scale or 1.0) ** 2),
        "partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim,
    }  # fmt: skip
    if mixture := c.find(Mixture):
        keys |= {
            "num_experts": mixture.n_experts, "num_local_experts": mixture.n_experts, "decoder_sparse_step": 1,
            "num_experts_per_tok": mixture.experts_per_token, "moe_intermediate_size": mixture.expert_size,
            "shared_expert_intermediate_size": mixture.shared_expert_size,
            "norm_topk_prob": mixture.renormalize_experts, "mlp_only_layers": list(mixture.dense_layers),
        }  # fmt: skip
    if heads.window_layers:
        keys |= {"sliding_window": heads.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    for family, name in HF_CLASSES.items():
        own = {k: v for k, v in keys.items() if k in {*FAMILIES[family].keys, "hidden_act", "pad_token_id"}}
        own = {"model_type": family, "architectures": [f"{name}ForCausalLM"], **hf, **own}
        if heads.window_rope_theta:
            near = {"rope_type": "default", "rope_theta": heads.window_rope_theta}
            far = own.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": own.pop("rope_theta")}
            own["rope_parameters"] = dict(zip(ROPE_TYPES, (far, near), strict=True))
        with contextlib.suppress(InputError):
            back = checkpoint.make_config(our_values(read_hf({**own})) | {"eos_ids": c.eos_ids})
            if all(getattr(back, f.name, f.default) == getattr(c, f.name) for f in dataclasses.fields(c)):
                return own
    return None


def names_in_hf(name, config, family):
    """Return the Hugging Face names of the tensors that ours becomes, in order; each expert has its own."""
    names = hf_names(name, config)
    if family == "mixtral":
        for qwen, mixtral in MIXTRAL_NAMES.items():
            names = [name.replace(qwen, mixtral) for name in names]
    theirs = {glm: other for other, glm in FAMILIES[family].norms.items()}
    names = [".".join(theirs.get(part, part) for part in name.split(".")) for name in names]
    if ".experts." in name:
        names = [names[0].replace(".experts.", f".experts.{e}.") for e in range(config.find(Mixture).n_experts)]
    return names


def own_family(config):
    """Return the keys that name the model in exported/. transformers refuses its model_type without that code.

    Raises InputError for a Config that has no such form.
    """
    name = config.parsed.name
    if name not in WIRING_BLOCKS:
        raise InputError(f"wiring {config.wiring} has no Hugging Face form: only {', '.join(WIRING_BLOCKS)} have one")
    heads = config.find(Heads) or Heads()
    for settings in (config, heads):
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if field.name not in OWN_FAMILY_FIELDS and value != field.default:
                only = f"only {field.default!r} has one"
                raise InputError(f"{field.name} {value!r} has no Hugging Face form here, {only}")
    for each in config.architecture:
        if each is not heads:
            raise InputError(f"a model with {each.name} has no Hugging Face form here")
    return {
        **OWN_FAMILY, "wiring": config.wiring, "block": WIRING_BLOCKS[name], "stale": config.named_wiring.stale,
        "wired_layers": [i for i, wiring in enumerate(config.layer_wirings) if wiring is config.named_wiring],
        "attention_bias": config.qkv_bias, "attention_out_bias": config.wo_bias, "mlp_bias": config.mlp_bias,
        "qk_norm": heads.qk_norm, "attention_dropout": 0.0, "pad_token_id": None, "hidden_act": "silu",
        "no_rope_layers": [int(i not in heads.nope_layers) for i in range(config.n_layers)],
    }  # fmt: skip


def config_to_hf(config, dtype):
    """Return a Hugging Face config.json as a dict. Raises InputError for a Config that has no such form."""
    hf = {
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_size": config.dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype_name(dtype),
    }  # fmt: skip
    if config.rope_scaling:
        [rope_type] = [name for name, keys in ROPE_KEYS.items() if {*keys} == config.rope_scaling.keys() - {"truncate"}]
        hf["rope_scaling"] = {"rope_type": rope_type, **config.rope_scaling}
        if rope_type == "linear":  # else max_position_embeddings would be taken for the original context
            hf["rope_scaling"][ORIGINAL_CONTEXT] = int(config.max_seq_len / config.rope_scaling["factor"])
        if beta := (config.find(Heads) or Heads()).llama4_beta:
            hf["rope_scaling"]["llama_4_scaling_beta"] = beta
    family = family_of(config, hf) if config.wiring == "standard" else None
    return family or {**own_family(config), **hf}


def tensors_in_hf(name, tensor, config):
    """Return the tensors that ours becomes, as names_in_hf orders them: q, k and v (see huggingface.group), experts."""
    if ".wqkv." not in name:
        return tensor if ".experts." in name else [tensor]
    queries = config.n_heads // config.n_kv_heads * config.head_dim
    parts = tensor.unflatten(0, (config.n_kv_heads, -1)).split([queries, config.head_dim, config.head_dim], dim=1)
    return [t.flatten(0, 1) for t in parts]


def convert_to_hf(source, config, folder, dtype, shard_bytes):
    """Write a Hugging Face folder from our checkpoint's weights, with one file in memory at a time."""
    hf = config_to_hf(config, dtype)
    ours = {}  # {Hugging Face's name: (our name, index among what it becomes)}
    sizes = {}  # {Hugging Face's name: bytes}
    for name, shape in writing.shapes(config).items():
        tensors = tensors_in_hf(name, torch.empty(shape, dtype=dtype, device="meta"), config)
        for i, hf_name in enumerate(names_in_hf(name, config, hf["model_type"])):
            ours[hf_name] = name, i
            sizes[hf_name] = tensors[i].nbytes

    def read(hf_name):
        name, i = ours[hf_name]
        return tensors_in_hf(name, source.read(name).to(dtype), config)[i]

    writing.write_weights(folder, sizes, read, shard_bytes)
    writing.write_json(folder / "config.json", hf)
    if "auto_map" in hf:
        for path in EXPORTED_CODE.glob("*.py"):
            shutil.copyfile(path, folder / path.name)


def write_tokenizer_json(folder, sentencepiece):
    """Write a SentencePiece BPE model as a tokenizer.json, because transformers would read its spaces differently."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pieces = [sentencepiece.id_to_piece(i) for i in range(sentencepiece.vocab_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = []  # the pairs of pieces that make up a piece, those of the highest scores first
    for i, piece in enumerate(pieces):
        if not (sentencepiece.is_control(i) or sentencepiece.is_unknown(i) or sentencepiece.is_byte(i)):
            pairs = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
            pairs = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
            merges += [(-sentencepiece.get_score(i), vocabulary[a], vocabulary[b], (a, b)) for a, b in pairs]
    merges = [pair for *_, pair in sorted(merges)]
    model = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=pieces[0]))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    bos = sentencepiece.bos_id()
    eos = sentencepiece.eos_id()
    model.add_special_tokens([AddedToken(pieces[i], normalized=False) for i in (0, bos, eos)])
    model.post_processor = processors.TemplateProcessing(f"{pieces[bos]} $A", None, [(pieces[bos], bos)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": pieces[bos], "eos_token": pieces[eos]}
    writing.write_json(folder / "tokenizer_config.json", settings)


def convert_tokenizer(folder, tokenizer):
    """Make transformers read a SentencePiece model without settings files in the same way as this project."""
    has_settings = (folder / "tokenizer_config.json").exists()
    if not isinstance(tokenizer, SentencePieceTokenizer) or has_settings:
        return
    model = tokenizer.model
    sample = "ﬁ①é  x"
    plain = model.unk_id() == 0 and model.normalize(sample) == f"▁{sample}".replace(" ", "▁")
    if plain and model.is_byte(3) and len(tokenizer.special) == 3:
        write_tokenizer_json(folder, model)
    else:
        print("the tokenizer has special tokens or norms of its own: transformers needs tokenizer files of its origin")


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of ours, e.g. demo")
    flags.add_output_flags(p, "hf/demo")
    flags.add_wiring_flags(p)
    args = p.parse_args(argv)
    own = writing.read_original(args.checkpoint)
    weights = checkpoint.Weights(args.checkpoint)
    config = flags.with_wiring(own, args)
    flags.warn_of_wiring(own, config, (1,))
    dtype = checkpoint.chosen_dtype(args.dtype, weights)
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    with outputs.new_folder(args.out) as out:
        writing.copy_tokenizer(args.checkpoint, out)
        convert_tokenizer(out, tokenizer)
        convert_to_hf(weights, config, out, dtype, int(args.shard_gb * 1e9))
    print(f"wrote {args.out}: {config.n_layers} layers, wiring {config.wiring}, {dtype_name(dtype)}")
