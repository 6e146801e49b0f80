"""The families of Hugging Face models that can be converted, with the keys of their config.json files."""

from typing import NamedTuple

from ladder.checkpoints.checkpoint import UNQUANTIZED

COMMON = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "rope_theta": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False, "hidden_act": None, "original_max_position_embeddings": None,
    "ladder_layers": None,  # of the paper's authors
}  # fmt: skip
REQUIRED = (  # keys that a config.json must have unless its family has a default
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
HARMLESS = {  # transformers' classes have these, but a text's logits do not depend on them
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward",
    "dtype", "embd_pdrop", "ep_size", "hidden_dropout", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "num_mtp_layers", "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "qk_head_dim", "quantization_config",
    "resid_pdrop", "residual_dropout", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
ONLY_VALUES = {  # the one value that is computed of a key that transformers reads in every family, unless it is listed
    "is_causal": True, "partial_rotary_factor": 1.0, "per_layer_config": None, "attention_chunk_size": None,
}  # fmt: skip
REMEDIES = {  # {a key that changes what a model computes, in transformers or in other engines: what to do about it}
    "attn_factor": "transformers does not read it: write attention_factor, attn_factor * (0.1 * ln(factor) + 1)",
    "dual_chunk_attention_config": "without it the model computes full attention, as in transformers: drop it",
    "compression_config": UNQUANTIZED, "quantization": UNQUANTIZED,
}  # fmt: skip
NESTED = {  # {model_type of a model with a tower for pictures: that of its text_config, if it has none}
    "mistral3": "mistral", "gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip


class Family(NamedTuple):
    """What a model_type means. `keys` are those that transformers 5.23 reads, with the defaults that it has for them.

    Defaults matter: the first Llamas lack some keys, and transformers does not write a value that is its default, above
    all in a text_config of NESTED. Keys that transformers does not read are ignored; a test compares these tables with
    the attributes of its classes.
    """

    keys: dict
    values: dict = {}  # fields of our Config, or settings of an architecture, that the family has in any case
    norms: dict = {}  # {the family's name of a norm: Llama's name or, where a sum is normed, too, GLM's}
    only: dict = {}  # {a key that transformers reads: the one value of it that is computed here}
    two_bases: bool = False  # whether layers with a window have another rope_theta
    scaled_context: bool = False  # whether max_position_embeddings counts the context that rope_scaling extends
    needs_layer_types: bool = False  # whether transformers' defaults contradict one another where these are absent
    needs: tuple = ()  # keys that a config.json must have, if only with null
    strict: bool = False  # whether unknown keys are refused, since code that is not in transformers may read them
    translate: str = ""  # module:function (values) -> values with these keys, of a config.json that has others
    wiring: str = ""  # module:function (hf) -> the text of the wiring that the family's own keys mean, or None
    neighbours: bool = False  # whether rotary embeddings turn neighbouring dimensions of q and k
    wide_embeddings: bool = False  # whether the embeddings are multiplied by the root of hidden_size
    activations: dict = {}  # {a hidden_act: the one that transformers computes instead}


LLAMA = {**COMMON, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = {"use_bidirectional_attention": False}
QWEN = {**COMMON, "use_sliding_window": False, "sliding_window": 4096}
WINDOW_LAYERS = {"max_window_layers": 28, "layer_types": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"))
QWEN_EXPERTS = {
    **EXPERTS, "moe_intermediate_size": None, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}  # fmt: skip
SHARED = {"moe_intermediate_size": None, "shared_expert_intermediate_size": None}
LINEAR = {  # keys of Qwen's families with linear attention
    **LLAMA, "bos_token_id": None, "eos_token_id": None, "attention_bias": False, "head_dim": 256,
    "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mrope_section": None, "mrope_interleaved": None,  # for pictures: a text token's three positions are equal
}  # fmt: skip
GATED = {"heads": {"gate": True, "qk_norm": True}, "norm": "rms+1"}  # how the layers between those attend
GRANITE = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
GLM = {**COMMON, "attention_bias": True, "attention_out_bias": False, "partial_rotary_factor": 0.5}
GEMMA = {
    **LLAMA, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None,
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip
OLMO = {**COMMON, "attention_bias": False}
POST_NORMS = {  # Gemma's and OLMo's names of norms: GLM's
    "post_attention_layernorm": "post_self_attn_layernorm", "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}  # fmt: skip
DEEPSEEK = {  # keys that DeepSeek V3 and its relatives share, with V3's defaults
    **LLAMA, "bos_token_id": 0, "eos_token_id": 1, "n_group": 8, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
    "topk_group": 4, "max_position_embeddings": 4096,
}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V3 = {**DEEPSEEK, **LATENT, "first_k_dense_replace": 3, "rope_interleave": True}
DEEPSEEK_ONLY = {"attention_bias": False, "moe_layer_freq": 1}
MINISTRAL = {**COMMON, "sliding_window": 4096, "layer_types": None}
SIGMOID = {"mixture": {"router": "sigmoid"}}
SIGMOID_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
OLMO_NORMS = {"heads": {"qk_norm": True, "whole_qk_norm": True}, "postnorm": {"input_norms": False}}
FAMILIES = {
    "llama": Family({**LLAMA, **BIASES, "max_position_embeddings": 2048}),
    "llamaLadder": Family({**LLAMA, **BIASES}, needs=("ladder_layers",)),
    "ladder_residual": Family({  # what an exported folder says: a child of seed_oss
        **COMMON, **BIASES, "attention_out_bias": False, "no_rope_layers": None, "qk_norm": False,
        "parallel_blocks": False, "wiring": None, "wired_layers": None, "block": None, "stale": None,
    }, scaled_context=True),
    "mistral": Family({**LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(MINISTRAL),
    "qwen2": Family({**QWEN, **WINDOW_LAYERS}, {"qkv_bias": True}),
    "qwen3": Family({**QWEN, **WINDOW_LAYERS, "attention_bias": False}, {"heads": {"qk_norm": True}}),
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
    "glm": Family(GLM, neighbours=True),
    "glm4": Family(GLM, {"postnorm": {}}, neighbours=True),
    "stablelm": Family({
        **COMMON, "layer_norm_eps": None, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
        "use_parallel_residual": False,
    }, {"norm": "layer"}, only={"qk_layernorm": False}),
    "gemma": Family(
        GEMMA, {"norm": "rms+1"}, only=CAUSAL, wide_embeddings=True, activations={"gelu": "gelu_pytorch_tanh"},
    ),
    "gemma2": Family({
        **GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }, {"norm": "rms+1", "postnorm": {}}, POST_NORMS, CAUSAL, wide_embeddings=True),
    "gemma3_text": Family({
        **GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "rope_theta": 1e6,
        "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
        "sliding_window_pattern": 6, "_sliding_window_pattern": None, "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
    }, {"norm": "rms+1", "heads": {"qk_norm": True}, "postnorm": {}}, POST_NORMS,
       {**CAUSAL, "attn_logit_softcapping": None}, two_bases=True, scaled_context=True, wide_embeddings=True),
    "olmo2": Family(OLMO, OLMO_NORMS, POST_NORMS),
    "olmo3": Family(
        {**OLMO, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4}, OLMO_NORMS, POST_NORMS,
        two_bases=True,
    ),
    "granite": Family({**COMMON, **BIASES, **GRANITE}),
    "mixtral": Family({**COMMON, **EXPERTS, "sliding_window": None}),
    "granitemoe": Family({**COMMON, **EXPERTS, **GRANITE, "attention_bias": False}),
    "qwen2_moe": Family(
        {**QWEN, **WINDOW_LAYERS, **QWEN_EXPERTS, **SHARED, "qkv_bias": True}, needs_layer_types=True
    ),
    "qwen3_moe": Family({**QWEN, **QWEN_EXPERTS, "attention_bias": False}, {"heads": {"qk_norm": True}}),
    "qwen3_next": Family({**LINEAR, **QWEN_EXPERTS, **SHARED, "norm_topk_prob": True}, GATED),
    "qwen3_5_text": Family(LINEAR, GATED),
    "qwen3_5_moe_text": Family({
        **LINEAR, "num_experts": 256, "num_local_experts": None, "num_experts_per_tok": 8, "intermediate_size": 512,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }, GATED),
    "deepseek_v2": Family({
        **DEEPSEEK, **LATENT, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407, "n_group": None, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_experts_per_tok": None, "routed_scaling_factor": 1.0, "topk_group": None,
        "topk_method": "greedy", "max_position_embeddings": 2048,
    }, {"mixture": {"router": "softmax in float32"}}, only={
        **DEEPSEEK_ONLY, "mlp_bias": False, "norm_topk_prob": False, "rope_interleave": True, "scoring_func": "softmax",
    }, scaled_context=True),
    "deepseek_v3": Family(DEEPSEEK_V3, SIGMOID, only={
        **DEEPSEEK_ONLY, **SIGMOID_ONLY, "gated_attention": False, "farskip": False,
    }, scaled_context=True),
    "instella_moe": Family({
        **DEEPSEEK_V3, "gated_attention": True, "farskip": True, "farskip_start_idx": 0, "farskip_end_idx": 1e4,
        "attn_only_farskip": False, "mlp_only_farskip": False,
    }, SIGMOID, only={**DEEPSEEK_ONLY, **SIGMOID_ONLY}, scaled_context=True, strict=True,
       wiring="ladder.architectures.farskip:wiring_from_hf"),
    "glm4_moe": Family({
        **DEEPSEEK, "attention_bias": False,
        "bos_token_id": None, "eos_token_id": None, "first_k_dense_replace": 1, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
        "attention_out_bias": False,
    }, SIGMOID, only=SIGMOID_ONLY),
    "glm4_moe_lite": Family({
        **DEEPSEEK, **LATENT, "max_position_embeddings": 202752, "mlp_layer_types": None, "moe_intermediate_size": 1536,
        "n_group": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5, "rope_interleave": True, "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256,
    }, SIGMOID, only={**DEEPSEEK_ONLY, **SIGMOID_ONLY, "first_k_dense_replace": 1}),
    "gpt_oss": Family({
        **COMMON, **EXPERTS, "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "layer_types": None, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "attention_bias": True, "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }, {"heads": {"sinks": True}, "mixture": {"clamped_swiglu": True}}, only={
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    }, scaled_context=True, needs_layer_types=True),
    "smollm3": Family({
        **COMMON, **BIASES, "tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4,
        "use_sliding_window": False, "sliding_window": None, "layer_types": None,
    }, needs_layer_types=True),
    "seed_oss": Family({**COMMON, **BIASES, "attention_bias": True, "attention_out_bias": False}),
    "laneformer": Family(
        {**MINISTRAL, "laneformer": None}, strict=True, translate="ladder.sources.laneformer:as_ministral",
    ),
}  # fmt: skip
OTHER_NAMES = [  # (a model_type, the `architectures` beside it or None for any, the family that they mean)
    ("deepseek_v3", ["InstellaMoEForCausalLM"], "instella_moe"), ("laneformer_tp", None, "laneformer"),
]  # fmt: skip


def find_family(values):
    """Return the name of a config.json's family: mostly its model_type. It may be unknown, or no text."""
    for model_type, classes, family in OTHER_NAMES:
        if values.get("model_type") == model_type and classes in (None, values.get("architectures")):
            return family
    return values.get("model_type")
