"""The other process of the transport suite: a NIXL agent that owns a small arena and polls. Run as a script.

Reads one command a line on stdin, answers one JSON object a line on stdout:
`describe`, `expect COUNT` (poll until COUNT notices came; with the sum of the arena), `quit`. It polls only in
`expect` and `drive`. `push ADDRESS SIZE METADATA [NOTICE]` fills its arena with ones and posts a write of its first
SIZE bytes that it does not look after; `drive` polls all these writes until they have ended, and says how.
"""

import json
import sys
import time

import numpy as np

from kvtransfer.agent import Handle
from kvtransfer.manifest import Descriptors
from kvtransfer.nixl_agent import NixlAgent
from loopline.settings import TransferSettings

DEADLINE_S = 30.0


def main() -> None:
    name, num_bytes = sys.argv[1], int(sys.argv[2])
    agent = NixlAgent(name, TransferSettings(ucx=(("TLS", "tcp"), ("NET_DEVICES", "lo"))))
    arena = np.zeros(num_bytes, dtype=np.uint8)
    agent.register(arena.ctypes.data, num_bytes, "DRAM", 0)
    peers: dict[str, str] = {}  # by their metadata
    handles: list[Handle] = []
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: dict[str, object] = {}
        if command == "describe":
            answer = {"metadata": agent.metadata().hex(), "address": arena.ctypes.data}
        elif command == "expect":
            notices: list[tuple[str, str]] = []
            deadline_s = time.monotonic() + DEADLINE_S
            while len(notices) < int(arguments[0]) and time.monotonic() < deadline_s:
                notices += [(peer, notice.hex()) for peer, notice in agent.take_notices()]
            answer = {"notices": notices, "sum": int(arena.sum(dtype=np.uint64))}
        elif command == "push":
            arena[:] = 1
            address, size = int(arguments[0]), int(arguments[1])
            if arguments[2] not in peers:
                peers[arguments[2]] = agent.add_peer(bytes.fromhex(arguments[2]))
            notice = bytes.fromhex(arguments[3]) if len(arguments) > 3 else b"from a dying writer"
            sides = [Descriptors("DRAM", np.array([[at, size, 0]], np.uint64)) for at in (arena.ctypes.data, address)]
            handles.append(agent.post_write(peers[arguments[2]], sides[0], sides[1], notice))
        elif command == "drive":
            while not all(agent.poll(handle).is_terminal for handle in handles):
                agent.take_notices()
            answer = {"ended": [agent.poll(handle).state.value for handle in handles]}
        elif command == "quit":
            break
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    agent.close()


if __name__ == "__main__":
    main()
