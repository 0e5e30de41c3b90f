"""Samples from vLLM in this process, and skips work of vLLM on the host whose results nobody reads: TRL decodes tokens
itself, and reads completions only when all of them have ended.

With 256 completions of a 7B model, a decode step takes 8 ms on an H200 and 12 to 15 ms in Python. This module skips:

| work of vLLM | here |
|---|---|
| text for every token and its log-probability | no text, unless something needs it |
| arrays and an object for each log-probability | one float |
| an update of each completion's state at every token | one update, when the completion ends |
| a search for cache blocks at every token | only when the last block is full; with speculative decoding as in vLLM |
| garbage collection of these objects | after the generation |

The samples are the same, bit for bit. No code of vLLM is copied: the first row is an option of vLLM. For the other
rows, a function replaces a method of the live engine for one generation, and calls that method where it is needed.
"""

import gc
import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...trl_seams import exchanged
from ..answers import fault_of_end
from ..engine import Enough, Request, Samples
from ..kept import Kept
from ..settings import SamplingSettings
from .images import generated
from .speculation import nothing_drafted


logger = logging.getLogger(__name__)

# Sampling parameters that need completions as text
NEED_TEXT = ("stop", "structured_outputs", "detokenize")
# Sampling parameters that need more of a completion than its token ids and their log-probabilities
NEED_OUTPUTS = ("logprobs", "prompt_logprobs", "n", "output_kind", "flat_logprobs", "extra_args")


