"""Which columns a query may write: refused before it starts, not when its first epoch is staged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from onceflow.contract.schema import arrow_schema, columns, leaf_types, nested_twice, selected
from onceflow.contract.sink import Sink
from onceflow.errors import JobError


def refuse_columns(
    schema: str,
    outputs: Mapping[str, Sink],
    by: str | None,
    columns_of: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Refuse, before the query starts, columns that could not be staged later."""
    names = [field["name"] for field in json.loads(schema)["fields"]]
    lowered = [name.lower() for name in names]
    twice = sorted({name for name in names if lowered.count(name.lower()) > 1})
    if twice:
        raise JobError(
            f"column {', '.join(twice)} is there twice", hint="rename one with .alias(…)"
        )
    ours = [name for name in names if name.lower().startswith("_onceflow_")]
    if ours:
        raise JobError(f"column {', '.join(ours)} has a name that onceflow uses", hint="rename it")
    kinds = columns(schema)
    inside = nested_twice(schema)
    if inside:
        raise JobError(f"a struct has field {', '.join(inside)} twice", hint="rename one")
    untyped = [
        f"{name} ({kinds[name]})"
        for name, leaves in leaf_types(schema).items()
        if any(leaf == "void" or "interval" in leaf for leaf in leaves)
    ]
    if untyped or not names:
        raise JobError(
            f"column {', '.join(untyped) or '(none)'} cannot be written to a file",
            hint="cast it: F.lit(None).cast('string')",
        )
    if len(outputs) > 1:
        if by is None:
            raise JobError(
                "several outputs need by=: the column that names each row's output",
                hint='flow.write(name, df, to={"valid": …, "rejected": …}, by="outcome")',
            )
        if columns(schema).get(by) != "string":
            raise JobError(f"by={by!r} must be a string column of the rows", hint="add or cast it")
    for output, chosen in (columns_of or {}).items():
        missing = [name for name in chosen if name not in kinds]
        if missing or not chosen or len(set(chosen)) != len(chosen):
            raise JobError(
                f"columns= of output {output!r}: the rows have no column {', '.join(missing)}"
                if missing
                else f"columns= of output {output!r} names none, or one twice",
                hint=f"the rows have {', '.join(names)}",
            )
        arrow_schema(selected(schema, chosen))  # Arrow will read these columns from the files
