"""TRL's client of a vLLM server, with a time limit on every request and checks of every answer.

TRL's client waits for ever for a server that was stopped, or that sends one byte per second, and takes any answer for
samples of the policy. Here each request as a whole has a time limit, and an answer that is incomplete or not vLLM's
raises an error. Samples are used only if the server's workers still hold the weights of the last sync:

    sync    ---- weights, then a token ----> workers forget their token, then store the new one
    sample  ---- prompts ------------------> completions
            ---- which token? -------------> if it is not the sync's, the samples are thrown away

A server that was restarted after the sync has its checkpoint's weights and no token. A server that another run has
synced since has that run's token, or none if that run does not know of tokens, as TRL's own trainers do not.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from threading import Event
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient

from ..address import without_password
from ..answers import fault_of_end, fault_of_samples
from ..limits import called_within, finished_within
from .same_device import bytes_to_share, filled, how_to_share, place_of, shared_memory
from .support import require_nccl


PARTS = ("completion_ids", "logprobs", "logprob_token_ids")
NOT_IN_JSON = "Out of range float values are not JSON compliant"  # the error of Python's `json` for NaN and infinity
DROPPED = "abort"  # vLLM's reason for the end of a completion that was ended from outside
# What vLLM adds to a request's name, before and after it: for tokens, and for tokens with features of images
ENDPOINTS = {"cmpl": "-0", "generate-tokens": ""}
ANSWER_SHOWN = 200  # characters of an answer that an error message shows
# Why a server is refused of which some workers are on the trainer's device, and others are not
ALONE = (
    "NCCL refuses two ranks on one GPU, so weights reach these through shared memory alone, and the others over NCCL "
    "alone. Start the server on the trainer's GPU and no other, or on other GPUs."
)
ON_ONE_HOST = (
    "NCCL does not run on a CPU, so weights reach a worker through shared memory alone. Start the server on the "
    "trainer's host alone."
)
TRIED = 256  # bytes of the memory that is shared with a server once, to see whether it can be
# Seconds that a transfer may take beyond the limit of its requests. A request then fails first, with a better message
TRANSFER_SLACK = 10.0


class NotFiniteError(RuntimeError):
    """A server computed log-probabilities that are NaN or infinite, and so could not answer."""


class Client(VLLMClient):
    """
    TRL's client, with time limits and checked answers.

    Parameters:
        base_url (`str`): The server's address, which may end with slashes.
        seconds (`float` or `None`): Seconds that each whole request may take; `None` for no limit.
        vocabulary (`int`): Number of the policy's tokens.
        check (`Callable`): Called with the client before it connects to the server's workers.

    Attributes:
        token (`str` or `None`): The token of the last sync; `None` before the first.
        shared_on (`torch.device` or `None`): The device of this process, if the server's workers are on the same.
        is_ending (`Event`): Set before [`end`] ends the requests of this client. Only those of a [`named`] one are.
        was_ended (`bool`): Whether the last completion was ended so.
    """

    shared_on: torch.device | None = None
    is_ending, was_ended = Event(), False  # of a client that is not `named`; it ends nothing, so nobody sets the event

    def __init__(
        self, base_url: str, *, seconds: float | None, vocabulary: int, check: Callable[["Client"], None], **kwargs
    ):
        self.seconds, self.vocabulary, self.check, self.token = seconds, vocabulary, check, None
        super().__init__(base_url.rstrip("/"), **kwargs)

    @property
    def shown(self) -> str:
        """The server's address for messages."""
        return without_password(self.base_url)

    # Requests

    @property
    def session(self) -> requests.Session:
        """TRL's session, which sends every request except the first ones to `/health`."""
        return self._session

    @session.setter
    def session(self, session: requests.Session) -> None:
        session.send = partial(self._send, session.send)
        self._session = session

    def _send(self, send: Callable, request: requests.PreparedRequest, **options) -> requests.Response:
        """Sends a request and reads its whole answer, in any thread. Raises an error if the answer is incomplete."""
        described = f"`{request.method} {urlsplit(request.url).path}`"
        try:
            answer = finished_within(self.seconds, partial(self._timeout_message, described), send, request, **options)
            if answer.status_code == 200 and answer.content:
                answer.json()
        except requests.JSONDecodeError as error:
            raise RuntimeError(
                f"The vLLM server at {self.shown} answered {described} with incomplete or invalid JSON: "
                f"{answer.text[:ANSWER_SHOWN]!r} ({len(answer.text)} characters). Does something else listen there?"
            ) from error
        except requests.RequestException as error:
            message = f"The vLLM server at {self.shown} did not answer {described}: {without_password(str(error))}"
            raise ConnectionError(message) from error
        return answer

    def _post(self, url: str, **kwargs) -> dict:
        """
        Calls TRL's method.

        Raises:
            `NotFiniteError`: The answer would hold a number that is not finite.
            `RuntimeError`: The server has dropped completions before their end, and this client has not asked for it.
        """
        try:
            answer = super()._post(url, **kwargs)
        except Exception as error:  # TRL's method has no class for it
            if NOT_IN_JSON not in str(error):
                raise
            raise NotFiniteError(f"The vLLM server at {self.shown} computed NaN or infinity.") from error
        choices = answer.get("choices") if isinstance(answer, dict) else None
        reasons = [choice["finish_reason"] for choice in choices or ()]
        self.was_ended = self.is_ending.is_set() and reasons == [DROPPED]
        fault = fault_of_end(reasons)
        if fault is not None and not self.was_ended:
            raise RuntimeError(f"The vLLM server at {self.shown} returned samples that cannot be used: {fault}.")
        return answer

    def _timeout_message(self, described: str) -> str:
        return (
            f"The vLLM server at {self.shown} did not answer {described} within `vllm_request_timeout`="
            f"{self.seconds:g} seconds. It may be stopped or overloaded; its own output says more."
        )

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Calls TRL's method within a time limit, which it lacks. [`~serving.wait_for_server`] has run before."""
        seconds = max(total_timeout, 5.0)
        message = f"The vLLM server at {self.shown} did not answer `GET /health` within {seconds:g} seconds."
        try:
            finished_within(seconds, lambda: message, super().check_server, total_timeout, retry_interval)
        except ConnectionError as error:
            raise ConnectionError(without_password(str(error))) from None

    def get_server_info(self) -> dict:
        """Calls TRL's method. Raises `RuntimeError` for an answer that is not vLLM's."""
        with self._foreign_answers_explained("`GET /server_info`"):
            return super().get_server_info()

    @contextmanager
    def _foreign_answers_explained(self, described: str) -> Iterator[None]:
        """Context that turns an error caused by an unexpected answer into one that says so."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"The vLLM server at {self.shown} answered {described}, but not as `vllm serve` does "
                f"({type(error).__name__}: {error})."
            ) from error

    def ask_workers(self, method: str, **arguments) -> list[Any]:
        """Calls a method of [`~transfer.WorkerExtension`] in each of the server's workers; returns the results."""
        call = {"method": method, "kwargs": arguments}
        with self._foreign_answers_explained(f"a call of `{method}`"):
            results = self._post(f"{self.base_url}/collective_rpc", json=call)["results"]
            if not results:
                raise IndexError("the result of no worker")
            return results

    # Weights: requests with the client's limit. Between devices, a broadcast over NCCL at the same time may hang in C

    def init_communicator(self, device: torch.device) -> None:
        """
        Prepares the transfer of weights from `device`: over NCCL, as TRL does, or in memory that the workers share with
        this process, if they are on the same device.

        Raises:
            `ValueError`: Some of the workers are on this device, and others are not; all are, and cannot share memory;
                or the server stands in the middle of an update.
        """
        self.check(self)
        places = self.ask_workers("connect")
        if None in places:
            raise ValueError(
                f"The vLLM server at {self.shown} stands in the middle of an update of a run that has ended, or that "
                "still uses it. Restart it, and give each run a server of its own."
            )
        on_same = [place == place_of(device) for place in places]
        if all(on_same):
            self.shared_on = device
            self._try_sharing()
            return
        if any(on_same):
            raise ValueError(
                f"The vLLM server at {self.shown} has {len(on_same)} workers, {sum(on_same)} of them on the trainer's "
                f"device. {ALONE if device.type == 'cuda' else ON_ONE_HOST}"
            )
        self._require_free_port()
        self._transfer("join the workers for the transfer of weights", super().init_communicator, device)
        require_nccl(self.communicator, "in the trainer's process")

    def _try_sharing(self) -> None:
        """Raises `ValueError` unless what this process writes into shared memory arrives in all workers."""
        drawn = os.urandom(TRIED)  # not from torch's random state, which is the run's
        with self._memory_of_workers(TRIED) as memory:
            for _ in filled(memory, [("drawn", torch.frombuffer(bytearray(drawn), dtype=torch.uint8))]):
                self._require_sharing(self.ask_workers("why_memory_differs", expected=list(drawn)))

    @contextmanager
    def _memory_of_workers(self, size: int) -> Iterator[torch.Tensor]:
        """Context of memory that all workers, on this device, have opened. Raises `ValueError` if one cannot."""

        def have_opened(handle: list) -> None:
            self._require_sharing(self.ask_workers("open_memory", size=size, handle=handle))

        with shared_memory(size, self.shared_on, have_opened) as memory:
            yield memory
            self.ask_workers("close_memory")

    def _require_sharing(self, faults: list[str | None]) -> None:
        """Raises `ValueError` if a worker has told a fault of shared memory."""
        reasons = sorted({fault for fault in faults if fault is not None})
        if reasons:
            raise ValueError(
                f"The vLLM server at {self.shown} is on the trainer's device, and its workers cannot read the memory "
                f"in which the trainer shares weights: {'; '.join(reasons)}. {how_to_share(self.shared_on)}"
            )

    def _require_free_port(self) -> None:
        """
        Raises `ValueError` if this process cannot listen on the port for the transfer. TRL's method would raise only
        after the server has given up waiting for it there, or has joined another run's transfer.
        """
        from vllm.utils.network_utils import get_ip

        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
            try:
                probe.bind((get_ip(), self.group_port))
            except OSError as error:
                raise ValueError(
                    f"`vllm_group_port`={self.group_port} cannot be opened on this machine: {error}. Another run may "
                    "use it. Set it to a free port, one for each run."
                ) from error

    def update_named_params(self, metadata, named_params) -> None:
        self.require_token()  # a restarted server would not join the broadcast
        if self.shared_on is None:
            self._update(super().update_named_params, metadata, named_params)
            return
        with self._memory_of_workers(bytes_to_share(metadata)) as memory:
            self._update(self._share, memory, named_params)

    def _update(self, send: Callable, *args) -> None:
        """Calls `send`, which updates weights, while the server computes nothing."""

        def update() -> None:
            # The engine would end if a request of another client ran on a model that is half loaded
            self._post(f"{self.base_url}/pause", params={"mode": "keep"})
            send(*args)
            self._post(f"{self.base_url}/resume")

        try:
            self._transfer("take the weights", update)
        except Exception as error:
            raise RuntimeError(
                f"{error} The server may wait in the middle of an update: restart it before a run uses it again."
            ) from error

    def _share(self, memory: torch.Tensor, named_params) -> None:
        """Sends weights in memory that the workers have opened."""
        self._post(f"{self.base_url}/start_weight_update", json={})
        for announced in filled(memory, named_params):
            names, dtype_names, shapes = map(list, zip(*announced, strict=True))
            info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
            self._post(f"{self.base_url}/update_weights", json={"update_info": info})
        self._post(f"{self.base_url}/finish_weight_update", json={})

    def differing_weight(self, format: str | None, metadata, named_params) -> str | None:
        """
        Sends weights that the workers compare with theirs and do not load. Returns the name of one that differs in one
        of the workers; `None` if all are the same. For the `format` see [`~worker.WeightComparison`], for the others
        [`update_named_params`].
        """
        self.ask_workers("compare_next_update", format=format)
        self.update_named_params(metadata, named_params)
        return next(filter(None, self.ask_workers("differing_weight")), None)

    def _transfer(self, action: str, call: Callable, *args) -> None:
        def message() -> str:
            return (
                f"The vLLM server at {self.shown} did not {action} within `vllm_request_timeout`="
                f"{self.seconds:g} seconds."
            )

        called_within(None if self.seconds is None else self.seconds + TRANSFER_SLACK, message, call, *args)

    def reset_encoder_cache(self) -> None:
        """Lets the server compute images anew, with its current weights."""
        self.session.post(f"{self.base_url}/reset_encoder_cache").raise_for_status()

    def mark_sync(self) -> None:
        """Sends the workers a new token, after an update of weights."""
        token = uuid4().hex
        self.ask_workers("set_sync_token", token=token)
        self.token = token

    def require_token(self) -> None:
        """Raises `RuntimeError` unless all workers hold the weights of the last sync."""
        if self.token is None:
            return
        if set(self.ask_workers("get_sync_token")) != {self.token}:
            raise RuntimeError(
                f"The vLLM server at {self.shown} no longer holds the weights of this run's last sync: it was "
                "restarted, or another run has sent it weights. Its samples since then are not used."
            )

    # Samples

    def generate(self, prompts, *args, **kwargs) -> dict[str, list]:
        """Same as [`generate_unguarded`]. Raises `RuntimeError` if the samples are not from the last sync's weights."""
        samples = self.generate_unguarded(prompts, *args, **kwargs)
        self.require_token()
        return samples

    def generate_unguarded(self, prompts, *args, n: int = 1, **kwargs) -> dict[str, list]:
        """
        Calls TRL's `generate`, and does not ask which weights the server holds: see [`require_token`].

        Raises:
            `RuntimeError`: Samples are incomplete or belong to other prompts.
        """
        with self._foreign_answers_explained("a request for samples"):
            samples = super().generate(prompts, *args, n=n, **kwargs)
        given = kwargs.get("generation_kwargs") or {}
        most = given.get("max_tokens", kwargs.get("max_tokens"))
        asked = {"count": n * len(prompts), "vocabulary": self.vocabulary, "most": most}
        asked["ended"] = [False] if self.was_ended else None
        wrong = None
        if samples["prompt_ids"] != prompts and not isinstance(prompts[0], str):
            wrong = "they complete other prompts than the requested ones"
        elif samples["logprobs"] is None and kwargs.get("logprobs", 0) is not None:
            wrong = "they have no log-probabilities"
        wrong = fault_of_samples(*map(samples.get, PARTS), **asked) or wrong
        if wrong is not None:
            raise RuntimeError(f"The vLLM server at {self.shown} returned samples that cannot be used: {wrong}.")
        return samples

    def named(self, name: str, adapter: HTTPAdapter, is_ending: Event) -> "Client":
        """
        Returns a client for one request, which has a name by which [`end`] ends it. Each thread needs a client of its
        own.

        Args:
            name (`str`): The request's name, which no other request has.
            adapter (`HTTPAdapter`): The connections, which many clients may share.
            is_ending (`Event`): Set before the request is ended.
        """
        session = requests.Session()
        session.headers["X-Request-Id"] = name
        for scheme in ("http://", "https://"):
            session.mount(scheme, adapter)
        client = copy(self)
        client._send_by(session, is_ending)
        return client

    def _send_by(self, session: requests.Session, is_ending: Event) -> None:
        """Gives this client, a copy, a session of its own."""
        self.session, self.is_ending, self.was_ended = session, is_ending, False

    def end(self, names: Collection[str]) -> None:
        """
        Asks the server to end the requests of [`named`] clients. It answers them at once, with the tokens that they
        have. Requests that have not arrived yet, or have been answered, are not ended.
        """
        if not names:  # vLLM would end the requests of all clients
            return
        ids = [f"{endpoint}-{name}{part}" for name in names for endpoint, part in ENDPOINTS.items()]
        # A server may be several processes, which know only the requests of their own connections
        headers = {"Connection": "close"}
        self._post(f"{self.base_url}/abort_requests", json={"request_ids": ids}, headers=headers)


