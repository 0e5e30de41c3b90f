"""What vLLM does on the host while it samples, less what nobody reads: TRL decodes by itself, and waits for the ends.

With 256 completions of a 7B model a decode step is 8 ms of an H200 and 12 to 15 ms of Python. Cut from outside:

| vLLM, or TRL after it | here |
|---|---|
| turns every token and its log-probability into text | no text, unless something needs it |
| arrays, then an object, for each log-probability, and TRL's walk over those | numbers |
| the state of each completion, after every token | once, when it ends |
| a search for cache blocks for every token | where the last block is full |
| garbage collection of all that | after the generation |

Samples are the same, bit for bit. Nothing is copied of vLLM: the first of these is its own option, and the others stand
before its methods, on the live engine, for one generation.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from ...trl_seams import exchanged, extracting_with


# Sampling parameters with which completions are looked at as text, by vLLM or by the user
NEED_TEXT = ("stop", "structured_outputs", "detokenize")
# ... and those with which a completion is more than ids and the log-probability of each
NEED_OUTPUTS = ("logprobs", "prompt_logprobs", "n", "output_kind", "flat_logprobs", "extra_args")


@contextmanager
def sampling_lean(engine) -> Iterator[None]:
    """
    Context in which `engine` ([`~rollout.vllm.engine.VLLMEngine`]) samples ids and log-probabilities and does nothing
    else; no more is left out than the run's sampling parameters allow.
    """
    given = engine.generation_kwargs
    if engine.structured_outputs_regex is not None or any(given.get(name) for name in NEED_TEXT):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(exchanged(engine, generation_kwargs=given | {"detokenize": False}))
        vllm = engine.llm.llm_engine
        if not vllm.log_stats and not any(name in given for name in NEED_OUTPUTS):  # statistics are of each token
            stack.enter_context(extracting_with(extract_logprobs))
            outputs, scheduler = vllm.output_processor, vllm.engine_core.engine_core.scheduler
            manager = scheduler.kv_cache_manager
            blocks = BlocksWithRoom(manager, scheduler.block_size)
            update = partial(update_with_numbers, scheduler.update_from_output)
            stack.enter_context(exchanged(outputs, process_outputs=HeldOutputs(outputs)))
            stack.enter_context(exchanged(scheduler, update_from_output=update))
            stack.enter_context(exchanged(manager, allocate_slots=blocks.allocate, cache_blocks=blocks.cache))
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield


@contextmanager
def nothing_left_behind(llm) -> Iterator[None]:
    """
    Context in which vLLM's `llm` is asked for completions. An error or Ctrl-C in it leaves nothing of them in the
    engine: vLLM would finish them with the next ones and hand out both, and would serve keys and values from its prefix
    cache that a step which broke off never computed.
    """
    try:
        yield
    except BaseException:
        from . import worker

        engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        core.abort_requests(list(core.scheduler.requests))  # also those that were not handed over whole
        if core.batch_queue:  # steps that a GPU works on
            core.batch_queue.clear()
        held, *_ = llm.collective_rpc(worker.forget_step)
        core.scheduler.finished_req_ids.update(held)  # which the next step tells the workers
        llm.reset_prefix_cache()
        raise


class SampledLogps:
    """In place of vLLM's `LogprobsLists`, whose slices are arrays: log-probabilities of the sampled tokens, in nats."""

    def __init__(self, logprobs):
        self.values = logprobs.logprobs[:, 0].tolist()
        self.starts = logprobs.cu_num_generated_tokens  # of each request, where some sampled several tokens

    def slice_request(self, index: int, tokens: int) -> list[float]:
        start = index if self.starts is None else self.starts[index]
        return self.values[start : start + tokens]


def update_with_numbers(update: Callable, scheduler_output, output):
    """vLLM's `Scheduler.update_from_output`, with log-probabilities that are numbers."""
    if output.logprobs is not None:
        output.logprobs = SampledLogps(output.logprobs)
    return update(scheduler_output, output)


class HeldOutputs:
    """
    Stands before vLLM's `OutputProcessor.process_outputs` and holds the tokens of a completion until it ends. vLLM then
    processes them at once, without log-probabilities, which are put into its output as they came: `list[float]`, nats.
    """

    def __init__(self, processor):
        self.process = processor.process_outputs
        self.held: dict[str, tuple] = {}  # request -> its first output, its token ids, their log-probabilities

    def __call__(self, outputs, *args, **kwargs):
        ended, ended_logps = [], []
        for output in outputs:
            if output.request_id not in self.held:
                self.held[output.request_id] = output, [], []
            first, ids, logps = self.held[output.request_id]
            ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                logps.extend(output.new_logprobs)
            if output.finish_reason is not None:
                del self.held[output.request_id]
                first.new_token_ids, first.new_logprobs = ids, None
                first.finish_reason, first.stop_reason = output.finish_reason, output.stop_reason
                ended.append(first)
                ended_logps.append(logps)
        processed = self.process(ended, *args, **kwargs)
        for output, logps in zip(processed.request_outputs, ended_logps, strict=True):
            (completion,) = output.outputs
            completion.logprobs = logps
        return processed


class BlocksWithRoom:
    """
    Stands before vLLM's `KVCacheManager.allocate_slots` and `cache_blocks`, which look at every request at every token:
    a token that falls into a block that its request has needs no other one, and completes none before the block's end.
    """

    def __init__(self, manager, block_size: int):
        self.allocate_slots, self.cache_blocks = manager.allocate_slots, manager.cache_blocks
        self.nothing = manager.empty_kv_cache_blocks
        groups = manager.kv_cache_config.kv_cache_groups  # layers that share a table of blocks
        self.block_size = math.gcd(block_size, *(group.kv_cache_spec.block_size for group in groups))
        self.room: dict[str, int] = {}  # request -> tokens that its blocks hold

    def allocate(self, request, num_new_tokens, **kwargs):
        needed = request.num_computed_tokens + num_new_tokens + kwargs.get("num_lookahead_tokens", 0)
        if num_new_tokens == 1 and needed < self.room.get(request.request_id, 0):  # at the end one may be cached
            return self.nothing
        blocks = self.allocate_slots(request, num_new_tokens, **kwargs)
        # A request that starts, or starts again after it was put off, may have blocks of the cache: none are counted.
        running = blocks is not None and kwargs.keys() <= {"num_lookahead_tokens"}
        self.room[request.request_id] = math.ceil(needed / self.block_size) * self.block_size if running else 0
        return blocks

    def cache(self, request, num_computed_tokens):
        if num_computed_tokens % self.block_size == 0:
            self.cache_blocks(request, num_computed_tokens)


def extract_logprobs(outputs) -> tuple[list[list[list[float | None]]], list[list[list[int]]]]:
    """In place of TRL's, for completions whose log-probabilities are numbers: both (completions, tokens, 1)."""
    completions = [completion for output in outputs for completion in output.outputs]
    logps = [[[None if math.isnan(logp) else logp] for logp in completion.logprobs] for completion in completions]
    return logps, [[[token] for token in completion.token_ids] for completion in completions]
