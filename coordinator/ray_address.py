"""Whether anybody is where a Ray cluster should be. No Ray here: it would try for a quarter of an hour, silently."""

import asyncio
import os
import re
import socket

_LIMIT_S = 5.0
_ADDRESS = re.compile(r"(?P<host>[^/\s]+):(?P<port>\d+)")  # other forms are Ray's to judge


async def look_for_head(address: str, limit_s: float = _LIMIT_S) -> None:
    """Raises ConnectionError where nobody can be connected to at HOST:PORT within the limit."""
    if (parts := _ADDRESS.fullmatch(address)) is None:
        return
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(parts["host"].strip("[]"), int(parts["port"]))
    except TimeoutError:
        raise ConnectionError(f"{address} does not answer within {limit_s:g} s") from None
    except (OSError, OverflowError, UnicodeError) as error:  # refused, no such host, no such port, no name at all
        raise ConnectionError(f"{address} cannot be connected to: {_why(error)}") from None
    writer.close()


def _why(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno)
