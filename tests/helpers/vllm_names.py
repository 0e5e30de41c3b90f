"""The names of vLLM that the package builds on, where they stand in a live engine, and how a test finds them."""

import ast
import importlib.util
import inspect
from operator import attrgetter


LINEAR = "vllm.model_executor.layers.linear"
KERNELS = "vllm.model_executor.kernels.linear"
COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors"
UTILS = "vllm.model_executor.layers.quantization.utils"
ONLINE = "vllm.model_executor.layers.quantization.online.fp8"
LOADER = "vllm.model_executor.model_loader"
ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"
TRANSFER = "vllm.distributed.weight_transfer"

# Names in a module, or attributes of a class or of its instances
NAMES = {
    "vllm": "EngineArgs LLM ModelRegistry SamplingParams __version__ _custom_ops",
    "vllm:EngineArgs": """additional_config attention_config compilation_config disable_cascade_attn disable_log_stats
        distributed_executor_backend dtype
        enable_lora enable_return_routed_experts enable_sleep_mode enforce_eager gpu_memory_utilization hf_overrides
        kv_cache_memory_bytes
        load_format logprobs_mode lora_target_modules max_lora_rank max_model_len max_num_seqs model model_impl
        model_loader_extra_config quantization quantization_config seed skip_tokenizer_init speculative_config
        tensor_parallel_size trust_remote_code worker_cls""",
    "vllm:ModelRegistry": "models",
    "vllm:SamplingParams": """__struct_fields__ detokenize ignore_eos logprobs max_tokens min_tokens prompt_logprobs
        seed skip_reading_prefix_cache temperature""",
    "vllm.multimodal.inputs": "PlaceholderRange",
    "vllm.multimodal.inputs:PlaceholderRange": "get_num_embeds is_embed length offset",
    "vllm.renderers.base:BaseRenderer": "render_cmpl",
    "vllm.v1.engine.llm_engine:LLMEngine": "renderer reset_encoder_cache",
    "vllm.sampling_params": "RepetitionDetectionParams StructuredOutputsParams",
    "vllm.distributed": "parallel_state",
    "vllm.distributed.parallel_state": """_EP get_world_group init_model_parallel_group
        model_parallel_is_initialized""",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.model_executor.kernels": "linear",
    "vllm.model_executor.kernels.linear": "_POSSIBLE_INT8_KERNELS",
    "vllm.model_executor.kernels.linear.scaled_mm.cutlass": "CutlassInt8ScaledMMLinearKernel",
    "vllm.entrypoints.serve.dev.server_info.api_router": "PydanticVllmConfig",
    "vllm.v1.attention.backends.cpu_attn": "CPUAttentionBackend",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "get_supported_head_sizes",
    "vllm.utils.network_utils": "get_ip",
    "vllm.platforms": "PlatformEnum current_platform",
    "vllm.platforms.interface:Platform": "is_cpu",
    "vllm.entrypoints.openai": "api_server",
    "vllm.entrypoints.openai.completion.protocol": "CompletionRequest",
    "vllm.model_executor.models": "registry",
    "vllm.model_executor.models.registry": "_run_in_subprocess",
    # What the engine returns, and what a server tells of itself
    "vllm.outputs:RequestOutput": "outputs prompt_logprobs",
    "vllm.outputs:CompletionOutput": "logprobs routed_experts token_ids",
    "vllm.logprobs:Logprob": "logprob",
    "vllm.config:VllmConfig": """additional_config cache_config compilation_config device_config lora_config
        model_config speculative_config weight_transfer_config""",
    "vllm.config": "set_current_vllm_config",
    "vllm.config:DeviceConfig": "device",
    "vllm.forward_context": "set_forward_context",
    "vllm.config:ModelConfig": "dtype logprobs_mode max_model_len model quantization",
    "vllm.config.weight_transfer:WeightTransferConfig": "backend",
    # Loading
    "vllm.config.load:LoadConfig": "__dataclass_fields__ load_format model_loader_extra_config",
    f"{LOADER}": "get_model_loader register_model_loader",
    f"{LOADER}.reload.layerwise": "logger",  # by its name, in `worker`
    f"{LOADER}.default_loader:DefaultModelLoader": "get_all_weights load_weights",
    "vllm.v1.worker.worker_base:WorkerBase": "device get_model vllm_config",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "effective_drafter_max_model_len",
    "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope": "YaRNScalingRotaryEmbedding",
    "vllm.v1.worker.gpu_worker:Worker": "model_runner reload_weights weight_transfer_engine",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
    "vllm.v1.worker.cpu_worker:CPUWorker": "distributed_init_method",
    # Embeddings, of which a rank has rows
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": "shard_indices",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices": """org_vocab_end_index
        org_vocab_start_index""",
    # Linear layers, by the classes that run them (`precisions.PRECISIONS`)
    f"{LINEAR}:LinearBase": "input_size params_dtype prefix quant_method tp_rank tp_size",
    f"{LINEAR}:UnquantizedLinearMethod": "process_weights_after_loading",
    f"{ONLINE}:Fp8PtpcOnlineLinearMethod": "fp8_linear",
    f"{ONLINE}:Fp8PerTensorOnlineLinearMethod": "fp8_linear",
    f"{ONLINE}:Fp8PerBlockOnlineLinearMethod": "fp8_linear",
    # `scheme` is what it gives a layer
    f"{COMPRESSED}.compressed_tensors:CompressedTensorsConfig": "from_config ignore scheme target_scheme_map",
    f"{COMPRESSED}.schemes:CompressedTensorsW8A8Fp8": "fp8_linear strategy",
    f"{COMPRESSED}.schemes:CompressedTensorsW8A8Int8": "kernel",
    f"{COMPRESSED}.schemes:CompressedTensorsW4A4Fp4": "kernel",
    f"{COMPRESSED}.schemes:CompressedTensorsW4A4Mxfp4": "kernel",
    f"{KERNELS}.scaled_mm.cpu:CPUInt8ScaledMMLinearKernel": """dnnl_handler layer_param_names
        process_weights_for_onednn""",
    f"{KERNELS}.scaled_mm.cpu:CPUFp8BlockScaledMMKernel": "apply_weights is_supported process_weights_after_loading",
    f"{KERNELS}.scaled_mm.marlin": "MarlinFP8ScaledMMLinearKernel",
    f"{KERNELS}.nvfp4.emulation": "EmulationNvFp4LinearKernel",
    f"{KERNELS}.nvfp4.humming": "HummingNvFp4LinearKernel",
    f"{KERNELS}.nvfp4.marlin": "MarlinNvFp4LinearKernel",
    f"{KERNELS}.mxfp4.humming": "HummingMxFp4LinearKernel",
    f"{KERNELS}.mxfp4.marlin": "MarlinMxFp4LinearKernel",
    f"{KERNELS}.nvfp4": "marlin",
    f"{KERNELS}.mxfp4": "marlin",
    # A base that trainer and engine share, in Marlin's layout
    f"{COMPRESSED}.compressed_tensors": "CompressedTensorsLinearMethod",
    f"{COMPRESSED}": "compressed_tensors compressed_tensors_moe",
    f"{COMPRESSED}.compressed_tensors_moe": "compressed_tensors_moe_w8a8_int8",
    "vllm.model_executor.layers.fused_moe": "config",
    "vllm.model_executor.layers.fused_moe.config": "int8_w8a16_moe_quant_config int8_w8a8_moe_quant_config",
    "vllm.model_executor.layers.fused_moe.oracle.fp8": "Fp8MoeBackend",
    "vllm.model_executor.layers.fused_moe.oracle.int8": "Int8MoeBackend",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": "MoERunner",
    f"{COMPRESSED}.utils": "should_ignore_layer",
    f"{COMPRESSED}.schemes": "compressed_tensors_w4a4_mxfp4",
    f"{COMPRESSED}.schemes.compressed_tensors_w4a4_mxfp4": "init_mxfp4_linear_kernel",
    UTILS: "marlin_utils_fp4",
    f"{UTILS}.marlin_utils_fp4": "is_fp4_marlin_supported prepare_fp4_layer_for_marlin",
    f"{UTILS}.marlin_utils_test": "get_weight_perm marlin_weights",
    f"{UTILS}.fp8_utils": "per_token_group_quant_fp8",
    # The KV cache
    "vllm.config:CacheConfig": "block_size cache_dtype",
    "vllm.model_executor.layers.attention:Attention": "kv_cache_dtype layer_name query_quant",
    # Sampling
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "empty_kv_cache_blocks kv_cache_config",
    "vllm.v1.core.sched.scheduler:Scheduler": "block_size kv_cache_manager",
    "vllm.v1.engine": "EngineCoreOutput FinishReason",
    "vllm.v1.engine:FinishReason": "ABORT",
    "vllm.v1.engine:EngineCoreOutput": """finish_reason new_logprobs new_token_ids request_id routed_experts
        stop_reason""",
    "vllm.v1.engine.output_processor:OutputProcessorOutput": "__dataclass_fields__ request_outputs",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups",
    "vllm.v1.outputs:LogprobsLists": "cu_num_generated_tokens logprobs slice_request",
    "vllm.v1.outputs:ModelRunnerOutput": "logprobs req_id_to_index sampled_token_ids",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_spec_decode_tokens",
    "vllm.v1.sample": "rejection_sampler",
    "vllm.v1.sample.rejection_sampler": "expand_batch_to_tokens rejection_sample",
    "vllm.v1.request:Request": "num_computed_tokens request_id",
    # The same numbers for any batch (`exact_rollouts`)
    "vllm.model_executor.layers.layernorm": "RMSNorm",
    "vllm.model_executor.layers.layernorm:RMSNorm": "variance_epsilon weight",
    "vllm.model_executor.layers.rotary_embedding": "_ROPE_DICT",
    "vllm.model_executor.layers.rotary_embedding.base": "RotaryEmbedding",
    f"{ROTARY}": "cos_sin_cache forward_cuda head_size is_neox_style rotary_dim",
    "vllm.v1.attention.backends.flash_attn": "FlashAttentionMetadataBuilder",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder": "max_cudagraph_size max_num_splits",
    "vllm.v1.worker.gpu.sample.gumbel": "apply_temperature",
    "vllm.v1.worker.gpu.sample.logprob": "compute_token_logprobs",
    "vllm.v1.worker.gpu.sample.sampler": "Sampler",
    "vllm.v1.worker.utils:AttentionGroup": "metadata_builders",
    "vllm.v1.attention.backends": "fa_utils",
    # Adapters
    "vllm.model_executor.utils": "get_packed_modules_mapping set_weight_attrs",
    f"{LINEAR}:QKVParallelLinear": "num_kv_head_replicas output_partition_sizes output_sizes weight_loader",
    f"{LINEAR}:MergedColumnParallelLinear": "output_partition_sizes output_sizes weight_loader",
    f"{LINEAR}:ColumnParallelLinear": "input_size_per_partition output_partition_sizes weight_loader",
    f"{LINEAR}:RowParallelLinear": "input_size_per_partition output_partition_sizes weight_loader",
    f"{LINEAR}:ReplicatedLinear": "input_size output_partition_sizes weight_loader",
    "vllm.lora.request": "LoRARequest",  # of vLLM's own adapters, which ours are compared with
    # A server's workers
    "vllm.distributed.device_communicators.pynccl": "PyNcclCommunicator",
    "vllm.distributed.utils": "StatelessProcessGroup",
    f"{TRANSFER}.factory": "WeightTransferEngineFactory",
    f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine": "model model_config",
    f"{TRANSFER}.nccl_engine:NCCLWeightTransferUpdateInfo": "dtype_names names shapes",
}

