"""
Replaces names of TRL, transformers, PEFT and other host libraries. [`LASTING`] lists every replacement that outlives
the call that makes it. The contexts below make the temporary ones that several rooms share.

A context restores the original when it ends:

| replaced | during | because |
|---|---|---|
| `VLLMGeneration` in the module of TRL's trainer | the construction of a trainer | TRL looks up its engine there |
| `is_vllm_available` in the same | the same | TRL's distillation asks for vLLM, and the embedded engine needs none |
| `create_model_from_path` in the same | the same, of a distillation | the larger of two vocabularies is cut |
| `get_peak_flops_per_device` in the module of TRL's asynchronous trainer | the same | it asks CUDA for its name |
| fields of the trainer's arguments | the same | TRL corrects for its sampler only with `use_vllm` |
| `num_generations` of a config | the checks of TRL's `GRPOConfig` | PPO needs a single completion of a prompt |
| `TrainingArguments.world_size` | the construction of a config | `trl-quant choose` is one process for several |
| `TrainingArguments.place_model_on_device` | `trl-quant choose` builds a trainer | it may be too large for a GPU |
| the arguments' `fsdp` and `deepspeed` | the same | transformers shards nothing in one process |
| `vllm_generation.LLM` | the construction of TRL's own engine in benchmarks | TRL passes no further arguments to vLLM |
| `rotate_checkpoints` in transformers' trainer | a save | `runs/` deletes old checkpoints by their steps |
| `sort_checkpoints` in the same | the end of a training | it would delete other runs' checkpoints |
| `shuffle_sequence_dict` in the module of TRL's trainer | a generation | packed rows are arranged after it |
| `ChunkedDivergenceFunction` in the module of TRL's trainer | a loss of distillation | divergences get weights |
| `load_balancing_loss_func` of transformers' Mixtral | a forward pass | a packed row has no mask, and shares prompts |
| `compute_flops_per_token` in the module of TRL's asynchronous trainer | a training | some configs lack its fields |
| `profiling.ProfilingContext` | a training | TRL reports its times only to trackers |
| `utils._ChunkedLogProbFunction` | a forward pass | it must return the engine's, or those of a truncated policy |

vLLM's own names are listed in `rollout/vllm/seams.py`. Layers that `nn.Module.set_submodule` puts into a model are not
replacements of a name.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
import transformers.trainer as hf_trainer
import trl.extras.profiling as profiling
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.utils as trl_utils
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_divergence import VOCAB_CHUNK_SIZE
from trl.kernels.chunked_logprob import _addmm_fp32


# (file, name) -> (its owner, how long the replacement lasts, the test that needs it)
LASTING = {
    ("config/documentation.py", "metadata"): (
        "the fields of our configs, in which transformers' parser looks for their help",
        "the process",
        "tests/cli/test_cli.py::test_stored_options_are_up_to_date",
    ),
    ("config/fields.py", "__class__"): (
        "the copy of a config of TRL's that becomes one of ours",
        "the copy",
        "tests/trainers/test_default_is_trl.py::test_plain_config_is_taken",
    ),
    ("policy/adapters.py", "__class__"): (
        "PEFT's LoRA layers of a policy whose base is frozen after it was adapted",
        "the model",
        "tests/policy/test_adapters.py::test_a_base_that_is_frozen_later",
    ),
    ("policy/adapters.py", "_register_custom_module"): (
        "the copy of PEFT's `LoraConfig`, whose layers for `FrozenLinear` are ours",
        "the copy",
        "tests/policy/test_adapters.py::test_the_configuration_is_copied",
    ),
    ("policy/adapters.py", "_cast_input_dtype"): (
        "PEFT's LoRA layers of the policy",
        "the model",
        "tests/policy/test_adapters.py::test_autocast_alone_converts_inputs",
    ),
    ("trainers/precision.py", "should_training_stop"): (
        "the control of transformers' trainer, of a run that has made its steps",
        "the training",
        "tests/runs/test_ends.py::test_a_finished_run_trains_no_further",
    ),
    ("policy/exact/model.py", "register"): (
        "transformers' tables of attention functions and masks",
        "the process",
        "tests/layers/test_exact.py::test_the_policy_is_the_same_function",
    ),
    ("policy/exact/model.py", "exact_attention"): (
        "the attention modules of the policy",
        "the model",
        "tests/layers/test_exact.py::test_padding_changes_no_bit",
    ),
    ("policy/exact/model.py", "rotary_emb"): (
        "the policy's decoder",
        "the model",
        "tests/layers/test_exact.py::test_the_policy_is_the_same_function",
    ),
    ("policy/exact/model.py", "register_forward_hook"): (
        "the policy's embeddings",
        "the model",
        "tests/layers/test_exact.py::test_the_residual_stream_is_in_bf16",
    ),
    ("policy/exact/model.py", "forward"): (
        "the policy, whose head is TRL's",
        "the model",
        "tests/layers/test_exact.py::test_trls_head_returns_them_with_its_own_gradients",
    ),
    ("policy/frozen.py", "register_quantization_config"): (
        "transformers' table of quantization configs",
        "the process",
        "tests/policy/test_frozen_base.py::test_a_16_bit_checkpoint_is_packed_as_engines_pack_it",
    ),
    ("policy/frozen.py", "register_quantizer"): (
        "transformers' table of quantizers",
        "the process",
        "tests/policy/test_frozen_base.py::test_a_16_bit_checkpoint_is_packed_as_engines_pack_it",
    ),
    ("policy/frozen.py", "_ddp_params_and_buffers_to_ignore"): (
        "the policy, as PyTorch's DDP reads it",
        "the model",
        "tests/trainers/test_ranks.py::test_a_frozen_base",
    ),
    ("policy/packed.py", "register"): (
        "transformers' tables of attention functions and masks",
        "the process",
        "tests/policy/test_packing.py::test_packed_rows_are_padded_ones",
    ),
    ("policy/positions.py", "fixed_context"): (
        "the rotary modules of the models of a run, with their `rope_type` and `inv_freq`",
        "the model, until `release_positions`",
        "tests/policy/test_positions.py::test_fixed_positions",
    ),
    ("policy/positions.py", "original_max_position_embeddings"): (
        "the config of the copy that the embedded engine samples from",
        "the copy",
        "tests/policy/test_positions.py::test_sampler_and_trainer_agree",
    ),
    ("policy/routing.py", "register_forward_pre_hook"): (
        "the attention of a mixture of experts, linear or not: the policy's and its reference's",
        "the model",
        "tests/policy/test_routing.py::test_gradients_are_those_of_a_loop",
    ),
    ("policy/routing.py", "register_forward_hook"): (
        "the routers of those layers",
        "the model",
        "tests/policy/test_routing.py::test_gradients_are_those_of_a_loop",
    ),
    ("policy/trees.py", "register"): (
        "transformers' tables of attention functions and masks",
        "the process",
        "tests/policy/test_trees.py::test_a_trie_is_each_sample_alone",
    ),
    ("policy/unified.py", "forward"): (
        "the MLPs of the policy",
        "the model, until `restore`",
        "tests/layers/test_unified_gated.py::test_another_activation_or_forward_stays",
    ),
    ("policy/unified.py", "__class__"): (
        "PEFT's LoRA layers of the policy",
        "the model, until `restore`",
        "tests/trainers/test_unified_training.py::test_it_is_saved_as_it_was",
    ),
    ("rollout/embedded/transformers_engine.py", "register_forward_hook"): (
        "the norms of the engine's copy of the policy",
        "the copy",
        "tests/rollout/test_transformers_engine.py::test_noise_goes_on_clean_norms_and_comes_off",
    ),
    ("rollout/limits.py", "_register_atexit"): (
        "Python's list of calls before it waits for threads",
        "the process, from the first limit that was exceeded",
        "tests/runs/test_exit.py::test_a_process_ends_with_its_own_status",
    ),
    ("rollout/limits.py", "register"): (
        "Python's list of calls at the end of the process",
        "the end of the process, after a limit was exceeded",
        "tests/runs/test_exit.py::test_a_process_ends_with_its_own_status",
    ),
    ("rollout/vllm/trial.py", "_weight_conversions"): (
        "the policy that `trl-quant choose` builds from a config",
        "the process that tries an engine",
        "tests/trainers/test_trial.py::test_what_sees_images_is_named_as_published",
    ),
    ("scaling/modifier.py", "register"): (
        "llmcompressor's table of modifiers",
        "the process",
        "tests/scaling/test_scaling_modifier.py::test_modifier_composes_in_a_recipe",
    ),
    ("runs/checkpoints.py", "set_epoch"): (
        "TRL's sampler of prompts",
        "a training",
        "tests/runs/test_resume.py::test_killed_and_resumed_equals_unbroken",
    ),
    ("storage/quantization.py", "qat_gathered_dtype"): (
        "the policy's config, which is saved with it",
        "the model",
        "tests/trainers/test_qat_ranks.py::test_weights_that_are_gathered_in_bf16",
    ),
}


@contextmanager
def exchanged(owner: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of `owner` have other values."""
    saved = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


