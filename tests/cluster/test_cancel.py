"""Clients that leave: killed mid-stream, closing early, cancelling at any moment. Nothing stays held anywhere."""

import asyncio
import os
import random
import subprocess

from loopline.client import Accepted, AsyncClient, Chunk
from tests.support.cluster import LOOPLINE, Cluster

ROUNDS = 200
LONG_ANSWER = 80
"""Tokens that no machine generates in most of the limits."""
PROMPT = tuple(b"def main(arguments):\n    parser = argparse.ArgumentParser(description=__doc__)\n" * 2)


def test_killing_the_client_mid_stream_frees_everything(ouro: Cluster) -> None:
    command = [str(LOOPLINE), "generate", "--address", ouro.address, "--prompt", "class Parser:"]
    client = subprocess.Popen([*command, "--max-tokens", "900", "--ignore-eos"], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert os.read(client.stdout.fileno(), 1), "text arrives while the answer is made"
    assert ouro.client.status().running == 1
    client.kill()
    client.wait()
    client.stdout.close()
    ouro.wait_idle()


def test_closing_the_stream_at_each_event_frees_everything(ouro: Cluster) -> None:
    for most_events in range(4):
        stream = ouro.client.generate(PROMPT, max_tokens=600, ignore_eos=True)
        for event, _ in zip(stream, range(most_events + 1), strict=False):
            assert isinstance(event, Accepted | Chunk)
        stream.close()
    ouro.wait_idle()


def test_random_sends_and_cancels(ouro: Cluster) -> None:
    """Requests are cut off after a random time of their life, 8 at a time; the next one is answered right."""
    generator = random.Random(20)
    expected = ouro.client.complete(PROMPT, max_tokens=4).token_ids
    limits = [generator.choice((0.0, 0.002, 0.01, 0.05, 0.1, 0.2, 0.4)) for _ in range(ROUNDS)]
    lengths = [generator.randrange(1, len(PROMPT)) for _ in range(ROUNDS)]

    async def send_and_cancel(client: AsyncClient, room: asyncio.Semaphore, limit_s: float, length: int) -> bool:
        async with room:
            try:
                await asyncio.wait_for(
                    client.complete(PROMPT[:length], max_tokens=LONG_ANSWER, ignore_eos=True), limit_s
                )
            except TimeoutError:
                return True
            return False

    async def all_of_them() -> int:
        room = asyncio.Semaphore(8)
        async with AsyncClient(ouro.address) as client:
            calls = [
                send_and_cancel(client, room, limit_s, length) for limit_s, length in zip(limits, lengths, strict=True)
            ]
            return sum(await asyncio.gather(*calls))

    assert asyncio.run(all_of_them()) > ROUNDS // 2
    ouro.wait_idle()
    assert ouro.client.complete(PROMPT, max_tokens=4).token_ids == expected
