"""The log of a process: one line a record on standard error, as text for people or as JSON for a log store.

A record about one request carries the request's internal id as a field of its own, so that one search finds its way
through every process: `logger.info("...", extra=about(request_id))`.
"""

import logging
import time

from pythonjsonlogger.json import JsonFormatter

_REQUEST_ID = "request_id"


def about(request_id: str) -> dict[str, str]:
    """The `extra` of a record about this request."""
    return {_REQUEST_ID: request_id}


def configure_logging(process: str, log_format: str = "text", level: str = "info") -> None:
    """Send this process's log to standard error. `process`: its name, in every line; `log_format`: text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(process) if log_format == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _Text(logging.Formatter):
    """Time, process, level, logger, message and, where there is one, the request."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base class's name
        line = super().formatMessage(record)
        request_id = getattr(record, _REQUEST_ID, None)
        return line if request_id is None else f"{line} [request {request_id}]"


class _Json(JsonFormatter):
    """The same as one JSON object: time in UTC, process, level, logger, message, request_id."""

    def __init__(self, process: str) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            static_fields={"process": process},
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        self.converter = time.gmtime

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return f"{super().formatTime(record, datefmt)}.{int(record.msecs):03d}Z"
