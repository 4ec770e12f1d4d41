"""The families whose prefixes are shared, as engines that a module's tests have in common."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from loopline.engine.engine import Engine
from loopline.engine.local import LocalEngine
from loopline.settings import EngineSettings
from tests.support.families import FAMILIES
from tests.support.pair import BLOCK_SIZE, make_engines


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> EngineSettings:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def engines(family: EngineSettings) -> tuple[Engine, Engine, Engine]:
    """A prefill and a decode worker's, and one of another prefill worker that only warms the decode worker."""
    prefill, decode = make_engines(num_blocks=96, base=family)
    return prefill, decode, make_engines(num_blocks=96, base=family)[0]


@pytest.fixture(scope="module")
def cold(family: EngineSettings) -> Iterator[LocalEngine]:
    """An engine without a cache."""
    engine = LocalEngine(replace(family, block_size=BLOCK_SIZE, num_blocks=24, prefix_cache="off"))
    yield engine
    engine.close()
