import json
import logging
from collections.abc import Iterator

import pytest

from loopline.telemetry.logs import about, configure_logging


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_its_request_as_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode-0", "json")
    logging.getLogger("decode_worker.handoff_in").warning("handed %d blocks", 3, extra=about("5f0c"))
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "process": "decode-0",
        "logger": "decode_worker.handoff_in",
        "message": "handed 3 blocks",
        "request_id": "5f0c",
    }


def test_an_error_stays_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("coordinator", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "two\nlines" in json.loads(line)["exc_info"]


def test_a_text_line_ends_with_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("prefill-1", level="warning")
    logging.getLogger("x").info("not written")
    logging.getLogger("x").warning("slow", extra=about("5f0c"))
    logging.getLogger("x").warning("of no request")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("prefill-1 WARNING x: slow [request 5f0c]")
    assert second.endswith("prefill-1 WARNING x: of no request")
