"""`QuantDistillationTrainer`: quantized rollouts for TRL's `DistillationTrainer`, and a correction in its loss.

On-policy distillation (GKD, arXiv 2306.13649) minimises, over completions `y` that the student itself writes, the
divergence D between the next-token distributions of student and teacher at each position t:

    L = E_{y ~ pi} [ 1/N sum_t D(y_<t) ],    D(y_<t) = D(pi(. | y_<t), teacher(. | y_<t))

The gradient goes through D alone, not through the sampling:

    grad L = E_{y ~ pi} [ 1/N sum_t grad D(y_<t) ]

If a quantized sampler mu writes the completions, each prefix `y_<t` is reached with another probability. Importance
sampling corrects this:

    grad L = E_{y ~ mu} [ 1/N sum_t W_t grad D(y_<t) ],    W_t = prod_{s < t} pi(y_s | y_<s) / mu(y_s | y_<s)

| symbol | here |
|---|---|
| `pi`, the student in training | `old_logps`, from the hidden states of the loss itself |
| `mu`, the sampler | `rollout_logps` |
| `W_t`, the weight of the prefix before the token t | `unit_weights` at the level `"prefix"`; `W_0` is 1 |

D(y_<t) does not depend on the drawn token y_t, so that token's own ratio corrects nothing: its mean given `y_<t` is 1.
It would only add noise and, once capped, shrink the step. Nor do the tokens after t belong in W_t.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from trl import DistillationTrainer

from ..config import QuantDistillationConfig
from ..config.given import vocabulary_sizes
from ..corrections.batch import counted
from ..policy.frozen import loading_teacher
from ..policy.vocabulary import cut_vocabulary
from ..trl_seams import divergences_by, loaded_by
from .checks import config_for
from .introduction import PACKAGE_TAG
from .recorded import RecordedRollouts, RecordedStep


class DistillationCorrectionStep(RecordedStep):
    """
    The correction of a distillation trainer, and its state between two calls of TRL. Without a correction it does
    nothing.

    A generation serves one update, so the policy of the loss is the one that was sampled from. The hidden states of the
    loss score the tokens, which costs one more product with the head, without a gradient.

    The calls in their order, with what is read and written at each:

    1. `_generate_and_score_completions` begins. [`scoring`] drops the state of the last generation.
    2. TRL samples, in one or more turns, and `vllm_generation` records the log-probabilities.
    3. `_generate` ends. [`take_turns`] keeps them for the tokens of the completions.
    4. `_generate_and_score_completions` ends. [`before_loss`] adds `sampling_per_token_logps` to the batch.
    5. TRL shuffles the batch, including the tensors written so far, and splits it into micro-batches.
    6. `_compute_loss` begins, for each micro-batch. [`during_loss`] opens a copy of the micro-batch.
    7. TRL's loss computes the divergence of each token. [`weighted`] scores the tokens, writes their weights into the
       copy, logs after the last micro-batch of the generation, and returns the weighted divergences.
    8. `_compute_loss` ends, and the copy is dropped.
    """

    def before_loss(self, batch: dict[str, Tensor]) -> None:
        if self.samples is None:
            return
        batch["sampling_per_token_logps"] = self.padded(self.samples)
        # Distillation has no advantages, and its config allows no correction that reads them
        batch["advantages"] = torch.zeros(len(self.samples), device=batch["completion_mask"].device)

    @contextmanager
    def during_loss(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        if "sampling_per_token_logps" not in batch:
            yield batch
            return
        with self.opened(batch) as open_batch, divergences_by(type(self.trainer), self.weighted):
            yield open_batch

    def weighted(self, divergences: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
        """
        Returns the divergences times their weights.

        Args:
            divergences (`torch.Tensor` of shape `(N,)`):
                The divergence at each position in nats, where N counts all positions of the completions in the
                micro-batch or only those of `completion_mask` (see [`~trl_seams.divergences_by`]).
            score (`Callable`):
                Maps the token ids `(N,)` at these positions to the student's log-probabilities `(N,)` in nats.
        """
        batch = self.open_batch
        ids, mask = batch["completion_ids"], counted(batch).bool()
        places = mask if len(divergences) != ids.numel() else torch.ones_like(mask)
        logps = divergences.new_zeros(ids.shape)
        logps[places] = score(ids[places])
        self.write_into_open_batch(logps)
        return divergences * batch["importance_sampling_ratio"][places]


class QuantDistillationTrainer(RecordedRollouts, DistillationTrainer):
    """
    TRL's [`~trl.DistillationTrainer`] with quantized rollouts, weights that correct its loss for them, and a teacher
    that may be quantized. It takes the arguments of `DistillationTrainer`. With [`QuantDistillationConfig`]'s defaults,
    a plain [`~trl.DistillationConfig`] or `args=None` it is `DistillationTrainer`.

    ```python
    >>> trainer = QuantDistillationTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     teacher_model="Qwen/Qwen2.5-7B-Instruct",
    ...     args=QuantDistillationConfig(use_vllm=True, rollout_precision="fp8", teacher_precision="nvfp4"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Attributes:
        one_pass (`bool`): Whether the loss's own forward pass scores the tokens for the correction. It always does.
        correction_step ([`DistillationCorrectionStep`]): The correction and its state.
    """

    config_class = QuantDistillationConfig
    one_pass = True
    _tag_names = [*DistillationTrainer._tag_names, PACKAGE_TAG]

    def __init__(
        self,
        model,
        teacher_model=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
    ):
        args = config_for(self, model, args)
        correction = args.correction()
        self.correction_step = DistillationCorrectionStep(self, correction, level="prefix", same_bits=False)
        self._given = {"student": model, "teacher": teacher_model}
        with loaded_by(type(self), self._cut_loaded):
            super().__init__(
                model=model,
                teacher_model=teacher_model,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
            )
        del self._given

    # The models, while they are loaded

    def fields_while_built(self, args) -> dict:
        # Called when the arguments were checked, and before TRL's constructor
        student, teacher = self._given.values()
        self._shared_rows = min(vocabulary_sizes(args, student, teacher))
        for name, given in self._given.items():
            if not isinstance(given, str):
                cut_vocabulary(given, self._shared_rows, name)
        if args.teacher_precision is None:
            return {}
        return {"teacher_model_init_kwargs": loading_teacher(args, teacher)}

    def _cut_loaded(self, loaded_from: str, model) -> None:
        """Cuts a model that TRL has loaded by its name to the rows that student and teacher share."""
        cut_vocabulary(model, self._shared_rows, "student" if loaded_from == self._given["student"] else "teacher")

    # The correction in the loss. `RecordedRollouts` makes the calls of `DistillationCorrectionStep` that come before it

    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        with self.correction_step.during_loss(inputs) as batch:
            return super()._compute_loss(unwrapped_student, batch, num_items_in_batch)
