"""A cached digest is the digest of the files as they are, or is not used; and where the cache is."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loopline.cache import cache_folder
from loopline.model import digest_cache
from loopline.model.digest_cache import cached_digest

LATER_NS = 10_000_000_000


@dataclass
class Checkpoint:
    """Two files, and `digest()` of them that counts how often it is computed; its clock is ahead of the files."""

    folder: Path
    computed: list[str] = field(default_factory=list)
    ahead_ns: int = LATER_NS

    @property
    def files(self) -> list[Path]:
        return [self.folder / "a", self.folder / "b"]

    def digest(self, kind: str = "kind", meanwhile: Callable[[], object] = lambda: None) -> str:
        def compute() -> str:
            meanwhile()
            self.computed.append("".join(path.read_bytes().hex() for path in self.files))
            return self.computed[-1]

        return cached_digest(self.folder, self.files, kind, compute, self.now_ns)

    def now_ns(self) -> int:
        """`ahead_ns` after the newest change of a file, so that tests need not wait."""
        states = [path.stat() for path in self.files]
        return max(max(state.st_mtime_ns, state.st_ctime_ns) for state in states) + self.ahead_ns


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOPLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(cache: Path, tmp_path: Path) -> Checkpoint:
    (tmp_path / "checkpoint").mkdir()
    for name in "ab":
        (tmp_path / "checkpoint" / name).write_text(name)
    return Checkpoint(tmp_path / "checkpoint")


def record(cache: Path) -> Path:
    (found,) = (cache / "digests").iterdir()
    return found


def test_a_second_start_computes_nothing(checkpoint: Checkpoint) -> None:
    assert checkpoint.digest() == checkpoint.digest() == "6162"
    assert len(checkpoint.computed) == 1


def test_a_folder_is_known_by_where_it_leads(checkpoint: Checkpoint, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("x")
    (tmp_path / "other" / "b").write_text("y")
    assert (checkpoint.digest(), Checkpoint(tmp_path / "other").digest()) == ("6162", "7879")
    assert len(list((cache / "digests").iterdir())) == 2


def test_a_changed_file_is_read_again(checkpoint: Checkpoint) -> None:
    checkpoint.digest()
    (checkpoint.folder / "b").write_text("c")
    assert checkpoint.digest() == checkpoint.digest() == "6163"
    assert len(checkpoint.computed) == 2


def test_a_change_that_sets_the_time_back_is_seen(checkpoint: Checkpoint) -> None:
    before = (checkpoint.folder / "b").stat()
    checkpoint.digest()
    (checkpoint.folder / "b").write_text("c")
    os.utime(checkpoint.folder / "b", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checkpoint.digest() == "6163"


def test_a_file_put_in_anothers_place_is_seen(checkpoint: Checkpoint) -> None:
    checkpoint.digest()
    (checkpoint.folder / "new").write_text("c")
    os.replace(checkpoint.folder / "new", checkpoint.folder / "b")
    assert checkpoint.digest() == "6163"


def test_another_kind_of_digest_is_another(checkpoint: Checkpoint) -> None:
    checkpoint.digest("one")
    checkpoint.digest("two")
    checkpoint.digest("two")
    assert len(checkpoint.computed) == 2


@pytest.mark.parametrize("ahead_ns", [-LATER_NS, 0, 1_900_000_000])
def test_what_changed_just_now_is_not_cached(checkpoint: Checkpoint, cache: Path, ahead_ns: int) -> None:
    checkpoint.ahead_ns = ahead_ns
    checkpoint.digest()
    assert not cache.exists()


def test_a_change_during_the_computation_is_not_cached(checkpoint: Checkpoint, cache: Path) -> None:
    assert checkpoint.digest(meanwhile=lambda: (checkpoint.folder / "b").write_text("longer")) == "616c6f6e676572"
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"{}", b'{"digest": "6162"}', b"[" * 100_000],
    ids=["empty", "cut", "binary", "list", "null", "no keys", "digest alone", "deep"],
)
def test_foreign_content_is_overwritten(checkpoint: Checkpoint, cache: Path, content: bytes) -> None:
    checkpoint.digest()
    right = record(cache).read_bytes()
    record(cache).write_bytes(content)
    assert checkpoint.digest() == "6162"
    assert len(checkpoint.computed) == 2
    assert record(cache).read_bytes() == right


@pytest.mark.parametrize("digest", [None, 3, "", "not hexadecimal"])
def test_a_digest_that_is_none_is_overwritten(checkpoint: Checkpoint, cache: Path, digest: object) -> None:
    checkpoint.digest()
    record(cache).write_text(json.dumps(json.loads(record(cache).read_text()) | {"digest": digest}))
    assert checkpoint.digest() == "6162"
    assert json.loads(record(cache).read_text())["digest"] == "6162"


def test_a_cache_that_cannot_be_written_costs_only_the_caching(checkpoint: Checkpoint, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert checkpoint.digest() == checkpoint.digest() == "6162"
    assert len(checkpoint.computed) == 2


def test_a_record_that_cannot_be_replaced_leaves_no_rest(checkpoint: Checkpoint, cache: Path) -> None:
    checkpoint.digest()
    place = record(cache)
    place.unlink()
    place.mkdir()
    assert checkpoint.digest() == "6162"
    assert record(cache) == place


def test_no_home(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> Path:
        raise OSError("no home")

    monkeypatch.setattr(digest_cache, "cache_folder", no_folder)
    assert checkpoint.digest() == "6162"


def test_what_computing_raises_is_raised_and_a_missing_file_too(checkpoint: Checkpoint, cache: Path) -> None:
    def fail() -> None:
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        checkpoint.digest(meanwhile=fail)
    (checkpoint.folder / "b").unlink()
    with pytest.raises(FileNotFoundError, match="b"):
        checkpoint.digest()
    assert not cache.exists()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LOOPLINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "loopline"
    for nothing in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert cache_folder() == tmp_path / ".cache" / "loopline"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/loopline")
    monkeypatch.setenv("LOOPLINE_CACHE", "/own")
    assert cache_folder() == Path("/own")
