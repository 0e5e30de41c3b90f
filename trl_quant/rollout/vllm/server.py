"""The vLLM engine behind a server: `vllm serve`, started in the run's precision on GPUs of its own or the trainer's.

Weights go over NCCL, as TRL's client sends them, or through memory that server and trainer share, into vLLM's own
bracketed reload, to which `vllm_server_worker` adds missing steps.
A trainer cannot change a running server. If the server's options do not fit the run, the trainer raises an error with
the right command line.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import PreTrainedConfig

from ...models.architecture import differences
from ...models.families import wider_window
from ...models.linears import sampled_linears
from ...models.positions import why_vllm_differs
from ...noise import noised_norms
from ...precisions import PRECISIONS, in_vllm
from ...storage.quantization import prepared_precisions
from ..engine import Enough, Request, RolloutNoise, Samples, requests_for
from ..fingerprint import Fingerprint
from ..verify.kv_cache import CACHE_FORMATS, UNQUANTIZED, KVCache
from .base import VLLMBase
from .client import Client, NotFiniteError
from .same_device import described
from .sampling import reduced
from .separate import sampled_separately
from .serving import BACKEND, is_exposed, read_config, serve_command
from .support import (
    check_version,
    outside_decoder,
    warn_of_two_copies,
)


logger = logging.getLogger(__name__)


class VLLMServerEngine(VLLMBase):
    """
    vLLM in `precision` behind `vllm serve`, with TRL's names and client. Adapters arrive merged.

    A server in BF16, or one that quantizes to FP8 itself, gets BF16 weights. A server in INT8, NVFP4 or MXFP4, or one
    that quantizes a mixture of experts, must be started on a prepared checkpoint, and gets codes and scales: all of
    them the first time, and then those that have changed. The self-check sends what the server does not quantize, and
    all experts, a second time: its workers compare these weights with their own.

    Parameters:
        request_timeout (`float` or `None`, *optional*): Seconds that the server may take to answer a request.
        main_samples (`bool`, *optional*, defaults to `False`):
            Whether the main process alone calls `sample`, with all requests, as a trainer does that samples while it
            trains. By default all ranks call it together, each with its own.
    """

    def __init__(self, *args, request_timeout: float | None = None, main_samples: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.request_timeout, self.main_samples = request_timeout, main_samples
        # Facts that the server reports when the trainer connects
        self._cache: tuple = ()  # (vLLM's name of the KV cache's type, the model's config)
        self._limits = (0, 0)
        self._prepared = False
        self._norm_dtype = torch.bfloat16
        # Name, type and shape of each tensor that a sync of some groups sends: of all groups, and of the last ones ...
        self._announced: dict[frozenset[str] | None, list[tuple]] = {}
        self._compared: list[tuple] | None = None  # ... and of those that a self-check sends
        self.start()

    def start_vllm(self) -> None:
        check_version()
        given = {"seconds": self.request_timeout, "vocabulary": self.vocabulary, "check": self._check_server}
        if self.accelerator.is_main_process:
            reached = {"group_port": self.vllm.group_port, "connection_timeout": self.vllm.server_timeout}
            self.vllm_client = Client(self.vllm.server_url, **reached, **given)
            self.vllm_client.init_communicator(device=self.accelerator.device)
        facts = [None]
        if self.accelerator.is_main_process:
            self.expect_caches(*self._cache)
            facts = [(self._limits, self._prepared, self._norm_dtype, self.caches)]
        broadcast_object_list(facts, from_process=0)
        self._limits, self._prepared, self._norm_dtype, self.caches = facts[0]
        self.plan_stream(self._prepared)
        if self.own_base_bytes():
            warn_of_two_copies(self.own_base_bytes(), "the server has its own, with the adapter merged into it")
        if self.weights.unified(self.precision) and not self.travels_quantized:
            logger.warning(
                "The vLLM server quantizes weights itself, with scales in FP32. The policy is trained with scales in "
                "its own type, which differ in the last bits. Start the server on a checkpoint that `trl-quant "
                "prepare` wrote; it then takes the policy's codes and scales."
            )

    def _check_server(self, client) -> None:
        """Raises `ValueError` unless the server's model and options fit the run."""
        model = self.model.name_or_path
        policy = self.weights.base_model
        outside = outside_decoder(policy, policy.config.architectures or [], "auto")
        options = {"trust_remote_code": self.vllm.trust_remote_code, "wide_norms": self.wide_norms, "outside": outside}
        options["reads_images"] = self.image_token is not None
        command = serve_command(model, self.precision, client.base_url, has_experts=self.has_experts, **options)
        if is_exposed(client.base_url):
            logger.warning(
                "The vLLM server at %s takes new weights and calls of its workers from anyone who reaches it, and runs "
                "their code (`/init_weight_transfer_engine` unpickles what it finds at an address that the caller "
                "names): its development endpoints ask for no key, also with `--api-key`. Let only this machine reach "
                "the port, by a firewall or an SSH tunnel to a server with `--host 127.0.0.1`.",
                client.shown,
            )
        try:
            info = client.get_server_info()
        except TimeoutError:
            raise
        except Exception as error:
            raise ValueError(f"{error} Start it with:\n\n{command}\n") from error
        served, cache = info["model_config"], info["cache_config"]
        # The server may name any model. Only the code of the run's own model is trusted.
        config = read_config(served["model"], self.vllm.trust_remote_code and served["model"] == model)
        if config is None:
            logger.warning("The server's model %s cannot be read from here and is not checked.", served["model"])
        faults = self.unfit_options(info, config)
        if outside and not faults:
            layers = [layer.name for layer in sampled_linears(policy).values() if not layer.holds_experts]
            towers = client.ask_workers("quantized_outside", layers=layers)[0]
            if towers:
                faults.append(
                    f"{len(towers)} quantized linear layers outside of the language model, such as "
                    f"{'; '.join(towers[:3])}"
                )
        if faults:
            raise ValueError(
                f"The vLLM server at {client.shown} was started with {'; with '.join(faults)}. Start it with:\n\n"
                f"{command}\n"
            )
        for why in client.ask_workers("why_experts_differ", precision=self.precision) if self.has_experts else ():
            if why is not None:
                raise ValueError(f"The vLLM server at {client.shown} does not compute as the run needs. {why}")
        loader = (info.get("load_config") or {}).get("model_loader_extra_config") or {}
        self._norm_dtype = torch.float32 if loader.get("wide_norms") else torch.bfloat16
        if self.wide_norms and self._norm_dtype == torch.bfloat16:
            logger.warning(
                "The vLLM server at %s holds its norms in BF16, which rounds away noise below 4e-3: see "
                "`noise/effective_sigma`. To keep all of the noise, start it with:\n\n%s",
                client.shown,
                command,
            )
        self._cache = cache["cache_dtype"], config
        self._prepared = served["quantization"] == "compressed-tensors"
        self._limits = cache["block_size"], served["max_model_len"]

    def unfit_options(self, info: dict, config: PreTrainedConfig | None) -> list[str]:
        """
        Describes those of a server's options that do not fit the run.

        Args:
            info (`dict`): The server's answer to `GET /server_info`.
            config ([`~transformers.PreTrainedConfig`] or `None`): The config of its model, if it can be read from here.
        """
        served, cache = info["model_config"], info["cache_config"]
        faults = []
        if served["logprobs_mode"] != "processed_logprobs":
            faults.append(f"`--logprobs-mode {served['logprobs_mode']}`, and 'processed_logprobs' is needed")
        if info.get("speculative_config"):
            faults.append(
                "`--speculative-config`, whose log-probabilities may be wrong: a check of them would draw samples, and "
                "so change the server's random state"
            )
        transfer = info.get("weight_transfer_config")
        if transfer is None:
            faults.append(f"no `--weight-transfer-config`, and {BACKEND!r} is needed")
        elif transfer["backend"] != BACKEND:
            faults.append(f"the weight transfer {transfer['backend']!r}, and {BACKEND!r} is needed")
        differing_fields = "" if config is None else differences(self.model.config, config)
        if differing_fields:
            own = self.model.name_or_path
            faults.append(f"the model {served['model']}, which differs from {own} in {differing_fields}")
        positions = why_vllm_differs(self.weights.base_model.config, served["max_model_len"])
        if positions is not None:
            faults.append(f"`--max-model-len {served['max_model_len']}`: {positions}")
        window = wider_window(self.weights.base_model.config, served["max_model_len"])
        if window is not None:
            faults.append(
                f"`--max-model-len {served['max_model_len']}`, and {window} or less is needed: some of the policy's "
                "layers see so many tokens, and vLLM's, since 0.31 at the latest, one more"
            )
        allowed = (*UNQUANTIZED, *CACHE_FORMATS)
        if cache["cache_dtype"] not in allowed:
            computed = ", ".join(allowed)
            faults.append(f"`--kv-cache-dtype {cache['cache_dtype']}`, and the self-check computes {computed}")
        if cache.get("calculate_kv_scales"):
            faults.append("`--calculate-kv-scales`, whose scales are stale after the first sync")
        parallel = info.get("parallel_config") or {}
        engines = parallel.get("data_parallel_size", 1)
        if engines > 1:
            faults.append(
                f"`--data-parallel-size {engines}`, of whose engines only the first one's answers arrive: what the "
                "others compute, and whether they have the policy's weights, could not be checked"
            )
        if self.has_experts and parallel.get("enable_expert_parallel"):
            faults.append("`--enable-expert-parallel`, with which vLLM crashes on a CPU, and which a GPU has not shown")
        precisions = _served_precisions(served, config)
        if self.has_experts and served["quantization"] not in (None, "compressed-tensors"):
            precisions = set()  # vLLM would quantize routers too
        if precisions is not None and self.precision not in precisions:
            found = " or ".join(map(repr, sorted(precisions))) or repr(served["quantization"] or served["dtype"])
            faults.append(f"the precision {found}, and `rollout_precision`={self.precision!r}")
        return faults

    # Sync

    def send(self, policy: Fingerprint) -> None:
        groups = self.changed_groups(policy)
        if groups is not None:
            self.lay_noise(RolloutNoise())  # the norms that hold it may not be sent
        sent = None if groups is None else frozenset(groups)
        if sent not in self._announced:  # the server needs the metadata of all tensors before the first one
            of_all = {key: tensors for key, tensors in self._announced.items() if key is None}
            self._announced = of_all | {sent: announcement(self.stream(groups, measured=False))}
            self.streaming = "the first tensor"  # none of those that were announced has failed
        if self.accelerator.is_main_process and self._announced[sent]:
            announced = self._announced[sent]
            self.vllm_client.update_named_params(announced, as_announced(announced, self.stream(groups)))
            self.vllm_client.reset_prefix_cache()
            if self.image_token is not None:
                self.vllm_client.reset_encoder_cache()
            self.vllm_client.mark_sync()
        else:
            for _ in self.stream(groups):  # gathering is collective
                pass
        self.sync_metrics = self.drift.metrics()
        self.forget_noise()

    # Noise

    def read_norms(self) -> dict[str, Tensor]:
        """Reads the policy's norms, which have the same names in the server's model."""
        params = self.weights.parameters()
        clean = {}
        for name in noised_norms(self.weights.model_type, params):
            with self.weights.gathered([params[name]]):
                clean[name] = self.weights.full(params[name]).to(self._norm_dtype, copy=True)
        return clean

    def write_norms(self, values: dict[str, Tensor]) -> None:
        if self.accelerator.is_main_process:
            self.vllm_client.update_named_params(announcement(values.items()), iter(values.items()))
            self.vllm_client.reset_prefix_cache()
            self.vllm_client.mark_sync()
        self.accelerator.wait_for_everyone()

    def requests(self) -> None:
        """Returns `None`: anyone with the server's address may send requests."""

    # Sample

    def sample(self, requests: list[Request], enough: Enough | None = None) -> Samples:
        """
        Samples one completion for each request. Unless `main_samples`, all ranks must call it: the first one sends the
        requests of all ranks to the server, and asks its `enough` about all of them. The server samples the copies of a
        prompt together, unless the call may end early or goes on with completions.

        Raises:
            `RuntimeError`: The server's answer cannot be used; see [`~client.Client.generate`].
        """
        if self.main_samples:
            return self._served(requests, enough)
        counts, everyones = gather_object([len(requests)]), gather_object(requests)
        result = [self._served(everyones, enough) if self.accelerator.is_main_process else None]
        broadcast_object_list(result, from_process=0)
        start = sum(counts[: self.accelerator.process_index])
        own = slice(start, start + len(requests))
        served, ended = result[0], result[0].ended
        return Samples(served.token_ids[own], served.logps[own], ended and ended[own])

    def _served(self, requests: list[Request], enough: Enough | None) -> Samples:
        """Returns the samples with which the server answers the requests of all ranks."""
        firsts: list[int] = []  # for each request, the number of the first one with its prompt
        while len(firsts) < len(requests):
            firsts += [len(firsts)] * requests[len(firsts)].copies
        features = self._features(requests, sorted(set(firsts)))
        fixed = {"structured_outputs_regex": self.settings.structured_outputs_regex, **self.tempering()}
        options = {"max_tokens": self.settings.max_completion_length, **self.further_options()}
        if enough is not None or any(request.sampled for request in requests):
            calls = []
            for number, (request, first) in enumerate(zip(requests, firsts, strict=True)):
                own = reduced(options, len(request.sampled))
                if own.get("seed") is not None:
                    own["seed"] += number - first  # as vLLM seeds the copies of a prompt
                images = None if features is None else [features[first]]
                calls.append({"prompts": [request.given], "features": images, "generation_kwargs": own, **fixed})
            return sampled_separately(self.vllm_client, calls, enough)
        answer = self.vllm_client.generate(
            [requests[first].prompt for first in sorted(set(firsts))],
            features=None if features is None else list(features.values()),
            n=requests[0].copies,
            max_tokens=self.settings.max_completion_length,
            logprobs=0,
            generation_kwargs=self.further_options(),
            **fixed,
        )
        return Samples(answer["completion_ids"], [[logp for (logp,) in row] for row in answer["logprobs"]])

    def _features(self, requests: list[Request], asked: list[int]) -> dict[int, dict | None] | None:
        """
        Lets the server process the images of the requests with the numbers `asked`. Returns the features by these
        numbers, with the places of the images in the prompts; `None` if no request has images.
        """
        if all(request.images is None for request in requests):
            return None
        found = self.vllm_client.image_features([requests[number].images for number in asked])
        prompts = [requests[number].prompt for number in asked]
        places = [placed(own, ids, self.image_token) for own, ids in zip(found, prompts, strict=True)]
        return dict(zip(asked, places, strict=True))

    # Self-check

    def logps(
        self, prompts: list[list[int]], new_tokens: int, images: list[list] | None = None
    ) -> tuple[list[list[int]], list[Tensor]]:
        result = [None]
        if self.accelerator.is_main_process:
            try:
                result = [self._served_logps(prompts, new_tokens, images)]
            except NotFiniteError:  # the check then says which weight differs
                result = [not_finite(prompts, new_tokens)]
        broadcast_object_list(result, from_process=0)
        return result[0]

    def _served_logps(
        self, prompts: list[list[int]], new_tokens: int, images: list[list] | None
    ) -> tuple[list[list[int]], list[Tensor]]:
        client, options = self.vllm_client, {"temperature": 0.0, "generation_kwargs": {"ignore_eos": True}}
        if images is not None:
            features = self._features(requests_for(prompts, images), [*range(len(prompts))])
            options["features"] = [*features.values()]
        continued = client.generate(prompts, n=1, max_tokens=new_tokens, logprobs=0, **options)
        scored = [[]] * len(prompts)
        if images is None:
            scored = client.get_sequence_logprobs(prompts, [1] * len(prompts), top_logprobs=1)["actual_logprobs"]
        sequences = [[*ids, *new] for ids, new in zip(prompts, continued["completion_ids"], strict=True)]
        rows = zip(scored, continued["logprobs"], strict=True)
        return sequences, [torch.tensor([value for (value,) in [*prompt, *new]]) for prompt, new in rows]

    def differing_weight(self) -> str | None:
        if self._compared is None:
            self._compared = announcement(self.unquantized())
        if not self.accelerator.is_main_process:
            for _ in self.unquantized():  # gathering is collective
                pass
            return None
        weights = ((name, tensor.to(self.accelerator.device)) for name, tensor in self.unquantized())
        format, weights = PRECISIONS[self.precision].format, as_announced(self._compared, weights)
        return self.vllm_client.differing_weight(format, self._compared, weights)

    def read_caches(self) -> list[dict[int, KVCache]]:
        if not self.accelerator.is_main_process:
            return []
        workers = self.vllm_client.ask_workers("read_caches")
        return [{index: KVCache(**fields) for index, fields in worker} for worker in workers]

    def limits(self) -> tuple[int, int]:
        return self._limits


