"""`QuantPPOTrainer`: PPO with quantized rollouts, on TRL's `GRPOTrainer`.

TRL's GRPO loss also accepts an advantage for each token. With the critic's advantages A_t, it is PPO's loss:

    J = E[ w_t min(R_t A_t, clip(R_t, 1 - e_lo, 1 + e_hi) A_t) ] - beta KL

So sampling, rewards, corrections and the policy's loss are those of [`QuantGRPOTrainer`]. PPO adds a critic
([`~trainers.ppo.critic`]) and computes the advantages A_t from its values ([`~trainers.ppo.gae`]), where GRPO compares
the completions of a prompt with each other.
"""

import logging
from functools import partial

import torch
from torch import Tensor
from trl import GRPOTrainer

from ...config import QuantPPOConfig
from ...config.given import name_of
from ...corrections.batch import counted
from ...policy.vocabulary import pad_vocabulary
from ...runs.agreement import on_every_rank
from ...storage.run_checkpoints import saved_only_model
from ..grpo import QuantGRPOTrainer
from ..introduction import PACKAGE_TAG
from .critic import Critic, CriticSteps, OwnCritic, load_critic
from .gae import explained_variance, gae, moments, rewards_of, value_losses, whitened
from .value_head import SharedCritic


logger = logging.getLogger(__name__)


