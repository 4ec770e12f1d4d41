"""Which requests have equal KV for equal tokens, by how noise is keyed, and the roots of their prefixes."""

import itertools
from dataclasses import replace

import pytest

from loopline.errors import ConfigError
from loopline.identity import Fingerprint
from loopline.kv.digests import request_root
from loopline.model_spec import load_model_spec
from loopline.noise_key import NO_NOISE, NoiseKey, check_prefix_cache, noise_fields, noise_name
from loopline.request import InitialState, SamplingParams
from tests.support.golden import MODELS

OURO, HUGINN = load_model_spec(MODELS / "tiny-ouro"), load_model_spec(MODELS / "tiny-huginn")
NOISE = SamplingParams(loops=4, seed=5)
ZEROS = replace(NOISE, initial_state=InitialState.ZEROS)


def group(spec: object, key: NoiseKey, seed: int = 0) -> Fingerprint:
    return Fingerprint((("weights", "w"), *noise_fields(spec, key, seed)))  # type: ignore[arg-type]


def test_names_of_noise() -> None:
    by_position, by_request = group(HUGINN, NoiseKey.POSITION, 9), group(HUGINN, NoiseKey.REQUEST, 9)
    assert [noise_name(by_position, one) for one in (NOISE, ZEROS)] == ["position 9", "zeros"]
    assert [noise_name(by_request, one) for one in (NOISE, ZEROS)] == [None, "zeros"]
    for key in NoiseKey:  # a model without noise: whatever is asked for
        assert {noise_name(group(OURO, key, 9), one) for one in (NOISE, ZEROS)} == {NO_NOISE}


def test_roots_are_equal_where_kv_is() -> None:
    """Neither the request's seed nor how it samples is in them; its depth and its noise are."""
    group_ = group(HUGINN, NoiseKey.POSITION, 9)
    assert request_root(group_, NOISE) == request_root(group_, replace(NOISE, seed=6, temperature=0.7, max_tokens=3))
    seeds = [group(HUGINN, NoiseKey.POSITION, seed) for seed in (0, 1, 10, 2**64 - 1)]
    groups = [*seeds, group(HUGINN, NoiseKey.REQUEST), group(OURO, NoiseKey.POSITION)]
    kinds = [NOISE, ZEROS, replace(NOISE, loops=8), replace(ZEROS, loops=8)]
    roots = [request_root(one, kind) for one, kind in itertools.product(groups[:-1], kinds)]
    assert roots.count(None) == 2  # of noise of the request's own
    assert len({*roots}) == len(roots) - 1
    without = {request_root(groups[-1], kind) for kind in kinds}
    assert len(without) == 2 and without.isdisjoint(roots)


def test_fingerprints_of_other_versions_share_nothing_they_should_not() -> None:
    """The coordinator takes them as they come."""
    assert noise_name(Fingerprint((("weights", "w"),)), NOISE) == NO_NOISE
    strange = Fingerprint((("noise_key", "tomorrow's"),))
    assert request_root(strange, NOISE) is None
    assert noise_name(Fingerprint((("noise_key", "position"),)), NOISE) == "position None"


def test_sharing_is_refused_where_noise_is_each_requests_own() -> None:
    with pytest.raises(ConfigError, match=r"kv\.prefix_cache is true and model\.noise_key is request: .* allowed: "):
        check_prefix_cache(HUGINN, "on", NoiseKey.REQUEST)
    check_prefix_cache(HUGINN, "on", NoiseKey.POSITION)
    check_prefix_cache(OURO, "on", NoiseKey.REQUEST)
    for choice in ("auto", "off"):
        check_prefix_cache(HUGINN, choice, NoiseKey.REQUEST)
