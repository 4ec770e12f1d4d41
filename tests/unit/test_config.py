"""A cluster YAML: defaults, paths, slices, and the one error that names file, key, value and what is allowed."""

import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from coordinator.starters import make_starter
from loopline.config import ClusterConfig, load_config
from loopline.config_sections import ModelConfig
from loopline.errors import ConfigError
from loopline.identity import Role


def _write(folder: Path, text: str) -> Path:
    path = folder / "two-workers.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _fault(folder: Path, text: str) -> str:
    path = _write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_path_alone_is_a_whole_configuration(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, "model: {path: models/x}"))
    assert config.name == "two-workers"
    assert config.model.path == str(tmp_path.resolve() / "models/x")
    assert (config.prefill.max_running, config.decode.max_running) == (4, 32)
    assert config.limits.max_message_bytes == 16 * 1024 * 1024


def test_worker_settings_are_the_roles_own_slice(tmp_path: Path) -> None:
    text = """
        model: {path: /m, dtype: fp32, max_loops: 3, noise_key: position, noise_seed: 18446744073709551615}
        kv: {block_size: 8}
        prefill: {num_blocks: 7, chunk_tokens: 64}
        decode: {num_blocks: 9, deterministic: false, num_threads: 2}
        transfer: {ucx: {UCX_TLS: tcp, UCX_A: "1"}, error_mode: none, verify: off}
        membership: {drain_limit_s: 4}
        launcher: {rebalance: off}
    """
    config = load_config(_write(tmp_path, text))
    prefill = config.worker_settings("prefill", "p0", "127.0.0.1:5")
    decode = config.worker_settings("decode", "d0", "127.0.0.1:5", port=77)
    assert (prefill.engine.num_blocks, prefill.engine.scheduler.chunk_tokens, prefill.port) == (7, 64, 0)
    assert (decode.engine.num_blocks, decode.engine.num_threads, decode.port) == (9, 2, 77)
    assert decode.engine.model_path == "/m"
    assert (decode.engine.dtype, decode.engine.max_loops, decode.engine.block_size) == ("fp32", 3, 8)
    for engine in (prefill.engine, decode.engine):
        assert (engine.noise_key, engine.noise_seed) == ("position", 2**64 - 1)
    assert prefill.drain_limit_s == decode.drain_limit_s == 4
    assert decode.transfer.ucx == (("UCX_A", "1"), ("UCX_TLS", "tcp"))
    assert (decode.transfer.error_mode, decode.transfer.verify) == ("none", "off")
    assert config.launcher.rebalance == "off"
    with pytest.raises(ConfigError, match="prefill, decode"):
        config.worker_settings("both", "x", "y")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", (1, 1, 0)),
        ("decode: {replicas: 2}", (1, 2, 0)),
        ("unified: {replicas: 2}", (0, 0, 2)),
        ("unified: {replicas: 2}\nprefill: {}", (1, 1, 2)),
        ("unified: {replicas: 1}\nprefill: {replicas: 2}\ndecode: {replicas: 3}", (2, 3, 1)),
        ("unified: {replicas: 1}\nprefill: {replicas: 0}\ndecode: {replicas: 0}", (0, 0, 1)),
    ],
)
def test_who_is_in_a_cluster(tmp_path: Path, text: str, counts: tuple[int, int, int]) -> None:
    config = load_config(_write(tmp_path, f"model: {{path: m}}\n{text}"))
    assert tuple(config.group(role).replicas for role in Role) == counts


