"""What the product's code must not use, because it breaks in a way that no ordinary test sees."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("loopline", "coordinator", "prefill_worker", "decode_worker", "kvtransfer", "kernels")


def test_no_queue_whose_timed_wait_may_never_end() -> None:
    """In CPython 3.11 `SimpleQueue.get(timeout=...)` after a `put` and a `get_nowait` may wait without a limit, once in
    some hundred rounds of short timeouts: a thread that polls would stand still until somebody puts something.
    """
    assert users_of("SimpleQueue(") == []


def test_no_code_between_fork_and_exec() -> None:
    """`preexec_fn` makes Python fork where it would not have to, and a fork beside gRPC's threads may abort the child:
    gRPC's handlers around a fork do nothing while another of its threads is inside a call.
    """
    assert users_of("preexec_fn=") == []


def users_of(text: str) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if text in path.read_text(encoding="utf-8")
    ]
