"""The embedded engine: a quantized copy of the policy that samples with transformers, on any device, without vLLM."""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    ProcessorMixin,
    StoppingCriteriaList,
)
from transformers.initialization import no_init_weights

from ...formats import QuantizedTensor
from ...layers import EngineExperts, EngineLinear, SampledExperts, SampledLinear
from ...models.linears import sampled_linears
from ...models.routers import routers
from ...noise import noised_norms
from ...policy.hybrids import convolutions
from ...policy.positions import fix_positions, fixed_context, keep_cache
from ...policy.routing import choices_recorded
from ...policy.unified import fuse, is_silu
from ..base import RolloutEngine, count_layers
from ..engine import OF_EACH_TOKEN, Enough, Request, RolloutNoise, Samples
from ..routing import split_by_request
from ..sampling_options import check_supported, truncating
from ..tensors import default_dtype, ties_embeddings
from ..tokenizer import id_list
from ..verify.copy_check import copy_check
from .drawing import Ends, Least, SampledLogps, lengths_to_end, warpers


logger = logging.getLogger(__name__)


class TransformersEngine(RolloutEngine):
    """
    A quantized copy of the policy that samples with transformers' `generate`.

    The linear layers of the copy's decoder run in `precision` (weights and activations through `trl_quant.formats`).
    Embeddings, norms and the head keep the policy's type, and attention runs as in the policy. If the policy runs in
    mixed precision, the copy runs under the same autocast, so that only the quantization separates the two.

    If the policy is trained in `precision` and sharded (FSDP2), the copy's linear layers hold the same codes and scales
    as the trainer's and compute the same product. If each rank holds the whole policy, there is no copy: see
    [`~rollout.SharedEngine`].

    Memory: one copy of the policy, plus the KV cache of one generation batch. A parameter takes 2 bytes in BF16 or
    mixed precision, 4 otherwise and for `fp8_block`, and 1 for layers that hold codes. Except for these layers, only
    the arithmetic has low precision, not the storage.

    Time: a sync quantizes each weight once, at about the cost of reading it. A decoding step costs an unquantized step
    plus the quantization of each linear layer's input. This engine is the reference, and it runs on machines without
    vLLM. Where speed matters, set `use_vllm=True`.

    In a vision-language model only the language model is quantized.

    Every rank holds a copy and samples its own prompts, from its own global random state.

    Parameters:
        cache_implementation (`str`, *optional*):
            The class of KV cache, by transformers' name, such as `"static"`.
        returns_kept (`bool`, *optional*, defaults to `True`):
            Whether to return the tokens that `top_p`, `top_k` and `min_p` leave ([`~rollout.kept`]).

    Attributes:
        copy (`PreTrainedModel`): The model that samples.
        multiplies_codes (`bool`):
            Whether the copy's linear layers multiply codes, by the products of `layers/products.py`, instead of the
            values that the codes stand for. `False` in this engine.
    """

    multiplies_codes = False
    reads_images = False

    def __init__(self, *args, cache_implementation: str | None = None, returns_kept: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.returns_kept = returns_kept
        self.cache_implementation = cache_implementation
        check_supported(self.settings.generation_kwargs)
        self.copy = self.build_copy(self.weights.base_model)
        self.returns_routing = bool(routers(self.copy))

    def _generation_options(self) -> dict:
        """Returns the settings by `GenerationConfig`'s names; `generation_kwargs` override them."""
        settings = self.settings
        length = {"max_new_tokens": settings.max_completion_length}
        if settings.max_completion_length is None:  # the model's limit, as in TRL; transformers' default is 20 tokens
            length = {"max_length": self.model.generation_config.max_length}
        options = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            **length,
            "cache_implementation": self.cache_implementation,
            **settings.generation_kwargs,
        }
        if isinstance(self.processing_class, ProcessorMixin) and self.image_token is not None:
            # No image would belong to an image token that is sampled
            options.setdefault("suppress_tokens", [self.image_token])
        return options

    def _traits(self, policy: PreTrainedModel) -> tuple:
        """
        Returns the properties of the policy, other than weights, on which a copy depends: type, ties, positions and
        sizes. Each of them may change between two syncs.
        """
        dtype, config = policy.get_input_embeddings().weight.dtype, policy.config.get_text_config()
        sizes = config.vocab_size, config.num_hidden_layers
        return self.weights.gathered_dtype or dtype, ties_embeddings(policy), fixed_context(policy), *sizes

    def build_copy(self, policy: PreTrainedModel) -> PreTrainedModel:
        """Builds the model that samples, with the policy's architecture. It gets its weights at the first sync."""
        config = copy.deepcopy(policy.config)
        if hasattr(config, "quantization_config"):  # a 4-bit base of bitsandbytes is streamed dequantized
            del config.quantization_config
        self._copied_traits = self._traits(policy)
        policy_dtype, is_tied, context = self._copied_traits[:3]
        # Calls the class itself, since `from_config` would shard the copy under ZeRO-3
        quiet, device = warnings.catch_warnings(action="ignore"), torch.device(self.accelerator.device)
        with quiet, device, default_dtype(policy_dtype), no_init_weights():
            model = type(policy)(config)
        if context is not None:
            fix_positions(model, context)
            keep_cache(model)
        model.tie_weights()
        head = model.get_output_embeddings()
        if head is not None:  # tied like the policy's head, whatever the config says
            head.weight = (
                model.get_input_embeddings().weight if is_tied else nn.Parameter(torch.empty_like(head.weight))
            )
        model.requires_grad_(False).eval()

        layers = sampled_linears(model)
        experts = {id(model.get_parameter(place)) for place, layer in layers.items() if layer.holds_experts}
        known = experts | {id(param) for param in convolutions(model)}
        if any(param.dim() > 2 and id(param) not in known for param in model.get_decoder().parameters()):
            raise ValueError(
                f"{type(policy).__name__} has convolution weights, which the embedded engine cannot run in "
                f"`rollout_precision`={self.precision!r}. Leave it unset: TRL generates."
            )
        mixed = self.accelerator.mixed_precision
        dtype = torch.bfloat16 if mixed == "bf16" or policy_dtype == torch.bfloat16 else torch.float32
        logger.info(
            "The embedded engine samples in %s: %d linear layers.", self.precision, count_layers(model, self.precision)
        )
        unified = self.weights.quantized_weights(self.precision)
        for place, layer in layers.items():
            parent, _, leaf = place.rpartition(".")
            module = model.get_submodule(parent)
            if layer.holds_experts and layer.weight in unified:
                if not isinstance(module, SampledExperts):  # which both tensors share
                    model.set_submodule(parent, SampledExperts(module, self.precision, is_silu(module.act_fn)))
                continue
            if layer.holds_experts:
                sampling = EngineExperts(layer.shape, self.precision, dtype)
                delattr(module, leaf)  # torch lets no module take a parameter's place
            elif self.multiplies_codes or layer.weight in unified:
                sampling = SampledLinear(getattr(module, leaf), self.precision)
            else:
                sampling = EngineLinear(getattr(module, leaf), self.precision, dtype)
            setattr(module, leaf, sampling)
        if experts:
            model.set_experts_implementation("eager")  # transformers' loop over experts; see `EngineExperts`
        if self.multiplies_codes:
            fuse(model, layers)
        return model

    @torch.no_grad()
    def sync(self) -> None:
        """
        Quantizes the policy's current weights into the copy, without noise, and sets `sync_metrics`.

        Raises:
            `ValueError`: A weight cannot be quantized, for example because it holds NaN.
            `RuntimeError`: The policy and the copy have different parameters.
        """
        self.is_current = False  # until all weights have been copied
        self.weights.forget_quantized_weights()
        policy = self.weights.base_model
        if self._traits(policy) != self._copied_traits:
            self.copy = self.build_copy(policy)
        buffers = dict(self.copy.named_buffers())
        for name, buffer in policy.named_buffers():
            if name in buffers:  # shared with the policy, so that later writes act on the copy too
                path, _, leaf = name.rpartition(".")
                setattr(self.copy.get_submodule(path), leaf, buffer.to(self.accelerator.device))
        linears = self._loaded_layers()
        params = dict(self.copy.named_parameters())
        waiting = {*linears, *params}
        for name, tensor in self.quantized_as_trained(self._measured(linears)):
            if name in linears:
                try:
                    linears[name](tensor)
                except ValueError as error:
                    raise ValueError(f"Cannot quantize `{name}` for the rollout: {error}") from error
            elif name in params:
                params[name].data.copy_(tensor)
            elif name not in self.copy.state_dict():  # a tied weight has a second name
                raise RuntimeError(f"The policy streams `{name}`, which its copy {type(self.copy).__name__} lacks.")
            waiting.discard(name)
        if waiting:
            raise RuntimeError(f"The policy did not stream {sorted(waiting)[:4]} ({len(waiting)} in all) to its copy.")
        self.sync_metrics = self.drift.metrics()
        self.forget_noise()
        self.mark_current()

    def _loaded_layers(self) -> dict[str, Callable[[Tensor | QuantizedTensor], object]]:
        """Returns, by the policy's names of the weights, the functions that load them into layers of the copy."""
        found = {}
        for name, module in self.copy.named_modules():
            if isinstance(module, EngineLinear | SampledLinear):
                found[f"{name}.weight"] = module.load
            elif isinstance(module, EngineExperts):
                found[name] = module.load
            elif isinstance(module, SampledExperts):
                found |= {f"{name}.{leaf}": partial(module.load, leaf) for leaf in module.leaves}
        return found

    def prepare(self) -> None:
        self.ensure_ready()
        is_read_whole = not (self.weights.is_sharded or isinstance(self.processing_class, ProcessorMixin))
        if is_read_whole and self.function_changed():
            self.lay_noise(RolloutNoise())
            copy_check(self)
            self.mark_checked()
        self.lay_noise(self.noise)

    def copied_layers(self) -> dict[str, nn.Module]:
        """
        Returns the copy's quantized linear layers, by their places in the policy. The experts of a layer that hold the
        trainer's codes are one module.
        """
        found = {}
        for place, layer in self.weights.linears().items():
            parent, module = place.rpartition(".")[0], self.copy.get_submodule(layer.name.rpartition(".")[0])
            if isinstance(module, SampledExperts):
                found[parent] = module
            else:
                found[place] = self.copy.get_submodule(layer.name)
        return found

    def replaced_layers(self) -> Collection[str]:
        """
        Returns the places of the policy's layers that the copy has other layers for. Experts that hold the trainer's
        codes are computed by the policy as by the copy.
        """
        return self.weights.linears()

    def longest_row(self) -> int:
        """Returns the number of tokens of the longest row that the copy computes."""
        return getattr(self.copy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def _measured(self, linears: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Streams the policy's weights. Those of linear layers are moved to the engine's device and measured."""
        for name, tensor in self.policy_stream(self.quantized_in_training()):
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
                # The norm multiplies in FP32; the hook casts the output back to the type of the input
                params[name].data = params[name].data.float()
                norm = self.copy.get_submodule(name.removesuffix(".weight"))
                norm.register_forward_hook(lambda module, args, output: output.to(args[0].dtype))
        return {name: params[name].data.clone() for name in names}

    def write_norms(self, values: dict[str, Tensor]) -> None:
        params = dict(self.copy.named_parameters())
        for name, value in values.items():
            params[name].data.copy_(value)

    @torch.no_grad()
    def sample(
        self, requests: list[Request], enough: Enough | None = None, processed: Mapping[str, Any] | None = None
    ) -> Samples:
        """
        Samples one completion for each request from the quantized copy.

        Args:
            requests (`list[Request]`): The requests.
            enough (`Callable`, *optional*): Ends the call early; see [`~rollout.engine.Engine`].
            processed (`Mapping`, *optional*):
                The processor's results for their prompts: tensors, and lists of one row of values for each request.

        Returns:
            [`Samples`]: The completions, with the log-probability, in nats, with which each token was sampled: after
            temperature, top-k, top-p and min-p, and with these the tokens that they left. A mixture's have their
            routing too.
        """
        self._check_prompts(requests, processed)
        prompts = [request.given for request in requests]
        device, tokenizer, options = self.accelerator.device, self.tokenizer, self._generation_options()
        sampled = SampledLogps(self.returns_kept and bool(truncating(options)))
        processors = warpers(options, device)
        processors.append(sampled)
        # `generation_kwargs` may add tokens that end a completion. TRL's own always do.
        end_ids = [*self.eos_token_ids, *id_list(options.pop("eos_token_id", None))]
        defaults = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "disable_compile": True,
        }
        fixed = {"do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": end_ids or None}
        strings, most = options.pop("stop_strings", None), options.get("max_new_tokens")
        rest = [(most or sys.maxsize) - len(request.sampled) for request in requests]
        if most is not None:
            options["max_new_tokens"] = max(rest)
        if any(request.sampled for request in requests) and options.get("min_new_tokens") and end_ids:
            least = [options["min_new_tokens"] - len(request.sampled) for request in requests]
            processors.insert(0, Least(torch.tensor(least, device=device), end_ids))
            options["min_new_tokens"] = None
        config = GenerationConfig(**defaults | options | fixed)
        self.copy.generation_config = config

        input_ids = _left_padded(prompts, tokenizer.pad_token_id, device)
        longest = input_ids.shape[1]
        ends = Ends(torch.tensor(rest, device=device), end_ids, strings, tokenizer, enough)
        attention_mask = _left_padded([[1] * len(ids) for ids in prompts], 0, device)
        fields = {
            name: field.to(device) if isinstance(field, Tensor) else _left_padded(field, 0, device)
            for name, field in _for_given(processed or {}, requests).items()
        }

        with self.accelerator.autocast(), choices_recorded(self.copy) as choices:
            sequences = self.copy.generate(
                input_ids,
                attention_mask=attention_mask,
                **fields,
                generation_config=config,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([ends]),
                synced_gpus=False,
            )
        sampled.take(sequences[:, -1])
        logps = torch.stack(sampled.logps, dim=1).tolist()
        lengths = lengths_to_end(torch.stack(ends.columns, dim=1))
        token_ids = [row[:length] for row, length in zip(sequences[:, longest:].tolist(), lengths, strict=True)]
        logps = [row[:length] for row, length in zip(logps, lengths, strict=True)]
        layers = self.copy.config.get_text_config().num_hidden_layers
        routing = split_by_request(choices, layers, [*map(len, prompts)], lengths) if choices else None
        kept = sampled.kept(lengths) if sampled.keeps else None
        return Samples(token_ids, logps, ends.ended.tolist() if ends.is_early else None, routing, kept)

    def _check_prompts(self, requests: list[Request], processed: Mapping[str, Any] | None) -> None:
        """Raises `ValueError` for images that the processor has not prepared, and for tokens that the model lacks."""
        if any(request.images for request in requests) and not processed:
            raise ValueError(
                "The embedded rollout engine got `images` without the processor's results for them. A tool that "
                "returns images causes this. Use `use_vllm=True`."
            )
        known = self.copy.config.get_text_config().vocab_size
        largest = max(max(request.prompt) for request in requests)
        if largest >= known:
            raise ValueError(f"A prompt has the token {largest}, but the model embeds only {known} tokens.")

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Computes the log-probabilities of given tokens; see [`~rollout.engine.ScoringEngine`]."""
        scored = []
        with self.accelerator.autocast():
            for ids in sequences:
                tokens = torch.tensor([ids], device=self.accelerator.device)
                logps = self.copy(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
                scored.append(logps.gather(-1, tokens[0, 1:, None])[:, 0].tolist())
        return scored


def _for_given(processed: Mapping[str, Any], requests: list[Request]) -> dict[str, Any]:
    """Returns the processor's results for prompts, with values for the tokens so far after them, which are text."""
    longer = {
        name: [[*row, *[0] * len(request.sampled)] for row, request in zip(processed[name], requests, strict=True)]
        for name in OF_EACH_TOKEN
        if name in processed
    }
    return {**processed, **longer}


def _left_padded(rows: list[list[int]], value: int, device: torch.device) -> torch.LongTensor:
    """Pads rows of different lengths on the left to one tensor of shape (batch, longest)."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left").to(device)
