"""Just enough of Redis' wire protocol to tell one command, and one reply, from the next."""

from __future__ import annotations

from collections.abc import Iterator


def values(buffer: bytearray) -> Iterator[bytes]:
    """Take every whole value from the front of `buffer`; what is not whole yet stays in it."""
    while end := _end(buffer, 0):
        value = bytes(buffer[:end])
        del buffer[:end]
        yield value


def command_name(command: bytes) -> bytes:
    """The name in capitals: the first string of the array that a client sends."""
    return command.split(b"\r\n", 3)[2].upper()


def _end(buffer: bytearray, start: int) -> int:
    """Where the value that begins at `start` ends; 0 where its end has not come yet."""
    line_end = buffer.find(b"\r\n", start)
    if line_end < 0:
        return 0
    kind, count = buffer[start : start + 1], buffer[start + 1 : line_end]
    end = line_end + 2
    if kind in b"$=!":
        end += int(count) + 2 if int(count) >= 0 else 0
        return end if end <= len(buffer) else 0
    if kind in b"*~>%":
        for _ in range(int(count) * (2 if kind == b"%" else 1)):
            end = _end(buffer, end)
            if not end:
                return 0
    return end
