"""Clusters that several test modules share; each test leaves them idle."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loopline.engine.local import LocalEngine
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.cluster import Cluster, launched, write_config
from tests.support.golden import MODELS, SMALL


@pytest.fixture(scope="session")
def ouro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker on tiny-ouro."""
    folder = tmp_path_factory.mktemp("ouro")
    telemetry: dict[str, object] = {"log_format": "json", "metrics_port": 0}
    config = write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", model={"exit_gate": True}, telemetry=telemetry)
    with launched(config, folder) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def huginn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker on tiny-huginn."""
    folder = tmp_path_factory.mktemp("huginn")
    with launched(write_config(folder / "cluster.yaml", MODELS / "tiny-huginn"), folder) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ouro_engine() -> Iterator[LocalEngine]:
    engine = _engine(MODELS / "tiny-ouro")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def small_engine() -> Iterator[LocalEngine]:
    engine = _engine(SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def huginn_engine() -> Iterator[LocalEngine]:
    engine = _engine(MODELS / "tiny-huginn")
    yield engine
    engine.close()


def _engine(checkpoint: Path) -> LocalEngine:
    scheduler = SchedulerSettings(chunk_tokens=32)  # not the cluster's: chunking must not matter
    return LocalEngine(EngineSettings(model_path=str(checkpoint), dtype="fp32", num_blocks=128, scheduler=scheduler))
