"""Cached prefixes at every alignment: the tokens and log probabilities of a cold run, to the bit; shared blocks keep
their bytes."""

from collections.abc import Iterator

import pytest
import torch

from loopline.engine.local import LocalEngine
from loopline.errors import ConfigError
from loopline.messages import TokenRow
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.golden import GOLDEN, MODELS

BLOCK = 4
TEXT = tuple((11 * i) % 250 for i in range(60))


def settings(prefix_cache: str, num_blocks: int = 64, model: str = str(GOLDEN / "ouro_fp32")) -> EngineSettings:
    scheduler = SchedulerSettings(chunk_tokens=8)
    return EngineSettings(
        model_path=model, block_size=BLOCK, num_blocks=num_blocks, prefix_cache=prefix_cache, scheduler=scheduler
    )


@pytest.fixture(scope="module")
def cold() -> Iterator[LocalEngine]:
    engine = LocalEngine(settings("off"))
    yield engine
    engine.close()


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 5, loops: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens, loops=loops, logprobs=3)
    return Request(request_id=name, prompt_ids=prompt, params=params)


def answer(engine: LocalEngine, one: Request) -> list[tuple[int | None, object]]:
    return [(row.token_id, row.logprobs) for row in engine.generate(one)]


@pytest.fixture(scope="module")
def sharing() -> Iterator[LocalEngine]:
    engine = LocalEngine(settings("on", num_blocks=512))
    yield engine
    engine.close()


@pytest.mark.parametrize("warm", [0, 3, 4, 8, 12, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 13, 16, 17])
def test_hits_at_every_alignment(cold: LocalEngine, sharing: LocalEngine, warm: int, length: int) -> None:
    text = (warm, length, *((11 * i) % 250 for i in range(18)))  # a text of its own
    if warm:
        answer(sharing, request("warm", text[:warm], max_tokens=1))
    before = sharing.arena.tensor.clone()
    shared = sharing.find_cached(request("look", text[:length]))
    assert len(shared) == min(warm, length) // BLOCK
    assert answer(sharing, request("hit", text[:length])) == answer(cold, request("cold", text[:length]))
    assert torch.equal(sharing.arena.tensor[shared], before[shared]), "a shared block was written"
    sharing.audit()


def test_an_answers_blocks_are_found_by_the_next_turn(cold: LocalEngine) -> None:
    engine = LocalEngine(settings("on"))
    first = [token for token, _ in answer(engine, request("turn1", TEXT[:9], max_tokens=12)) if token is not None]
    prompt = TEXT[:9] + tuple(first) + TEXT[20:25]
    assert len(engine.find_cached(request("look", prompt))) == (9 + 12 - 1) // BLOCK
    assert answer(engine, request("turn2", prompt)) == answer(cold, request("cold", prompt))
    engine.close()


def test_depth_is_part_of_the_key(cold: LocalEngine) -> None:
    engine = LocalEngine(settings("on"))
    answer(engine, request("deep", TEXT[:16], max_tokens=1))
    assert not engine.find_cached(request("look", TEXT[:16], loops=2))
    assert answer(engine, request("shallow", TEXT[:16], loops=2)) == answer(cold, request("cold", TEXT[:16], loops=2))
    engine.close()


def test_requests_that_come_together_compute_their_prefix_once(cold: LocalEngine) -> None:
    engine = LocalEngine(settings("on"))
    requests = [request(f"r{n}", (*TEXT[:25], n)) for n in range(6)]
    rows: dict[str, list[TokenRow]] = engine.generate_all(requests)
    for one in requests:
        assert [(row.token_id, row.logprobs) for row in rows[one.request_id]] == answer(cold, one)
    engine.close()


def test_eviction_under_pressure_changes_no_answer(cold: LocalEngine) -> None:
    engine = LocalEngine(settings("on", num_blocks=9))
    for n in range(12):
        prompt = tuple((n % 4 + 3 * i) % 250 for i in range(8 + n))
        assert answer(engine, request(f"r{n}", prompt)) == answer(cold, request("cold", prompt))
        engine.audit()
    engine.close()


def test_huginn_refuses_it_until_its_noise_can_be_shared() -> None:
    model = str(MODELS / "tiny-huginn")
    with pytest.raises(ConfigError, match=r"prefix_cache is on.*Huginn.*off, auto"):
        LocalEngine(settings("on", model=model))
    engine = LocalEngine(settings("auto", model=model))
    assert not engine.find_cached(request("look", TEXT[:16], loops=1))
    engine.close()


def test_preempted_requests_give_the_same_answers(cold: LocalEngine) -> None:
    """A pool of two worst cases, six long answers, growth not promised: some are preempted and computed again."""
    scheduler = SchedulerSettings(chunk_tokens=8, growth_share=0.0)
    engine = LocalEngine(
        EngineSettings(model_path=str(GOLDEN / "ouro_fp32"), block_size=BLOCK, num_blocks=20, scheduler=scheduler)
    )
    requests = [request(f"r{n}", TEXT[n : n + 6], max_tokens=30) for n in range(6)]
    rows = engine.generate_all(requests)
    assert engine.num_preempted > 0
    for one in requests:
        assert [(row.token_id, row.logprobs) for row in rows[one.request_id]] == answer(cold, one)
    engine.close()
