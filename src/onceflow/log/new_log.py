"""Check a new log: its columns, its key, and the folder in which it is created."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from onceflow.contract.schema import arrow_schema, columns, nullable, parse_schema, spark_schema
from onceflow.errors import Damaged, JobError
from onceflow.log.commits import Facts
from onceflow.log.segments import OURS, refuse_key
from onceflow.store.posix import make_dirs, unseal

if TYPE_CHECKING:
    import pyarrow as pa

KIND = "log"


def refuse_facts(facts: Facts) -> None:
    kinds = columns(facts.schema)
    if not kinds:
        raise JobError("a log needs at least one column", hint="name one")
    lowered = [field.name.lower() for field in arrow_schema(facts.schema)]
    twice = sorted({name for name in lowered if lowered.count(name) > 1})
    if twice:
        raise JobError(
            f"column {', '.join(twice)} is there twice (Spark ignores upper and lower case)",
            hint="rename one of them",
        )
    ours = [name for name in kinds if name.lower() in OURS]
    if ours:
        raise JobError(
            f"column {', '.join(ours)} has a name that the log uses itself",
            hint="rename or drop it",
        )
    if not 1 <= facts.partitions <= 1024:
        raise JobError(f"a log has 1 to 1024 partitions, not {facts.partitions}")
    refuse_key(facts.key, kinds)
    for name, value in (("age", facts.retain_ms), ("size", facts.retain_bytes)):
        if value is not None and value < 1:
            raise JobError(f"the {name} to retain must be above zero")


def refuse_other_kind(path: Path) -> None:
    """An output folder of Files has commits too."""
    for name in sorted(os.listdir(path / "_commits"))[:3]:
        try:
            data = (path / "_commits" / name).read_bytes()
            found = str(json.loads(data.partition(b"\n")[0])["onceflow"])
            unseal(data, found, None, name)
        except (OSError, ValueError, KeyError, TypeError, Damaged):
            continue  # reading the commits reports the damage
        if found != f"{KIND} commit":
            raise JobError(
                f"{path} is not a log: it has {found}s ({name})", hint="correct the path"
            )


def refuse_strange_folder(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise JobError(f"{root} is not a folder", hint="name a new folder")
    names = os.listdir(root) if root.exists() else []
    if "_commits" in names:
        refuse_other_kind(root)
    elif names:
        raise JobError(
            f"{root} holds other files: {', '.join(sorted(names)[:5])}",
            hint="name a new or an empty folder",
        )
    make_dirs(root)


def spark_json(schema: str | pa.Schema) -> str:
    if not isinstance(schema, str):
        return nullable(spark_schema(schema))
    if not schema.lstrip().startswith("{"):
        return nullable(parse_schema(schema))
    try:
        arrow_schema(schema)
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"{schema!r} is not a schema: {error!r}",
            hint="give the text that df.schema.json() of Spark returns",
        ) from error
    return nullable(schema)
