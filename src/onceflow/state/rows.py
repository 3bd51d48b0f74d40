"""Rows that wait in the state of their key: as structs without the key's columns, and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from onceflow.state.vectors import Ints, one, unpacked


def struct_of(rows: pa.Schema, keys: pa.Schema) -> pa.StructType:
    """All columns of a row but those of its key; any of them may be null."""
    return pa.struct([(f.name, f.type) for f in rows if f.name not in keys.names])


def as_structs(rows: pa.Table, kind: pa.StructType) -> pa.Array:
    if not kind.num_fields:
        return pa.array([{}] * len(rows), kind)
    return pa.StructArray.from_arrays([one(rows[f.name]) for f in kind], fields=list(kind))


def as_columns(keys: pa.Table, of: Ints, structs: pa.Array) -> dict[str, pa.Array]:
    """The rows again, by column; `of` says which key each is of."""
    some = pa.array(of)
    columns = {name: one(keys[name].take(some)) for name in keys.column_names}
    fields = structs.flatten()
    return {**columns, **{f.name: fields[n] for n, f in enumerate(structs.type)}}


def added(known: pa.Array, new: pa.Array, of: Ints) -> tuple[pa.Array, Ints, Ints]:
    """Elements of a list column and new ones, those of a key together and the known ones first.

    With the key of each, and where each stood: below the number of known ones, or above.
    """
    elements, known_of = unpacked(known)
    both = np.concatenate((known_of, of)).astype(np.int64)
    order = np.argsort(both, kind="stable")
    whole = pa.concat_arrays([elements, new.cast(elements.type)])
    return whole.take(pa.array(order)), both[order], order


def field(structs: pa.Array, name: str) -> pa.Array:
    """A field of all structs."""
    return structs.flatten()[structs.type.get_field_index(name)]