def shuffled_by(trainer_class: type, arrange: Callable[[dict], dict]) -> AbstractContextManager:
    """Context in which `arrange` follows TRL's shuffle of a generation's rows."""
    module = _module_of_engine(trainer_class)
    shuffle = module.shuffle_sequence_dict
    return exchanged(module, shuffle_sequence_dict=lambda batch: arrange(shuffle(batch)))


def divergences_by(
    trainer_class: type, weigh: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
) -> AbstractContextManager:
    """
    Context in which TRL's distillation loss sums the result of `weigh` instead of the tokens' divergences (N,), in
    nats.

    N is the number of all positions of the completions in the micro-batch, or of those that count; which of the two TRL
    uses depends on the device. `weigh` gets the divergences and a function that scores tokens at these positions: it
    maps their ids (N,) to the student's log-probabilities (N,), in nats, without a gradient.
    """
    module = _module_of_engine(trainer_class)
    original = module.ChunkedDivergenceFunction

    class Weighed:
        @staticmethod
        def apply(hidden, weight, bias, teacher, teacher_weight, teacher_bias, beta, temperature, scale, cap, *others):
            head = (hidden, weight, bias)
            given = (*head, teacher, teacher_weight, teacher_bias, beta, temperature, scale, cap, *others)
            divergences, entropy = original.apply(*given)

            @torch.no_grad()
            def score(ids: Tensor) -> Tensor:
                return ChunkedLogProbFunction.apply(*head, ids, temperature, VOCAB_CHUNK_SIZE, cap, scale, ())[0]

            return weigh(divergences, score), entropy

    return exchanged(module, ChunkedDivergenceFunction=Weighed)


