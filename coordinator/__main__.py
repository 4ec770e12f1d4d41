"""`python -m coordinator --config CONFIG`: one coordinator process.

Exit status 0 after a stop in order, 2 where the operator must change something (one line on standard error says what).
"""

import argparse
import asyncio
import sys
from pathlib import Path

from coordinator.server import ServerOptions, serve
from loopline.errors import OperatorError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator", description="The front door of a Loopline cluster.")
    parser.add_argument("--config", type=Path, required=True, help="cluster YAML")
    parser.add_argument("--port", type=int, help="port to listen on; by default the configuration's, 0: any free one")
    parser.add_argument("--listen-file", type=Path, help="file to write the address to once it listens")
    parser.add_argument("--drain-limit", type=float, help="seconds for running requests when told to leave")
    parser.add_argument("--life-fd", type=int, help="read end of a pipe; its end-of-file ends this process")
    options = parser.parse_args()
    try:
        asyncio.run(
            serve(
                ServerOptions(
                    config_path=options.config,
                    port=options.port,
                    listen_file=options.listen_file,
                    drain_limit_s=options.drain_limit,
                    life_fd=options.life_fd,
                )
            )
        )
    except OperatorError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