# As `NAMES`, of what a version has that returns what truncation left, from 0.28 on
NAMES_OF_TRUNCATION = {
    "vllm:EngineArgs": "return_sampling_mask",
    "vllm.outputs:CompletionOutput": "sampling_mask",
    "vllm.outputs:SamplingMask": "token_ids",
    "vllm.v1.engine:EngineCoreOutput": "new_sampling_mask",
    "vllm.v1.outputs": "SamplingMaskLists",
    "vllm.v1.outputs:SamplingMaskLists": "offsets token_ids",
}

# What we call or override: function -> parameters by position, and by keyword after `*`
CALLS = {
    "vllm:LLM.apply_model": "func",
    "vllm:LLM.collective_rpc": "method * args kwargs",
    "vllm:LLM.generate": "prompts sampling_params * lora_request use_tqdm",
    "vllm:LLM.reset_prefix_cache": "",
    "vllm:LLM.sleep": "* level",
    "vllm:LLM.wake_up": "* tags",
    "vllm._custom_ops:cpu_prepack_moe_weight": "weight isa",
    "vllm._custom_ops:create_onednn_scaled_mm": """weight weight_scales output_type dynamic_quant use_azp
        primitive_cache_size""",
    "vllm._custom_ops:onednn_scaled_mm": "dnnl_handler x output input_scale input_zp input_zp_adj bias",
    f"{LOADER}:get_model_loader": "load_config",
    f"{LOADER}:register_model_loader": "load_format",
    f"{LOADER}.default_loader:DefaultModelLoader.__init__": "load_config",
    f"{LOADER}.default_loader:DefaultModelLoader.get_all_weights": "model_config model",
    f"{LOADER}.default_loader:DefaultModelLoader.load_model": "vllm_config model_config",
    f"{LOADER}.default_loader:DefaultModelLoader.load_weights": "model model_config",
    f"{LOADER}.dummy_loader:DummyModelLoader.load_weights": "model model_config",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights": "* weights_iterator",
    f"{LINEAR}:LinearMethodBase.apply": "layer x bias",
    f"{COMPRESSED}.compressed_tensors:CompressedTensorsLinearMethod.process_weights_after_loading": "layer",
    f"{UTILS}.marlin_utils:marlin_padded_nk": "size_n size_k group_size",
    f"{UTILS}.marlin_utils_fp4:nvfp4_marlin_process_global_scale": "global_scale a_dtype",
    f"{LOADER}.reload.meta:materialize_meta_tensor": "meta_tensor",
    f"{LINEAR}:UnquantizedLinearMethod.process_weights_after_loading": "layer",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading": (
        "layer"
    ),
    f"{KERNELS}.scaled_mm.cpu:CPUInt8ScaledMMLinearKernel.process_weights_for_onednn": "layer",
    f"{KERNELS}.scaled_mm.cpu:CPUFp8BlockScaledMMKernel.apply_weights": "layer x bias",
    f"{KERNELS}.scaled_mm.cpu:CPUFp8BlockScaledMMKernel.process_weights_after_loading": "layer",
    "vllm.model_executor.models.utils:WeightsMapper.apply_list": "values",
    "vllm.model_executor.utils:get_packed_modules_mapping": "model",
    "vllm.lora.request:LoRARequest": "lora_name lora_int_id lora_path",
    "vllm.model_executor.models.utils:extract_layer_index": "layer_name",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "request num_new_tokens * num_lookahead_tokens",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": "request num_computed_tokens",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "scheduler_output model_runner_output",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": "engine_core_outputs",
    "vllm.v1.outputs:LogprobsLists.slice_request": "req_idx num_positions",
    "vllm._custom_ops:rotary_embedding": "positions query key head_size cos_sin_cache is_neox * inverse",
    f"{ROTARY}.forward_cuda": "positions query key",
    "vllm.model_executor.layers.layernorm:RMSNorm.forward_native": "x residual",
    "vllm.v1.worker.gpu.sample.gumbel:apply_temperature": "logits expanded_idx_mapping temperature",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs": "logits token_ids",
    f"{TRANSFER}.factory:WeightTransferEngineFactory.register_engine": "name module_path_or_cls",
    f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.init_transfer_engine": "init_info",
    f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.start_weight_update": "",
    f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.receive_weights": "update_info",
    f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.finish_weight_update": "",
}

