"""Whatever a cluster's file holds, it is a configuration or a fault of one line, which shows no token."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loopline.config import load_config
from loopline.errors import ConfigError

TOKEN = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
KEYS = st.sampled_from(
    [
        *("model", "path", "kv", "block_size", "coordinator", "host", "port", "launcher", "kind", "prefill_labels"),
        *("transfer", "ucx", "UCX_A", "faults", "worker", "do", "security", "tls", "ca_file", "unified", "replicas"),
        *("[key]", "a\nb", "{allowed}", TOKEN),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["{allowed}", "ray", "kill", TOKEN]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(KEYS | st.integers(0, 9) | st.none(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(KEYS | st.integers(0, 9), VALUES, max_size=4))
@example({"kv": {"[key]": 1}})
@example({"[key]": 1})
@example({"coordinator": {"host": "a\nb"}})
@example({"coordinator": TOKEN})
@example({"launcher": {"kind": "ray", "prefill_labels": {TOKEN: 1, "[key]": 1}}})
@example({"transfer": {"ucx": {TOKEN: 1}}})
@example({"faults": [{"worker": "decode-0", "do": "kill", 3: 1}]})
@example({"faults": [{"worker": "decode-0", "do": "kill", TOKEN: 1}]})
def test_any_file_is_a_configuration_or_one_line_without_a_token(tmp_path: Path, content: dict[Any, Any]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "m"}} | content), encoding="utf-8")
    try:
        load_config(file)
    except ConfigError as error:
        assert str(error).isprintable() and TOKEN not in str(error)
