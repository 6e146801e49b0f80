"""Small models of transformers, their Hugging Face folders, and what the converter makes of these."""

import copy

import torch
import transformers
from file_edits import read_json, write_json
from helpers import last_logits, load_folder, seeded
from running import run_main

import convert_hf_checkpoint
import generate
from generate import Runner
from ladder.decoding.batch import Sampler
from ladder.sources.huggingface import config_from_hf

SMALL = {
    "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 131,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.15, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.2, 3.0, 8.0],
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.25, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
}  # fmt: skip
HF_FAMILIES = {  # name: (transformers' config class, changes to SMALL)
    "llama3.2-tied": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7,
                              "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7,
                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "llama, yarn": ("LlamaConfig", {"rope_parameters": YARN_ROPE, "original_max_position_embeddings": 12,
                                    "head_dim": 32, "num_key_value_heads": 6}),
    "mistral": ("MistralConfig", {"sliding_window": 1}),
    "ministral": ("MinistralConfig", {"sliding_window": 7, "head_dim": 8,
                                      "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "smollm3, tied, biased, yarn": ("SmolLM3Config", {
        "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True, "use_sliding_window": True,
        "sliding_window": 11, "rope_parameters": {**YARN_ROPE, "attention_factor": 0.7}}),
    "seed-oss, linear rope": ("SeedOssConfig", {"head_dim": 16, "rope_parameters": LINEAR_ROPE}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": {
        **YARN_ROPE, "original_max_position_embeddings": 6, "mscale": 1.0, "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.4}}),
    "phi3, long": ("Phi3Config", {"original_max_position_embeddings": 10, "rope_parameters": LONG_ROPE}),
    "phi3, short": ("Phi3Config", {"original_max_position_embeddings": 40, "rope_parameters": LONG_ROPE,
                                   "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4, yarn": ("Glm4Config", {"head_dim": 16, "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.75}}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLmConfig", {"use_parallel_residual": True}),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 9,
                                "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                                "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {
        "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 9, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}),
    "gemma3, wide window": ("Gemma3TextConfig", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 7, "rope_parameters": {
        "full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}  # fmt: skip
FOLDED = {  # families whose tensors are not ours one by one: they go back as Llamas
    "phi3, windowed": ("Phi3Config", {"sliding_window": 12}),
    "granite, tied, biased": (
        "GraniteConfig", {**MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
}  # fmt: skip
MULTIMODAL = {
    "mistral small 3.1": ("Mistral3", {"model_type": "mistral", "head_dim": 16}),
    "ministral 3": ("Mistral3", {"model_type": "ministral3", "head_dim": 16,
                                 "rope_parameters": HF_FAMILIES["ministral3"][1]["rope_parameters"]}),
    "gemma 3": ("Gemma3", {"model_type": "gemma3_text", **HF_FAMILIES["gemma3"][1]}),
}  # fmt: skip


def hf_model(family, seed=0):
    """Return a tiny transformers model with random weights, norms and biases included. family: a name or its values."""
    class_name, changes = family if isinstance(family, tuple) else {**HF_FAMILIES, **FOLDED}[family]
    config = getattr(transformers, class_name)(**copy.deepcopy({**SMALL, **changes}))  # else it changes them
    torch.manual_seed(seed)
    how = {"attn_implementation": "eager"} if class_name == "Gemma2Config" else {}  # which alone knows caps
    net = transformers.AutoModelForCausalLM.from_config(config, **how).eval()
    return randomize_vectors(net)


def multimodal_model(outer, text, more_vision=None, **changes):
    """Return a tiny transformers model with a tower for pictures."""
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "head_dim": 8, **(more_vision or {})}
    config = getattr(transformers, f"{outer}Config")(
        text_config=copy.deepcopy({**SMALL, **text}), vision_config=vision, mm_tokens_per_image=4, **changes
    )
    torch.manual_seed(0)
    return randomize_vectors(transformers.AutoModelForImageTextToText.from_config(config).eval())


def randomize_vectors(net):
    """Return the model with random norms and biases."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5) if name.endswith("weight") else weight.normal_()
    return net


def config_from_values(folder, values):
    """Return our Config of a folder that gets a config.json of these values."""
    write_json(folder / "config.json", values)
    return config_from_hf(folder / "config.json")


def convert(source, out, *args):
    """Run the converter and return its model on one device, in float32."""
    run_main(convert_hf_checkpoint, source, "--out", out, *args)
    return load_folder(out)


def convert_hf(folder, name, *args):
    """Convert folder/hf to folder/name."""
    return convert(folder / "hf", folder / name, *args)


TOKENS = torch.randint(3, 131, (3, 20), generator=seeded(5))
LENGTHS = torch.tensor([20, 17, 12])


def check_parity(ours, theirs):
    """Logits within 1e-4, whole sequence, and prefill with token-by-token decode, rows of unequal lengths."""
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.1
        assert (ours(TOKENS) - expected).abs().max() < 1e-4
    logits = last_logits(ours, TOKENS, LENGTHS, steps=8)
    for row, length in enumerate(LENGTHS):
        assert (logits[row] - expected[row, length - 9 : length]).abs().max() < 1e-4


def check_greedy(ours, theirs):
    """The ids that follow rows of unequal lengths, in transformers padded on the left."""
    prompts = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
    padded = torch.tensor([[0] * (20 - len(prompt)) + prompt for prompt in prompts])
    theirs.generation_config.eos_token_id = None
    mask = torch.arange(20) >= 20 - LENGTHS[:, None]
    out = theirs.generate(padded, attention_mask=mask.long(), max_new_tokens=8, do_sample=False, pad_token_id=0)
    runner = Runner(ours, ours.new_cache(3, 28))
    assert generate.generate(runner, prompts, 8, Sampler(0)).rows == out[:, 20:].tolist()


def as_on_the_hub(folder):
    """Rewrite a config.json of transformers 5 in the form that most of the hub's have."""
    path = folder / "config.json"
    hf = read_json(path)
    rope = hf.pop("rope_parameters")
    if "full_attention" in rope:
        near = rope["sliding_attention"]
        rope = rope["full_attention"]
        if hf["model_type"] == "gemma3_text":
            hf["rope_local_base_freq"] = near["rope_theta"]
    hf["rope_theta"] = rope.pop("rope_theta")
    hf |= {key: rope.pop(key) for key in ["partial_rotary_factor"] if key in rope}
    hf["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    hf["torch_dtype"] = hf.pop("dtype")
    write_json(path, hf)


def check_family(theirs, folder, greedy=True):
    """Save a model of transformers as folder/hf, convert that to folder/ours, and compare; returns our model."""
    theirs.save_pretrained(folder / "hf")
    ours = convert_hf(folder, "ours")
    check_parity(ours, theirs)
    if greedy:
        check_greedy(ours, theirs)
    return ours


def check_config_as_on_the_hub(folder, ours):
    """The config.json of a Hugging Face folder means the same in the form that most of the hub's have."""
    as_on_the_hub(folder)
    assert config_from_hf(folder / "config.json") == ours.config
