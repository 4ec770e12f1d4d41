"""Files of profiles and reports that are damaged: a plan or one line that names the file, never a traceback."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopline.bench.shapes import SHAPES
from loopline.capacity.plan import make_plan
from loopline.capacity.profiles import PROFILES, read_profile
from loopline.capacity.workers import Workload
from loopline.config import ClusterConfig
from loopline.errors import ConfigError

DATA = Path(__file__).parents[2] / "data/capacity"
H200 = PROFILES["h200"]
LOAD = Workload(prompt_tokens=1024, new_tokens=256, rate=3.0)
CONFIG = ClusterConfig.model_validate(
    {"model": {"path": "m", "dtype": "bf16"}, "prefill": {"device": "cuda"}, "decode": {"device": "cuda"}}
)


def _engine() -> Any:
    return json.loads((DATA / "h200-ouro-1.4b.json").read_text(encoding="utf-8"))


def _transfer() -> Any:
    return json.loads((DATA / "h200-nvlink.json").read_text(encoding="utf-8"))


def _profile() -> Any:
    return H200.model_dump() | {"base": "gh200-96"}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


VALUES = (
    st.sampled_from([0, -1, 1e-300, 1e300, 10**400, math.nan, math.inf, -math.inf, "8", "x", "", None, True])
    | st.sampled_from([[], {}, [1], {"a": 1}, [[]], "h200", {"median_ms": -1}, 10**9])
    | st.floats()
    | st.integers()
)


def _plan_or_fault(file: Path) -> str | None:
    """The fault in words; None: there is a plan, and its figures are figures."""
    try:
        profile = read_profile(str(file), H200, lambda name: SHAPES.get(name, SHAPES["ouro-1.4b"]))
        plan = make_plan(CONFIG, SHAPES["ouro-1.4b"], (profile, profile), LOAD)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return str(error)
    figures = [*plan.rates.values(), plan.decode.full.expected_s, plan.prefill.one_prompt.expected_s]
    assert all(math.isfinite(one) and one >= 0 for one in figures)
    return None


@pytest.mark.parametrize("kind", ["engine", "transfer", "profile"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_damaged_file_gives_a_plan_or_one_line(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    content = {"engine": _engine, "transfer": _transfer, "profile": _profile}[kind]()
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(list(_places(content))))
        if key in container or (isinstance(container, list) and key < len(container)):
            if isinstance(container, dict) and data.draw(st.booleans()):
                del container[key]
            else:
                container[key] = copy.deepcopy(data.draw(VALUES))
    file = tmp_path / ("profile.yaml" if kind == "profile" else "report.json")
    file.write_text(yaml.safe_dump(content) if kind == "profile" else json.dumps(content), encoding="utf-8")
    fault = _plan_or_fault(file)
    assert fault is None or str(file) in fault or "profile" in fault


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("rates", "copy_bytes_per_s"), 0, "rates.copy_bytes_per_s is 0; allowed: a number, at least 1"),
        (("rates", "matmul_flops_per_s"), math.nan, "rates.matmul_flops_per_s is nan; allowed: a number"),
        (("decode", 0, "rows"), "8", "decode.0.rows is '8'; allowed: a whole number, at least 1"),
        (("decode", 0, "rows"), 10**400, "decode.0.rows is 1000"),
        (("decode", 0, "context"), -100, "decode.0.context is -100; allowed: a whole number, at least 0"),
        (("prefill", 0, "tokens"), 0, "prefill.0.tokens is 0"),
        (("decode", 0, "arms", "engine", "median_ms"), -3, "decode.0.arms.engine.median_ms is -3; allowed: a number"),
        (("decode", 0, "arms"), None, "decode.0.arms is None; allowed: a mapping with the keys engine, packed"),
        (("decode",), {}, "decode is {}; allowed: a list of values, each a mapping with the keys rows"),
        (("model", "dtype"), "fp8", "model.dtype is 'fp8'; allowed: fp32 or bf16"),
        (("model",), None, "model is None; allowed: a mapping with the keys name, loops, dtype"),
    ],
)
def test_a_fault_of_a_report_names_key_and_value(
    tmp_path: Path, where: tuple[Any, ...], value: Any, words: str
) -> None:
    report = _engine()
    part = report
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    assert words in (_plan_or_fault(tmp_path / "report.json") or "")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deep.json", "[" * 100_000, "nested too deeply"),
        ("deep.yaml", "[" * 5_000, "nested too deeply"),
        ("nan.json", "NaN", "holds no mapping"),
        ("empty.yaml", "", "holds no mapping"),
        ("base.yaml", "base: [h200]", "base is ['h200']; allowed: h200"),
        ("zero.yaml", "flops_per_s: {fp32: 0}", "flops_per_s.fp32 is 0; allowed: a number, at least 1"),
        ("inf.yaml", "layer_pass_s: .inf", "layer_pass_s is inf; allowed: a number, at least 0"),
        ("key.yaml", "{null: 1}", "allowed: name, source"),
        ("default.yaml", "default_link: pigeon", "link is 'pigeon'"),
        ("bad.yaml", "a: [1\nb: 2", "cannot be read as a profile"),
        ("date.yaml", "name: 2024-99-99", "cannot be read as a profile"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    fault = _plan_or_fault(tmp_path / name)
    assert fault is not None and words in fault and str(tmp_path / name) in fault


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("bytes_per_s: 3e12", encoding="utf-8")
    assert read_profile(str(tmp_path / "ours.yaml"), H200, SHAPES.__getitem__).bytes_per_s == 3e12
