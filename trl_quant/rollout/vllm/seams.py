"""
Lists every name of vLLM, or of TRL's client of vLLM, that this package replaces for longer than one call.

Replacements that end with their call are not listed; the code that makes them documents them. `sampling.py` replaces
methods of a live engine for one generation, `one_copy.py` and `worker.reload` one method of a model while it loads.
"""

# (file, name) -> (its owner, how long the replacement lasts, the test that needs it)
LASTING_IN_VLLM = {
    ("rollout/vllm/adapter.py", "requires_unquantized_input"): (
        "vLLM's linear layers with an adapter",
        "the engine",
        "tests/gpu/test_adapter_gpu.py::test_under_vllms_compiler_and_its_kernels",
    ),
    ("rollout/vllm/adapter.py", "apply"): (
        "the quantization methods of those layers",
        "the engine",
        "tests/rollout/vllm/test_vllm_adapter.py::test_it_equals_vllms_adapter_from_files",
    ),
    ("rollout/vllm/client.py", "send"): (
        "the session of TRL's client",
        "the client",
        "tests/rollout/vllm/test_server_faults.py::test_a_server_that_does_not_answer_in_time",
    ),
    ("rollout/vllm/exact.py", "forward"): (
        "vLLM's norms",
        "the engine",
        "tests/layers/test_exact.py::test_vllm_gets_the_norm",
    ),
    ("rollout/vllm/exact.py", "max_num_splits"): (
        "vLLM's builders of attention metadata",
        "the engine",
        "tests/gpu/test_exact_gpu.py::test_the_same_bits",
    ),
    ("rollout/vllm/exact.py", "max_cudagraph_size"): (
        "vLLM's builders of attention metadata",
        "the engine",
        "tests/gpu/test_exact_gpu.py::test_the_same_bits",
    ),
    ("rollout/vllm/lifetime.py", "model_executor"): (
        "vLLM's client of an engine that has ended",
        "the process",
        "tests/rollout/vllm/test_vllm_notebook.py::test_trainers_one_after_another",
    ),
    ("rollout/vllm/one_copy.py", "process_weights_after_loading"): (
        "the quantization methods of layers that share the policy's base",
        "the engine",
        "tests/rollout/vllm/test_one_copy.py::test_one_memory",
    ),
    ("rollout/vllm/own_class.py", "_ROPE_DICT"): (
        "vLLM's table of rotary embeddings, emptied",
        "the process",
        "tests/rollout/vllm/test_vllm_families.py::test_an_earlier_engine_does_not_change_rotations",
    ),
    ("rollout/vllm/own_class.py", "__class__"): (
        "the parts of vLLM's model that are transformers'",
        "the engine",
        "tests/rollout/vllm/test_vllm_families.py::test_live_equals_fresh",
    ),
    ("rollout/vllm/transfer.py", "register_engine"): (
        "vLLM's table of weight transfers",
        "the server's worker",
        "tests/rollout/vllm/test_vllm_server.py::test_server_samples_from_the_policy",
    ),
    ("rollout/vllm/own_class.py", "register"): (
        "transformers' table of configs, in which vLLM has put its own",
        "the process",
        "tests/rollout/vllm/test_vllm_images.py::test_transformers_still_builds_the_policys_family",
    ),
    ("rollout/vllm/loading.py", "register_model_loader"): (
        "vLLM's table of model loaders",
        "the process",
        "tests/rollout/vllm/test_vllm_engine.py::test_every_sync_equals_a_fresh_engine",
    ),
    ("rollout/vllm/repairs.py", "process_weights_for_onednn"): (
        "vLLM's INT8 kernels on CPUs",
        "the engine",
        "tests/rollout/vllm/test_vllm_engine.py::test_onednn_keeps_the_scales_it_points_to",
    ),
    ("rollout/vllm/repairs.py", "kept_scale"): (
        "vLLM's INT8 kernels on CPUs",
        "the engine",
        "tests/rollout/vllm/test_vllm_engine.py::test_onednn_keeps_the_scales_it_points_to",
    ),
    ("rollout/vllm/repairs.py", "set_weight_attrs"): (
        "the biases of vLLM's layers",
        "the engine",
        "tests/rollout/vllm/test_one_copy.py::test_a_merged_adapter_in_layers_with_biases",
    ),
}