def test_a_unified_worker_has_a_slice_of_its_own_and_no_transport(tmp_path: Path) -> None:
    text = "model: {path: /m}\nunified: {replicas: 1, num_blocks: 5, prefill_share_tokens: 48, growth_share: 0.5}"
    settings = load_config(_write(tmp_path, text)).worker_settings("unified", "u0", "127.0.0.1:5")
    scheduler = settings.engine.scheduler
    assert (settings.role, settings.transfer.backend, settings.engine.num_blocks) == ("unified", "none", 5)
    assert (scheduler.prefill_tokens_per_loop, scheduler.growth_share, scheduler.max_running) == (48, 0.5, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x", "model is missing; needed: a mapping with the keys path, dtype"),
        ("model: {}", "model.path is missing; needed: text"),
        ("model: {path: ''}", "model.path is ''; allowed: text"),
        ("model: {path: m, dtype: fp8}", "model.dtype is 'fp8'; allowed: auto or fp32 or bf16"),
        (
            "model: {path: m, depth: 3}",
            "model.depth: no such key; allowed: path, dtype, max_loops, load_format, prefill, initial_state",
        ),
        (
            "model: {path: m}\nprefill: {replicas: 0}",
            "prefill.replicas is 0; allowed: at least 1 where there are decode workers",
        ),
        (
            "model: {path: m}\nunified: {replicas: 2}\ndecode: {replicas: 0}",
            "decode.replicas is 0; allowed: at least 1 where there are prefill workers; prefill.replicas is 1 by "
            "default: set it to 0 too",
        ),
        (
            "model: {path: m}\nunified: {replicas: 2}\nprefill: {replicas: 0}",
            "prefill.replicas is 0; allowed: at least 1 where there are decode workers; decode.replicas is 1 by "
            "default: set it to 0 too",
        ),
        (
            "model: {path: m}\nunified: {replicas: 2}\nprefill: {replicas: 0}\ndecode: {replicas: 3}",
            "prefill.replicas is 0; allowed: at least 1 where there are decode workers",
        ),
        (
            "model: {path: m}\nprefill: {replicas: 0}\ndecode: {replicas: 0}",
            "unified.replicas is 0; allowed: at least 1 where there are no prefill and decode workers",
        ),
        (
            "model: {path: m}\nunified: {replicas: 0}",
            "unified.replicas is 0; allowed: at least 1 where there are no prefill and decode workers",
        ),
        (
            "model: {path: m}\nunified: {replicas: 1, chunk_tokens: 20}",
            "unified.chunk_tokens is 20; allowed: a multiple of kv.block_size (16)",
        ),
        (
            "model: {path: m}\nunified: {replicas: 1}\nfaults: [{worker: unified-0, do: drop_notice}]",
            "faults.0.do is 'drop_notice'; allowed: drop_message,",
        ),
        ("model: {path: m}\nprefil: {}", "prefil: no such key; allowed: name, model, kv,"),
        ("model: {path: m}\nkv: {block_size: 0}", "kv.block_size is 0; allowed: a whole number, at least 1"),
        ("model: {path: m}\nkv: {block_size: '16'}", "kv.block_size is '16'; allowed: a whole number, at least 1"),
        (
            "model: {path: m}\ntelemetry: {otlp_endpoint: 'collector:4317'}",
            "telemetry.otlp_endpoint is 'collector:4317'; allowed: http://HOST:PORT or https://HOST:PORT or null",
        ),
        ("model: {path: m}\nkv: {prefix_cache: 3}", "kv.prefix_cache is 3; allowed: auto or true or false"),
        ("model: {path: m, noise_key: seed}", "model.noise_key is 'seed'; allowed: request or position"),
        (
            "model: {path: m, noise_seed: -1}",
            "model.noise_seed is -1; allowed: a whole number, at least 0, at most 184467",
        ),
        ("model: {path: m}\ndecode: {steps_ahead: 2}", "decode.steps_ahead is 2; allowed: 0 or 1 or null"),
        ("model: {path: m}\ntransfer: {verify: on}", "transfer.verify is True; allowed: off or digest"),
        ("model: {path: m}\nlauncher: {rebalance: on}", "launcher.rebalance is True; allowed: off or auto"),
        (
            "model: {path: m}\nlauncher: {rebalance_patience_s: 0.5}",
            "launcher.rebalance_patience_s is 0.5; allowed: a number, at least 1",
        ),
        ("model: {path: m}\nkv: 16", "kv is 16; allowed: a mapping with the keys block_size"),
        (
            "model: {path: m}\ndecode: {num_blocks: x}",
            "decode.num_blocks is 'x'; allowed: a whole number, at least 1 or",
        ),
        ("model: {path: m}\ndecode: {device: tpu}", "decode.device is 'tpu'; allowed: cpu, cuda or cuda:N"),
        ("model: {path: m}\ndecode: {deterministic: 1}", "decode.deterministic is 1; allowed: true or false"),
        (
            "model: {path: m}\ncoordinator: {port: 70000}",
            "coordinator.port is 70000; allowed: a whole number, at least 0, at most 65535",
        ),
        ("model: {path: m}\nmembership: {lease_s: 0}", "membership.lease_s is 0; allowed: a number, above 0"),
        ("model: {path: m}\nmembership: {lease_s: .nan}", "membership.lease_s is nan; allowed: a number, above 0"),
        (
            "model: {path: m}\ntransfer: {ucx: {TLS: tcp}}",
            "transfer.ucx.TLS is 'TLS'; allowed: a mapping of UCX_NAME to t",
        ),
        ("model: {path: m}\ntransfer: {ucx: {UCX_A: 1}}", "transfer.ucx.UCX_A is 1; allowed: text (quote numbers)"),
        (
            "model: {path: m}\nprefill: {chunk_tokens: 40}",
            "prefill.chunk_tokens is 40; allowed: a multiple of kv.block",
        ),
        ("model: {path: m}\ndecode: {num_threads: 2}", "decode.num_threads is 2; allowed: 1, or more with determin"),
        ("- a\n- b", "holds ['a', 'b']; allowed: a mapping with the keys name, model"),
        ("", "holds None; allowed: a mapping"),
        ("model: {path: m}\n? [a]\n: b", "line 2"),
        ("model: {path: m}\n5: b", "5: no such key; allowed: name, model"),
        ("model: {path: m}\nkv: {7: 5}", "kv.7: no such key; allowed: block_size"),
        ("model: {path: m}\nname: [", "line 2, column 8: "),
        ("model: {path: m}\nname: a\nname: b", "line 3, column 1: the key 'name' is there twice"),
    ],
)
def test_a_fault_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, expected: str) -> None:
    assert _fault(tmp_path, text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {path: ~nosuchuser/x}", "path names no path that can be followed"),
        ('model: {path: "a\\0b"}', "path names no path that can be followed"),
        ("{model: {path: x}, security: {cluster_token_file: ~nosuchuser/x}}", "cluster_token_file names no path"),
        ("{model: {path: x}, name: 2024-99-99}", "line 1, column 26: not a value of the type timestamp"),
        (f"{{model: {{path: x}}, coordinator: {{port: {'9' * 5000}}}}}", "not a value of the type int"),
        ("{model: {path: x}, coordinator: {port: !!bool x}}", "not a value of the type bool"),
        ("{model: {path: x}, name: !!timestamp x}", "not a value of the type timestamp"),
        (f"{{model: {{path: x}}, security: {{{'S' * 40}: 1}}}}", "security.a key of 40 characters: no such key"),
        (f"{{model: {{path: x}}, {'S' * 40}: 1, {'S' * 40}: 2}}", "a key of 40 characters is there twice"),
        (
            f"{{model: {{path: x}}, kv: {{block_size: -0x{'f' * 5000}}}}}",
            "kv.block_size is a value of type int; allowed:",
        ),
        (f"0x{'f' * 5000}", "holds a value of type int; allowed: a mapping"),
        (f"name: {'[' * 5000}", "nested too deeply"),
    ],
)
def test_what_cannot_even_be_read_is_a_fault_of_the_file(tmp_path: Path, text: str, expected: str) -> None:
    fault = _fault(tmp_path, text)
    assert expected in fault
    assert "SSS" not in fault


