"""The families of Hugging Face's models that convert: their keys, with what an absent one means."""

COMMON = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
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
    "mtp_use_dedicated_embeddings",
}  # fmt: skip
NESTED = {  # model_type: that of a text_config without one
    "mistral3": "mistral", "gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
QWEN = {**COMMON, "bos_token_id": None, "eos_token_id": None, "use_sliding_window": False, "sliding_window": 4096}
WINDOW_LAYERS = {"max_window_layers": 28, "layer_types": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
QWEN_EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
LINEAR = {  # Qwen's with linear attention
    **COMMON, "bos_token_id": None, "eos_token_id": None, "attention_bias": False, "head_dim": 256,
    "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mrope_section": None, "mrope_interleaved": None,  # of pictures: the three positions of a text's token are one
}  # fmt: skip
GRANITE = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
GLM = {
    **COMMON, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
    "attention_out_bias": False, "partial_rotary_factor": 0.5, "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
GEMMA = {
    **COMMON, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None,
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "attention_bias": False,
    "use_bidirectional_attention": None,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
OLMO = {**COMMON, "rms_norm_eps": 1e-5, "attention_bias": False, "bos_token_id": None, "eos_token_id": 50279}
# model_type: {key: transformers 5.23's default}, for the keys that the family has. Every config.json has
# the model's shape, except for the keys that the first Llamas lack.
FAMILIES = {
    "llama": {**COMMON, **BIASES},
    "llamaLadder": {**COMMON, **BIASES},
    "ladder_residual": {  # extras/export/exported: a child of seed_oss
        **COMMON, **BIASES, "attention_out_bias": False, "bos_token_id": 0, "no_rope_layers": None, "qk_norm": False,
        "parallel_blocks": False, "wiring": None, "wired_layers": None, "block": None, "stale": None,
    },
    "mistral": {**COMMON, "sliding_window": 4096},
    "ministral": {**COMMON, "sliding_window": 4096, "layer_types": None},
    "qwen2": {**QWEN, **WINDOW_LAYERS},
    "qwen3": {**QWEN, **WINDOW_LAYERS, "attention_bias": False},
    "ministral3": {
        **COMMON, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": {
        **COMMON, "rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32000, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "glm": GLM,
    "glm4": GLM,
    "stablelm": {
        **COMMON, "rms_norm_eps": None, "layer_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
        "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    "gemma": GEMMA,
    "gemma2": {
        **GEMMA, **CAPS, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "layer_types": None, "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        **GEMMA, **dict.fromkeys(CAPS), "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
        "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
        "sliding_window_pattern": 6, "_sliding_window_pattern": None, "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
    },
    "olmo2": OLMO,
    "olmo3": {**OLMO, "rope_theta": 5e5, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
    "granite": {**COMMON, **BIASES, **GRANITE},
    "mixtral": {
        **COMMON, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {**COMMON, **GRANITE, "attention_bias": False, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **QWEN, **WINDOW_LAYERS, **QWEN_EXPERTS, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
    },
    "qwen3_moe": {
        **QWEN, **QWEN_EXPERTS, "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "qwen3_next": {
        **LINEAR, **QWEN_EXPERTS, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {
        **LINEAR, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "smollm3": {
        **COMMON, **BIASES, "tie_word_embeddings": True, "rope_theta": 2000000.0, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None, "layer_types": None,
        "bos_token_id": 128000, "eos_token_id": 128001,
    },
    "seed_oss": {**COMMON, **BIASES, "attention_bias": True, "attention_out_bias": False, "bos_token_id": 0},
}  # fmt: skip
