"""Samples each completion of a server by a request of its own, so that one may end before the others.

A server answers when the last completion of a request has ended. With one request for each completion, `enough` can be
asked after each answer, and it is asked every tenth of a second. Once it says so, the server is asked to end the
others, and answers with their tokens so far:

    main     ----- enough? ----- enough? yes: end them ----- end them ----- token of the last sync?
    thread   -------^                          |                |
    thread   ---------------------^            |                |
    thread   ----------------------------------^ tokens so far  |
    thread             (arrives late) --------------------------^ tokens so far
    thread   (its turn comes now: sends nothing)

vLLM does not end a request that has not reached it yet. So it is asked again until all requests are answered. Nothing
is paused: requests of other clients go on, and a request that nobody ends samples up to its end.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event
from uuid import uuid4

from requests.adapters import HTTPAdapter

from ..engine import Enough, Samples
from ..limits import finished_within
from .client import Client


REQUESTS_AT_ONCE = 512  # requests that are sent at a time; each takes a connection and two threads
ROUND = 0.1  # seconds after which the server is asked again to end requests
LAST_WAIT = 5.0  # seconds to wait for the end of all requests after an error


def sampled_separately(client: Client, calls: Sequence[dict], enough: Enough | None) -> Samples:
    """
    Samples one completion for each call from a server; see [`~rollout.engine.Engine`]. Also after an error, no request
    is left on the server.

    Args:
        client (`Client`): The server's client.
        calls (`Sequence[dict]`): The arguments of [`~client.Client.generate`] for one completion each.
        enough (`Callable` or `None`): Ends the call early.

    Raises:
        `RuntimeError`: An answer of the server cannot be used; see [`~client.Client.generate`].
    """
    separate = Separate(client, calls)
    try:
        separate.await_answers(enough)
        separate.end()
        rows = [request.result() for request in separate.requests]
    except BaseException:
        with suppress(Exception):  # the error itself says more
            finished_within(LAST_WAIT, lambda: "", separate.end)
        raise
    finally:
        separate.close()
    client.require_token()
    token_ids, logps, ended = map(list, zip(*rows, strict=True))
    return Samples(token_ids, logps, None if all(ended) else ended)


class Separate:
    """
    Requests that have been sent to a server, or wait for their turn, one for each of the `calls`.

    Attributes:
        names (`list[str]`): The requests' names.
        requests (`list[Future]`): Their results: tokens, log-probabilities in nats, and whether the completion ended.
        is_ending (`Event`): Set once the requests are ended. No request is sent from then on.
    """

    def __init__(self, client: Client, calls: Sequence[dict]):
        self.client, self.is_ending = client, Event()
        self.names = [uuid4().hex for _ in calls]
        most = min(len(calls), REQUESTS_AT_ONCE)
        retries = client.session.get_adapter(client.base_url).max_retries
        self._adapter = HTTPAdapter(max_retries=retries, pool_maxsize=most)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="completions")
        pairs = zip(self.names, calls, strict=True)
        self.requests: list[Future] = [self._pool.submit(self._answer, name, call) for name, call in pairs]

    def _answer(self, name: str, call: dict) -> tuple[list[int], list[float | None], bool]:
        """Sends a request and returns its result. Called in a thread of the pool."""
        if self.is_ending.is_set():
            return [], [], False
        client = self.client.named(name, self._adapter, self.is_ending)
        answer = client.generate_unguarded(**call, n=1, logprobs=0)
        (token_ids,), (logps,) = answer["completion_ids"], answer["logprobs"]
        return token_ids, [logp for (logp,) in logps], not client.was_ended

    def await_answers(self, enough: Enough | None) -> None:
        """
        Waits until all requests are answered, or until `enough` says so, which is also asked while none is answered.
        Raises the first error of a request.
        """
        ended = [False] * len(self.requests)
        numbers, left = {request: number for number, request in enumerate(self.requests)}, set(self.requests)
        while left:
            answered, left = wait(left, ROUND, FIRST_COMPLETED)
            for request in answered:
                request.result()
                ended[numbers[request]] = True
            if enough is not None and left and enough(list(ended)):
                return

    def end(self) -> None:
        """Ends all requests on the server that have not been answered, and waits for their answers."""
        self.is_ending.set()
        while names := [name for name, request in zip(self.names, self.requests, strict=True) if not _is_over(request)]:
            self.client.end(names)
            if not wait(self.requests, ROUND).not_done:
                return

    def close(self) -> None:
        """Closes the connections. Threads that still wait for an answer are left behind."""
        self._pool.shutdown(wait=False)
        self._adapter.close()


def _is_over(request: Future) -> bool:
    """Whether a request has been answered. One that failed, for example by its time limit, may still run."""
    return request.done() and request.exception() is None