def not_vllm(url: str, seconds: float) -> str | None:
    """
    Asks a server for its models. Returns the reason why it is not `vllm serve`, for a message, or `None` if it may be.
    """
    message = f"no answer within {seconds:g} seconds"
    try:
        answer = finished_within(seconds, lambda: message, requests.get, f"{url}/v1/models", timeout=seconds)
    except (requests.RequestException, TimeoutError) as error:
        return f"`GET /v1/models` got {without_password(str(error))}"
    source = f" from {answer.headers['Server']}" if "Server" in answer.headers else ""
    if answer.status_code != 200:
        return f"`GET /v1/models` got status {answer.status_code}{source}: {answer.text[:ANSWER_SHOWN]!r}"
    try:
        owner = answer.json()["data"][0].get("owned_by", "vllm")
    except (requests.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
        return f"`GET /v1/models` got no list of models{source}: {answer.text[:ANSWER_SHOWN]!r}"
    return None if owner == "vllm" else f"`GET /v1/models` got a model of {owner!r}{source}"


def served_context(url: str, seconds: float) -> int | None:
    """Returns the `--max-model-len` of a server that is `vllm serve`; `None` if it does not say it."""
    answer = finished_within(seconds, lambda: url, requests.get, f"{url}/v1/models", timeout=seconds)
    return answer.json()["data"][0].get("max_model_len")