def parameters(options: dict, regex: str | None, tokens: int = 0):
    """
    Returns vLLM's `SamplingParams`.

    Args:
        options (`dict`): Their fields. `structured_outputs` may be a dict.
        regex (`str` or `None`): The regular expression that completions match.
        tokens (`int`, *optional*): Tokens of the completion so far, which are not sampled again.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = options.get("structured_outputs")
    if regex is not None:
        if structured is not None:
            logger.warning(
                "Both `structured_outputs_regex` and `generation_kwargs['structured_outputs']` are set; "
                "`structured_outputs_regex` takes precedence."
            )
        structured = StructuredOutputsParams(regex=regex)
    elif isinstance(structured, dict):
        structured = StructuredOutputsParams(**structured)
    return SamplingParams(**reduced(options, tokens) | {"structured_outputs": structured})


def reduced(options: dict, tokens: int) -> dict:
    """Returns sampling parameters with their limits, `max_tokens` and `min_tokens`, less the `tokens` so far."""
    limits = {name: options[name] for name in ("max_tokens", "min_tokens") if options.get(name) is not None}
    return options | {name: max(0, limit - tokens) for name, limit in limits.items()}


def checking(bound: int | None, **given):
    """
    Returns vLLM's `SamplingParams` for the tokens of a check. They are greedy, which does not advance the random state
    of the run's samples. A vLLM that returns what truncation left refuses greedy requests and those without `top_k`:
    there the `bound`, the number of all tokens, is its `top_k`, and the random numbers are the request's own.
    """
    from vllm import SamplingParams

    drawing = {"temperature": 0} if bound is None else {"temperature": 1.0, "top_k": bound, "seed": 0}
    return SamplingParams(**drawing | given)


def greedy_logps(
    llm, requests: list[Request], new_tokens: int, bound: int | None, image_token: int | None
) -> tuple[list[list[int]], list[Tensor]]:
    """
    Continues prompts as [`checking`] draws, and scores them; see [`~rollout.vllm.base.VLLMBase.logps`].

    Args:
        llm: vLLM's `LLM`.
        requests (`list[Request]`): The prompts.
        new_tokens (`int`): The tokens that each gets.
        bound (`int` or `None`): As in [`checking`].
        image_token (`int` or `None`): As in [`~images.generated`].
    """
    ask = partial(generated, llm, requests, image_token=image_token)
    with nothing_left_behind(llm):
        continued = ask(checking(bound, max_tokens=new_tokens, ignore_eos=True, logprobs=0))
        with nothing_drafted(llm):
            scored = ask(checking(bound, max_tokens=1, prompt_logprobs=0))
    sequences, logps = [], []
    for request, output, prompt in zip(requests, continued, scored, strict=True):
        completion = output.outputs[0]
        sequences.append([*request.given, *completion.token_ids])
        steps = [*prompt.prompt_logprobs[1:], *completion.logprobs]
        logps.append(torch.tensor([step[t].logprob for t, step in zip(sequences[-1][1:], steps, strict=True)]))
    return sequences, logps


def read(outputs, unfinished: Collection[str] = (), vocabulary: int = 0) -> Samples:
    """
    Returns the samples in vLLM's outputs, each with one completion. `unfinished` are the requests that [`EndedEarly`]
    has ended. `vocabulary` is the number of the model's tokens.

    Raises:
        `RuntimeError`: vLLM has dropped another completion before its end.
    """
    ended = [not unfinished or output.request_id not in unfinished for output in outputs]
    completions = [completion for output in outputs for completion in output.outputs]
    reasons = [each.finish_reason for each, has_ended in zip(completions, ended, strict=True) if has_ended]
    fault = fault_of_end(reasons)
    if fault is not None:
        raise RuntimeError(f"vLLM returned samples that cannot be used: {fault}.")
    ids, logps = [list(each.token_ids) for each in completions], [logps_of(each) for each in completions]
    routing = [routing_of(each) for each in completions]
    carried = routing, [kept_of(each, vocabulary) for each in completions]
    routing, kept = (rows if any(row is not None for row in rows) else None for rows in carried)
    return Samples(ids, logps, ended if unfinished else None, routing, kept)


def sampled(
    llm,
    requests: list[Request],
    asked: Callable,
    enough: Enough | None,
    image_token: int | None = None,
    vocabulary: int = 0,
) -> Samples:
    """
    Samples from vLLM's `llm`; see [`~rollout.engine.Engine`]. `asked` returns the `SamplingParams` of a request with a
    number of tokens so far. `image_token` is the token of which a prompt has one for each feature of its images.
    `vocabulary` is the number of the model's tokens.

    Raises:
        `ValueError`, `RuntimeError`: As in [`~images.generated`], and vLLM has dropped a completion before its end.
    """
    goes_on = any(request.sampled for request in requests)
    each = [asked(len(request.sampled)) for request in requests] if goes_on else asked(0)
    with ending_early(llm, enough) as unfinished:
        outputs = generated(llm, requests, each, image_token)
    return read(outputs, unfinished, vocabulary)


def logps_of(completion) -> list[float | None]:
    """
    Returns the log-probabilities, in nats, of a completion's tokens; `None` for NaN. They are floats where the lean
    sampling has collected them, and else vLLM's objects by their tokens.
    """
    values = [
        value if isinstance(value, float) else value[token].logprob
        for token, value in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return [None if math.isnan(value) else value for value in values]


def routing_of(completion) -> Tensor | None:
    """Returns the [`~rollout.routing`] of a completion; `None` if vLLM returns none."""
    experts = completion.routed_experts
    return None if experts is None else torch.from_numpy(experts.astype(np.int16))


def kept_of(completion, vocabulary: int) -> Kept | None:
    """
    Returns what truncation left for a completion's tokens; `None` if vLLM, or a version before 0.28, returns nothing.
    It is arrays where the lean sampling has collected them, and else vLLM's object.
    """
    found = getattr(completion, "sampling_mask", None)
    if found is None:
        return None
    return Kept.of(found if isinstance(found, list) else map(np.array, found.token_ids), vocabulary)


@contextmanager
def sampling_lean(llm, settings: SamplingSettings) -> Iterator[dict]:
    """
    Context in which vLLM's `llm` only samples token ids and log-probabilities. Work that the `settings` need is not
    skipped. It yields further fields of vLLM's `SamplingParams`.
    """
    given = settings.generation_kwargs
    if settings.structured_outputs_regex is not None or any(given.get(name) for name in NEED_TEXT):
        yield {}
        return
    with ExitStack() as stack:
        vllm = llm.llm_engine
        # vLLM's statistics need each token
        if not vllm.log_stats and not any(name in given for name in NEED_OUTPUTS):
            outputs, scheduler = vllm.output_processor, vllm.engine_core.engine_core.scheduler
            manager = scheduler.kv_cache_manager
            update = partial(update_with_float_logps, scheduler.update_from_output)
            stack.enter_context(exchanged(outputs, process_outputs=HeldOutputs(outputs)))
            stack.enter_context(exchanged(scheduler, update_from_output=update))
            if vllm.vllm_config.speculative_config is None:  # it takes several tokens a step, which may pass a block
                blocks = BlocksWithRoom(manager, scheduler.block_size)
                stack.enter_context(exchanged(manager, allocate_slots=blocks.allocate, cache_blocks=blocks.cache))
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield {"detokenize": False}


@contextmanager
def nothing_left_behind(llm) -> Iterator[None]:
    """
    Context in which vLLM's `llm` samples. If an error or Ctrl-C interrupts it, the started requests are removed.
    Otherwise vLLM would finish them with the next requests and return both, and would reuse blocks of its prefix cache
    that the interrupted step never computed.
    """
    try:
        yield
    except BaseException:
        from . import worker

        engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        core.abort_requests(list(core.scheduler.requests))  # includes requests that the line above does not know yet
        if core.batch_queue:  # steps that still run on the GPU
            core.batch_queue.clear()
        held, *_ = llm.collective_rpc(worker.forget_step)
        core.scheduler.finished_req_ids.update(held)  # the next step tells the workers that these have ended
        llm.reset_prefix_cache()
        raise


class EndedEarly:
    """
    Replaces vLLM's `OutputProcessor.process_outputs`. Once `enough` says so, all other requests end with the tokens
    that they have, as vLLM ends those that have met a stop string.

    Attributes:
        unfinished (`set[str]`): The numbers of these requests, as `RequestOutput.request_id`.
    """

    def __init__(self, processor, enough: Enough):
        self.processor, self.process, self.enough = processor, processor.process_outputs, enough
        self.requests: list[str] = []  # in their order
        self.unfinished: set[str] = set()

    def __call__(self, outputs, *args, **kwargs):
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        states = self.processor.request_states  # of those that have not ended
        self.requests, before = self.requests or list(states), len(states)
        processed = self.process(outputs, *args, **kwargs)
        some_ended = 0 < len(states) < before
        if not some_ended or not self.enough([name not in states for name in self.requests]):
            return processed
        left = list(states)
        ends = [EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=FinishReason.ABORT) for name in left]
        rest = self.process(ends, *args, **kwargs)
        self.unfinished |= {output.request_id for output in rest.request_outputs}
        processed.request_outputs.extend(rest.request_outputs)
        processed.reqs_to_abort.extend(left)
        return processed


@contextmanager
def ending_early(llm, enough: Enough | None) -> Iterator[Collection[str]]:
    """Context in which vLLM's `llm` samples until `enough` says so. It yields what [`EndedEarly`] leaves unfinished."""
    if enough is None:
        yield ()
        return
    processor = llm.llm_engine.output_processor
    early = EndedEarly(processor, enough)
    with exchanged(processor, process_outputs=early):
        yield early.unfinished


