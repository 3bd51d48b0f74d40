"""Bytes as records: lines, and CSV as in RFC 4180 (a quoted field may contain line breaks)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from onceflow.errors import BadInput
from onceflow.log.strict_values import Malformed

Record = tuple[int, bytes]  # number of its first line, and its bytes as they are

_BOM = b"\xef\xbb\xbf"
_LONGEST = (
    16 * 1024 * 1024
)  # bytes of a record of several lines; a longer one has a quote that is not closed

# A record that ends inside of quotes continues in the next line.
_UNCLOSED = re.compile(rb'(?>(?:"(?>[^"]++|"")*+"|[^",]*+),)*+"(?>[^"]++|"")*+')
_CELL = re.compile(r'(?:"((?>[^"]++|"")*+)"|([^",]*+))(,|\Z)')


def numbered_lines(file: BinaryIO, seen: Callable[[bytes], object]) -> Iterator[Record]:
    """The lines of a file, numbered from 1, without a byte order mark. `seen` gets all bytes."""
    for number, line in enumerate(file, 1):
        seen(line)
        yield number, line.removeprefix(_BOM) if number == 1 else line


def csv_records(lines: Iterator[Record], name: str) -> Iterator[Record]:
    """Join lines where one ends inside of quotes."""
    for number, first in lines:
        record = first
        if b'"' in record and _UNCLOSED.fullmatch(_end_off(record)):
            parts, size = [record], len(record)
            for _, line in lines:
                parts.append(line)
                size += len(line)
                if size > _LONGEST:
                    raise BadInput(
                        f"{name}, line {number}: a quote is opened and not closed within "
                        f"{_LONGEST:,} bytes; nothing was appended",
                        hint="correct the line",
                    )
                # Only a line with an odd number of quotes can close them.
                if line.count(b'"') % 2 and not _UNCLOSED.fullmatch(_end_off(b"".join(parts))):
                    break
            record = b"".join(parts)
        yield number, record


def _end_off(record: bytes) -> bytes:
    return record.removesuffix(b"\n").removesuffix(b"\r")


def decode(record: bytes) -> str:
    try:
        return _end_off(record).decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"is not UTF-8 (byte {error.start + 1} of it)") from None


def cells_of(record: str) -> list[str | None]:
    """The fields of a record; an empty one without quotes is None."""
    if '"' not in record:
        return [cell or None for cell in record.split(",")]
    cells: list[str | None] = []
    at, more = 0, True
    while more:
        found = _CELL.match(record, at)
        if found is None:
            raise Malformed(_wrong_quotes(record, at))
        quoted, bare, end = found.groups()
        cells.append((bare or None) if quoted is None else quoted.replace('""', '"'))
        at, more = found.end(), end == ","
    return cells


def _wrong_quotes(record: str, at: int) -> str:
    if not record.startswith('"', at):
        return "a quote stands inside of a field that does not begin with one"
    closed = re.match(r'"(?>[^"]++|"")*+"', record[at:])
    return "a closing quote has text behind it" if closed else "a quote is opened and not closed"
