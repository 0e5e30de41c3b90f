"""`DiffusionGRPOTrainer`: GRPO for masked diffusion language models, with quantized sampling and its correction.

TRL computes everything that GRPO derives from log-probabilities: advantages, ratios, clipping, losses, the KL term. The
log-probabilities are the one-step estimates of [`~policy.masked`], and completions are denoised
([`~rollout.embedded.diffusion`]). [`MaskDraws`] ensures that all log-probabilities in one loss were estimated under the
same masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import Tensor

from ..config import DiffusionGRPOConfig
from ..policy.masked import MaskedRows, PromptMasks
from ..rollout.embedded.diffusion import Denoising
from .grpo import QuantGRPOTrainer


# Tensors that a batch holds once for each mask of its rows: (B, draws, T), or (B, draws, 1) where a sequence has one
# value
PER_DRAW = (
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    *("importance_sampling_ratio", "clip_low", "clip_high"),
)


class MaskDraws:
    """
    Holds the masks of one trainer's generations, and the estimates under each mask, between two calls of TRL.

    A generation may be trained on `num_iterations` times. Each time, the prompts of its rows get another mask, so that
    an update sees another estimate of the same completions (d1, section 3). A ratio of two estimates is meaningful only
    if both were made under the same mask. So the old policy, the reference and the sampler estimate the completions
    under every mask in advance, before an update changes the weights. A draw is one of these masks.

    The calls in their order, with what is read and written at each:

    1. `_generate_and_score_completions` begins. [`begin`] chooses the masks of the generation and passes them to the
       engine.
    2. The engine denoises, and estimates its completions under draw 0, in one or several rounds.
    3. TRL scores the generation with the policy and the reference. [`draws`] lists all draws, TRL gets the estimates of
       draw 0, and [`keep`] stores those of all draws.
    4. `_generate_and_score_completions` ends, with a batch of draw 0. [`as_rows`] adds the other draws, including the
       engine's, and repeats each row once for each draw. The correction sees these rows as one batch, so its statistics
       are over all draws. [`fold`] writes its output and the estimates back into TRL's batch, with the shape (B, draws,
       T).
    5. TRL shuffles the batch and splits it into micro-batches. The draws of a row move with it.
    6. `_compute_loss` begins. [`one`] picks the draw of this iteration, and the loss sees the shapes that it expects.

    Args:
        trainer ([`DiffusionGRPOTrainer`]): The trainer.

    Attributes:
        masks (`dict[str, PromptMasks]`): The masks of the newest generation, by `"train"` and `"eval"`.
        in_loss (`int` or `None`): The draw whose loss TRL is computing; `None` outside of a loss.
        kept (`list[list[torch.Tensor]]`): For each pass in which TRL scored the generation, the estimates of each draw.
    """

    def __init__(self, trainer: "DiffusionGRPOTrainer"):
        self.trainer = trainer
        self.masks: dict[str, PromptMasks] = {}
        self.in_loss: int | None = None
        self.kept: list[list[Tensor]] = []

    @property
    def mode(self) -> str:
        """The mode of the trainer, `"train"` or `"eval"`."""
        return "train" if self.trainer.model.training else "eval"

    @property
    def number(self) -> int:
        """The number of draws of each row. An evaluation has one."""
        return self.trainer.args.mask_draws if self.mode == "train" else 1

    @property
    def draws(self) -> list[int]:
        """The draws to estimate now: one in a loss, all while a generation is scored."""
        return list(range(self.number)) if self.in_loss is None else [self.in_loss]

    def begin(self) -> None:
        """Chooses the masks of the next generation, and passes them to the engine."""
        trainer, engine, self.kept = self.trainer, self.trainer.vllm_generation.engine, []
        args, place = trainer.args, trainer.rollout_noise()
        masks = PromptMasks(args.prompt_mask_probability, place.seed, place.step, place.draw)
        self.masks[self.mode] = engine.masks = masks
        train, evaluation = args.per_device_train_batch_size, args.per_device_eval_batch_size
        engine.rows_at_once = train if self.mode == "train" else evaluation

    def masked(self, model, prompt: int, draw: int) -> MaskedRows:
        """Returns the stand-in for `model` with which TRL scores rows whose first `prompt` columns are prompts."""
        engine, length = self.trainer.vllm_generation.engine, self.trainer.args.max_completion_length
        return MaskedRows(model, prompt, length, engine.mask_token_id, self.masks[self.mode], draw, engine.shift)

    def keep(self, estimates: list[Tensor]) -> None:
        """Stores the estimates (B, T) of each draw, of which TRL gets the first. In a loss it does nothing."""
        if self.in_loss is None:
            self.kept.append(estimates)

    def as_rows(self, batch: dict) -> dict:
        """Returns a batch in which each row appears once for each draw, with the estimates of that draw."""
        rows = {}
        for name, value in batch.items():
            has_rows = isinstance(value, Tensor) and value.ndim > 0
            rows[name] = value.repeat_interleave(self.number, 0) if has_rows else value
        for estimates in self.kept:
            for name in PER_DRAW:
                if batch.get(name) is estimates[0]:  # TRL stores the estimates of the first draw in its batch
                    rows[name] = torch.stack(estimates, 1).flatten(0, 1)
        rows["sampling_per_token_logps"] = torch.stack(self._of_sampler(batch), 1).flatten(0, 1)
        self.kept = []
        return rows

    def _of_sampler(self, batch: dict) -> list[Tensor]:
        """Returns the engine's estimates (B, T) of each draw. Those of the first came with the completions."""
        first = batch["sampling_per_token_logps"]
        lists = []
        for part in ("prompt", "completion"):
            ids, mask = batch[f"{part}_ids"], batch[f"{part}_mask"].bool()
            lists.append([row[kept].tolist() for row, kept in zip(ids, mask, strict=True)])
        estimates = [first]
        for draw in range(1, self.number):
            other = torch.zeros_like(first)
            for row, logps in enumerate(self.trainer.vllm_generation.engine.estimate(*lists, draw)):
                other[row, : len(logps)] = torch.tensor(logps)
            estimates.append(other)
        return estimates

    def fold(self, rows: dict, batch: dict) -> None:
        """Writes the tensors that differ between draws from `rows` into `batch`."""
        for name in PER_DRAW:
            if name in rows:
                batch[name] = rows[name].unflatten(0, (-1, self.number))

    @contextmanager
    def one(self, batch: dict) -> Iterator[dict]:
        """Context of TRL's `_compute_loss`, which must be given the copy of `batch` that this yields."""
        trainer, draw = self.trainer, 0
        if self.mode == "train":
            draw = trainer.iteration % self.number
        picked = {name: value[:, draw] if name in PER_DRAW else value for name, value in batch.items()}
        self.in_loss = draw
        try:
            yield picked
        finally:
            self.in_loss = None