class SampledLogps:
    """Replaces vLLM's `LogprobsLists`, whose slices are arrays. Holds the sampled tokens' log-probabilities in nats."""

    def __init__(self, logprobs):
        self.values = logprobs.logprobs[:, 0].tolist()
        self.starts = logprobs.cu_num_generated_tokens  # start of each request; `None` if each has one token

    def slice_request(self, index: int, tokens: int) -> list[float]:
        """Returns the log-probabilities of a request's new tokens."""
        start = index if self.starts is None else self.starts[index]
        return self.values[start : start + tokens]


def update_with_float_logps(update: Callable, scheduler_output, output):
    """Calls vLLM's `Scheduler.update_from_output` with log-probabilities that are floats."""
    if output.logprobs is not None:
        output.logprobs = SampledLogps(output.logprobs)
    return update(scheduler_output, output)


class HeldOutputs:
    """
    Replaces vLLM's `OutputProcessor.process_outputs` and collects the tokens of a completion until it ends. vLLM then
    processes all of them at once, without log-probabilities, and these are added to its output as a `list[float]`, in
    nats. The routing of a mixture of experts and what truncation left, which vLLM returns in parts, are joined too.
    """

    def __init__(self, processor):
        self.process = processor.process_outputs
        # request -> (its first output, its token ids, their log-probabilities, parts of its routing, what was left)
        self.held: dict[str, tuple] = {}

    def __call__(self, outputs, *args, **kwargs):
        ended, collected = [], []
        for output in outputs:
            if output.request_id not in self.held:
                self.held[output.request_id] = output, [], [], [], []
            first, ids, logps, routing, left = self.held[output.request_id]
            ids.extend(output.new_token_ids)
            if output.routed_experts is not None:
                routing.append(output.routed_experts)
            if getattr(output, "new_sampling_mask", None) is not None:
                left.extend(left_by(output.new_sampling_mask))
            if output.new_logprobs is not None:
                logps.extend(output.new_logprobs)
            if output.finish_reason is not None:
                del self.held[output.request_id]
                first.new_token_ids, first.new_logprobs = ids, None
                first.finish_reason, first.stop_reason = output.finish_reason, output.stop_reason
                first.routed_experts = np.concatenate(routing) if routing else None
                ended.append(first)
                collected.append((logps, left))
        processed = self.process(ended, *args, **kwargs)
        for output, (logps, left) in zip(processed.request_outputs, collected, strict=True):
            (completion,) = output.outputs
            completion.logprobs = logps
            if left:
                completion.sampling_mask = left
        return processed


