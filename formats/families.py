"""The families of Hugging Face's models that convert."""

from typing import NamedTuple

COMMON = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "rope_theta": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = {  # of every family
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "rope_scaling", "rope_parameters", "model_type", "hidden_act", "ladder_layers",
    "original_max_position_embeddings",
}  # fmt: skip
IGNORED = {  # do not change what a model computes
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "chunk_size_feed_forward", "context_window_size",
    "dtype", "embd_pdrop", "hidden_dropout", "id2label", "initializer_range", "is_encoder_decoder", "is_llama_config",
    "label2id", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "prefill_chunk_size", "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "torch_dtype", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache", "cache_implementation", "mamba_ssm_dtype", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "quantization_config",
}  # fmt: skip
ONLY = {  # the one value that is computed of these, in families that do not list the key
    "attention_bias": False, "attention_out_bias": False, "mlp_bias": False, "attn_output_gate": True,
    "output_gate_type": "swish", "attn_logit_softcapping": None, "qk_layernorm": False, "truncate": True,
    "use_bidirectional_attention": False, "partial_rotary_factor": 1.0, "rope_interleaved": False,
    "llama_4_scaling_beta": None, "num_experts": 0, "num_local_experts": 0, "n_routed_experts": 0,
    "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,  # in Phi-4-mini
}  # fmt: skip
NESTED = {  # model_type: that of a text_config without one
    "mistral3": "mistral", "gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip


class Family(NamedTuple):
    """A model_type. Its keys are those that transformers 5.23 reads, with its default where a config.json may lack one.

    The first Llamas lack some, and transformers leaves out what is its default, above all in a text_config of NESTED.
    """

    keys: dict
    values: dict = {}  # of our Config, whatever the keys
    norms: dict = {}  # {the family's name of a norm: GLM's name}


LLAMA = {**COMMON, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}
QWEN = {**COMMON, "use_sliding_window": False, "sliding_window": 4096}
WINDOW_LAYERS = {"max_window_layers": 28, "layer_types": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"))
QWEN_EXPERTS = {
    **EXPERTS, "moe_intermediate_size": None, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}  # fmt: skip
SHARED = {"moe_intermediate_size": None, "shared_expert_intermediate_size": None}
LINEAR = {  # Qwen's with linear attention
    **LLAMA, "bos_token_id": None, "eos_token_id": None, "attention_bias": False, "head_dim": 256,
    "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mrope_section": None, "mrope_interleaved": None,  # of pictures: the three positions of a text's token are one
}  # fmt: skip
GATED = {"attention_gate": True, "qk_norm": True, "norm": "rms+1"}  # attention in the layers between those
GRANITE = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
GLM = {**COMMON, "attention_bias": True, "attention_out_bias": False, "partial_rotary_factor": 0.5}
GEMMA = {
    **LLAMA, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None,
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip
OLMO = {**COMMON, "attention_bias": False}
SUM_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm", "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}  # fmt: skip
OLMO_NORMS = {"qk_norm": True, "whole_qk_norm": True, "input_norms": False, "sum_norms": True}
FAMILIES = {
    "llama": Family({**LLAMA, **BIASES}),
    "llamaLadder": Family({**LLAMA, **BIASES}),
    "ladder_residual": Family({  # extras/export/exported: a child of seed_oss
        **COMMON, **BIASES, "attention_out_bias": False, "no_rope_layers": None, "qk_norm": False,
        "parallel_blocks": False, "wiring": None, "wired_layers": None, "block": None, "stale": None,
    }),
    "mistral": Family({**LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family({**COMMON, "sliding_window": 4096, "layer_types": None}),
    "qwen2": Family({**QWEN, **WINDOW_LAYERS}, {"qkv_bias": True}),
    "qwen3": Family({**QWEN, **WINDOW_LAYERS, "attention_bias": False}, {"qk_norm": True}),
    "ministral3": Family({
        **LLAMA, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "sliding_window": None, "llama_4_scaling_beta": None, "rope_parameters": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    }),
    "phi3": Family({
        **COMMON, "sliding_window": None, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096,
    }),
    "glm": Family(GLM),
    "glm4": Family(GLM, {"sum_norms": True}),
    "stablelm": Family({
        **COMMON, "layer_norm_eps": None, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
        "use_parallel_residual": False,
    }, {"norm": "layer"}),
    "gemma": Family(GEMMA, {"norm": "rms+1"}),
    "gemma2": Family({
        **GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }, {"norm": "rms+1", "sum_norms": True}, SUM_NORMS),
    "gemma3_text": Family({
        **GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "rope_theta": 1e6,
        "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
        "sliding_window_pattern": 6, "_sliding_window_pattern": None, "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
    }, {"norm": "rms+1", "qk_norm": True, "sum_norms": True}, SUM_NORMS),
    "olmo2": Family(OLMO, OLMO_NORMS, SUM_NORMS),
    "olmo3": Family(
        {**OLMO, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4}, OLMO_NORMS, SUM_NORMS
    ),
    "granite": Family({**COMMON, **BIASES, **GRANITE}),
    "mixtral": Family({**COMMON, **EXPERTS, "sliding_window": None}),
    "granitemoe": Family({**COMMON, **EXPERTS, **GRANITE, "attention_bias": False}),
    "qwen2_moe": Family({**QWEN, **WINDOW_LAYERS, **QWEN_EXPERTS, **SHARED, "qkv_bias": True}),
    "qwen3_moe": Family({**QWEN, **QWEN_EXPERTS, "attention_bias": False}, {"qk_norm": True}),
    "qwen3_next": Family({**LINEAR, **QWEN_EXPERTS, **SHARED, "norm_topk_prob": True}, GATED),
    "qwen3_5_text": Family(LINEAR, GATED),
    "qwen3_5_moe_text": Family({
        **LINEAR, "num_experts": 256, "num_local_experts": None, "num_experts_per_tok": 8, "intermediate_size": 512,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }, GATED),
    "smollm3": Family({
        **COMMON, **BIASES, "tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4,
        "use_sliding_window": False, "sliding_window": None, "layer_types": None,
    }),
    "seed_oss": Family({**COMMON, **BIASES, "attention_bias": True, "attention_out_bias": False}),
}  # fmt: skip
