"""<folder>/stream.json: which stream was sent, so that it can be made again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ads.generator import Generator, Line
from ads.places import COMMAND
from onceflow.errors import JobError

NAME = "stream.json"


@dataclass(frozen=True)
class Stream:
    """So many chunks of a generator, and the closing lines if it is closed.

    The last batch (its number, and how many of the chunks are in it) may not have been sent to the
    end: it is sent again before the stream continues.
    """

    seed: int
    per_minute: int
    clean: bool = False
    chunks: int = 0
    closed: bool = False
    batch: int = 0
    chunks_in_batch: int = 0

    def save(self, folder: Path) -> None:
        """Write it in one step: a reader finds the old one or the new one."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{NAME}.part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NAME)
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)  # otherwise a power cut could bring back the old one
        finally:
            os.close(opened)

    @classmethod
    def load(cls, folder: Path) -> Stream | None:
        """None if there is none yet."""
        try:
            return cls(**json.loads((folder / NAME).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise JobError(
                f"{folder / NAME} is damaged: {error}",
                hint="take a new folder: what was sent to this one can't be known any more",
            ) from error

    def generator(self) -> Generator:
        return Generator(self.seed, per_minute=self.per_minute, clean=self.clean)

    def lines(self) -> Iterator[dict[str, list[Line]]]:
        """Everything that was sent, again."""
        generator = self.generator()
        for _ in range(self.chunks):
            yield generator.chunk()
        if self.closed:
            yield generator.closing()


def must_load(folder: Path) -> Stream:
    stream = Stream.load(folder)
    if stream is None:
        raise JobError(
            f"{folder / NAME} does not exist: nothing was sent to this folder",
            hint=f"{COMMAND} generate --folder {folder}",
        )
    return stream
