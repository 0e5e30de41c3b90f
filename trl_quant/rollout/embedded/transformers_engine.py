"""The embedded engine: a quantized copy of the policy in plain transformers, for any device and without vLLM."""

import copy
import logging
import warnings
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    ProcessorMixin,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.initialization import no_init_weights
from trl.trainer.utils import pad

from ...layers import QuantizedLinear, SampledLinear
from ...models.linears import dense_linears, is_mixtures
from ...noise import noised_norms
from ..sampling_options import check_supported
from ..stream import default_dtype, ties_embeddings
from ..trl_adapter import RolloutEngine, count_layers


logger = logging.getLogger(__name__)


class _SampledLogps(LogitsProcessor):
    """Last of the processors: log-probabilities of the tokens drawn from the scores that it sees, a step at a time."""

    def __init__(self):
        self.logps: list[Tensor] = []
        self._scores = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.take(input_ids[:, -1])
        self._scores = scores
        return scores

    def take(self, token_ids: torch.LongTensor) -> None:
        if self._scores is not None:
            chosen = self._scores.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
            self.logps.append((chosen - self._scores.logsumexp(-1)).float())


class _Likeliest(LogitsProcessor):
    """Leaves only the likeliest token, the first of equals, as a temperature of 0 does; none of NaN or infinity."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not scores.amax(-1).isfinite().all():  # NaN where any score is
            raise ValueError("The model computes scores that are not finite, so no token is the likeliest.")
        return torch.full_like(scores, -torch.inf).scatter(-1, scores.argmax(-1, keepdim=True), 0.0)


class TransformersEngine(RolloutEngine):
    """
    A quantized copy of the policy that samples with transformers' `generate`, behind TRL's generation interface.

    The copy's decoder linears run in `precision` (weights and activations through `trl_quant.formats`); embeddings,
    norms and the head keep the policy's type, and attention runs as in the policy. With the policy in mixed precision
    the copy runs under the same autocast, so what separates the two is the quantization alone.

    Of a policy that is trained in `precision` and sharded (FSDP2) the copy's linears are the trainer's, and hold its
    codes; one that each rank holds whole has no copy, see [`~rollout.SharedEngine`].

    Memory: one copy of the policy: 2 bytes a parameter in BF16 or mixed precision, 4 otherwise and for `fp8_block`, 1
    for codes, plus the KV cache of one generation batch; the numerics are those of low precision, the storage is not.
    Time: a sync quantizes each weight once (about the cost of reading it); a decode step costs one unquantized step
    plus an activation quantization per linear. It is the reference and the engine for machines without vLLM; where
    speed matters, use `use_vllm=True`.

    Of a vision-language model the language model is quantized; the vision tower stays as it is.

    Every rank holds a copy and samples its own prompts, from its own global random state.
    """

    def _init_vllm(self):
        policy = self.weights.base_model
        self.sampling = self._sampling_options()
        if isinstance(self.processing_class, ProcessorMixin):
            # A sampled image token would have no image behind it.
            self.sampling.setdefault("suppress_tokens", [policy.config.image_token_id])
        self.copy = self.build_copy(policy)

    def _sampling_options(self) -> dict:
        """TRL's generation arguments, with `generation_kwargs` on top, in `GenerationConfig`'s names."""
        check_supported(self.generation_kwargs)
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.max_completion_length,
            **self.generation_kwargs,
        }

    def _kind(self, policy: PreTrainedModel) -> tuple:
        """What a copy of a policy depends on beside its weights: type, ties and sizes, which users may change."""
        dtype, config = policy.get_input_embeddings().weight.dtype, policy.config.get_text_config()
        sizes = config.vocab_size, config.num_hidden_layers
        return self.weights.gathered_dtype or dtype, ties_embeddings(policy), *sizes

    def build_copy(self, policy: PreTrainedModel) -> PreTrainedModel:
        """The model that samples, of the policy's architecture, whose weights a sync brings."""
        config = copy.deepcopy(policy.config)
        if hasattr(config, "quantization_config"):  # a 4-bit base of bitsandbytes is streamed dequantized
            del config.quantization_config
        self._copied = self._kind(policy)
        policy_dtype, is_tied = self._copied[:2]
        # The class itself rather than `from_config`, which would shard the copy under ZeRO-3.
        quiet, device = warnings.catch_warnings(action="ignore"), torch.device(self.accelerator.device)
        with quiet, device, default_dtype(policy_dtype), no_init_weights():
            model = type(policy)(config)
        model.tie_weights()
        head = model.get_output_embeddings()
        if head is not None:  # tied as the policy's, whatever the config says
            own = model.get_input_embeddings().weight if is_tied else nn.Parameter(torch.empty_like(head.weight))
            head.weight = own
        model.requires_grad_(False).eval()

        decoder = model.get_decoder()
        if any(param.dim() > 2 or is_mixtures(name) for name, param in decoder.named_parameters()):
            raise ValueError(
                f"{type(policy).__name__} has mixture-of-experts or convolution weights, which the embedded engine "
                f"cannot run in `rollout_precision`={self.precision!r}. Leave it unset: TRL generates."
            )
        mixed = self.accelerator.mixed_precision
        dtype = torch.bfloat16 if mixed == "bf16" or policy_dtype == torch.bfloat16 else torch.float32
        logger.info(
            "The embedded engine samples in %s: %d linear layers.", self.precision, count_layers(model, self.precision)
        )
        unified = self.weights.unified(self.precision)
        for place, layer in dense_linears(model).items():
            linear, in_codes = model.get_submodule(place), layer.name in unified
            samples = SampledLinear(linear) if in_codes else QuantizedLinear(linear, self.precision, dtype)
            model.set_submodule(place, samples)
        return model

    @torch.no_grad()
    def sync_weights(self):
        """Quantizes the policy's current weights into the copy, without noise; fills `sync_metrics`."""
        self.is_current = False  # until all weights are there
        self.weights.forget_codes()
        policy = self.weights.base_model
        if self._kind(policy) != self._copied:
            self.copy = self.build_copy(policy)
        buffers = dict(self.copy.named_buffers())
        for name, buffer in policy.named_buffers():
            if name in buffers:  # the policy's own, so that what is written to it acts at once
                path, _, leaf = name.rpartition(".")
                setattr(self.copy.get_submodule(path), leaf, buffer.to(self.accelerator.device))
        linears = {
            f"{name}.weight": module
            for name, module in self.copy.named_modules()
            if isinstance(module, QuantizedLinear | SampledLinear)
        }
        params = dict(self.copy.named_parameters())
        waiting = {*linears, *params}
        for name, tensor in self.in_codes(self._measured(linears)):
            if name in linears:
                try:
                    linears[name].load(tensor)
                except ValueError as error:
                    raise ValueError(f"Cannot quantize `{name}` for the rollout: {error}") from error
            elif name in params:
                params[name].data.copy_(tensor)
            elif name not in self.copy.state_dict():  # a tied weight under its second name is no surprise
                raise RuntimeError(f"The policy streams `{name}`, which its copy {type(self.copy).__name__} lacks.")
            waiting.discard(name)
        if waiting:
            raise RuntimeError(f"The policy did not stream {sorted(waiting)[:4]} ({len(waiting)} in all) to its copy.")
        self.sync_metrics = self.drift.metrics()
        self.forget_noise()
        self.mark_current()

    def _measured(self, linears: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, those of linear layers on the engine's device and counted in the metrics."""
        for name, tensor in self._iter_named_params():
            if name in linears:
                tensor = tensor.to(self.accelerator.device)
                if self.drift.measures(name):
                    self.drift.add(name, tensor)
            yield name, tensor

    def read_norms(self) -> dict[str, Tensor]:
        params = dict(self.copy.named_parameters())
        names = noised_norms(self.weights.model_type, params)
        for name in names:
            if self.wide_norms and params[name].dtype != torch.float32:
                # The weight acts in FP32; what comes out keeps the type of what went in.
                params[name].data = params[name].data.float()
                norm = self.copy.get_submodule(name.removesuffix(".weight"))
                norm.register_forward_hook(lambda module, args, output: output.to(args[0].dtype))
        return {name: params[name].data.clone() for name in names}

    def write_norms(self, values: dict[str, Tensor]) -> None:
        params = dict(self.copy.named_parameters())
        for name, value in values.items():
            params[name].data.copy_(value)

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        """
        Samples one completion per prompt from the quantized copy; see TRL's `VLLMGeneration.generate`.

        Args:
            prompts (`list[list[int]]`): Token ids, one list per completion to sample.
            images: Images per prompt; the trainer gives what the processor made of them as `multimodal_fields`.
            num_generations (`int`): Not used: each prompt comes once per generation.
            profiler: Context manager that times the sampling.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`; the last two of shape
            (batch, completion length, 1): the log-probability, in nats, that each token was drawn with, after
            temperature, top-k, top-p and min-p, and the token itself.
        """
        if images is not None and any(images) and not self.multimodal_fields:
            raise ValueError(
                "The embedded rollout engine got `images` without the processor's `multimodal_fields`, as from "
                "a tool that returns images. Use `use_vllm=True` there."
            )
        known = self.copy.get_input_embeddings().num_embeddings
        if (largest := max(map(max, prompts))) >= known:
            raise ValueError(f"A prompt has the token {largest}, and the model has embeddings of {known} tokens.")
        device = self.accelerator.device
        options = dict(self.sampling)
        sampled = _SampledLogps()
        processors = _warpers(options, device)
        processors.append(sampled)
        tokenizer = self.tokenizer
        # As in TRL, which ends a completion at one of these, whatever `generation_kwargs` name beside them
        ends = [*self.eos_token_ids, *_listed(options.pop("eos_token_id", None))]
        own = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id, "disable_compile": True}
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": ends or None}
        config = GenerationConfig(**own | options | drawn)
        self.copy.generation_config = config

        input_ids = _left_padded(prompts, tokenizer.pad_token_id, device)
        longest = input_ids.shape[1]
        attention_mask = _left_padded([[1] * len(ids) for ids in prompts], 0, device)
        fields = {
            name: field.to(device) if isinstance(field, Tensor) else _left_padded(field, 0, device)
            for name, field in self.multimodal_fields.items()
        }

        with self.generation(), profiler or torch.no_grad(), self.accelerator.autocast():
            sequences = self.copy.generate(
                input_ids,
                attention_mask=attention_mask,
                **fields,
                generation_config=config,
                logits_processor=processors,
                synced_gpus=False,
                tokenizer=tokenizer if "stop_strings" in options else None,
            )
        sampled.take(sequences[:, -1])
        completions = sequences[:, longest:]
        logps = torch.stack(sampled.logps, dim=1).tolist()

        is_end = torch.isin(completions, torch.tensor(ends, device=device))
        if "stop_strings" in options:
            stopped = StopStringCriteria(tokenizer, options["stop_strings"])
            lengths = range(longest + 1, sequences.shape[1] + 1)
            is_end |= torch.stack([stopped(sequences[:, :length], None) for length in lengths], dim=1)
        lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, completions.shape[1]).tolist()
        completion_ids = [ids[:n] for ids, n in zip(completions.tolist(), lengths, strict=True)]
        logprobs = [[[logp] for logp in row[:n]] for row, n in zip(logps, lengths, strict=True)]
        return prompts, completion_ids, logprobs, [[[token] for token in ids] for ids in completion_ids]


def _left_padded(rows: list[list[int]], value: int, device: torch.device) -> torch.LongTensor:
    """Rows of different lengths as one tensor (batch, longest)."""
    return pad([torch.tensor(row) for row in rows], padding_value=value, padding_side="left").to(device)


def _warpers(options: dict, device: torch.device) -> LogitsProcessorList:
    """Takes temperature, top-k, top-p and min-p out of `options` and makes them processors, in transformers' order."""
    temperature, top_k = options.pop("temperature"), options.pop("top_k")
    top_p, min_p = options.pop("top_p"), options.pop("min_p")
    processors = LogitsProcessorList()
    if temperature == 0:
        processors.append(_Likeliest())
    elif temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k and top_k != -1:  # which is none in vLLM
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors


def _listed(token_ids: int | list[int] | None) -> list[int]:
    return [] if token_ids is None else [token_ids] if isinstance(token_ids, int) else list(token_ids)
