"""`QuantGRPOTrainer` and `AISGRPOTrainer`: the glue between TRL's `GRPOTrainer` and the rooms of this package."""

import json
import os
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from transformers import AutoConfig
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.import_utils import is_vllm_available
from trl.trainer.utils import get_config_model_id, nanmax, nanmin

from .config import AISGRPOConfig, QuantGRPOConfig
from .corrections import CORRECTIONS, CorrectionInputs
from .noise import sigma
from .norms import family_of
from .rollout import RolloutEngine, RolloutNoise, VLLMBase, choose_precision, engine_of
from .rollout.vllm_support import check_device
from .scaling import scale_model, uaq_applied


ROLLOUT_STATE_NAME = "rollout_state.json"


class QuantGRPOTrainer(GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] with quantized rollouts and the correction for them. It takes what `GRPOTrainer` takes;
    with [`QuantGRPOConfig`]'s defaults, with a plain [`~trl.GRPOConfig`] and with `args=None` it is `GRPOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl.rewards import accuracy_reward
    >>> from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    >>> trainer = QuantGRPOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=QuantGRPOConfig(use_vllm=True, rollout_precision="fp8"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = QuantGRPOConfig
    _engine: RolloutEngine | None = None  # where samples come from, if not from TRL itself
    _correction = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{model_name.split('/')[-1]}-GRPO")
        elif not isinstance(args, QuantGRPOConfig):
            args = self.config_class.from_grpo(args)
        _check_before_loading(model, args, train_dataset, peft_config, environment_factory)
        if args.rollout_precision == "auto":
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args.rollout_precision = _precision_before(args.output_dir) or choose_precision(args, model_name)
        self._correction = _correction_of(args)

        with engine_of(args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        engine = getattr(self, "vllm_generation", None)
        self._engine = engine if isinstance(engine, RolloutEngine) else None
        if args.uaq_scale is not None and uaq_applied(self.model) is None:
            scale_model(self.model, args.uaq_scale)

    # Generate: the noise of this step, laid on the copy before it samples

    def _generate(self, prompts):
        if self._engine is not None:
            self._engine.noise = self._rollout_noise()
        return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        if self._engine is not None:
            self._engine.multimodal_fields = multimodal_fields
        try:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        except ValueError:  # a refusal, which says itself what is wrong
            raise
        except Exception as error:
            if self._engine is None:
                raise
            checkpoint = last_complete_checkpoint(self.args.output_dir)
            raise RuntimeError(
                f"The {self._engine.precision} rollout engine failed at step {self.state.global_step}. The last whole "
                f"checkpoint is {checkpoint}; continue with `train(resume_from_checkpoint=True)`. Cause: {error}"
            ) from error

    def _rollout_noise(self) -> RolloutNoise:
        args, step = self.args, self.state.global_step
        if args.noise_schedule is None or not self.model.training:  # evaluation samples from the clean copy
            return RolloutNoise()
        value = sigma(
            step,
            self.state.max_steps,
            args.noise_schedule,
            args.noise_stages,
            args.noise_sigma_start,
            args.noise_sigma_end,
        )
        self._metrics["train"]["noise/sigma"].append(value)
        return RolloutNoise(value, args.seed, step)

    def check_sync(self) -> dict[str, float]:
        """
        Compares the vLLM engine with the policy at once, as is done every `sync_check_steps`; syncs first where the
        next generation would.

        Returns:
            `dict[str, float]`: `sync_check/logp_difference`, the mean |difference| of their log-probabilities in nats a
            token, and `sync_check/bound`, what the format explains.

        Raises:
            `RuntimeError`: if the engine's weights are stale, corrupted, or those of the base model alone.
            `ValueError`: without a vLLM engine of ours.
        """
        if not isinstance(self._engine, VLLMBase):
            raise ValueError("`check_sync` checks vLLM engines: set `use_vllm=True` and a `rollout_precision`.")
        if self.state.global_step != self._last_loaded_step:
            self._engine.sync_weights()
            self._last_loaded_step = self.state.global_step
        return self._engine.check_sync()

    # Correct: what the tokens of the quantized sampler are worth

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self._correction is None or output.get("sampling_per_token_logps") is None:
            return output
        mode = "train" if self.model.training else "eval"
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        corrected = self._correction(
            CorrectionInputs(
                rollout_logps=output["sampling_per_token_logps"],
                old_logps=output["old_per_token_logps"],
                advantages=output["advantages"],
                mask=mask,
            )
        )
        for name, value in corrected.metrics.items():
            self._metrics[mode][name].append(value)
        if self._engine is not None:
            for name, value in self._engine.sync_metrics.items():
                self._metrics[mode][name].append(value)
            self._engine.sync_metrics = {}
        if self.args.is_correction == "trl":  # only the diagnostics are ours
            return output

        output["importance_sampling_ratio"] = corrected.weights
        self._log_weights(mode, corrected.weights[mask.bool()])
        if corrected.old_logps is not None:
            output["old_per_token_logps"] = corrected.old_logps
        if corrected.clip_high is not None:
            output["clip_low"], output["clip_high"] = corrected.clip_low, corrected.clip_high
        return output

    def _log_weights(self, mode: str, weights: torch.Tensor) -> None:
        """Has TRL's own metrics of the importance sampling ratio tell of the weights that replaced it."""
        if weights.numel() == 0:
            weights = weights.new_zeros(1)
        for statistic, value in (
            ("min", nanmin(self.accelerator.gather(weights.min()))),
            ("mean", self.accelerator.gather(weights.mean()).nanmean()),
            ("max", nanmax(self.accelerator.gather(weights.max()))),
        ):
            self._metrics[mode][f"sampling/importance_sampling_ratio/{statistic}"][-1] = value.item()

    # Loss: TRL's own, between a token's own clip bounds where the correction gives them (QuRL eq. 9)

    def _compute_loss(self, model, inputs):
        if "clip_high" not in inputs:
            return super()._compute_loss(model, inputs)
        bounds = self.epsilon_low, self.epsilon_high
        # TRL clamps the ratio to [1 - epsilon_low, 1 + epsilon_high]; near 1 both subtractions are exact.
        self.epsilon_low, self.epsilon_high = 1 - inputs["clip_low"], inputs["clip_high"] - 1
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.epsilon_low, self.epsilon_high = bounds

    # Checkpoints: only complete ones count, and a model is scaled once

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model, trial):
        if self._engine is not None:
            state = {"precision": self._engine.precision, **self._engine.state_dict()}
            if self.args.should_save:
                folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ROLLOUT_STATE_NAME).write_text(json.dumps(state))
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        path = Path(resume_from_checkpoint) / "config.json"
        if path.is_file():
            recorded = json.loads(path.read_text()).get("uaq_scale")
            if recorded != uaq_applied(self.model):
                raise ValueError(
                    f"The checkpoint {resume_from_checkpoint} was trained with `uaq_scale`={recorded}, this run has "
                    f"`uaq_scale`={self.args.uaq_scale}. Resume with the same value."
                )
        path = Path(resume_from_checkpoint) / ROLLOUT_STATE_NAME
        if self._engine is not None and path.is_file():
            self._engine.load_state_dict(json.loads(path.read_text()))
        return super()._load_from_checkpoint(resume_from_checkpoint, model)


