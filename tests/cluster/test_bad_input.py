"""What is wrong with a request, a file or a port is said with the value that was wrong, and nothing stays held."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import open_blocking_channel
from tests.support.cluster import LOOPLINE, READY_S, Cluster, launched, write_config
from tests.support.golden import GOLDEN, MODELS

IDS = loopline_pb2.TokenIds(ids=[100, 101, 102])
NAN = float("nan")


def call(address: str, **fields: Any) -> grpc.RpcError:
    """The error of one Generate call with these fields; sampling fields in `sampling`."""
    sampling = loopline_pb2.SamplingParams(**fields.pop("sampling", {}))
    with open_blocking_channel(address) as channel:
        stub: Any = loopline_pb2_grpc.LooplineStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(loopline_pb2.GenerateRequest(sampling=sampling, **fields), timeout=20))
    return caught.value


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("no prompt", {}, "prompt"),
    ("empty ids", {"token_ids": loopline_pb2.TokenIds()}, "prompt is empty"),
    ("empty text", {"text": b""}, "text is empty"),
    ("id outside the vocabulary", {"token_ids": loopline_pb2.TokenIds(ids=[5, 320])}, r"token_ids\[1\].*320.*319"),
    ("huge id", {"token_ids": loopline_pb2.TokenIds(ids=[2**32 - 1])}, "4294967295"),
    ("past the context", {"token_ids": IDS, "sampling": {"max_tokens": 2046}}, "2049.*2048"),
    ("max_tokens 0", {"token_ids": IDS, "sampling": {"max_tokens": 0}}, "max_tokens is 0"),
    ("max_tokens -1", {"token_ids": IDS, "sampling": {"max_tokens": -1}}, "max_tokens is -1"),
    ("loops 0", {"token_ids": IDS, "sampling": {"loops": 0}}, "loops is 0; allowed: 1 to 4"),
    ("loops above", {"token_ids": IDS, "sampling": {"loops": 5}}, "loops is 5; allowed: 1 to 4"),
    ("temperature below 0", {"token_ids": IDS, "sampling": {"temperature": -0.5}}, "temperature is -0.5"),
    ("temperature nan", {"token_ids": IDS, "sampling": {"temperature": NAN}}, "temperature is nan"),
    ("top_p 0", {"token_ids": IDS, "sampling": {"top_p": 0.0}}, "top_p is 0"),
    ("top_p above 1", {"token_ids": IDS, "sampling": {"top_p": 1.5}}, "top_p is 1.5"),
    ("top_p nan", {"token_ids": IDS, "sampling": {"top_p": NAN}}, "top_p is nan"),
    ("top_k below 0", {"token_ids": IDS, "sampling": {"top_k": -3}}, "top_k is -3"),
    ("min_p above 1", {"token_ids": IDS, "sampling": {"min_p": 2.0}}, "min_p is 2"),
    ("min_tokens above max", {"token_ids": IDS, "sampling": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens is 9"),
    ("repetition penalty 0", {"token_ids": IDS, "sampling": {"repetition_penalty": 0.0}}, "repetition_penalty is 0"),
    ("presence penalty", {"token_ids": IDS, "sampling": {"presence_penalty": 9.0}}, "presence_penalty is 9"),
    ("logit bias id", {"token_ids": IDS, "sampling": {"logit_bias": {999: 1.0}}}, "999"),
    ("stop id", {"token_ids": IDS, "sampling": {"stop_token_ids": [777]}}, "777"),
    ("logprobs", {"token_ids": IDS, "sampling": {"logprobs": 99}}, "logprobs is 99"),
    ("text not UTF-8", {"text": b"caf\xe9"}, "UTF-8"),
    ("deadline 0", {"token_ids": IDS, "deadline_s": 0.0}, "deadline_s is 0"),
    ("delivered too much", {"token_ids": IDS, "delivered_token_ids": [1, 2, 3], "sampling": {"max_tokens": 2}}, "3"),
]


@pytest.mark.parametrize(("fields", "text"), [case[1:] for case in REQUESTS], ids=[case[0] for case in REQUESTS])
def test_bad_requests(ouro: Cluster, fields: dict[str, Any], text: str) -> None:
    error = call(ouro.address, **fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details()
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(error.details())
    ouro.wait_idle()


def test_a_message_that_is_not_utf8(ouro: Cluster) -> None:
    messages = loopline_pb2.ChatMessages(messages=[loopline_pb2.ChatMessage(role="user", content=b"\xff\xfe")])
    error = call(ouro.address, messages=messages)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in (error.details() or "")


def test_more_than_the_arena_can_ever_hold(tmp_path: Path) -> None:
    """And, in the same cluster, text for a checkpoint without a tokenizer."""
    config = write_config(
        tmp_path / "cluster.yaml",
        GOLDEN / "ouro_fp32",
        kv={"block_size": 4},
        prefill={"num_blocks": 16, "chunk_tokens": 16},
        decode={"num_blocks": 16},
    )
    with launched(config, tmp_path) as cluster:
        error = call(cluster.address, token_ids=IDS, sampling={"max_tokens": 63})
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "66" in (error.details() or "") and "64" in (error.details() or "")
        error = call(cluster.address, text=b"def")
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "tokenizer" in (error.details() or "")
        fits = cluster.client.complete((100, 101, 102), max_tokens=62, ignore_eos=True)
        assert len(fits.token_ids) == 62
        cluster.wait_idle()


# ---- files, ports, addresses: a quick end, not zero, with the reason ---------------------------------------------


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_launch_on_a_taken_port(tmp_path: Path) -> None:
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro")
    with taken_port() as port:
        status, text = run(str(LOOPLINE), "launch", str(config), "--port", str(port))
    assert status != 0
    assert str(port) in text


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_on_a_taken_port(role: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro")
    with taken_port() as port:
        arguments = ["--config", str(config), "--coordinator", "127.0.0.1:1", "--port", str(port)]
        status, text = run(sys.executable, "-m", f"{role}_worker", *arguments)
    assert status != 0
    assert str(port) in text


def test_a_worker_that_cannot_reach_the_coordinator(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "cluster.yaml", GOLDEN / "ouro_fp32", prefill={"num_blocks": 16}, decode={"num_blocks": 16}
    )
    with taken_port() as port:
        pass  # nobody listens there any more
    address = f"127.0.0.1:{port}"
    status, text = run(sys.executable, "-m", "decode_worker", "--config", str(config), "--coordinator", address)
    assert status != 0
    assert address in text


def test_unknown_keys_and_values_of_the_yaml(tmp_path: Path) -> None:
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro")
    good = yaml.safe_load(config.read_text())
    for change, expected in (
        ({"modle": {}}, "modle"),
        ({"kv": {"block_sise": 16}}, "block_sise"),
        ({"kv": {"block_size": 0}}, "block_size"),
        ({"model": {"path": good["model"]["path"], "dtype": "fp64"}}, "fp64"),
        ({"launcher": {"kind": "moon"}}, "moon"),
    ):
        config.write_text(yaml.safe_dump({**good, **change}))
        status, text = run(str(LOOPLINE), "check", str(config))
        assert status != 0
        assert expected in text and "cluster.yaml" in text.replace("\n", "")
        status, _ = run(str(LOOPLINE), "launch", str(config))
        assert status != 0
