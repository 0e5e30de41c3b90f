"""Chooses the `rollout_precision` of a run by measuring vLLM's engines, before the run: `trl-quant choose MODEL`.

The run's trainer is built up to the point at which it would build its engine. By then the models are loaded, as they
are when the run samples, and TRL has named the engine's arguments. Instead of one engine, each precision's is measured
(`rollout.vllm.trial`), and the trainer is given up. Nothing is written.
"""

import copy
import os
import tempfile
from collections.abc import Iterable

from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import AutoConfig

from ..config.checks import RULES
from ..config.fields import QuantFields
from ..config.given import Given, name_of
from ..precisions import in_vllm
from ..reading import reading
from ..rollout import EngineSpec
from ..rollout.vllm.choice import Choice, choose
from ..rollout.vllm.support import runnable_precisions
from ..rollout.vllm.trial import Trial
from ..storage.named import check_named
from ..storage.quantization import prepared_precisions
from ..trl_seams import unsharded
from .sampling import QuantSampling


class _Measured(BaseException):
    """Ends the constructor of a trainer whose engines have been measured. It is no error that somebody may handle."""

    def __init__(self, choice: Choice):
        super().__init__()
        self.choice = choice


def choose_precision(
    trainer_class: type[QuantSampling],
    model,
    args: QuantFields,
    peft_config=None,
    precisions: Iterable[str] | None = None,
    **given,
) -> Choice:
    """
    Measures how fast vLLM samples for a run in each precision, on this machine, and chooses one.

    ```python
    >>> args = QuantGRPOConfig(use_vllm=True, rollout_precision="bf16", max_completion_length=1024)
    >>> choice = choose_precision(QuantGRPOTrainer, "Qwen/Qwen2.5-0.5B-Instruct", args)
    >>> choice.print()
    >>> args.rollout_precision = choice.precision
    ```

    It runs in one process. An engine of several ranks (`vllm_tensor_parallel_size`) starts them by itself.

    Args:
        trainer_class (`type`): The run's trainer, such as [`QuantGRPOTrainer`].
        model: The policy, as the trainer takes it.
        args ([`QuantGRPOConfig`] or the like): The run's settings, whose `rollout_precision` does not count.
        peft_config ([`~peft.PeftConfig`], *optional*): The adapter.
        precisions (`Iterable[str]`, *optional*): What to measure. If `None`, all that vLLM runs here.
        given: Further arguments of the trainer, such as `quantization_config`. Data and rewards are not needed.

    Returns:
        [`~rollout.vllm.choice.Choice`]: The choice, and what was measured.

    Raises:
        `ImportError`: vLLM is missing, or its version was not tested.
        `ValueError`: vLLM cannot run here, or nothing can be chosen for this run.
        `RuntimeError`: No engine started.
    """
    measured = _measured_here(precisions)
    args = copy.copy(args) if isinstance(args, QuantFields) else trainer_class.config_class.from_trl(args)
    args.resolve_for(adapted=peft_config is not None or (not isinstance(model, str) and is_peft_model(model)))
    _check_run(args)
    with tempfile.TemporaryDirectory() as directory:
        args = args.having(output_dir=directory, report_to=[], push_to_hub=False)  # so that nobody else is told
        precisions, given = _of_checkpoint(model, args, measured), _stand_ins(args) | given
        configs = _configs(args, precisions, model, {"peft_config": peft_config, **given})
        first = next(config for config in configs.values() if isinstance(config, QuantFields))
        try:
            with unsharded(first):
                _measuring(trainer_class, configs, args)(model=model, args=first, peft_config=peft_config, **given)
        except _Measured as ended:
            return ended.choice
    raise RuntimeError(f"{trainer_class.__name__} builds no engine with these settings.")


