"""A process that uses NIXL as far as its argument says, and then simply ends. `test_nixl_exit.py` starts it."""

import sys
import uuid

import numpy as np

from kvtransfer.nixl_agent import NixlAgent
from loopline.settings import TransferSettings


def main(how_far: str) -> None:
    if how_far == "import":
        import nixl._api  # noqa: F401 - that is all

        return
    agent = NixlAgent(f"exit-{uuid.uuid4()}", TransferSettings())
    memory = np.zeros(1 << 16, dtype=np.uint8)
    if how_far in ("registered", "closed"):
        agent.register(memory.ctypes.data, memory.nbytes, "DRAM", 0)
        agent.metadata()
    if how_far == "closed":
        agent.close()
    if how_far == "raising":
        raise SystemExit(7)


if __name__ == "__main__":
    main(sys.argv[1])
