"""The critic of PPO: a value head on a trunk, with its optimizer, learning rate schedule and checkpoints.

A value head is a linear layer from a token's hidden state to one number. The trunk computes the hidden states. There
are two kinds:

| | the trunk | what the value loss trains |
|---|---|---|
| [`OwnCritic`] | a model of its own, transformers' token classifier with one label | this model |
| [`~trainers.ppo.value_head.SharedCritic`] | the policy's layers | the head, and the policy's layers |

transformers' `Trainer` handles a single model and a single optimizer. So the critic's own parameters are kept apart
from that model, with an optimizer and a schedule of their own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    get_scheduler,
)

from ...policy.packed import in_one_row
from ...reading import ANOTHER, reading
from ...runs.finite import check_step
from ...storage.run_checkpoints import CRITIC_NAME
from ..packing import accepted


OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer.pt", "scheduler.pt"


def load_critic(name: str, args) -> PreTrainedModel:
    """
    Loads a model with a value head. If the checkpoint has no head, the head is initialized to zero, so the critic first
    predicts 0 everywhere and has the same weights on every rank.

    Dropout and other noise of training are turned off, so that old values and new values come from the same function.

    Args:
        name (`str`): A language model, a reward model or an earlier critic: a hub id or a directory.
        args ([`QuantPPOConfig`]): The run's settings. The critic gets the policy's data type and attention.

    Raises:
        `ValueError`: The checkpoint lacks weights other than the head's.
    """
    given = {"dtype": "float32"} | (args.model_init_kwargs or {})
    options = args.critic_source
    with reading(name):
        config = AutoConfig.from_pretrained(name, num_labels=1, **options)
    noisy = {f for f, value in config.to_dict().items() if isinstance(value, float) and ("drop" in f or "jitter" in f)}
    for field in noisy | {"classifier_dropout"}:  # the head has this dropout even if the config does not name it
        setattr(config, field, 0.0)
    options |= {key: given[key] for key in ("dtype", "attn_implementation") if given.get(key) is not None}
    with reading(name):
        model, loaded = AutoModelForTokenClassification.from_pretrained(
            name, config=config, output_loading_info=True, **options
        )
    missing = sorted(loaded["missing_keys"])
    lost = [weight for weight in missing if weight.startswith(f"{model.base_model_prefix}.")]
    if lost:
        raise ValueError(
            f"The critic's {name!r} lacks {len(lost)} weights of a {type(model).__name__}: {', '.join(lost[:3])}"
            f"{', ...' if len(lost) > 3 else ''}. Name another model in `value_model_name_or_path`."
        )
    for weight in missing:
        made, (owner, _, attribute) = model.get_parameter(weight), weight.rpartition(".")
        # transformers 5.23 leaves new weights on "meta" on ranks that read no file, where they cannot be written to
        zeros = torch.zeros_like(made, device="cpu" if made.is_meta else made.device)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(zeros))
    return model


class Critic(ABC):
    """
    The critic of one trainer.

    | TRL's and transformers' calls | here |
    |---|---|
    | the constructor ends | the model is prepared for the device and the ranks |
    | `create_scheduler`, as a training begins | [`create_scheduler`] |
    | `_get_per_token_logps_and_entropies` | [`reading`] may read the policy's hidden states |
    | `_generate_and_score_completions` ends | [`old_values`] |
    | `_compute_loss`, for each micro-batch | [`values`]; one backward pass serves the losses of policy and critic |
    | the policy's gradient is clipped and checked | [`step`] clips and checks the critic's, and updates it |
    | a checkpoint is saved, or a training resumes | [`save`], [`load`] |
    | the best model is loaded at the end | [`load_weights`] |

    Args:
        trainer ([`QuantPPOTrainer`]): The trainer.

    Attributes:
        model (`nn.Module`): The critic's own module, prepared for device and ranks: the whole model, or the value head.
        optimizer ([`~accelerate.optimizer.AcceleratedOptimizer`]): Its optimizer.
        coefficient (`float`): The factor of the value loss in the sum of both losses.
    """

    model: nn.Module
    optimizer: AcceleratedOptimizer
    coefficient = 1.0

    def __init__(self, trainer: Trainer):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.scheduler = None

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Makes an optimizer for a model, with the policy's settings except for `value_learning_rate`."""
        trainer, args = self.trainer, self.trainer.args
        decayed = trainer.get_decay_parameter_names(model)
        groups = [
            {
                "params": [param for name, param in model.named_parameters() if (name in decayed) == decays],
                "weight_decay": args.weight_decay if decays else 0.0,
                "lr": args.value_learning_rate,
            }
            for decays in (True, False)
        ]
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind(groups, **options)

    # Values

    def reading(self, score: Callable[[], tuple]) -> tuple:
        """Returns the result of `score`: TRL's log-probabilities, entropies and auxiliary loss of a forward pass."""
        return score()

    @abstractmethod
    def values(self, batch: dict[str, Tensor]) -> Tensor:
        """
        Computes the value of the state before each token of the completions. Must be called right after the policy's
        loss on the batch.

        Args:
            batch (`dict`): A scored batch of TRL's, with prompts `(B, P)` and completions `(B, T)`.

        Returns:
            `torch.Tensor` of shape `(B, T)`, in float32.
        """

    @abstractmethod
    def old_values(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """
        Computes the [`values`] `(B, T)` of a whole generation without a gradient, in parts of `rows` rows.
        """

    # Updates

    def create_scheduler(self, num_training_steps: int) -> None:
        """
        Starts the critic's learning rate schedule: the policy's, times `value_learning_rate` / `learning_rate`.
        Schedules that end at a given rate take their shape from the optimizer's default rate, which is `learning_rate`
        here too.
        """
        args = self.trainer.args
        self.optimizer.optimizer.zero_grad()  # of a step that was interrupted, where accelerate's own call does nothing
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = args.value_learning_rate
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer=self.optimizer.optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    def step(self) -> float:
        """
        Updates the critic, unless its gradient is not finite.

        Returns:
            `float`: The norm of the gradient before it was clipped.

        Raises:
            `RuntimeError`: The gradient is not finite, on any rank. Raised on every rank.
        """
        self.join_gradients()
        norm = clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        check_step(self.trainer, torch.zeros_like(norm), norm, "of the critic ")
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm.item()

    @abstractmethod
    def join_gradients(self) -> None:
        """Averages the ranks' gradients, unless the backward pass has done so. All ranks must call it."""

    # Checkpoints

    def save(self, checkpoint: str) -> None:
        """Saves the critic, its optimizer and its schedule in a checkpoint of the run. All ranks must call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=self.accelerator.is_fsdp2)
        weights, optimizer = get_state_dict(self.model, self.optimizer.optimizer, options=options)
        if not self.trainer.args.should_save:
            return
        directory = Path(checkpoint, CRITIC_NAME)
        self.write(directory, weights)
        torch.save(optimizer, directory / OPTIMIZER_NAME)
        torch.save(self.scheduler.state_dict(), directory / SCHEDULER_NAME)

    @abstractmethod
    def write(self, directory: Path, weights: dict[str, Tensor]) -> None:
        """Writes the weights of [`model`] into a directory, which may not exist yet."""

    def load(self, checkpoint: str) -> None:
        """
        Loads what [`save`] saved.

        Raises:
            `ValueError`: The checkpoint has no critic, or only a part of it.
        """
        directory = Path(checkpoint, CRITIC_NAME)
        lacks = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if not (directory / name).is_file()]
        if lacks:
            raise ValueError(f"{directory} lacks {' and '.join(lacks)}. {ANOTHER}")
        self.load_weights(checkpoint)
        options = StateDictOptions(full_state_dict=True)
        with reading(directory / OPTIMIZER_NAME, advice=ANOTHER):
            optimizer = torch.load(directory / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
            if optimizer["state"]:  # PyTorch cannot load an empty state, as of SGD without momentum, on several ranks
                set_optimizer_state_dict(self.model, self.optimizer.optimizer, optimizer, options=options)
        with reading(directory / SCHEDULER_NAME, advice=ANOTHER):
            self.scheduler.load_state_dict(torch.load(directory / SCHEDULER_NAME, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def load_weights(self, checkpoint: str) -> None:
        """Loads only the weights that [`save`] saved. Raises `ValueError` as [`load`] does."""
        directory, weights = Path(checkpoint, CRITIC_NAME), {}
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{directory} lacks its weights. {ANOTHER}")
        with reading(*files, advice=ANOTHER):
            for file in files:
                weights |= load_file(file)
            set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True))


class OwnCritic(Critic):
    """
    A critic that is a model of its own. DDP and FSDP2 wrap it as they wrap the policy.

    Args:
        trainer ([`QuantPPOTrainer`]): The trainer.
        model ([`~transformers.PreTrainedModel`]): A token classifier with one label.

    Attributes:
        packs (`bool`): Whether the critic computes packed rows.
    """

    def __init__(self, trainer: Trainer, model: PreTrainedModel):
        super().__init__(trainer)
        args = trainer.args
        trainer.fix_positions(model)
        self.packs = trainer.packs and accepted(trainer, {"critic": model})
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self.model, self.optimizer = self.accelerator.prepare(model, self.new_optimizer(model))
        self.model.train()  # transformers checkpoints activations only in training mode

    def values(self, batch: dict[str, Tensor]) -> Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        waits = nullcontext() if self.accelerator.sync_gradients else self.accelerator.no_sync(self.model)
        with waits, self.accelerator.autocast():
            if self.packs:
                values = in_one_row(lambda **row: self.model(**row).logits, ids, mask)
            else:
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                values = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        first = batch["prompt_ids"].shape[1] - 1
        return values.squeeze(2)[:, first:-1].float()

    @torch.no_grad()
    def old_values(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        parts = zip(*(batch[name].split(rows) for name in names), strict=True)
        return torch.cat([self.values(dict(zip(names, part, strict=True))) for part in parts])

    def join_gradients(self) -> None:
        """Does nothing: DDP and FSDP2 have averaged them in the backward pass."""

    def write(self, directory: Path, weights: dict[str, Tensor]) -> None:
        self.accelerator.unwrap_model(self.model).save_pretrained(directory, state_dict=weights)


class CriticSteps(TrainerCallback):
    """Updates the critic whenever the policy is updated, and logs the norm of its gradient."""

    def __init__(self, critic: Critic):
        self.critic = critic

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.critic.trainer.log_values({"value/grad_norm": self.critic.step()})
