r"""
The one-step estimate of log-probabilities under a masked diffusion model (d1, section 3; AIS, C.2).

An autoregressive model computes the probability of a text: the product of its tokens' probabilities, each given the
tokens before it. A masked diffusion model writes its tokens in any order, a few in each step, and the probability of a
text is a sum over all orders, which is intractable. d1 replaces it by an estimate that takes one forward pass: the
whole completion is masked, and each of its tokens gets the log-probability that the model then predicts for it at the
token's own position.

    log pi(o_k | q)  ~  log f_theta(o_k | q' M M ... M)_k,      q'_i = M with probability p, else q_i

| paper | here |
|---|---|
| `q`, `o` | a row's prompt and its completion |
| `M` | `mask_token_id` |
| `M M ... M` | the canvas: always `length` masks, because a shorter one would reveal the completion's length |
| `q'` | the prompt under a mask that [`PromptMasks`] draws |
| `p` | `probability`, 0.15 |
| `f_theta(...)_k` | the distribution for position k at the run's temperature, computed at position k - [`shift_of`] |

**This is not the probability with which the tokens were sampled.** It ignores how the tokens of a completion depend on
each other. Trainer and sampler compute it in the same way, each in its own arithmetic, so the ratio of the two
estimates measures how far quantization moved the model.

Because of the masks on the prompts, each update uses another estimate of the same completion. A mask depends only on
the row's content, its generation and the number of its draw. So trainer and sampler compute the same mask for a row,
wherever a shuffle puts it, in any micro-batch, on any rank, and after a resume.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.families import families_with
from ..noise.gaussian import keyed_generator


IGNORED = -100  # the label of a position that is not scored


@dataclass(frozen=True)
class PromptMasks:
    """
    The masks on the prompts of one generation.

    Parameters:
        probability (`float`): Probability with which each token of a prompt is masked.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step that the generation belongs to.
        generation (`int`): Index, from 0, of the generation within its step.
    """

    probability: float = 0.15
    seed: int = 0
    step: int = 0
    generation: int = 0

    def of(self, prompt: Sequence[int], completion: Sequence[int], draw: int) -> Tensor:
        """
        Returns which tokens of a row's prompt are masked.

        Args:
            prompt, completion (`list[int]`): The row's tokens, without padding.
            draw (`int`): Index of the row's mask, from 0.

        Returns:
            `torch.Tensor` of shape `(len(prompt),)`: Booleans, on the CPU.
        """
        row = f"{list(prompt)}/{list(completion)}"
        generator = keyed_generator(f"{self.seed}/{self.step}/{self.generation}/{draw}/{row}")
        return torch.rand(len(prompt), generator=generator, dtype=torch.float64) < self.probability


def is_bidirectional(config) -> bool:
    """Whether a model with this config is a masked diffusion model: each of its tokens attends to all others."""
    return not getattr(config, "is_causal", True)


def shift_of(config) -> int:
    """
    Returns how many positions before a token its logits are computed: 1 in a model such as Dream, whose config has
    `shifted_logits=True`, else 0.
    """
    return int(getattr(config, "shifted_logits", False))


def check_bidirectional(config) -> None:
    """Raises `ValueError` unless a model is known to support attention in both directions, and its config sets it."""
    known = families_with("both_ways")
    if config.model_type not in known:
        raise ValueError(
            f"The policy's `model_type`={config.model_type!r} is not among those that are known to attend in both "
            f"directions: {', '.join(known)}. `trl_quant.storage.llada.convert` converts a checkpoint of LLaDA."
        )
    if not is_bidirectional(config):
        raise ValueError(
            "The policy attends only to earlier tokens, as an autoregressive model does. A masked diffusion model has "
            "`is_causal=False` in its config."
        )


def mask_token_of(given: int | None, tokenizer, config, ends: Collection[int]) -> int:
    """
    Returns the token that marks a masked position: the one that is `given`, else the tokenizer's mask token, else the
    `mask_token_id` of the model's config.

    Args:
        given (`int` or `None`): The run's `mask_token_id`.
        tokenizer: The tokenizer; `None` while it is not loaded.
        config: The model's config.
        ends (`Collection[int]`): The tokens that end a completion by the model's generation config.

    Raises:
        `ValueError`: No mask token is given or known, the model does not embed it, or it ends a completion.
    """
    found = (given, getattr(tokenizer, "mask_token_id", None), getattr(config, "mask_token_id", None))
    token = next((token for token in found if token is not None), None)
    if token is None:
        raise ValueError(
            "`mask_token_id`=None: neither the tokenizer nor the model's config has a mask token. Give the id of the "
            "token that the model was trained to fill in."
        )
    if not 0 <= token < config.vocab_size:
        raise ValueError(
            f"`mask_token_id`={token} is not a token of the model. It must be at least 0 and below {config.vocab_size}."
        )
    if tokenizer is not None and token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        raise ValueError(
            f"`mask_token_id`={token} is also the tokenizer's token for the end of a text or for padding. It must be "
            "a token that no text holds."
        )
    if token in ends:
        raise ValueError(
            f"`mask_token_id`={token} ends a completion (`eos_token_id`={[*ends]} in the model's generation config). "
            "It must be a token that no text holds."
        )
    return token


class MaskedRows:
    """
    Stands in for a model where TRL's `_get_per_token_logps_and_entropies` calls it with padded rows of prompts and
    completions, and returns the one-step estimate.

    Parameters:
        model (`nn.Module`): A bidirectional model, wrapped for several ranks or not, with TRL's fused head.
        prompt (`int`): Number of columns of the prompts.
        length (`int`): Number of masks of the canvas.
        mask_token_id (`int`): The mask token.
        masks ([`PromptMasks`]): The masks of the generation.
        draw (`int`): Index of each row's mask.
        shift (`int`): How many positions before a token its logits are computed, from [`shift_of`].
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: int,
        length: int,
        mask_token_id: int,
        masks: PromptMasks,
        draw: int = 0,
        shift: int = 0,
    ):
        self.model, self.prompt, self.length = model, prompt, length
        self.mask_token_id, self.masks, self.draw, self.shift = mask_token_id, masks, draw, shift

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs):
        """
        Computes the estimate of a batch.

        Args:
            input_ids (`torch.Tensor`): (B, S), prompts padded on the left and completions padded on the right.
            attention_mask (`torch.Tensor`): (B, S), 1 on tokens.
            labels (`torch.Tensor`): (B, S), the tokens to score, -100 elsewhere.
            kwargs: The arguments that TRL passes to its fused head.

        Returns:
            The model's output, whose `log_probs` and `entropy` have the shape (B, S - prompt): a value for each column
            of the completions, 0 where nothing is scored.
        """
        batch, columns = len(input_ids), input_ids.shape[1] - self.prompt
        first = self.prompt - self.shift  # the column whose logits are those of the first token
        canvas = input_ids.new_full((batch, self.length), self.mask_token_id)
        targets = _resized(labels[:, self.prompt :], self.length, IGNORED)
        output = self.model(
            input_ids=torch.cat([self._masked_prompts(input_ids, attention_mask, labels), canvas], 1),
            attention_mask=torch.cat([attention_mask[:, : self.prompt], torch.ones_like(canvas)], 1),
            # TRL's head scores these labels in place. It would shift `labels` by one token.
            shift_labels=F.pad(targets, (first, self.shift), value=IGNORED),
            **kwargs,
        )
        for name in ("log_probs", "entropy"):
            if output.get(name) is not None:
                output[name] = _resized(output[name][:, first : first + self.length], columns, 0.0)
        return output

    def _masked_prompts(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Returns the columns of the prompts (B, prompt), with each row under its mask."""
        prompts, targets = input_ids[:, : self.prompt].cpu(), labels[:, self.prompt :].cpu()
        is_token = attention_mask[:, : self.prompt].cpu().bool()
        is_masked = torch.zeros_like(is_token)
        for row, tokens in enumerate(is_token):
            completion = targets[row][targets[row] != IGNORED]
            is_masked[row, tokens] = self.masks.of(prompts[row, tokens].tolist(), completion.tolist(), self.draw)
        return input_ids[:, : self.prompt].masked_fill(is_masked.to(input_ids.device), self.mask_token_id)


def _resized(values: Tensor, columns: int, fill: float) -> Tensor:
    """Pads or truncates (B, T) on the right to (B, columns). Only padding may be truncated."""
    return F.pad(values, (0, columns - values.shape[1]), value=fill)