class AISGRPOTrainer(QuantGRPOTrainer):
    """
    [`QuantGRPOTrainer`] with the defaults of AIS-GRPO ([`AISGRPOConfig`]): adaptive importance sampling between the
    quantized sampler and the trainer, and unnormalised advantages.
    """

    config_class = AISGRPOConfig


def _correction_of(args: QuantGRPOConfig):
    """The correction of this run; `none`, for its diagnostics, where TRL corrects for a quantized copy of ours."""
    if args.is_correction == "trl" and args.rollout_precision is None:
        return None
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    options = {
        "tis": {"cap": args.is_cap},
        "acr": {"cap": args.is_cap, "epsilon_low": args.epsilon, "epsilon_high": high},
        "ais": {
            "cap": args.is_cap,
            "delta": args.ais_delta,
            "gamma": args.ais_gamma,
            "beta_var": args.ais_beta_var,
        },
    }
    name = "none" if args.is_correction == "trl" else args.is_correction
    return CORRECTIONS[name](**{key: value for key, value in options.get(name, {}).items() if value is not None})


def _check_before_loading(model, args, train_dataset, peft_config, environment_factory) -> None:
    """What can be known to fail before a model is loaded."""
    columns = getattr(train_dataset, "column_names", None)
    if columns is not None and environment_factory is None and "prompt" not in columns:
        raise ValueError(f"`train_dataset` has the columns {columns}; a column 'prompt' is needed.")
    if args.use_vllm and args.rollout_precision is not None and not is_vllm_available():
        raise ImportError(
            "`use_vllm`=True, but vLLM is not installed. Install `trl_quant[vllm]` (CUDA) or `trl_quant[cpu]`, or set "
            f"`use_vllm=False` to sample from the embedded engine in `rollout_precision`={args.rollout_precision!r}."
        )
    if args.use_vllm and args.rollout_precision is not None and args.vllm_mode == "colocate":
        check_device(args.rollout_precision, args.vllm_enable_sleep_mode)
    if args.noise_schedule is None and args.uaq_scale is None:
        return
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    else:
        config = model.config
    family_of(config.get_text_config().model_type)
    applied = getattr(config, "uaq_scale", None)
    if args.uaq_scale is not None:
        if applied is not None and applied != args.uaq_scale:
            raise ValueError(f"`uaq_scale`={args.uaq_scale}, but the model was already scaled by {applied}.")
        if applied is None and (peft_config is not None or (not isinstance(model, str) and is_peft_model(model))):
            raise ValueError(
                f"`uaq_scale`={args.uaq_scale} scales the base model, which a saved adapter does not contain. Scale "
                "the base once with `trl_quant.scaling.scale_model`, save it, and train the adapter on that."
            )


def _precision_before(output_dir: str) -> str | None:
    """The precision of the run whose last whole checkpoint is in `output_dir`, if there is one."""
    path = Path(last_complete_checkpoint(output_dir) or "", ROLLOUT_STATE_NAME)
    return json.loads(path.read_text()).get("precision") if path.is_file() else None


def last_complete_checkpoint(output_dir: str) -> str | None:
    """
    The newest checkpoint in `output_dir` that was written to its end, or `None`. The trainer state is written last:
    a run that was killed, or whose disk was full, while saving leaves a directory without a readable one.
    """
    steps = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            steps[int(path.name.rpartition("-")[2])] = json.loads((path / "trainer_state.json").read_text()) and path
        except (OSError, ValueError):
            continue
    return os.fspath(steps[max(steps)]) if steps else None