@pytest.mark.parametrize("host", ["10.0.0.1", "head", "fd00::1"])
def test_no_workers_are_launched_on_loopback_where_those_of_other_machines_may_join(tmp_path: Path, host: str) -> None:
    """Such workers would be refused once their models are loaded. To start all by hand the file is right."""
    config = load_config(_write(tmp_path, f"{{model: {{path: m}}, coordinator: {{host: '{host}'}}}}"))
    expected = "launcher.host is 127.0.0.1; allowed: an address that other machines reach"
    with pytest.raises(ConfigError, match=f"{expected}.*{host}"):
        config.require_reachable_workers()
    with pytest.raises(ConfigError, match=expected):
        make_starter(config, tmp_path / "cluster.yaml")
    for launcher in ("host: 10.0.0.1", "host: 0.0.0.0", "kind: ray"):
        text = f"{{model: {{path: m}}, coordinator: {{host: '{host}'}}, launcher: {{{launcher}}}}}"
        load_config(_write(tmp_path, text)).require_reachable_workers()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "::1", "0.0.0.0", "::"])
def test_workers_of_one_machine_are_on_loopback_by_default(tmp_path: Path, host: str) -> None:
    config = load_config(_write(tmp_path, f"{{model: {{path: m}}, coordinator: {{host: '{host}'}}}}"))
    config.require_reachable_workers()
    assert config.launcher.host == "127.0.0.1"