def left_by(masks) -> list[np.ndarray]:
    """Returns the ids of each token in vLLM's `SamplingMaskLists`, which has no offsets for a single token."""
    return [masks.token_ids] if masks.offsets is None else np.split(masks.token_ids, masks.offsets[1:-1])


class BlocksWithRoom:
    """
    Replaces vLLM's `KVCacheManager.allocate_slots` and `cache_blocks`, which visit every request at every token. Here
    they do so only when a token needs a new block, or completes one.
    """

    def __init__(self, manager, block_size: int):
        self.allocate_slots, self.cache_blocks = manager.allocate_slots, manager.cache_blocks
        self.nothing = manager.empty_kv_cache_blocks
        groups = manager.kv_cache_config.kv_cache_groups  # layers that share a table of blocks
        self.block_size = math.gcd(block_size, *(group.kv_cache_spec.block_size for group in groups))
        self.room: dict[str, int] = {}  # request -> number of tokens that its blocks can hold

    def allocate(self, request, num_new_tokens, **kwargs):
        """Calls vLLM's `allocate_slots`, unless the request's last block has room for its one new token."""
        needed = request.num_computed_tokens + num_new_tokens + kwargs.get("num_lookahead_tokens", 0)
        # A token that fills the last block goes to vLLM, which may cache the block
        if num_new_tokens == 1 and needed < self.room.get(request.request_id, 0):
            return self.nothing
        blocks = self.allocate_slots(request, num_new_tokens, **kwargs)
        # A request that starts, or restarts after preemption, may use cached blocks. Its room is unknown.
        is_running = blocks is not None and kwargs.keys() <= {"num_lookahead_tokens"}
        self.room[request.request_id] = math.ceil(needed / self.block_size) * self.block_size if is_running else 0
        return blocks

    def cache(self, request, num_computed_tokens):
        """Calls vLLM's `cache_blocks` when a block is complete."""
        if num_computed_tokens % self.block_size == 0:
            self.cache_blocks(request, num_computed_tokens)