# Where things stand in a live engine
PATHS = {
    "llm": """llm_engine.abort_request llm_engine.output_processor.request_states
        llm_engine.engine_core.engine_core.abort_requests llm_engine.engine_core.engine_core.batch_queue
        llm_engine.engine_core.engine_core.scheduler.finished_req_ids
        llm_engine.engine_core.engine_core.scheduler.requests
        llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        llm_engine.engine_core.engine_core.scheduler.block_size
        llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.empty_kv_cache_blocks
        llm_engine.log_stats llm_engine.model_config.model llm_engine.output_processor.process_outputs
        llm_engine.step llm_engine.vllm_config.cache_config.block_size
        llm_engine.vllm_config.cache_config.cache_dtype llm_engine.vllm_config.model_config.hf_config
        llm_engine.vllm_config.compilation_config.mode llm_engine.vllm_config.model_config.dtype
        llm_engine.vllm_config.model_config.max_model_len llm_engine.vllm_config.speculative_config
        request_counter.counter""",
    "worker": """get_model model_runner.attn_groups model_runner.execute_model_state model_runner.requests
        model_runner.sampler reload_weights vllm_config.model_config.dtype""",
    "model": """config.tie_word_embeddings lm_head.quant_method.process_weights_after_loading lm_head.weight
        load_weights""",
}


def resolve(path: str):
    """`module:attribute.attribute`"""
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    return attrgetter(attributes)(found) if attributes else found


def short(path: str) -> str:
    """The name of a test."""
    module, _, attributes = path.partition(":")
    return f"{module.rpartition('.')[2]}:{attributes}"


def has(owner, name: str) -> bool:
    """Whether a module or class has a name, or the code of the class sets such an attribute."""
    if hasattr(owner, name):
        return True
    if inspect.ismodule(owner):
        return importlib.util.find_spec(f"{owner.__name__}.{name}") is not None
    for base in inspect.getmro(owner):
        if name in vars(base).get("__annotations__", ()):
            return True
        if base.__module__.partition(".")[0] == "vllm":
            nodes = ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))))
            if any(isinstance(n, ast.Attribute) and n.attr == name and isinstance(n.ctx, ast.Store) for n in nodes):
                return True
    return False
