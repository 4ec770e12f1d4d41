"""One answer's way from token ids to text: whole characters as soon as they are there, cut before a stop string.

Each byte and each character is looked at once, however long the answer gets.
"""

import codecs
from collections.abc import Sequence


class TextStream:
    """Detokenizer of one answer. What it has given out is never taken back, whatever pieces the tokens come in."""

    def __init__(self, token_bytes: tuple[bytes, ...], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._watches = [_StopWatch(text) for text in stop if text]
        self._held = ""  # may be the beginning of a stop string
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more comes out."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; the text that is certain now. Unknown ids and special tokens have none."""
        table = self._token_bytes
        data = b"".join(table[token_id] for token_id in token_ids if token_id < len(table))
        return self._scan(self._characters.decode(data))

    def finish(self) -> str:
        """No token follows: the text that was held back. Bytes of an incomplete character become U+FFFD."""
        text = self._scan(self._characters.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _scan(self, text: str) -> str:
        """Give out what cannot belong to a stop string.

        The stop string that is complete first wins, the longest of those that end together: the only rule that does not
        depend on how the text was cut into pieces and needs no further tokens.
        """
        if self._stopped:
            return ""
        if not self._watches:
            return text
        text = self._held + text
        for index in range(len(self._held), len(text)):
            found = max(watch.feed(text[index]) for watch in self._watches)
            if found:
                self._stopped = True
                self._held = ""
                return text[: index + 1 - found]
        certain = len(text) - max(watch.matched for watch in self._watches)
        self._held = text[certain:]
        return text[:certain]


class _StopWatch:
    """Finds one stop string in text that comes character by character (Knuth, Morris, Pratt 1977).

    `matched` is the length of the longest end of the text so far that begins the stop string.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shorter = _borders(stop)
        self.matched = 0

    def feed(self, character: str) -> int:
        """The stop string's length if it ends with this character, else 0."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched if self.matched == len(self._stop) else 0


def _borders(text: str) -> list[int]:
    """For each beginning of `text`: the length of the longest shorter string that both begins and ends it."""
    borders = [0]
    for index in range(1, len(text)):
        length = borders[-1]
        while length and text[index] != text[length]:
            length = borders[length - 1]
        borders.append(length + (text[index] == text[length]))
    return borders