def announcement(stream: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str, list[int]]]:
    """Returns name, type and shape of each tensor, as TRL's client announces them to the server."""
    return [described(name, tensor) for name, tensor in stream]


def as_announced(announced: list[tuple], stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """
    Yields `stream`, of which the server gets the bytes alone. Raises `RuntimeError` at the first tensor that is not the
    one of the [`announcement`] at its place.
    """
    for expected, (name, tensor) in zip(announced, stream, strict=True):
        found = described(name, tensor)
        if found != expected:
            raise RuntimeError(f"the policy streams {found} now, where the server was told to expect {expected}")
        yield name, tensor


def not_finite(prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[Tensor]]:
    """Returns what `logps` does for a server whose log-probabilities are NaN or infinite: any tokens, and NaN."""
    sequences = [[*ids, *ids[:1] * new_tokens] for ids in prompts]
    return sequences, [torch.full((len(ids) - 1,), torch.nan) for ids in sequences]


def placed(features: dict | None, prompt: list[int], image_token: int) -> dict | None:
    """
    Returns the features of a prompt's images with the places of its runs of image tokens, in tokens. The server knows
    only the places in the conversation that it read the images from.

    Raises:
        `ValueError`: The prompt has not one run for each image.
    """
    if features is None:
        return None
    places, start = [], 0
    for is_image, run in groupby(prompt, lambda token: token == image_token):
        length = len(list(run))
        if is_image:
            places.append({"offset": start, "length": length})
        start += length
    images = len(features["mm_placeholders"]["image"])
    if len(places) != images:
        raise ValueError(f"A prompt has {len(places)} runs of image tokens for {images} images. It must have one each.")
    return features | {"mm_placeholders": features["mm_placeholders"] | {"image": places}}


def _served_precisions(served: dict, config) -> set[str] | None:
    """Returns the precisions that a server may run in, empty if it runs in none of ours; `None` if it is unknown."""
    quantization = served["quantization"]
    if quantization is None:
        return {"bf16"} if served["dtype"].removeprefix("torch.") == "bfloat16" else set()
    if quantization == "compressed-tensors":
        return None if config is None else prepared_precisions(config)
    return {name for name, vllm in in_vllm().items() if vllm.online == quantization}
