"""Requests to a cluster of tests, and what one engine alone answers to the same ones."""

from loopline.client import Accepted, Chunk, Client
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from tests.support.cluster import Cluster
from tests.support.golden import MODELS

TEXT = (MODELS / "train_tiny.py").read_bytes()
RETURN_S = 60.0


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """Text from another place for each number; after many of them from the beginning again."""
    start = 61 * number % (len(TEXT) - length)
    return tuple(TEXT[start : start + length])


def alone(engine: LocalEngine, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What one engine without a cluster answers."""
    params = SamplingParams(loops=engine.spec.default_loops, stop_ids=(), max_tokens=max_tokens)
    rows = engine.generate(Request(request_id="alone", prompt_ids=prompt, params=params))
    return tuple(row.token_id for row in rows if row.token_id is not None)


def ask(cluster: Cluster, prompt: tuple[int, ...], max_tokens: int, label: str = "") -> tuple[int, ...]:
    with Client(cluster.address) as client:
        answer = client.complete(prompt, label=label, deadline_s=RETURN_S, max_tokens=max_tokens, ignore_eos=True)
    return answer.token_ids


class Stream:
    """One request that the cluster has accepted, and whose events the test takes when it likes."""

    def __init__(self, cluster: Cluster, prompt: tuple[int, ...], max_tokens: int, label: str = "") -> None:
        self._client = Client(cluster.address)
        self._events = self._client.generate(prompt, label=label, max_tokens=max_tokens, ignore_eos=True)
        assert isinstance(next(self._events), Accepted)  # the call is made with the first event

    def wait_token(self) -> tuple[int, ...]:
        for event in self._events:
            if isinstance(event, Chunk) and event.tokens:
                return tuple(token.id for token in event.tokens)
        raise AssertionError("the answer has ended without a token")

    def leave(self) -> None:
        self._events.close()  # type: ignore[attr-defined]
        self._client.close()
