"""Cached prefixes at every alignment: the tokens and log probabilities of a cold run, to the bit; shared blocks keep
their bytes. Of Ouro, and of Huginn with noise keyed by position; each request has a seed of its own."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from loopline.engine.local import LocalEngine
from loopline.errors import ConfigError
from loopline.messages import TokenRow
from loopline.request import InitialState, Request
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.families import FAMILIES, LOOPS, asking

BLOCK = 4
TEXT = tuple((11 * i) % 250 for i in range(60))
BY_REQUEST = replace(FAMILIES["huginn"], noise_key="request")


def settings(base: EngineSettings, prefix_cache: str, num_blocks: int = 64) -> EngineSettings:
    scheduler = SchedulerSettings(chunk_tokens=8)
    return replace(base, block_size=BLOCK, num_blocks=num_blocks, prefix_cache=prefix_cache, scheduler=scheduler)


@pytest.fixture(scope="module")
def cold(family: EngineSettings) -> Iterator[LocalEngine]:
    engine = LocalEngine(settings(family, "off"))
    yield engine
    engine.close()


def request(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 5,
    loops: int = LOOPS,
    initial_state: InitialState = InitialState.NOISE,
    seed: int | None = None,
) -> Request:
    return asking(name, prompt, max_tokens, loops=loops, logprobs=3, initial_state=initial_state, seed=seed)


def answer(engine: LocalEngine, one: Request) -> list[tuple[int | None, object]]:
    return [(row.token_id, row.logprobs) for row in engine.generate(one)]


@pytest.fixture(scope="module")
def sharing(family: EngineSettings) -> Iterator[LocalEngine]:
    engine = LocalEngine(settings(family, "on", num_blocks=512))
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


def test_an_answers_blocks_are_found_by_the_next_turn(family: EngineSettings, cold: LocalEngine) -> None:
    engine = LocalEngine(settings(family, "on"))
    first = [token for token, _ in answer(engine, request("turn1", TEXT[:9], max_tokens=12)) if token is not None]
    prompt = TEXT[:9] + tuple(first) + TEXT[20:25]
    assert len(engine.find_cached(request("look", prompt))) == (9 + 12 - 1) // BLOCK
    assert answer(engine, request("turn2", prompt)) == answer(cold, request("cold", prompt))
    engine.close()


def test_every_turn_of_a_conversation_is_a_cold_runs(family: EngineSettings, cold: LocalEngine) -> None:
    """Two conversations go on side by side; a turn computes no more than its own tokens, however long they are."""
    engine = LocalEngine(settings(family, "on", num_blocks=128))
    prompts = {"a": TEXT[:13], "b": TEXT[:11]}
    written = dict.fromkeys(prompts, 0)
    for turn in range(5):
        asked = {name: request(f"{name}{turn}", prompt, max_tokens=7) for name, prompt in prompts.items()}
        for name, one in asked.items():
            assert len(engine.find_cached(one)) >= written[name] // BLOCK
        rows = engine.generate_all(list(asked.values()))
        for name, one in asked.items():
            said = rows[one.request_id]
            assert [(row.token_id, row.logprobs) for row in said] == answer(cold, request("cold", one.prompt_ids, 7))
            tokens = tuple(row.token_id for row in said if row.token_id is not None)
            written[name] = len(one.prompt_ids) + len(tokens) - 1
            prompts[name] = one.prompt_ids + tokens + (turn, *name.encode(), 7)
    engine.close()


def test_depth_is_part_of_the_key(family: EngineSettings, cold: LocalEngine) -> None:
    engine = LocalEngine(settings(family, "on"))
    answer(engine, request("deep", TEXT[:16], max_tokens=1))
    assert not engine.find_cached(request("look", TEXT[:16], loops=2))
    assert answer(engine, request("shallow", TEXT[:16], loops=2)) == answer(cold, request("cold", TEXT[:16], loops=2))
    engine.close()


def test_requests_that_come_together_compute_their_prefix_once(family: EngineSettings, cold: LocalEngine) -> None:
    engine = LocalEngine(settings(family, "on"))
    requests = [request(f"r{n}", (*TEXT[:25], n)) for n in range(6)]
    rows: dict[str, list[TokenRow]] = engine.generate_all(requests)
    for one in requests:
        assert [(row.token_id, row.logprobs) for row in rows[one.request_id]] == answer(cold, one)
    engine.close()


def test_eviction_under_pressure_changes_no_answer(family: EngineSettings, cold: LocalEngine) -> None:
    engine = LocalEngine(settings(family, "on", num_blocks=9))
    for n in range(12):
        prompt = tuple((n % 4 + 3 * i) % 250 for i in range(8 + n))
        assert answer(engine, request(f"r{n}", prompt)) == answer(cold, request("cold", prompt))
        engine.audit()
    engine.close()


def test_preempted_requests_give_the_same_answers(family: EngineSettings, cold: LocalEngine) -> None:
    """A pool of two worst cases, six long answers, growth not promised: some are preempted and computed again."""
    scheduler = SchedulerSettings(chunk_tokens=8, growth_share=0.0)
    engine = LocalEngine(replace(settings(family, "auto", num_blocks=20), scheduler=scheduler))
    requests = [request(f"r{n}", TEXT[n : n + 6], max_tokens=30) for n in range(6)]
    rows = engine.generate_all(requests)
    assert engine.num_preempted > 0
    for one in requests:
        assert [(row.token_id, row.logprobs) for row in rows[one.request_id]] == answer(cold, one)
    engine.close()


def test_huginn_refuses_it_where_noise_is_each_requests_own() -> None:
    with pytest.raises(
        ConfigError, match=r"kv\.prefix_cache is true and model\.noise_key is request.*Huginn.*position"
    ):
        LocalEngine(settings(BY_REQUEST, "on"))
    with pytest.raises(ConfigError, match="noise_key is 'seed'; allowed: request, position"):
        LocalEngine(replace(BY_REQUEST, noise_key="seed"))


@pytest.mark.parametrize("base", [FAMILIES["huginn"], BY_REQUEST], ids=lambda base: base.noise_key)
def test_requests_that_start_otherwise_share_nothing(base: EngineSettings) -> None:
    """Noise and zeros on the same tokens, in turn: each finds its own kind's blocks; noise of a request's own none."""
    cold, engine = LocalEngine(settings(base, "off")), LocalEngine(settings(base, "auto"))
    shares_noise = base.noise_key == "position"
    said = set[str]()
    for turn, state in enumerate([InitialState.NOISE, InitialState.ZEROS] * 3):
        one = request(f"r{turn}", TEXT[:18], initial_state=state, seed=turn)
        comes_again = turn > 1 and (state is InitialState.ZEROS or shares_noise)
        assert len(engine.find_cached(one)) == (18 // BLOCK if comes_again else 0)
        got = answer(engine, one)
        assert got == answer(cold, request("cold", TEXT[:18], initial_state=state, seed=turn))
        said.add(repr(got))
    assert len(said) == (2 if shares_noise else 4)
    for one_engine in (cold, engine):
        one_engine.close()


def test_another_seed_of_the_cluster_is_another_noise() -> None:
    answers = [
        answer(
            engine := LocalEngine(replace(settings(FAMILIES["huginn"], "on"), noise_seed=seed)), request("r", TEXT[:9])
        )
        for seed in (1, 2, 2)
    ]
    assert answers[0] != answers[1] == answers[2]
    engine.close()