def balanced_by(copies: Callable[[], Tensor]) -> AbstractContextManager:
    """
    Context in which the load-balancing loss of a mixture, which TRL's head takes from transformers' Mixtral, counts
    each token of a packed row as often as it occurs in the padded rows: `copies` returns how often, (T,).
    """
    import transformers.models.mixtral.modeling_mixtral as mixtral

    balance = mixtral.load_balancing_loss_func

    def balanced(logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Tensor) -> Tensor:
        return balance(logits, experts, chosen, copies())

    return exchanged(mixtral, load_balancing_loss_func=balanced)


def arguments_seen(args: Any, **fields: Any) -> AbstractContextManager:
    """Context in which TRL's constructor of a trainer or of a config finds `fields` in `args`."""
    return exchanged(args, **fields)


def old_checkpoints_kept() -> AbstractContextManager:
    """Context of a save, or of the end of a training, in which transformers deletes no old checkpoints."""
    return exchanged(hf_trainer, rotate_checkpoints=lambda **given: None, sort_checkpoints=lambda **given: [])


@contextmanager
def trainer_builds(trainer_class: type, engine: Callable | None, args: Any, **fields: Any) -> Iterator[None]:
    """
    Context in which the constructor of TRL's trainer builds `engine` instead of TRL's own, and finds `fields` in
    `args`.
    """
    module = _module_of_engine(trainer_class)
    ours = {} if engine is None else {"VLLMGeneration": engine, "is_vllm_available": lambda: True}
    ours = {name: value for name, value in ours.items() if hasattr(module, name)}
    with exchanged(module, **ours), arguments_seen(args, **fields):
        yield