@pytest.mark.parametrize("key", ["coordinator.host", "launcher.host"])
def test_what_is_no_host_is_refused(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    fault = _fault(tmp_path, f"{{model: {{path: m}}, {section}: {{{name}: '10.0.0.1:50051'}}}}")
    assert fault.startswith(f"{key} is 10.0.0.1:50051; allowed: a name or an address, without a port")


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("address: auto", "launcher.address is auto; allowed: only with launcher.kind: ray"),
        ("prefill_labels: {a: b}", "launcher.prefill_labels is {'a': 'b'}; allowed: only with launcher.kind: ray"),
        ("kind: ray, host: 10.0.0.1", "launcher.host is 10.0.0.1; allowed: only with launcher.kind: local"),
        (
            "kind: ray, address: 'ray://head:10001'",
            "launcher.address is 'ray://head:10001'; allowed: auto, local or HO",
        ),
        ("kind: ray, address: head", "launcher.address is 'head'; allowed: auto, local or HOST:PORT"),
        (
            "kind: ray, decode_resources: {big: 0}",
            "launcher.decode_resources.big is 0; allowed: a number, above 0",
        ),
        (
            "kind: ray, decode_labels: {zone: 1}",
            "launcher.decode_labels.zone is 1; allowed: A, !A, in(A,B) or !in(A,B), where A and B",
        ),
        (
            "kind: ray, prefill_labels: {pool: 'in(decode'}",
            "launcher.prefill_labels.pool is 'in(decode'; allowed: A, !A, in(A,B) or !in(A,B), wh",
        ),
    ],
)
def test_what_only_one_kind_of_launcher_has(tmp_path: Path, launcher: str, expected: str) -> None:
    assert _fault(tmp_path, f"{{model: {{path: m}}, launcher: {{{launcher}}}}}").startswith(expected)


def test_a_number_of_workers_is_bounded_and_a_default_that_does_not_fit_is_said_to_be_one(tmp_path: Path) -> None:
    fault = _fault(tmp_path, "{model: {path: m}, decode: {replicas: 10000000}}")
    assert fault.startswith("decode.replicas is 10000000; allowed: a whole number, at least 0, at most 1000")
    chunks = "prefill: {chunk_tokens: 1024}, decode: {chunk_tokens: 1024}"
    fault = _fault(tmp_path, f"{{model: {{path: m}}, kv: {{block_size: 1024}}, {chunks}}}")
    assert (
        fault
        == "unified.chunk_tokens is 256; allowed: a multiple of kv.block_size (1024); that is the default: set another"
    )


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_config(binary)


def test_a_configuration_is_frozen_and_checked_when_built_in_code() -> None:
    config = ClusterConfig(model=ModelConfig(path="m"))
    with pytest.raises(pydantic.ValidationError):
        config.name = "other"  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError, match="multiple of kv"):
        ClusterConfig.model_validate({"model": {"path": "m"}, "kv": {"block_size": 48}})


def test_every_field_has_a_docstring() -> None:
    sections = [ClusterConfig, *(field.annotation for field in ClusterConfig.model_fields.values())]
    for section in sections:
        if isinstance(section, type) and issubclass(section, pydantic.BaseModel):
            assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_configuration_loads_without_torch() -> None:
    code = "import sys, loopline.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
