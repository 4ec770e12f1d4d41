"""The Python client of a cluster: `Client` blocks, `AsyncClient` is for asyncio; both speak the public gRPC API.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("def main():", max_tokens=32):
            ...

A prompt is text, token ids, or `Chat`; the options are the fields of `loopline.intake.RequestOptions`. Nothing heavy is
imported: no torch, no tokenizer.
"""

from loopline.client.asynchronous import AsyncClient
from loopline.client.blocking import Client
from loopline.client.records import (
    Accepted,
    Chunk,
    ClusterStatus,
    Completion,
    Event,
    Finished,
    LinkInfo,
    ModelInfo,
    Token,
    WorkerInfo,
)
from loopline.intake import Chat, RequestOptions
from loopline.security import Credentials

__all__ = [
    "Accepted",
    "AsyncClient",
    "Chat",
    "Chunk",
    "Client",
    "ClusterStatus",
    "Completion",
    "Credentials",
    "Event",
    "Finished",
    "LinkInfo",
    "ModelInfo",
    "RequestOptions",
    "Token",
    "WorkerInfo",
]
