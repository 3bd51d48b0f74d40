"""The state stores of an operator and their columns, read from Spark's files without Spark.

`state/<operator>/_metadata/metadata` names the operator and its stores. Beside the first partition
of a store, `_metadata/schema` has the columns of its key and of its value, written by Java's
`writeUTF`; since version 2 each is in chunks, with their number before them. (`transformWithState`
uses other formats, which this module does not read.)
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.spark.file_source_log import names_in, number_of

DEFAULT = "default"

Columns = list[dict[str, str]]  # name and type


@dataclass(frozen=True)
class StateStore:
    """One store of one stateful operator."""

    operator: int
    kind: str  # as Spark calls it: stateStoreSave, dedupe, symmetricHashJoin …
    name: str
    partitions: int
    key: Columns | None  # None: not known
    value: Columns | None

    def folder(self, partition: int) -> str:
        """The folder of the store's files in the checkpoint."""
        inner = "" if self.name == DEFAULT else f"/{self.name}"
        return f"state/{self.operator}/{partition}{inner}"


def state_stores(checkpoint: Path) -> list[StateStore]:
    """All stores of a query, by operator."""
    found = []
    for operator in sorted(n for n in map(number_of, names_in(checkpoint / "state")) if n >= 0):
        try:
            text = (checkpoint / f"state/{operator}/_metadata/metadata").read_text()
            version, _, body = text.partition("\n")
            fields = json.loads(body) if version == "v1" else {}
            kind = fields["operatorInfo"]["operatorName"]
            infos = [(i["storeName"], i["numPartitions"]) for i in fields["stateStoreInfo"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name, partitions in infos:
            store = StateStore(operator, kind, name, partitions, None, None)
            key, value = _columns(checkpoint / store.folder(0) / "_metadata" / "schema")
            found.append(StateStore(operator, kind, name, partitions, key, value))
    return found


def _columns(path: Path) -> tuple[Columns | None, Columns | None]:
    try:
        file = _Texts(path.read_bytes())
        version = file.text()
        read = {"v1": file.text, "v2": file.chunks}[version]
        return _named(json.loads(read())), _named(json.loads(read()))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None, None


class _Texts:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def text(self) -> str:
        (length,) = struct.unpack_from(">H", self._data, self._at)
        self._at += 2 + length
        return self._data[self._at - length : self._at].decode()

    def chunks(self) -> str:
        (count,) = struct.unpack_from(">i", self._data, self._at)
        self._at += 4
        return "".join(self.text() for _ in range(count))


def _named(schema: dict[str, Any]) -> Columns:
    return [{"name": field["name"], "type": _type(field["type"])} for field in schema["fields"]]


def _type(kind: Any) -> str:
    if not isinstance(kind, dict):
        return str(kind)
    match kind["type"]:
        case "struct":
            inner = ",".join(f"{field['name']}:{_type(field['type'])}" for field in kind["fields"])
            return f"struct<{inner}>"
        case "array":
            return f"array<{_type(kind['elementType'])}>"
        case "map":
            return f"map<{_type(kind['keyType'])},{_type(kind['valueType'])}>"
        case other:
            return str(other)
