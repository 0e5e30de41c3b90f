"""What breaks each rule of what may not go together, in the rules' order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from peft import LoraConfig, PromptTuningConfig
from rule_runs import (
    ASYNC,
    BF16_VLLM,
    DIFFUSION,
    DISTILLATION,
    DRAFTING,
    EAGLE,
    EXACT,
    INT8,
    LORA,
    PPO,
    PROXIMAL,
    REPLAY,
    RLOO,
    SCALED_STEPS,
    SERVER,
    SYNTHETIC,
    THREAD,
    TRLS_VLLM,
    VLLM,
    ZERO3,
    PlainGRPOConfig,
    bare,
    changed,
    lost,
    names_another,
    of_class,
    outside,
    quantized,
    quantized_mixture,
    saved,
    saved_mixture,
    teacher,
    tiny,
    without_tower,
)
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import DeepseekV3Config, T5Config

from trl_quant import QuantGRPOConfig


@dataclass
class Case:
    """What breaks a rule, and a part of the message."""

    says: str
    config_class: type = QuantGRPOConfig
    fields: dict = field(default_factory=dict)
    model: object = None  # a function of a directory makes the policy, or its name
    others: dict | Callable = field(default_factory=dict)  # the trainer's other arguments, or a function of a directory
    assigned: dict = field(default_factory=dict)  # set after the config was built
    needs_vllm: bool = False


CASES = {
    "diffusion": [
        Case("a canvas needs a length", DIFFUSION, {"max_completion_length": None}),
        Case("does not divide `max_completion_length`=33", DIFFUSION, {"max_completion_length": 33}),
        Case("`tokens_per_step`=5 does not divide `block_length`=32", DIFFUSION, {"tokens_per_step": 5}),
        Case("a block has one step", DIFFUSION, {"cache_finished_blocks": True, "tokens_per_step": 32}),
        Case("more than `num_iterations`=1", DIFFUSION, {"prompt_mask_draws": 2}),
        Case(
            "all masks are the same",
            DIFFUSION,
            {"prompt_mask_draws": 2, "num_iterations": 2, "prompt_mask_probability": 0.0},
        ),
        Case("has 2 masks", DIFFUSION, {"is_correction": "trl", "num_iterations": 2}),
        Case("`top_p`=0.5: a masked diffusion model is denoised", DIFFUSION, {"top_p": 0.5}),
        Case("`tools` with a masked diffusion model", DIFFUSION, model=tiny(), others={"tools": [print]}),
        Case("attends only to earlier tokens", DIFFUSION, model=tiny("llama")),
        Case("`mask_token_id`=999 is not a token", DIFFUSION, {"mask_token_id": 999}, model=tiny()),
    ],
    "machine": [
        Case("nowhere is not supported", assigned={"report_to": ["nowhere"]}),
        Case("'wandb' cannot be imported", assigned={"report_to": ["wandb"]}),
        Case("needs Liger's kernels", fields={"use_liger_kernel": True}),
        Case("vLLM is not installed", fields=VLLM),
        Case("does not run in vLLM on this device", fields=VLLM, needs_vllm=True),
        Case("vLLM returns the routing of experts from its second", fields=BF16_VLLM | REPLAY, needs_vllm=True),
        Case(
            "vLLM returns what truncation left from 0.28",
            fields=VLLM | {"min_p": 0.1, "truncation_replay": True},
            needs_vllm=True,
        ),
    ],
    "critic": [
        Case("`scale_rewards`='group' compares", PPO, {"scale_rewards": "group"}),
        Case("`loss_type`='luspo' does not clip", PPO, {"loss_type": "luspo"}),
        Case("has one ratio for a completion", PPO, {"importance_sampling_level": "sequence"}),
        Case(
            "`multi_objective_aggregation`='normalize_then_sum' compares",
            PPO,
            {"multi_objective_aggregation": "normalize_then_sum"},
        ),
        Case("cannot be trained with `fp16`", PPO, assigned={"fp16": True}),
        Case("`vf_coef`=0.2 acts only with `vf_share_layers=True`", PPO, {"vf_coef": 0.2}),
        Case("is a critic of its own", PPO, {"vf_share_layers": True, "value_model_name_or_path": "critic"}),
        Case("does not expose them", PPO, {"vf_share_layers": True, "torch_compile": True}),
        Case("The policy was built in memory, and the critic", PPO, model=tiny()),
        Case("is quantized, and the critic trains", PPO, model=quantized),
    ],
    "teacher": [
        Case(
            "and 'quantization_config' in `teacher_model_init_kwargs` both",
            DISTILLATION,
            {"teacher_precision": "nf4", "teacher_model_init_kwargs": {"quantization_config": None}},
        ),
        Case("`teacher_model`=None: name the model", DISTILLATION),
        Case("is loaded already. Pass its name", DISTILLATION, {"teacher_precision": "nf4"}, others=teacher()),
        Case(
            "`teacher_model_revision`='v2' acts only", DISTILLATION, {"teacher_model_revision": "v2"}, others=teacher()
        ),
        Case(
            "`teacher_model_init_kwargs`={'a': 1} acts only",
            DISTILLATION,
            {"teacher_model_init_kwargs": {"a": 1}},
            others=teacher(),
        ),
        Case("but `teacher_model` is 'in memory'", DISTILLATION, {"teacher_model_name_or_path": "x"}, others=teacher()),
        Case(
            "has 320 tokens and the teacher's 300",
            DISTILLATION,
            model=tiny(),
            others=lambda directory: teacher(vocab_size=300)(directory) | {"processing_class": tiny_tokenizer()},
        ),
        Case("has 320 rows and the teacher's 300", DISTILLATION, TRLS_VLLM, tiny(), others=teacher(vocab_size=300)),
        Case(
            "a mixture of 4 experts, which stay",
            DISTILLATION,
            {"teacher_precision": "nf4"},
            others=lambda directory: {"teacher_model": save_tiny(directory / "teacher", "qwen3_moe")},
        ),
        Case(
            "a mixture of experts stored in 'nvfp4'. transformers does not read the global scales",
            DISTILLATION,
            others=lambda directory: {"teacher_model": quantized_mixture(directory)},
        ),
    ],
    "asynchronous": [
        Case("trainer does not evaluate", ASYNC, THREAD | {"eval_strategy": "steps"}),
        Case("`device_map`='cpu': TRL's", ASYNC, THREAD | {"model_init_kwargs": {"device_map": "cpu"}}),
        Case("which erases small changes", ASYNC, {"train_precision": "nvfp4"}),
        Case("packs its samples by itself", ASYNC, THREAD | {"pack_sequences": True}),
        Case("do not carry their routing yet", ASYNC, THREAD | {"router_replay": True}),
        Case("no generations to carry completions between", ASYNC, THREAD | {"rollouts_in_flight": 2.0}),
        Case("needs advantages that are not standardized", ASYNC, {"is_correction": "ais"}),
        Case("one update follows each sync", ASYNC, THREAD | {"proximal_pass": True}),
        Case("proximal policy is the trained one", ASYNC, {"is_correction": "dppo"} | PROXIMAL),
        Case("samples while nothing trains", ASYNC, assigned={"vllm_mode": "colocate"}),
        Case("`vllm_server_timeout`=9.0 acts only with `use_vllm=True`", ASYNC, THREAD | {"vllm_server_timeout": 9.0}),
        Case("`request_timeout`=9 acts only with TRL's worker", ASYNC, {**INT8, "request_timeout": 9}),
        Case("`reward_timeout`=9 acts only with rewards that", ASYNC, {"reward_timeout": 9}),
        Case("`vllm_group_port`=9 acts only with a server that", ASYNC, THREAD | {"vllm_group_port": 9}),
        Case("under DeepSpeed", ASYNC, INT8, assigned={"deepspeed_plugin": SimpleNamespace(zero_stage=2)}),
        Case("nothing samples", ASYNC, {"use_vllm": False}),
        Case("with `rollout_worker`, which samples instead", ASYNC, INT8, others={"rollout_worker": print}),
        Case("`fork_threshold_tokens`=9 acts only with `tools`", ASYNC, THREAD | {"fork_threshold_tokens": 9}),
        Case("caps the logits of its attention", ASYNC, THREAD, model=tiny("gemma2")),
        Case(
            "`residual_dropout`=0.1 and `lora_dropout`=0.2 with `gradient_checkpointing`=True",
            ASYNC,
            THREAD,
            others={"peft_config": LoraConfig(lora_dropout=0.2)},
            model=tiny("seed_oss", residual_dropout=0.1),
        ),
    ],
    "sampler": [
        Case("with FSDP1, which joins", fields=INT8, assigned={"fsdp_plugin_args": {"fsdp_version": 1}}),
        Case("returns no log-probabilities", fields={**INT8, "use_transformers_continuous_batching": True}),
        Case("'nf4' is not available with `use_vllm=True`", fields={**VLLM, "rollout_precision": "nf4"}),
        Case(
            "`use_transformers_continuous_batching=True`", fields={"transformers_continuous_batching_config": {"a": 1}}
        ),
        Case("a trainer that has dynamic sampling", PlainGRPOConfig, {"dynamic_sampling_rounds": 1}),
        Case("needs an engine of this package", fields={"rollouts_in_flight": 2.0}),
        Case("may be at most `max_staleness` + 1", fields={**INT8, "rollouts_in_flight": 3.5, "max_staleness": 2}),
        Case("denoises all completions", DIFFUSION, {**INT8, "rollouts_in_flight": 2.0}),
        Case(
            "which count from the start of a completion",
            fields={**VLLM, "rollouts_in_flight": 2.0, "generation_kwargs": {"frequency_penalty": 0.5}},
        ),
        Case(
            "cannot be combined with `tools` and `rollout_func`",
            fields={**INT8, "rollouts_in_flight": 2.0},
            others={"tools": [print], "rollout_func": print},
        ),
        Case("`max_staleness`=3 acts only with `rollouts_in_flight` above 1", fields={"max_staleness": 3}),
        Case("is below `noise_sigma_end`", fields={"noise_sigma_start": 1e-4}),
        Case("needs a copy of the policy", fields={"noise_schedule": "linear"}),
        Case("`noise_stages`=5 acts only with a `noise_schedule`", fields={"noise_stages": 5}),
        Case("cannot sample with", fields={**INT8, "generation_kwargs": {"num_beams": 2}}),
        Case("`cache_implementation`='paged' is unknown", fields={**INT8, "cache_implementation": "paged"}),
        Case("`generate`, which samples without vLLM", fields={"generation_kwargs": {"stop": "."}}),
        Case("must be an integer", fields={"generation_kwargs": {"min_length": "2"}}),
        Case("`top_p`=0.9: the sampler draws", fields={**INT8, "top_p": 0.9, "truncation_replay": False}),
        Case("acts only with `top_p`, `top_k` or `min_p`", fields={**INT8, "truncation_replay": True}),
        Case("TRL's client takes no such tokens", fields={**SERVER, "top_k": 5, "truncation_replay": True}),
        Case("Qwen3Model, which generates no text", fields=INT8, model=lambda directory: tiny()(directory).model),
        Case("attends in both directions", fields=INT8, model=tiny(is_causal=False)),
        Case("engines here know the experts of", fields=INT8, model=bare(DeepseekV3Config())),
        Case(
            "that docs/models.md lists", fields=INT8, model=outside, assigned={"fsdp_plugin_args": {"fsdp_version": 2}}
        ),
        Case("t5 is an encoder with a decoder", fields=INT8, model=bare(T5Config())),
    ],
    "vllm": [
        Case("`lora_sync`='adapter' acts only with a `rollout_precision`", fields={"lora_sync": "adapter"}),
        Case("VLLM_USE_DEEP_GEMM_E8M0=0", fields=SERVER | {"rollout_precision": None, "train_precision": "fp8_block"}),
        Case("`sync_check_steps`=9 acts only with vLLM", ASYNC, THREAD | {"sync_check_steps": 9}),
        Case("acts only with vLLM, and `use_vllm=False`", fields={**INT8, "vllm_max_model_length": 600}),
        Case("acts only with transformers' `generate`", fields={**VLLM, "cache_implementation": "static"}),
        Case("`vllm_model_impl`='vlm' is unknown", fields={**VLLM, "vllm_model_impl": "vlm"}),
        Case("leaves no room for a prompt", fields={**VLLM, "vllm_max_model_length": 512}),
        Case("'seed' (set by the trainer's `seed`)", fields={**VLLM, "vllm_engine_kwargs": {"seed": 1}}),
        Case("the scales of its KV cache", fields={**VLLM, "vllm_engine_kwargs": {"calculate_kv_scales": True}}),
        Case("accepts drafted tokens", fields={**VLLM, "vllm_engine_kwargs": {"speculative_config": SYNTHETIC}}),
        Case("'kv_cache_dtype'='int3'", fields={**VLLM, "vllm_engine_kwargs": {"kv_cache_dtype": "int3"}}),
        Case("has ['x'], which vLLM does not take", fields={**VLLM, "vllm_engine_kwargs": {"x": 1}}, needs_vllm=True),
        Case("`min_p`=0.1 with 'speculative_config'", fields={**VLLM, **DRAFTING, "min_p": 0.1}),
        Case(
            "the weights of the model that drafts",
            fields={**VLLM, "vllm_engine_kwargs": {"speculative_config": EAGLE}, "vllm_enable_sleep_mode": True},
        ),
        Case("a server takes its arguments", fields={**SERVER, "vllm_engine_kwargs": {"enforce_eager": True}}),
        Case("must not hold 'n'", fields={**VLLM, "generation_kwargs": {"n": 2}}),
        Case("must not hold 'logprobs'", fields={**VLLM, "generation_kwargs": {"logprobs": 2}}),
        Case("a group would be one completion", fields={**VLLM, "generation_kwargs": {"seed": 2}}),
        Case(
            "vLLM in `vllm_mode`='colocate' does not take",
            fields={**VLLM, "generation_kwargs": {"x": 2}},
            needs_vllm=True,
        ),
        Case("are refused by vLLM", fields={**VLLM, "generation_kwargs": {"min_tokens": -1}}, needs_vllm=True),
        Case(
            "Set `vllm_max_model_length` to 32 or less",
            fields={**VLLM, "vllm_max_model_length": 600},
            model=tiny("llama", max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        ),
        Case("see 8 tokens, and vLLM's", fields=VLLM, model=tiny("cohere2")),
        Case("vLLM was shown to run on a CPU in 'bf16' alone", fields=VLLM, model=tiny("qwen3_moe"), needs_vllm=True),
        Case(
            "On a CPU vLLM 0.31 looks for all of them on each rank and crashes",
            fields={**BF16_VLLM, "vllm_engine_kwargs": {"enable_expert_parallel": True}},
            model=tiny("qwen3_moe"),
        ),
        *(
            Case(f"`{name}`={value!r} was not shown yet", fields={**BF16_VLLM, name: value}, model=tiny("qwen3_moe"))
            for name, value in {
                "vllm_model_impl": "transformers",
                "vllm_engine_kwargs": {"moe_backend": "flashinfer_cutlass"},
            }.items()
        ),
        Case("heads have 48 dimensions", fields=VLLM, model=tiny(head_dim=48), needs_vllm=True),
        Case("The policy was built in memory, and vLLM", fields=VLLM, model=tiny()),
        Case("where vLLM finds no config", fields=VLLM, model=lost),
        Case("which cannot be read", fields={**VLLM, "vllm_engine_kwargs": {"model": "/gone"}}, model=tiny()),
        Case("on which vLLM starts, in rms_norm_eps", fields=VLLM, model=changed),
        Case("would start a Qwen3_5ForConditionalGeneration from", fields=VLLM, model=without_tower),
        Case("another model than the policy", fields=VLLM, model=names_another),
        Case(
            "does not know the architecture ['Odd']",
            fields=VLLM,
            model=lambda directory: of_class(directory, "Odd"),
            needs_vllm=True,
        ),
        Case("a checkpoint quantized to 'fp8'", fields=VLLM, model=lambda directory: quantized(directory, "fp8")),
    ],
    "adapter": [
        Case(
            "Use one precision for both",
            fields={**VLLM, "train_precision": "nvfp4", "lora_sync": "adapter"},
        ),
        Case(
            "no sync brings them back",
            fields={**VLLM, "lora_sync": "adapter", "vllm_enable_sleep_mode": True, "vllm_sleep_level": 2},
        ),
        Case("adapter to `lm_head`", others={"peft_config": LoraConfig(target_modules=["lm_head"])}),
        Case(
            "an adapter of the kind PromptTuningConfig",
            fields=INT8,
            others={"peft_config": PromptTuningConfig(num_virtual_tokens=2)},
        ),
        Case("adds layers", fields=INT8, others={"peft_config": LoraConfig(layer_replication=[(0, 2)])}),
        Case(
            "more than a product of B and A",
            fields={"train_precision": "int8", "lora_sync": "merge"},
            others={"peft_config": LoraConfig(use_dora=True)},
        ),
        Case(
            "which trains a copy of `model.layers.0.mlp`",
            fields={"train_precision": "nvfp4"},
            model=tiny(),
            others={"peft_config": LoraConfig(modules_to_save=["mlp"])},
        ),
        Case(
            "`use_dora`=True with an adapter of experts or routers",
            fields=INT8,
            model=saved_mixture,
            others={"peft_config": LoraConfig(target_modules="all-linear", use_dora=True)},
        ),
        Case(
            "adapts `model.layers.0.mlp.gate.weight`, a tensor of experts or a router",
            fields={"train_precision": "fp8"},
            model=saved_mixture,
            others={"peft_config": LoraConfig(target_modules="all-linear")},
        ),
        Case(
            "`peft_config`: Target modules",
            fields=INT8,
            model=saved,
            others={"peft_config": LoraConfig(target_modules=["nowhere"])},
        ),
        Case(
            "cannot sample from the policy",
            fields=INT8,
            model=saved,
            others={"peft_config": LoraConfig(target_modules=["q_proj"], lora_bias=True)},
        ),
    ],
    "exact": [
        Case("compares whole distributions", DISTILLATION, {**TRLS_VLLM, **EXACT}),
        Case("needs `use_vllm=True`", fields=EXACT),
        Case(
            "Older ones need a correction",
            fields={**TRLS_VLLM, **EXACT, "rollouts_in_flight": 2.0, "is_correction": "none"},
        ),
        Case("has 'enforce_eager'=True", fields={**TRLS_VLLM, **EXACT, "vllm_engine_kwargs": {"enforce_eager": True}}),
        Case("a mixture of 4 experts, and it was not shown", fields={**TRLS_VLLM, **EXACT}, model=tiny("qwen3_moe")),
        Case("needs FlashAttention 3", fields={**TRLS_VLLM, **EXACT}, model=tiny()),
    ],
    "correction": [
        Case("takes the weights of a correction", PlainGRPOConfig, {**INT8, "is_correction": "tis"}),
        Case("and TRL's RLOOTrainer has none", RLOO, {**INT8, "is_correction": "trl"}),
        Case("`ais_delta`=1.0 acts only with `is_correction` 'ais'", fields={**INT8, "ais_delta": 1.0}),
        Case("`delta`=2.0 cuts the ratio", fields={**INT8, "is_correction": "acr", "delta": 2.0}),
        Case("or a loss that clips", fields={**INT8, "is_correction": "acr", "loss_type": "cispo"}),
        Case("RLOO clips the ratio of a whole completion", RLOO, {**INT8, "is_correction": "acr"}),
        Case("only their weight corrects it", DISTILLATION, {**INT8, "is_correction": "ais"}),
        Case(
            "weights differ between the levels",
            RLOO,
            {**INT8, "is_correction": "none", "importance_sampling_level": "sequence"},
        ),
        Case(
            "judges the ratio of each token",
            fields={**INT8, "is_correction": "trm", "importance_sampling_level": "sequence"},
        ),
        Case("raise it to the power T", fields={**INT8, "loss_type": "vespo", "importance_sampling_level": "sequence"}),
        Case(
            "the comparison is only logged",
            fields={**INT8, "is_correction": "none", "vllm_importance_sampling_correction": False},
        ),
        Case("use `is_correction='none'` to", fields={**INT8, "vllm_importance_sampling_correction": False}),
        Case("they are ignored", fields={**INT8, "vllm_importance_sampling_mode": "token_mask"}),
        Case("must weigh tokens", fields={**INT8, "is_correction": "trl", "loss_type": "vespo"}),
        Case(
            "neither corrected nor measured",
            fields={**INT8, "is_correction": "trl", "vllm_importance_sampling_correction": False},
        ),
        Case("'tis', bit for bit", fields={**INT8, "is_correction": "acr"}),
        Case("needs an engine of this package", fields={"ess_step_scaling": True}),
        Case("and this is a QuantDistillationConfig", DISTILLATION, INT8 | SCALED_STEPS),
        Case("one-step estimates of single tokens", DIFFUSION, INT8 | SCALED_STEPS),
        Case("switches off. Leave that", fields=INT8 | SCALED_STEPS | {"vllm_importance_sampling_correction": False}),
        Case("so every weight is 1", fields=EXACT | SCALED_STEPS),
        Case("which steps during the backward pass", fields=INT8 | SCALED_STEPS | {"optim": "adalomo"}),
        Case("with DeepSpeed, whose engine", fields=INT8 | SCALED_STEPS, assigned=ZERO3),
        Case("the first is lower", RLOO, {"reward_clip_range": (1.0, 0.0)}),
        Case("with a `rollout_func` needs", fields={"is_correction": "tis"}, others={"rollout_func": print}),
        Case("does nothing in this run", fields={"is_correction": "tis"}),
    ],
    "training": [
        Case("saves in the middle of a step", fields={"enable_jit_checkpoint": True}),
        Case("no reference model to sync", fields={"sync_ref_model": True}),
        Case("`ref_model_mixup_alpha`=0.1 acts only", fields={"ref_model_mixup_alpha": 0.1}),
        Case("`ref_model_sync_steps`=2 acts only", fields={"ref_model_sync_steps": 2}),
        Case("would mix scaled weights", fields={"uaq_scale": 2.0, "sync_ref_model": True, "beta": 0.1}),
        Case("divides the loss by that length", fields={"loss_type": "dr_grpo", "max_completion_length": None}),
        Case("which a `quantization_config`", fields={"train_precision": "int8"}, others={"quantization_config": 1}),
        Case("there is no adapter to train", fields={"train_precision": "nvfp4"}, model=saved),
        Case("has none. Scale and save", fields={"train_precision": "nvfp4", "uaq_scale": 2.0}, others=LORA),
        Case("and the policy has an adapter", fields={"train_precision": "int4"}, others=LORA),
        Case("quantize the 16- or 32-bit weights", fields={"train_precision": "int4", "rollout_precision": "int8"}),
        Case(
            "each sync sends all of them",
            fields={**TRLS_VLLM, "train_precision": "nvfp4", "lora_sync": "adapter"},
            assigned={"is_adapted": False},
        ),
        Case("with ZeRO-3, which shards weights that must be held", fields={"train_precision": "nf4"}, assigned=ZERO3),
        Case("that must be quantized whole", fields={"train_precision": "int8"}, assigned=ZERO3),
        Case(
            "the classes 'Qwen3_5VisionBlock', of which the policy has none",
            model=tiny("qwen3_5_text"),
            assigned={"fsdp_plugin_args": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
        ),
        Case("would train wrong ones", model=quantized_mixture),
        Case("is quantized already", fields=INT8, model=quantized),
        Case(
            "trains for a checkpoint in 4 bits",
            fields={"train_precision": "int4"},
            model=lambda directory: tiny_model(intermediate_size=200),
        ),
        Case("reads the weight of mamba.out_proj", fields={"train_precision": "int8"}, model=tiny("falcon_h1")),
        Case("torch multiplies in one call in 'fp8'", fields={"train_precision": "int8"}, model=tiny("mixtral")),
        Case(
            "which is not read from a checkpoint that `trl-quant prepare` wrote",
            fields={**TRLS_VLLM, "train_precision": "fp8", "lora_sync": "adapter"},
            model=lambda directory: quantized_mixture(directory, "fp8"),
            assigned={"is_adapted": True},
        ),
        Case(
            "was not tried in a compiled model",
            fields={"train_precision": "fp8"},
            model=tiny("qwen3_moe"),
            assigned={"torch_compile": True},
        ),
        Case("that were trained so", fields={"train_precision": "int8"}, model=outside),
        Case(
            "which padding on its left shifts", fields={**INT8, "pack_sequences": False}, model=tiny("hunyuan_v1_dense")
        ),
        Case("not known which of its norms", fields={"uaq_scale": 2.0}, model=bare(T5Config())),
        Case("already scaled by 3", fields={"uaq_scale": 2.0}, model=tiny(uaq_scale=3)),
        Case("which a saved adapter does not contain", fields={"uaq_scale": 2.0}, model=tiny(), others=LORA),
        Case("cannot act: the policy's `model_type`='t5'", fields={"pack_sequences": True}, model=bare(T5Config())),
        Case("needs an engine that returns its routing", fields=REPLAY),
        Case("TRL's client takes no routing from a server", fields=SERVER | REPLAY),
        Case("were not tried in a compiled model", fields={**INT8, **REPLAY}, assigned={"torch_compile": True}),
        Case("which tokens the engine has sampled", fields={**INT8, **REPLAY}, others={"rollout_func": print}),
        Case("and the policy's `model_type` is 'qwen3'", fields={**INT8, **REPLAY}, model=tiny()),
        Case("needs a reference model", fields={"beta": 0.1}, model=tiny()),
    ],
}