def check_here() -> list[str]:
    """
    Returns the precisions that vLLM runs here. Raises as [`choose_precision`] does where vLLM cannot run, and
    `ValueError` in one of several processes.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("A precision is chosen in one process, which starts vLLM's ranks itself. Use no launcher.")
    return runnable_precisions()


def _measured_here(precisions: Iterable[str] | None) -> list[str]:
    """Returns the precisions to measure. Raises `ValueError` for one that vLLM does not run here."""
    runnable = check_here()
    if precisions is None:
        return runnable
    precisions = list(precisions)
    unknown = [name for name in precisions if name not in runnable]
    if unknown or not precisions:
        raise ValueError(f"`precisions`={precisions!r}: here vLLM runs only {', '.join(map(repr, runnable))}.")
    return [name for name in in_vllm() if name in precisions]


def _check_run(args: QuantFields) -> None:
    """Raises `ValueError` for a run whose precision cannot be chosen by speed."""
    if not (args.use_vllm and args.vllm_mode == "colocate"):
        alike = "Set `use_vllm=True` and `vllm_mode='colocate'`"
        if args.is_asynchronous:  # which has no such engine
            alike = "Measure a run of `--trainer grpo`, with `vllm_mode='colocate'`, on a card like the server's"
        raise ValueError(
            f"`use_vllm`={args.use_vllm} and `vllm_mode`={args.vllm_mode!r}: only vLLM's engines in the run's own "
            f"process are measured. {alike}. A server runs in the precision that "
            "it was started in, and the embedded engine is equally slow in all."
        )
    if args.max_completion_length is None:
        raise ValueError(
            "`max_completion_length`=None, and completions of that length are measured. Set it, or name a precision."
        )
    if args.train_precision is not None and not args.spec.training.freezes_base:
        raise ValueError(
            f"`train_precision`={args.train_precision!r}: with another `rollout_precision` the sampler would no longer "
            "compute what is trained. Leave `rollout_precision` unset: the run samples in the `train_precision`."
        )


def _of_checkpoint(model, args: QuantFields, precisions: list[str]) -> list[str]:
    """Returns those precisions in which vLLM starts on the run's checkpoint: a quantized one has its own alone."""
    init, start = args.model_init_kwargs or {}, (args.vllm_engine_kwargs or {}).get("model")
    options = {"trust_remote_code": args.trust_remote_code}
    if start is None:
        start, options["revision"] = name_of(model), init.get("revision")
    if not start:
        return precisions  # the trainer says what it lacks
    check_named("model", start, options.get("revision"))
    with reading(start):
        prepared = prepared_precisions(AutoConfig.from_pretrained(start, **options))
    found = [name for name in precisions if prepared is None or name in prepared]
    if not found:
        raise ValueError(f"vLLM starts on {start!r}, which holds {', '.join(prepared)}: vLLM does not run that here.")
    return found


def _configs(args: QuantFields, precisions: list[str], model, given: dict) -> dict[str, QuantFields | str]:
    """
    Returns the run's settings with each precision, or the reason why they cannot have it with this model. At least one
    can.
    """
    configs = {}
    for name in precisions:
        config = args.having(rollout_precision=name)
        try:
            config.check_assigned()
            configs[name] = _refused(Given(config, model, given)) or config
        except ValueError as error:
            configs[name] = str(error)
    if all(isinstance(config, str) for config in configs.values()):
        raise ValueError("\n".join(dict.fromkeys(configs.values())))
    return configs


def _refused(run: Given) -> str | None:
    """Returns why the settings of a run refuse its model; `None` if they take it."""
    needing = (rule for rules in RULES.values() for rule in rules if rule.needs == "model" and rule.error is not None)
    return next(filter(None, (rule.broken(run) for rule in needing)), None)


def _stand_ins(args: QuantFields) -> dict:
    """Returns prompts and rewards for a trainer that does not sample."""
    prompts = Dataset.from_dict({"prompt": ["?"] * args.generation_batch_size})
    given = {"train_dataset": prompts}
    if args.eval_strategy != "no":
        given["eval_dataset"] = prompts
    if args.has_rewards:
        return given | {"reward_funcs": [_no_reward] * len(args.reward_weights or [1.0])}
    return given | {"teacher_model": args.teacher_model_name_or_path}


def _no_reward(completions, **others) -> list[float]:
    return [0.0] * len(completions)


def _measuring(
    trainer_class: type[QuantSampling], configs: dict[str, QuantFields | str], args: QuantFields
) -> type[QuantSampling]:
    """
    Returns a trainer that measures its engines instead of building one, and then ends with [`_Measured`]. `configs` are
    the run's settings `args` with each precision, as [`_configs`] returns them.
    """

    class Measuring(trainer_class):
        def build_engine(self, spec, model, accelerator, processing_class, **settings):
            trials = {}
            for name, config in configs.items():
                if isinstance(config, str):
                    trials[name] = config
                else:
                    options = EngineSpec.from_config(config).options()
                    del options["precision"]
                    trials[name] = Trial.of(model, accelerator, settings | options)
            raise _Measured(choose(trials, uncounted(model, args)))

    return Measuring


def uncounted(model, args: QuantFields) -> list[str]:
    """Returns the parts of a step that take time in a run but are not measured."""
    is_zero3 = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
    parts = {
        "reading prompts": True,
        "gathering the sharded policy": is_zero3 or args.fsdp_version is not None,
        "dequantizing the policy's base": any(not param.is_floating_point() for param in model.parameters()),
        "putting the engine to sleep": args.vllm_enable_sleep_mode,
        "speculative decoding, which depends on the policy": "speculative_config" in (args.vllm_engine_kwargs or {}),
    }
    return [part for part, happens in parts.items() if happens]
