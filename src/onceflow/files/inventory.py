"""The published files of a folder in a few bytes: their number, and a digest of their names.

A start compares a listing of the folder with it, so it need not read which files the commits list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_MODULUS = 2**128


@dataclass(frozen=True)
class Inventory:
    """It does not depend on the order of the names."""

    files: int = 0
    digest: int = 0  # the sum of the digests of the names

    def plus(self, names: Iterable[str]) -> Inventory:
        files, digest = self.files, self.digest
        for name in names:
            files += 1
            digest += int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest())
        return Inventory(files, digest % _MODULUS)

    def as_json(self) -> list[Any]:
        return [self.files, f"{self.digest:032x}"]

    @classmethod
    def of_json(cls, said: list[Any]) -> Inventory:
        return cls(said[0], int(said[1], 16))
