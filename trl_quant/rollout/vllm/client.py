"""TRL's client of a vLLM server, with a limit on every request and an eye on what answers.

TRL waits for ever for a server that was stopped, or that sends a byte a second, and takes what comes for samples of the
policy. Here each request ends in time, in all of its parts; what is no whole answer of vLLM's is an error that says so;
and samples count only if the server's workers still hold the weights of the last sync:

    sync    ---- weights, then a token ----> workers keep the token
    sample  ---- prompts ------------------> completions
            ---- which token? -------------> that of the sync, or the samples are thrown away

A server that was started again between the two has its checkpoint's weights and no token. One that another run synced
has that run's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import requests
from trl.generation.vllm_client import VLLMClient

from ..limits import finished_within, time_limit


ANSWER_SHOWN = 200  # characters of an answer in a message
TRANSFER_SLACK = 10.0  # seconds that a transfer gets beyond the limit of its requests, which say more when they end


class Client(VLLMClient):
    """
    TRL's client, whose requests end within `seconds` and whose samples are of the last sync's weights.

    Parameters:
        seconds (`float` or `None`): That each request may take in total; `None` for no limit.
        check (`Callable`): Called with the client before it joins the server's workers.

    Attributes:
        token (`str` or `None`): Of the last sync; `None` before the first.
    """

    def __init__(self, *args, seconds: float | None, check: Callable[["Client"], None], **kwargs):
        self.seconds, self.check, self.token = seconds, check, None
        super().__init__(*args, **kwargs)

    # Requests

    @property
    def session(self) -> requests.Session:
        """TRL's, which sends every request but the first ones to `/health`."""
        return self._session

    @session.setter
    def session(self, session: requests.Session) -> None:
        session.send = partial(self._send, session.send)
        self._session = session

    def _send(self, send: Callable, request: requests.PreparedRequest, **options) -> requests.Response:
        """A request and its whole answer, in any thread. Raises for what is no whole answer."""
        asked = f"`{request.method} {urlsplit(request.url).path}`"
        try:
            answer = finished_within(self.seconds, partial(self._too_long, asked), send, request, **options)
            if answer.status_code == 200 and answer.content:
                answer.json()
        except requests.JSONDecodeError as error:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} answered {asked} with what is no whole JSON: "
                f"{answer.text[:ANSWER_SHOWN]!r} ({len(answer.text)} characters). Does something else listen there?"
            ) from error
        except requests.RequestException as error:
            raise ConnectionError(f"The vLLM server at {self.base_url} did not answer {asked}: {error}") from error
        return answer

    def _too_long(self, asked: str) -> str:
        return (
            f"The vLLM server at {self.base_url} did not answer {asked} within `vllm_request_timeout`="
            f"{self.seconds:g} seconds. It may be stopped or overloaded; what it prints says more."
        )

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """TRL's, which asks without a limit. It has answered before ([`~server.wait_for_server`])."""
        seconds = max(total_timeout, 5.0)
        told = f"The vLLM server at {self.base_url} did not answer `GET /health` within {seconds:g} seconds."
        finished_within(seconds, lambda: told, super().check_server, total_timeout, retry_interval)

    def get_server_info(self) -> dict:
        """TRL's; `RuntimeError` for an answer that is not vLLM's."""
        with self._in_vllms_words("`GET /server_info`"):
            return super().get_server_info()

    @contextmanager
    def _in_vllms_words(self, asked: str) -> Iterator[None]:
        """Context in which an answer that lacks what vLLM's has is told as such."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} answered {asked}, but not as `vllm serve` does "
                f"({type(error).__name__}: {error})."
            ) from error

    def ask_workers(self, method: str, **arguments) -> list[Any]:
        """What a method of [`~transfer.WorkerExtension`] returns in each of the server's workers."""
        question = {"method": method, "kwargs": arguments}
        with self._in_vllms_words(f"a call of `{method}`"):
            return self._post(f"{self.base_url}/collective_rpc", json=question)["results"]

    # Weights: requests that end, and a broadcast over NCCL beside them that may wait in C

    def init_communicator(self, device=0) -> None:
        self.check(self)
        with self._transfer("join the workers for the transfer of weights"):
            super().init_communicator(device)

    def update_named_params(self, metadata, named_params) -> None:
        self.require_token()  # a restarted server would not take part
        try:
            with self._transfer("take the weights"):
                super().update_named_params(metadata, named_params)
        except Exception as error:
            raise RuntimeError(
                f"{error} The server may wait in the middle of an update: start it again before a run goes on with it."
            ) from error

    def _transfer(self, what: str) -> AbstractContextManager:
        def told() -> str:
            return (
                f"The vLLM server at {self.base_url} did not {what} in `vllm_request_timeout`={self.seconds:g} seconds."
            )

        return time_limit(None if self.seconds is None else self.seconds + TRANSFER_SLACK, told)

    def mark_sync(self) -> None:
        """Gives the workers a token after a sync."""
        token = uuid4().hex
        self.ask_workers("keep_token", token=token)
        self.token = token

    def require_token(self) -> None:
        """Raises `RuntimeError` unless all workers hold the weights of the last sync."""
        if self.token is None:
            return
        if set(self.ask_workers("kept_token")) != {self.token}:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} no longer holds the weights of this run's last sync: it was "
                "started again, or another run has sent it weights. Nothing of what it sampled since is used."
            )

    # Samples

    def generate(self, prompts, *args, n: int = 1, **kwargs) -> dict[str, list]:
        """TRL's; `RuntimeError` for samples that are not whole, not of these prompts or not of the last sync."""
        with self._in_vllms_words("a request for samples"):
            samples = super().generate(prompts, *args, n=n, **kwargs)
        completions, logps = samples["completion_ids"], samples["logprobs"]
        wrong = None
        if len(completions) != n * len(prompts):
            wrong = f"{len(completions)} completions, and {n} of each of {len(prompts)} prompts were asked for"
        elif samples["prompt_ids"] != prompts and not isinstance(prompts[0], str):
            wrong = "completions of other prompts than it was asked for"
        elif not all(completions):
            wrong = "a completion without a token"
        elif logps is not None and [*map(len, logps)] != [*map(len, completions)]:
            wrong = "completions and log-probabilities of different lengths"
        if wrong:
            raise RuntimeError(f"The vLLM server at {self.base_url} returned {wrong}.")
        self.require_token()
        return samples


def stranger(url: str, seconds: float) -> str | None:
    """What answers at `url` in place of `vllm serve`, in words; `None` for what may be one."""
    asked = f"{url}/v1/models"
    told = f"no answer within {seconds:g} seconds"
    try:
        answer = finished_within(seconds, lambda: told, requests.get, asked, timeout=seconds)
    except (requests.RequestException, TimeoutError) as error:
        return f"`GET /v1/models` got {error}"
    who = f" from {answer.headers['Server']}" if "Server" in answer.headers else ""
    if answer.status_code != 200:
        return f"`GET /v1/models` got status {answer.status_code}{who}: {answer.text[:ANSWER_SHOWN]!r}"
    try:
        owner = answer.json()["data"][0].get("owned_by", "vllm")
    except (requests.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
        return f"`GET /v1/models` got no list of models{who}: {answer.text[:ANSWER_SHOWN]!r}"
    return None if owner == "vllm" else f"`GET /v1/models` got a model of {owner!r}{who}"