@contextmanager
def without_peak_flops() -> Iterator[None]:
    """Context in which TRL's asynchronous trainer is built without asking CUDA for its name, where there is none."""
    if torch.cuda.is_available():
        yield
        return
    import trl.experimental.async_grpo.async_grpo_trainer as module

    with exchanged(module, get_peak_flops_per_device=lambda accelerator, dtype: None):
        yield


@contextmanager
def flops_if_known() -> Iterator[None]:
    """
    Context of a training in which TRL's asynchronous trainer goes on without a figure of FLOPs. TRL counts them by
    fields that the configs of some mixtures lack.
    """
    import trl.experimental.async_grpo.async_grpo_trainer as module

    count = module.compute_flops_per_token

    def counted(config: Any, length: int) -> float:
        try:
            return count(config, length)
        except AttributeError:
            return math.nan  # which TRL does not log

    with exchanged(module, compute_flops_per_token=counted):
        yield


def generation_derived(trainer_class: type, derive: Callable[[type], type]) -> AbstractContextManager:
    """Context in which TRL's trainer builds the class that `derive` makes of its own `VLLMGeneration`."""
    module = _module_of_engine(trainer_class)
    return exchanged(module, VLLMGeneration=derive(module.VLLMGeneration))


def loaded_by(trainer_class: type, finish: Callable[[str, Any], None]) -> AbstractContextManager:
    """Context in which TRL's trainer loads models by their names, and `finish` gets the name and the loaded model."""
    module = _module_of_engine(trainer_class)
    load = module.create_model_from_path

    def load_and_finish(name: str, **options: Any) -> Any:
        model = load(name, **options)
        finish(name, model)
        return model

    return exchanged(module, create_model_from_path=load_and_finish)


def one_generation_allowed(args: Any) -> AbstractContextManager:
    """
    Context of `GRPOConfig`'s checks in which one generation per prompt is allowed. GRPO needs two to compare them.
    """
    return arguments_seen(args, num_generations=_Enough(args.num_generations))


def configured_for(processes: int) -> AbstractContextManager:
    """Context in which configs are built as they are in a run of so many processes."""
    return exchanged(TrainingArguments, world_size=property(lambda args: processes))


@contextmanager
def unsharded(args: Any) -> Iterator[None]:
    """
    Context in which one process builds the trainer of a run that FSDP or DeepSpeed shards. The policy stays in the
    host's memory, as it does there until a training begins.
    """
    given = {name: getattr(args, name) for name in ("fsdp", "fsdp_plugin_args", "deepspeed", "deepspeed_plugin")}
    if not any(given.values()):
        yield
        return
    unset_hf_deepspeed_config()  # with it transformers would load the model in shards
    on_host = exchanged(TrainingArguments, place_model_on_device=property(lambda args: False))
    try:
        with on_host, arguments_seen(args, **dict.fromkeys(given)):
            yield
    finally:
        if args.deepspeed:
            set_hf_deepspeed_config(args.hf_deepspeed_config)


class _Enough(int):
    """An integer that never compares as less than another."""

    def __lt__(self, other: int) -> bool:
        return False


def _module_of_engine(trainer_class: type) -> ModuleType:
    """Returns the module of TRL's trainer from which `trainer_class` inherits. TRL looks up its engine there."""
    for kind in trainer_class.__mro__:
        module = sys.modules[kind.__module__]
        # A user's module may import `VLLMGeneration` as well
        if kind.__module__.startswith("trl.") and "VLLMGeneration" in vars(module):
            return module
    raise TypeError(f"{trainer_class.__name__} inherits from no trainer of TRL's that builds a `VLLMGeneration`.")


