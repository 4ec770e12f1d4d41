"""One answer without a cluster: it is the one that a cluster of the same noise would give."""

import json
from typing import Any

from typer.testing import CliRunner

from loopline.cli.main import app
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings
from tests.support.golden import MODELS

MODEL = MODELS / "tiny-huginn"
PROMPT = tuple(b"def read_file(path):")
NEW, NOISE_SEED = 6, 2**63 + 11
RUNNER = CliRunner()
Answer = tuple[list[int], list[float]]


def _run(*arguments: str) -> dict[str, Any]:
    request = ["--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", str(NEW), "--ignore-eos", "--logprobs", "0"]
    request += ["--temperature", "0.8", "--seed", "3"]
    result = RUNNER.invoke(app, ["run", str(MODEL), "--dtype", "fp32", "--json", *request, *arguments])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def _answer(record: dict[str, Any]) -> Answer:
    return record["token_ids"], [one["logprob"] for one in record["logprobs"]]


def _of_an_engine(**noise: Any) -> Answer:
    engine = LocalEngine(EngineSettings(model_path=str(MODEL), dtype="fp32", num_blocks=8, **noise))
    params = SamplingParams(
        loops=engine.spec.default_loops, stop_ids=(), max_tokens=NEW, logprobs=0, temperature=0.8, seed=3
    )
    rows = list(engine.generate(Request(request_id="r", prompt_ids=PROMPT, params=params)))
    engine.close()
    assert all(row.token_id is not None and row.logprobs is not None for row in rows)
    return [row.token_id or 0 for row in rows], [row.logprobs.chosen for row in rows if row.logprobs is not None]


def test_noise_is_keyed_as_a_cluster_keys_it() -> None:
    by_position = _of_an_engine(noise_key="position", noise_seed=NOISE_SEED)
    assert _answer(_run("--noise-key", "position", "--noise-seed", str(NOISE_SEED))) == by_position
    by_request = _of_an_engine()
    assert _answer(_run()) == by_request
    of_default_seed = _answer(_run("--noise-key", "position"))
    assert of_default_seed == _of_an_engine(noise_key="position")
    numbers = [one[1] for one in (by_position, by_request, of_default_seed)]
    assert len({tuple(one) for one in numbers}) == 3, "the noise is seen in the numbers"


def test_this_process_is_the_route() -> None:
    record = _run("--noise-seed", "5")
    assert record["route"] == {"prefill": "local", "decode": "local", "prefix_source": "local"}
    assert record["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": NEW, "cached_tokens": 0}


def test_a_noise_key_that_does_not_exist_is_named() -> None:
    result = RUNNER.invoke(app, ["run", str(MODEL), "--prompt", "x", "--noise-key", "seed"])
    assert result.exit_code == 2
    assert "'seed'" in result.output