class DiffusionGRPOTrainer(QuantGRPOTrainer):
    """
    [`QuantGRPOTrainer`] for a masked diffusion language model, such as LLaDA: a decoder whose config has
    `is_causal=False`, so that each token attends to all others.

    ```python
    >>> trainer = DiffusionGRPOTrainer(
    ...     model="llada-8b",  # written by trl_quant.storage.llada.convert
    ...     reward_funcs=strict_math_reward,
    ...     args=DiffusionGRPOConfig(rollout_precision="fp8_tensor", is_correction="ais"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Its log-probabilities are one-step estimates, not those with which tokens were sampled (see [`~policy.masked`]).
    Corrections, losses, adapters and precisions act on them as in [`QuantGRPOTrainer`]. It logs no
    `mismatch/by_position/*`: all tokens of a completion are estimated from one forward pass over masks, so no mismatch
    builds up from token to token.
    """

    config_class = DiffusionGRPOConfig

    def __init__(self, *args, **kwargs):
        self.prompt_masks = MaskDraws(self)
        super().__init__(*args, **kwargs)
        engine = self.vllm_generation.engine
        if not isinstance(engine, Denoising):
            raise ValueError(
                f"`build_engine` returned a {type(engine).__name__}. A masked diffusion model needs an "
                "engine that estimates log-probabilities under the trainer's masks: a `DiffusionEngine`."
            )

    @property
    def iteration(self) -> int:
        """How many times the current generation has already been trained on."""
        parts = self.args.steps_per_generation
        return self._step % (parts * self.num_iterations) // parts

    def log_values(self, values: dict[str, float]) -> None:
        super().log_values({k: v for k, v in values.items() if not k.startswith("mismatch/by_position/")})

    def generation_state(self) -> dict:
        return super().generation_state() | {"masks": asdict(self.prompt_masks.masks["train"])}

    def load_generation_state(self, state: dict) -> None:
        super().load_generation_state(state)
        self.prompt_masks.masks["train"] = PromptMasks(**state["masks"])

    # In the order in which `MaskDraws` and `CorrectionStep` list their calls

    def _generate_and_score_completions(self, inputs):
        self.prompt_masks.begin()
        return super()._generate_and_score_completions(inputs)

    def correct(self, batch) -> None:
        rows = self.prompt_masks.as_rows(batch)
        super().correct(rows)
        self.prompt_masks.fold(rows, batch)

    def _compute_loss(self, model, inputs):
        with self.prompt_masks.one(inputs) as batch:
            return super()._compute_loss(model, batch)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        score, prompt = super()._get_per_token_logps_and_entropies, input_ids.shape[1] - logits_to_keep
        scored = []
        for draw in self.prompt_masks.draws:
            masked = self.prompt_masks.masked(model, prompt, draw)
            scored.append(score(masked, input_ids, attention_mask, logits_to_keep, *args, **kwargs))
            if scored[0][0] is None:  # this pass is skipped, since each loss scores its own tokens
                return scored[0]
        self.prompt_masks.keep([logps for logps, *_ in scored])
        return scored[0]