class ValueStep:
    """
    Adds the critic to a generation and to its losses, and holds the state between two calls of TRL.

    The calls in their order, with what is read and written at each:

    1. `_calculate_rewards` ends. [`take_rewards`] keeps the rewards of all ranks.
    2. TRL's `_generate_and_score_completions` ends, and the correction comes next. [`before_loss`] writes `advantages`,
       `values` and `returns`, `(B, T)`, into the batch, and logs. A correction reads these advantages.
    3. TRL shuffles the batch, including the tensors written so far, and splits it into micro-batches.
    4. `_compute_loss` ends, for each micro-batch of each update. [`loss`], times the critic's coefficient, is added to
       the policy's loss.

    Args:
        trainer ([`QuantPPOTrainer`]): The trainer.
        critic ([`~trainers.ppo.critic.Critic`]): Its critic.

    Attributes:
        rewards (`torch.Tensor` or `None`): The rewards of the current generation, `(B of all ranks, functions)`.
    """

    def __init__(self, trainer: GRPOTrainer, critic: Critic):
        self.trainer, self.critic = trainer, critic
        self.rewards: Tensor | None = None

    def total(self, x: Tensor) -> Tensor:
        """Adds up a tensor over all ranks."""
        return self.trainer.accelerator.reduce(x, "sum")

    def take_rewards(self, rewards: Tensor) -> None:
        """Takes the rewards of each function, `(B of all ranks, functions)`; NaN where one does not apply."""
        self.rewards = rewards

    def scores(self, rows: int) -> Tensor:
        """Returns the reward of each completion of this rank, `(B,)`; NaN where no function gave one."""
        rewards, self.rewards = self.rewards, None
        scores = (rewards * self.trainer.reward_weights.to(rewards.device)).nansum(1)
        scores = scores.masked_fill(rewards.isnan().all(1), torch.nan)
        first = self.trainer.accelerator.process_index * rows
        return scores[first : first + rows]

    def before_loss(self, batch: dict[str, Tensor]) -> None:
        """
        Writes `advantages`, `values` and `returns`, each `(B, T)`, and `has_reward`, `(B,)`, into the batch of a
        generation.

        As in GRPO, a completion without any reward does not train the policy: its advantages are 0. Nor does it train
        the critic.

        Raises:
            `ValueError`: The batch has images, of a stream's prompts or of tools, which the critic does not read.
        """
        with on_every_rank():
            if batch.get("pixel_values") is not None:
                raise ValueError("A generation has images, and the critic reads only text.")
        args = self.trainer.args
        is_training = self.trainer.model.training
        rows = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        scores, values = self.scores(len(batch["completion_ids"])), self.critic.old_values(batch, rows)
        batch["has_reward"] = scores.isfinite()
        mask = counted(batch) * batch["has_reward"][:, None]
        advantages = gae(rewards_of(scores, mask), values, mask, args.gamma, args.lam)
        batch["values"], batch["returns"] = values, values + advantages
        batch["advantages"] = whitened(advantages, mask, self.total)
        self.log(batch, advantages, mask)

    def log(self, batch: dict[str, Tensor], advantages: Tensor, mask: Tensor) -> None:
        """Logs a generation's values and returns, and the share of the returns' variance that the values explain."""
        values, advantages, returns = (
            moments(x, mask, self.total) for x in (batch["values"], advantages, batch["returns"])
        )
        metrics = {"value/mean": values.mean.item(), "value/return_mean": returns.mean.item()}
        explained = explained_variance(values, advantages, returns, batch["values"].dtype)
        if explained is not None:
            metrics["value/explained_variance"] = explained
        trainer = self.trainer
        trainer.log_values(metrics)
        # TRL has logged what GRPO would train on: advantages within groups, and the share of groups with equal rewards
        trainer._metrics["train" if trainer.model.training else "eval"].pop("frac_reward_zero_std", None)
        means = (batch["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1)
        table, means = trainer._logs["advantages"], trainer.accelerator.gather(means).tolist()
        for _ in means[: len(table)]:  # TRL's table is no longer than a generation
            table.pop()
        table.extend(means)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """
        Computes the critic's loss on a micro-batch, a scalar, and logs the mean over its tokens. As in TRL's `dapo`,
        the loss is the sum over the tokens divided by (the tokens of the generation) x `gradient_accumulation_steps` /
        `steps_per_generation`, so the losses of micro-batches and ranks add up.
        """
        trainer, args = self.trainer, self.trainer.args
        values, mask = self.critic.values(batch), counted(batch) * batch["has_reward"][:, None]
        losses, is_clipped = value_losses(values, batch["values"], batch["returns"], args.cliprange_value)
        total = batch["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        if trainer.model.training:  # from the tokens of a generation to the share of one step
            total = total * trainer.current_gradient_accumulation_steps / args.steps_per_generation
        metrics = {"value/loss": moments(losses.detach(), mask, self.total).mean.item()}
        if is_clipped is not None:
            metrics["value/clip_fraction"] = moments(is_clipped, mask, self.total).mean.item()
        trainer.log_values(metrics)
        return (losses * mask).sum() / total


class QuantPPOTrainer(QuantGRPOTrainer):
    """
    PPO with quantized rollouts and a correction for them. It takes the arguments of [`QuantGRPOTrainer`]. TRL no longer
    has a PPO trainer; this one is a subclass of its [`~trl.GRPOTrainer`].

    ```python
    >>> trainer = QuantPPOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=gsm8k_reward,
    ...     args=QuantPPOConfig(use_vllm=True, rollout_precision="int8", is_correction="acr"),
    ...     train_dataset=load_prompts("openai/gsm8k"),
    ... )
    >>> trainer.train()
    ```

    The critic is a model of its own, and starts from the policy's checkpoint with a value head of zeros. With
    `vf_share_layers` it is a value head on the policy's layers.

    Attributes:
        critic ([`~trainers.ppo.critic.Critic`]): The critic: its model or value head, optimizer and schedule.
        value_step ([`ValueStep`]): The critic's part of a generation and of its losses.
    """

    config_class = QuantPPOConfig
    _tag_names = ["trl", "ppo", PACKAGE_TAG]
    _name = "PPO"
    _paper = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": """@article{schulman2017proximal,
    title        = {{Proximal Policy Optimization Algorithms}},
    author       = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
    year         = 2017,
    eprint       = {arXiv:1707.06347},
}""",
    }

    def __init__(self, model, reward_funcs=None, args=None, **given):
        name = name_of(model)
        if args is None:
            args = self.config_class(f"{name.split('/')[-1]}-PPO")
        _, schedule = given.get("optimizers") or (None, None)
        if schedule is not None:
            raise ValueError(
                "`optimizers` has a schedule, which sets the learning rate of its own optimizer, and so not the "
                "critic's. Name the schedule in `lr_scheduler_type` and `lr_scheduler_kwargs`."
            )
        super().__init__(model, reward_funcs, args, **given)
        if args.vf_share_layers:
            self.critic = SharedCritic(self)
        else:
            critic = load_critic(args.value_model_name_or_path or name, args)
            pad_vocabulary(critic, self.model.config.get_text_config().vocab_size)
            self.critic = OwnCritic(self, critic)
        self.value_step = ValueStep(self, self.critic)
        self.add_callback(CriticSteps(self.critic))

    # The advantages and the critic's loss, in the order of `ValueStep`'s list of calls

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.value_step.take_rewards(rewards)
        return rewards

    def correct(self, batch) -> None:
        self.value_step.before_loss(batch)
        super().correct(batch)

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + self.critic.coefficient * self.value_step.loss(inputs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.critic.reading(partial(super()._get_per_token_logps_and_entropies, *args, **kwargs))

    # The critic's schedule and checkpoints

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.critic.create_scheduler(num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.critic.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and not saved_only_model(checkpoint):
            self.critic.load(checkpoint)

    def _load_best_model(self):
        super()._load_best_model()
        best = self.state.best_model_checkpoint
        if saved_only_model(best):
            logger.warning("%s was saved with `save_only_model`, without its critic: the critic stays the last.", best)
        else:
            self.critic.load_weights(best)
