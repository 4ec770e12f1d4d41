"""A conversation with Huginn in a cluster whose noise is keyed by position: later turns find the KV of earlier ones,
and every turn's tokens are those of one engine without a cache that keys noise in the same way, whatever the seeds."""

from pathlib import Path
from typing import Any

import pytest

from loopline.client import Completion
from loopline.engine.local import LocalEngine
from loopline.request import InitialState
from loopline.settings import EngineSettings
from tests.support.asking import RETURN_S, alone, prompt_of
from tests.support.cluster import Cluster, launched, write_config
from tests.support.golden import MODELS

pytestmark = pytest.mark.timeout(240)
BLOCK = 16
FIRST, REST, ANSWER, TURNS = 3 * BLOCK + 5, 7, 12, 3
NOISE: dict[str, object] = {"noise_key": "position", "noise_seed": 2**63 + 11}


def ask(cluster: Cluster, prompt: tuple[int, ...], **options: Any) -> Completion:
    return cluster.client.complete(prompt, max_tokens=ANSWER, ignore_eos=True, deadline_s=RETURN_S, **options)


def test_later_turns_find_earlier_ones_and_say_what_a_cold_engine_says(tmp_path: Path) -> None:
    cold = LocalEngine(
        EngineSettings(
            model_path=str(MODELS / "tiny-huginn"),
            dtype="fp32",
            num_blocks=64,
            prefix_cache="off",
            noise_key="position",
            noise_seed=2**63 + 11,
        )
    )
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-huginn", model=NOISE, kv={"prefix_cache": True})
    with launched(config, tmp_path) as cluster:
        prompt, written = prompt_of(1, FIRST), 0
        for turn in range(TURNS):
            answer = ask(cluster, prompt, seed=turn)
            assert answer.token_ids == alone(cold, prompt, ANSWER)
            assert answer.finished is not None
            handoff = answer.finished.handoff
            in_decode = written // BLOCK * BLOCK
            assert handoff.num_bytes == (-(-len(prompt) // BLOCK) - in_decode // BLOCK) * BLOCK * cluster_token_bytes()
            assert (answer.finished.usage.cached_tokens > 0) == (turn > 0)
            written = len(prompt) + ANSWER - 1  # of the last token there is no KV
            prompt += answer.token_ids + prompt_of(2 + turn, REST)
        zeros = ask(cluster, prompt, initial_state=InitialState.ZEROS)  # the same tokens, from another state
        assert zeros.finished is not None and zeros.finished.usage.cached_tokens == 0
        again = ask(cluster, prompt, initial_state=InitialState.ZEROS)
        assert again.finished is not None and again.finished.usage.cached_tokens > 0
        assert again.token_ids == zeros.token_ids
        cluster.wait_idle()
    cold.close()


def cluster_token_bytes() -> int:
    """KV bytes of a token: 2 + 4 x 8 + 2 planes of keys and values, 4 heads of 64 numbers in float32."""
    return (2 + 4 * 8 + 2) * 2 * 4 * 64 * 4