@contextmanager
def llm_with(**arguments: Any) -> Iterator[None]:
    """Context in which TRL builds vLLM's `LLM` with `arguments`, which override its own."""
    original = vllm_generation.LLM
    with exchanged(vllm_generation, LLM=lambda **own: original(**own | arguments)):
        yield


def exact_log_probs(log_probs: Callable, frozen_head: Callable) -> type:
    """
    Returns TRL's fused head with the log-probabilities of `frozen_head`, which also computes gradients and entropies.
    If the head trains, or TRL requests further outputs, TRL computes everything itself except the log-probabilities,
    which are those of `log_probs`. An update then needs five products with the head, including the weight's gradient,
    instead of two.

    Args:
        log_probs, frozen_head (`Callable`): [`~policy.exact.head.log_probs`], [`~policy.exact.head.frozen_head`], with
            the engine's `score`.
    """

    class WithTRLs(ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature, *others):
            _, *outputs = ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets, temperature, *others)
            return log_probs(hidden.to(ctx.compute_dtype), weight, bias, targets, temperature), *outputs

    class ExactLogProbs:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, chunk, cap, scale, outputs):
            trains = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
            if trains or cap is not None or scale != 1 or not {"log_probs", "entropy"}.issuperset(outputs):
                return WithTRLs.apply(hidden, weight, bias, targets, temperature, chunk, cap, scale, outputs)
            device = hidden.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
            head = hidden.to(dtype), weight, bias, targets, temperature
            return *frozen_head(*head, entropies="entropy" in outputs), None, None, None

    return ExactLogProbs


def renormalised_log_probs(renormalise: Callable[..., Tensor]) -> type:
    """
    Returns TRL's fused head with the log-probabilities that `renormalise` returns. It gets TRL's own (N,), detached,
    then the arguments of [`~policy.kept.log_probs_over`] without the truncation. Entropies stay TRL's.
    """

    class Renormalised:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, chunk, cap, scale, outputs):
            given = hidden, weight, bias, targets
            full, *others = ChunkedLogProbFunction.apply(*given, temperature, chunk, cap, scale, outputs)
            return renormalise(full.detach(), *given, temperature=temperature, cap=cap, scale=scale), *others

    return Renormalised


def scoring_with(function: type) -> AbstractContextManager:
    """Context in which models with TRL's fused head compute their log-probabilities in `function`."""
    return exchanged(trl_utils, _ChunkedLogProbFunction=function)


@contextmanager
def phases_timed(add: Callable[[str, float], None]) -> Iterator[None]:
    """Context in which `add` also gets the name and the seconds of each phase that TRL times."""

    class Timed(profiling.ProfilingContext):
        def __enter__(self):
            self.began = perf_counter()
            return super().__enter__()

        def __exit__(self, *error):
            add(self.name.partition(".")[2], perf_counter() - self.began)  # "QuantGRPOTrainer.compute_loss"
            return super().__exit__(*error)

    with exchanged(profiling, ProfilingContext=Timed):
        yield


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices to `total` in FP32, as TRL's head does: on a GPU in one call, never rounded."""
    _addmm_fp32(total, left, right)


def choose_port() -> None:
    """Sets `MASTER_ADDR` and `MASTER_PORT`, unless they are set, to this host and a free port, as TRL does."""
    trl_utils.ensure_master_addr_port()


def empty_cache() -> None:
    """Frees the device memory that PyTorch's allocator caches, as TRL does."""
    vllm_generation.empty_cache()


def add_scoring_head(model: PreTrainedModel, temperature: float, in_fp32: bool) -> None:
    """Gives a model the head with which TRL's trainer scores tokens at a temperature, so that both round alike."""
    trl_utils.add_fused_lm_head(model, temperature=temperature, cast_lm_head_to_fp32=in_fp32)


def is_async(function: Callable) -> bool:
    """Whether TRL awaits the calls of a reward function or a tool."""
    return trl_utils.is_async_callable(function)
