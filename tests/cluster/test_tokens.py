"""What a cluster answers is what one engine answers, token for token, in fp32; and every answer took the whole way."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loopline.client import Completion
from loopline.engine.local import LocalEngine
from loopline.request import InitialState, Request, SamplingParams
from tests.support.cluster import Cluster, launched, write_config
from tests.support.golden import GOLDEN, MODELS, load_case, load_trained

BLOCK = 16
CHUNK = 64
TOKEN_BYTES = 6 * 4 * 2 * 4 * 64 * 4  # tiny-ouro: layers x loops x (k, v) x heads x width x fp32
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * CHUNK + 5)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "presence_penalty": 0.3}
TEXT = (MODELS / "train_tiny.py").read_bytes()


def prompt_of(length: int) -> tuple[int, ...]:
    start = 37 * length
    return tuple(TEXT[start : start + length])


def single(engine: LocalEngine, prompt: Sequence[int], **options: Any) -> list[int | None]:
    params = SamplingParams(**{"loops": engine.spec.default_loops, "stop_ids": engine.spec.stop_ids, **options})
    request = Request(request_id="single", prompt_ids=tuple(prompt), params=params)
    return [row.token_id for row in engine.generate(request) if row.token_id is not None]


def check_route(answer: Completion) -> None:
    assert answer.finished is not None
    assert answer.finished.route.prefill.startswith("prefill-")
    assert answer.finished.route.decode.startswith("decode-")
    assert answer.finished.usage.cached_tokens == 0


def both(request: pytest.FixtureRequest, family: str) -> tuple[Cluster, LocalEngine]:
    return request.getfixturevalue(family), request.getfixturevalue(f"{family}_engine")


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_cluster_equals_single_process(request: pytest.FixtureRequest, family: str, length: int, sampled: bool) -> None:
    cluster, engine = both(request, family)
    options: dict[str, Any] = {"max_tokens": 8, "seed": length, **(SAMPLED if sampled else {})}
    prompt = prompt_of(length)
    answer = cluster.client.complete(prompt, **options)
    assert list(answer.token_ids) == single(engine, prompt, **options)
    check_route(answer)
    handoff = answer.finished.handoff if answer.finished else None
    assert handoff is not None
    assert handoff.pushes == -(-length // CHUNK)
    cluster.wait_idle()


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_sixteen_requests_of_mixed_lengths_at_once(request: pytest.FixtureRequest, family: str) -> None:
    cluster, engine = both(request, family)
    cases = [
        (prompt_of(3 + 11 * n), {"max_tokens": 3 + n, "seed": 2**63 + n, **(SAMPLED if n % 2 else {})})
        for n in range(16)
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda case: cluster.client.complete(case[0], **case[1]), cases))
    for (prompt, options), answer in zip(cases, answers, strict=True):
        assert list(answer.token_ids) == single(engine, prompt, **options)
        check_route(answer)
    cluster.wait_idle()


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_fewer_loops_and_a_zero_state(request: pytest.FixtureRequest, family: str) -> None:
    cluster, engine = both(request, family)
    prompt = prompt_of(20)
    for loops in (1, engine.spec.default_loops - 1):
        options = {"max_tokens": 6, "loops": loops, "initial_state": InitialState.ZEROS}
        answer = cluster.client.complete(prompt, **options)
        assert list(answer.token_ids) == single(engine, prompt, **options)
        assert {token.depth for token in answer.tokens} == {loops}
    cluster.wait_idle()


def test_exit_probabilities_come_with_the_tokens_of_whoever_asks(ouro: Cluster, ouro_engine: LocalEngine) -> None:
    loops = ouro_engine.spec.default_loops
    asked = ouro.client.complete(prompt_of(20), max_tokens=6, exit_probabilities=True)
    for token in asked.tokens:  # the first is the prefill worker's
        assert len(token.exit_probabilities) == loops
        assert sum(token.exit_probabilities) == pytest.approx(1.0)
    plain = ouro.client.complete(prompt_of(20), max_tokens=6)
    assert plain.token_ids == asked.token_ids
    assert {token.exit_probabilities for token in plain.tokens} == {()}
    ouro.wait_idle()


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_trained_continuations(request: pytest.FixtureRequest, family: str) -> None:
    cluster = request.getfixturevalue(family)
    cases = load_trained(f"tiny-{family}")

    def complete(case: Any) -> Completion:
        options = {"max_tokens": len(case.greedy), "ignore_eos": True, "initial_state": InitialState.ZEROS}
        return cluster.client.complete(case.prompt, loops=case.loops, **options)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(complete, cases))
    for case, answer in zip(cases, answers, strict=True):
        assert answer.token_ids == case.greedy
        assert answer.text == case.text
    cluster.wait_idle()


def soak(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    "name",
    ["ouro_gqa_fp32", "huginn_r2_sharded_fp32", soak("ouro_fp32"), soak("ouro_sharded_fp32"), soak("huginn_fp32")],
)
def test_golden_sets(name: str, tmp_path: Any) -> None:
    """All cases; of Huginn's those that start from zeros, as states cannot be sent to a cluster."""
    golden = load_case(name)
    model = GOLDEN / name
    config = write_config(
        tmp_path / "cluster.yaml",
        model,
        kv={"block_size": 4},
        prefill={"num_blocks": 32, "chunk_tokens": 8},
        decode={"num_blocks": 64},
    )
    cases = [case for case in golden.cases if case.s0 is None or not case.s0.any()]
    assert cases
    with launched(config, tmp_path) as cluster:
        for case in cases:
            answer = cluster.client.complete(
                case.prompt, max_tokens=len(case.greedy), ignore_eos=True, initial_state=InitialState.ZEROS
            )
            assert answer.token_ids == case.greedy
            assert answer.text is None
        cluster.wait_idle()


def test_a_prefill_worker_finds_prompts_that_it_has_computed(ouro_engine: LocalEngine, tmp_path: Any) -> None:
    """Hits of whole blocks, of everything and of a part; the tokens stay those of one engine without a cache. The
    decode worker has the same prompts, so that of each one but the first only the last block moves."""
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro", kv={"prefix_cache": True})
    prompt = prompt_of(5 * BLOCK + 3)
    with launched(config, tmp_path) as cluster:
        cases = [(5 * BLOCK, 0, 5), (5 * BLOCK + 3, 5 * BLOCK, 1), (5 * BLOCK, 5 * BLOCK, 1), (20, BLOCK, 1)]
        for length, cached, num_moved in cases:
            answer = cluster.client.complete(prompt[:length], max_tokens=6)
            assert list(answer.token_ids) == single(ouro_engine, prompt[:length], max_tokens=6)
            assert answer.finished is not None
            assert answer.finished.usage.cached_tokens == cached
            assert answer.finished.handoff.num_bytes == num_moved * BLOCK * TOKEN_BYTES
        cluster.wait_idle()
