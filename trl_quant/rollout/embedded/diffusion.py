r"""
The embedded engine of masked diffusion models: it denoises a canvas of masks (LLaDA, section 2.4; AIS, C.2).

A completion begins as a canvas of `length` masks. In each step the model predicts all of them at once, and the few
predictions with the highest confidence are written. A written token never changes. The canvas is filled in blocks from
left to right, and within a block in the order of the model's confidence:

    for each block of B places, from left to right:
        B / n times:
            p_k  = softmax(logits_k)                            of the positions k of the block that are still masked
            x_k  = argmax (logits_k + T g),  g = -log(-log u)   a draw from softmax(logits_k / T)
            write x_k at the n positions with the largest p_k(x_k)

| paper | here |
|---|---|
| `N` tokens, `N / 2` steps | `length`, and `tokens_per_step` n = 2 |
| block length 32 | `block_length` B |
| Gumbel noise at temperature `T` | [`sampled`]; in float64, as LLaDA samples; `T` = 0 takes the likeliest token |
| low-confidence remasking | [`surest`] |

**Choice** The model never writes the mask token: its logit is -inf here. In LLaDA's own code such a position stays
masked, so the finished text may contain masks.

**Choice** A completion ends with its first end token. Tokens after it are dropped: they get no reward, no
log-probability and no gradient, as in d1. They stay on the canvas while the block is written, so the tokens before them
attend to them. A finished block never changes, so denoising stops after the block in which the last completion of the
batch ends. All completions have the same tokens as if every block had been denoised.

With `cache_finished_blocks`, the first step of a block computes the whole row, and the other steps only the block and
the masks after it. These steps read the keys and values of the prompt and of the finished blocks as the first step
computed them. With attention in both directions, exact keys and values would change with each token that is written, so
**this is an approximation**, that of Fast-dLLM's prefix cache (arXiv:2505.22618). It would be exact in a model whose
tokens attend to no later block. The estimate below is never computed from a cache.

The probability with which a completion was sampled is unknown. After denoising, one more forward pass computes the
one-step estimate of [`~policy.masked`], in the sampler's own arithmetic and under the masks that the trainer uses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from ...layers.products import multiplies
from ...policy.masked import IGNORED, MaskedRows, PromptMasks, mask_token_of, shift_of
from ...precisions import PRECISIONS, with_products
from ...trl_seams import add_scoring_head
from ..engine import Enough, Request, Samples
from .drawing import lengths_to_end
from .shared_base import SharedEngine
from .transformers_engine import TransformersEngine


CHUNK = 2**26  # logits that are held in float64 at once
TOKENS_AT_ONCE = 2**15  # of prompts and canvases in one forward pass: 64 rows of 512


@dataclass(frozen=True)
class Schedule:
    """
    How a canvas is denoised.

    Parameters:
        length (`int`): Tokens of the canvas, a multiple of `block_length`.
        block_length (`int`): Tokens of a block, a multiple of `tokens_per_step`.
        tokens_per_step (`int`): Tokens that each step writes.
        temperature (`float`): Temperature of the Gumbel noise; 0 for none.
        cache_finished_blocks (`bool`, *optional*, defaults to `False`):
            Whether the steps of a block share the keys and values of all tokens before it, as its first step has
            computed them.
    """

    length: int
    block_length: int
    tokens_per_step: int
    temperature: float
    cache_finished_blocks: bool = False

    @property
    def steps(self) -> int:
        """The number of denoising steps of a canvas."""
        return self.length // self.tokens_per_step


def sampled(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """
    Draws a token from each distribution.

    Args:
        logits (`torch.Tensor` of shape `(..., vocabulary)`): The distributions.
        temperature (`float`): Temperature of the draw; 0 takes the likeliest token.

    Returns:
        `(torch.Tensor, torch.Tensor)`, both of shape `(...)`: The tokens, and the model's confidence in each: its
        probability at temperature 1, in float64.
    """
    logits = logits.double()
    noised = logits
    if temperature > 0:
        noised = logits - temperature * torch.rand_like(logits).log_().neg_().log_()
    tokens = noised.argmax(-1)
    confidence = (logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)).exp()
    return tokens, confidence


def surest(confidence: Tensor, is_written: Tensor, count: int) -> Tensor:
    """
    Returns the positions (B, count) with the largest `confidence` (B, block) in a block, among those not yet written.
    """
    return confidence.masked_fill(is_written, -torch.inf).topk(count, dim=-1).indices


@torch.no_grad()
def denoise(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    schedule: Schedule,
    mask_token_id: int,
    end_ids: list[int],
    on_step: Callable[[Tensor], object] = lambda canvas: None,
) -> Tensor:
    """
    Writes a completion for each prompt, all in the same forward passes.

    Args:
        model (`PreTrainedModel`): A bidirectional language model.
        prompt_ids (`torch.Tensor` of shape `(B, P)`): The prompts, padded on the left.
        prompt_mask (`torch.Tensor` of shape `(B, P)`): 1 on tokens, 0 on padding.
        schedule ([`Schedule`]): How to denoise.
        mask_token_id (`int`): The mask token.
        end_ids (`list[int]`): The tokens that end a completion.
        on_step (`Callable`, *optional*): Called after each denoising step, with the canvas (B, length) so far.

    Returns:
        `torch.Tensor` of shape `(B, length)`: The canvas. Blocks after the last end of all rows may still be masks.
    """
    canvas = prompt_ids.new_full((len(prompt_ids), schedule.length), mask_token_id)
    attention_mask = torch.cat([prompt_mask, torch.ones_like(canvas)], 1)
    ends, shift = torch.tensor(end_ids, device=canvas.device, dtype=canvas.dtype), shift_of(model.config)
    for start in range(0, schedule.length, schedule.block_length):
        block = canvas[:, start : start + schedule.block_length]  # a view, so writing it writes the canvas
        is_written = torch.zeros_like(block, dtype=torch.bool)
        before = prompt_ids.shape[1] + start - shift  # columns that are finished and predict no token of the block
        places = torch.arange(before, before + schedule.block_length, device=canvas.device)
        cache = DynamicCache() if schedule.cache_finished_blocks else None
        for _ in range(schedule.block_length // schedule.tokens_per_step):
            held = 0 if cache is None else cache.get_seq_length()  # 0 in a block's first step, then `before`
            logits = model(
                input_ids=torch.cat([prompt_ids, canvas], 1)[:, held:],
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=places - held,
            ).logits
            if cache is not None:
                cache.crop(before - attention_mask.shape[1])  # a negative number says how many columns to remove
            logits[..., mask_token_id] = -torch.inf
            rows = max(1, CHUNK // logits[0].numel())
            parts = [sampled(part, schedule.temperature) for part in logits.split(rows)]
            tokens, confidence = (torch.cat(values) for values in zip(*parts, strict=True))
            chosen = surest(confidence, is_written, schedule.tokens_per_step)
            block.scatter_(1, chosen, tokens.gather(1, chosen))
            is_written.scatter_(1, chosen, True)
            on_step(canvas)
        if torch.isin(canvas, ends).any(1).all():
            break
    return canvas


class Denoising:
    """
    Mixin for an embedded engine that samples by denoising. It adds these arguments:

    Parameters:
        block_length, tokens_per_step (`int`): As in [`Schedule`].
        cache_finished_blocks (`bool`, *optional*, defaults to `False`): As in [`Schedule`].
        mask_token_id (`int`, *optional*): The mask token; by default the tokenizer's or the model's own.
        wide_head (`bool`, *optional*, defaults to `False`): Whether the trainer's head computes in FP32.
        shows_progress (`bool`, *optional*, defaults to `False`):
            Whether the main process shows a progress bar of the denoising steps, if standard error is a terminal.

    Attributes:
        shift (`int`):
            How many positions before a token its logits are computed, from [`~policy.masked.shift_of`].
        masks ([`~policy.masked.PromptMasks`]):
            The masks of the generation. The trainer sets it.
        rows_at_once (`int` or `None`):
            Rows that are scored in one forward pass; `None` for as many as are denoised in one pass. The trainer sets
            it to its own number, so that both compute products of the same shape.
    """

    def __init__(
        self,
        *args,
        block_length: int,
        tokens_per_step: int,
        cache_finished_blocks: bool = False,
        mask_token_id: int | None = None,
        wide_head: bool = False,
        shows_progress: bool = False,
        **kwargs,
    ):
        self.wide_head = wide_head  # read while the copy is built
        super().__init__(*args, **kwargs)
        config = self.weights.base_model.config
        lengths = self.settings.max_completion_length, block_length, tokens_per_step
        self.schedule = Schedule(*lengths, self.settings.temperature, cache_finished_blocks)
        self.mask_token_id = mask_token_of(mask_token_id, self.tokenizer, config, self.eos_token_ids)
        self.shift = shift_of(config)
        self.masks = PromptMasks()
        self.rows_at_once: int | None = None
        self.shows_progress = shows_progress

    def build_copy(self, policy: PreTrainedModel) -> PreTrainedModel:
        """Builds the model that samples, with the fused head that the trainer also scores tokens with."""
        model = super().build_copy(policy)
        # Greedy completions, which are not trained on, are scored at temperature 1
        add_scoring_head(model, self.settings.temperature or 1.0, self.wide_head)
        return model

    @torch.no_grad()
    def sample(self, requests: list[Request], enough: Enough | None = None) -> Samples:
        """
        Samples one completion for each request, of text alone. A batch of any size is denoised in parts of at most
        `TOKENS_AT_ONCE` tokens, one after the other, so that memory is bounded.

        Returns:
            [`Samples`]: The completions, each up to its first end token, with the one-step estimates of their tokens
            under the first mask of each row.

        Raises:
            `ValueError`: `enough` is given, or a request has `sampled` tokens.
        """
        if enough is not None or any(request.sampled for request in requests):
            raise ValueError("A masked diffusion model writes all tokens of a completion together: it has no rest.")
        prompts = [request.prompt for request in requests]
        prompt_ids, prompt_mask = self._padded(prompts, "left")
        parts = self._parts(prompt_ids)
        with self.accelerator.autocast(), self._progress(len(parts) * self.schedule.steps) as bar:
            written = []
            for number, rows in enumerate(parts, 1):
                inputs = self.copy, prompt_ids[rows], prompt_mask[rows], self.schedule, self.mask_token_id
                written.append(denoise(*inputs, self.eos_token_ids, lambda canvas: bar.update()))
                bar.update(number * self.schedule.steps - bar.n)  # steps that early ends have skipped
        canvas = torch.cat(written)
        is_end = torch.isin(canvas, torch.tensor(self.eos_token_ids, device=canvas.device))
        completions = [row[:length] for row, length in zip(canvas.tolist(), lengths_to_end(is_end), strict=True)]
        return Samples(completions, self.estimate(prompts, completions))

    @torch.no_grad()
    def estimate(self, prompts: list[list[int]], completions: list[list[int]], draw: int = 0) -> list[list[float]]:
        """
        Computes the one-step estimates of given completions, in the engine's arithmetic.

        Args:
            prompts, completions (`list[list[int]]`): Token ids.
            draw (`int`, *optional*, defaults to `0`): Which mask of each row.

        Returns:
            `list[list[float]]`: For each completion, a log-probability in nats for each token.
        """
        prompt_ids, prompt_mask = self._padded(prompts, "left")
        completion_ids, completion_mask = self._padded(completions, "right")
        input_ids = torch.cat([prompt_ids, completion_ids], 1)
        attention_mask = torch.cat([prompt_mask, completion_mask], 1)
        labels = input_ids.masked_fill(attention_mask == 0, IGNORED)
        labels[:, : prompt_ids.shape[1]] = IGNORED
        canvas = prompt_ids.shape[1], self.schedule.length, self.mask_token_id
        copy = MaskedRows(self.copy, *canvas, self.masks, draw, self.shift)
        scored = []
        for rows in self._parts(prompt_ids, self.rows_at_once):
            with self.accelerator.autocast():
                scored.append(copy(input_ids[rows], attention_mask[rows], labels[rows], fused_lm_head=True).log_probs)
        logps = torch.cat(scored).tolist()
        return [row[: len(ids)] for row, ids in zip(logps, completions, strict=True)]

    def _parts(self, prompt_ids: Tensor, rows: int | None = None) -> tuple[Tensor, ...]:
        """Divides a batch into the row numbers of each forward pass: `rows`, or as many as `TOKENS_AT_ONCE` allows."""
        batch, columns = prompt_ids.shape
        rows = rows or max(1, TOKENS_AT_ONCE // (columns + self.schedule.length))
        return torch.arange(batch, device=prompt_ids.device).split(rows)

    def _progress(self, steps: int) -> tqdm:
        """Returns a progress bar of denoising steps. It vanishes at its end: it is below the bar of training steps."""
        is_shown = self.shows_progress and self.accelerator.is_main_process
        hidden = None if is_shown else True  # `None` tells tqdm to draw only on a terminal
        return tqdm(total=steps, desc="denoising", unit="step", leave=False, dynamic_ncols=True, disable=hidden)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Raises `NotImplementedError`: a masked diffusion model does not score a token from those before it."""
        raise NotImplementedError("A masked diffusion model scores completions with `estimate`.")

    def _padded(self, rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
        """Pads rows of token ids; returns ids and mask, both (B, longest), on the engine's device."""
        device, pad = self.accelerator.device, self.tokenizer.pad_token_id
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        padded = pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side)
        ones = [torch.ones_like(row) for row in tensors]
        mask = pad_sequence(ones, batch_first=True, padding_value=0, padding_side=side)
        return padded.to(device), mask.to(device)


class DiffusionEngine(Denoising, TransformersEngine):
    """
    A quantized copy of a masked diffusion policy, which samples by denoising.

    On a GPU, in precisions that quantize inputs too, the copy's layers multiply in low precision. The copy then holds
    only codes, and fuses norms and activations with the quantizers of the layers that follow, as training does, unless
    those have one scale for all tokens. In other precisions, and on a CPU, it multiplies the dequantized values.
    Sampling and scoring run through the same layers.
    """

    @property
    def multiplies_codes(self) -> bool:
        has_product = self.precision in with_products()
        return has_product and multiplies(PRECISIONS[self.precision].format, self.accelerator.device)


class SharedDiffusionEngine(Denoising, SharedEngine):
    """[`DiffusionEngine`] for a policy that is sampled in its own `train_precision`, around the policy's tensors."""
