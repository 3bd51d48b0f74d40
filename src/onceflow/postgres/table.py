"""The table of an output in PostgreSQL: check it, create it and fill it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from onceflow.contract.schema import columns
from onceflow.errors import JobError, SchemaMismatch, TargetError
from onceflow.postgres.connection import client
from onceflow.postgres.values import postgres_type
from onceflow.tables.names import definitions, list_of, on_conflict, quote

if TYPE_CHECKING:
    from onceflow.postgres.connection import Db

ROW = "_onceflow_row"  # in copies: the number of the row in its epoch
TAG = "_onceflow_tag"  # in copies: which attempt of which task wrote the row
_OLDEST = 14
LONGEST_NAME = 63  # bytes; PostgreSQL cuts longer ones off
# Type -> other types that store each of its values unchanged.
_TAKE = {
    "smallint": ("integer", "bigint", "numeric"),
    "integer": ("bigint", "numeric"),
    "bigint": ("numeric",),
    "text": ("character varying",),
    "jsonb": ("json",),
}


@dataclass(frozen=True)
class Table:
    """A table, its key, and the columns that this output writes."""

    schema: str
    name: str
    key: tuple[str, ...] = ()
    epoch_column: str | None = None

    @cached_property
    def sql(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"

    def wanted(self, schema: str) -> dict[str, str]:
        """Column -> type. `JobError` for columns that PostgreSQL cannot have."""
        kinds = {f["name"]: postgres_type(f["type"]) for f in json.loads(schema)["fields"]}
        spark = columns(schema)
        without = [f"{name} ({spark[name]})" for name, kind in kinds.items() if kind is None]
        if without:
            raise JobError(
                f"PostgreSQL has no type for column {', '.join(without)}",
                hint="cast it, for instance to string",
            )
        if self.epoch_column in kinds:
            raise JobError(
                f"column {self.epoch_column} is written by onceflow (epoch_column)",
                hint="rename the column, or choose another epoch_column",
            )
        found = {name: kind for name, kind in kinds.items() if kind is not None}
        if self.epoch_column is not None:
            found[self.epoch_column] = "bigint"
        long = [name for name in found if len(name.encode()) > LONGEST_NAME]
        if long:
            raise JobError(
                f"column {', '.join(long)}: PostgreSQL's names have {LONGEST_NAME} bytes at most",
                hint="rename it with .alias(…)",
            )
        return found

    def create_sql(self, wanted: Mapping[str, str]) -> str:
        body = definitions(wanted)
        if self.key:
            body += f", PRIMARY KEY ({list_of(self.key)})"
        return f"CREATE TABLE {self.sql} ({body})"

    def copy_columns(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """The columns of a table of copies, from which rows are moved into ours."""
        return {**wanted, **({ROW: "bigint"} if self.key else {})}

    def move_sql(self, copies: str, wanted: Mapping[str, str]) -> str:
        """Move copies into our table. Of several rows of a key the one staged last stays."""
        names = list_of(wanted)
        if not self.key:
            return f"INSERT INTO {self.sql} ({names}) SELECT {names} FROM {copies}"
        key = list_of(self.key)
        return (
            f"INSERT INTO {self.sql} ({names}) SELECT DISTINCT ON ({key}) {names} FROM {copies} "
            f"ORDER BY {key}, {ROW} DESC {on_conflict(self.key, wanted)}"
        )

    def refuse_creation(self, db: Db, target: str, wanted: Mapping[str, str]) -> None:
        """Create such a table and roll back, to see whether it is possible: the real one is
        created with the first epoch, which is decided by then."""
        trial = replace(self, name=f"_onceflow_{secrets.token_hex(8)}")
        try:
            with db.transaction(force_rollback=True):
                db.execute(trial.create_sql(wanted))
        except client().Error as error:
            if (error.sqlstate or "")[:2] not in ("42", "54") or error.sqlstate == "42501":
                raise
            raise JobError(
                f"{target} cannot be created: {error.diag.message_primary}",
                hint="choose other names for its columns, or fewer columns",
            ) from error

    # -------------------------------------------------------------- what is there

    def exists(self, db: Db) -> bool:
        return exists(db, self.sql)

    def refuse(self, db: Db, wanted: Mapping[str, str], mode: str) -> None:
        """Raise an error if the table exists and the rows do not fit it."""
        found = db.execute(
            "SELECT c.relkind, coalesce(a.attname, ''), format_type(a.atttypid, a.atttypmod), "
            "a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', "
            "a.attgenerated <> '' OR a.attidentity = 'a' "
            "FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 "
            "AND NOT a.attisdropped WHERE c.oid = to_regclass(%s) ORDER BY a.attnum",
            (self.sql,),
        ).fetchall()
        if not found:
            return
        if found[0][0] not in ("r", "p"):
            raise TargetError(f"{self.sql} is not a table", hint="give the name of a table")
        have = {name: (kind, required, made) for _, name, kind, required, made in found}
        wrong = [f"{n} ({kind}) is not in the table" for n, kind in wanted.items() if n not in have]
        for name, (kind, required, made) in have.items():
            want = wanted.get(name)
            if want is None and required:
                wrong.append(f"{name} ({kind}) of the table is NOT NULL and has no default")
            if want is not None and kind != want and not _takes(kind, want):
                wrong.append(f"{name} is {want}, the table has {kind}")
            if want is not None and made:
                wrong.append(f"{name} is generated by the table")
        if wrong:
            raise SchemaMismatch(
                f"the rows do not fit {self.sql}:\n  - " + "\n  - ".join(wrong),
                hint="select and cast the columns that the table has, or alter the table",
            )
        if self.key:
            self._refuse_other_key(db)
        self._refuse_rights(db, mode)

    def _refuse_other_key(self, db: Db) -> None:
        """ON CONFLICT (key) needs a unique index over all rows, of just these columns."""
        found = db.execute(
            "SELECT array_agg(a.attname::text), i.indimmediate, "
            "bool_and(coalesce(l.collisdeterministic, true)) "
            "FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (number, place) "
            "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number "
            "LEFT JOIN pg_collation l ON l.oid = a.attcollation "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid "
            "AND i.indpred IS NULL AND i.indexprs IS NULL "
            "AND k.place <= i.indnkeyatts GROUP BY i.indexrelid, i.indimmediate",
            (self.sql,),
        ).fetchall()
        mine = [immediate and exact for names, immediate, exact in found if {*names} == {*self.key}]
        if not (mine and all(mine)):  # ON CONFLICT fails if one of them is deferrable
            raise SchemaMismatch(
                f"{self.sql} has no unique index on ({', '.join(self.key)})",
                hint=f"CREATE UNIQUE INDEX ON {self.sql} ({list_of(self.key)}); "
                "it may not be partial or deferrable, and needs a deterministic collation",
            )

    def _refuse_rights(self, db: Db, mode: str) -> None:
        needed = ["INSERT"]
        if self.key:
            needed += ["SELECT", "UPDATE"]
        if mode == "complete":
            needed += ["DELETE"]
        refuse_rights(db, self.sql, needed)


def refuse_server(db: Db, target: str, schema: str, *, temporary: bool) -> None:
    """Raise an error if the database itself cannot be used."""
    row = db.execute(
        "SELECT current_setting('server_encoding'), pg_is_in_recovery(), "
        "to_regnamespace(%s) IS NOT NULL, "
        "has_database_privilege(current_database(), 'TEMP'), current_database()",
        (quote(schema),),
    ).fetchone()
    assert row is not None
    encoding, standby, is_there, may_make_temporary, database = row
    if db.info.server_version < _OLDEST * 10_000:
        raise TargetError(
            f"{target}: the server is older than PostgreSQL {_OLDEST}", hint="upgrade the server"
        )
    if encoding != "UTF8":
        raise TargetError(
            f"{target}: the database has the encoding {encoding}, which lacks some characters",
            hint="use a database with the encoding UTF8",
        )
    if standby:
        raise TargetError(
            f"{target}: the server is a standby, which accepts no rows",
            hint="connect to the primary, for instance with target_session_attrs=read-write",
        )
    if not is_there:
        raise TargetError(
            f"{target}: there is no schema {schema}",
            hint=f"CREATE SCHEMA {quote(schema)};",
        )
    if not _one(db, "SELECT has_schema_privilege(%s, 'USAGE')", schema):
        raise lacking(db, f"USAGE ON SCHEMA {quote(schema)}")
    if temporary and not may_make_temporary:
        raise lacking(db, f"TEMP ON DATABASE {quote(database)}")


def exists(db: Db, table: str) -> bool:
    return _one(db, "SELECT to_regclass(%s) IS NOT NULL", table)


def ensure_table(db: Db, table: str, columns: str) -> None:
    """Create the table if there is none. Another driver may create it at the same time."""
    errors = client().errors
    if not exists(db, table):
        with contextlib.suppress(errors.DuplicateTable, errors.UniqueViolation):
            db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")


def refuse_rights(db: Db, table: str, needed: Sequence[str]) -> None:
    """`TargetError` with the GRANT that is missing."""
    missing = [
        right
        for right in needed
        if not _one(db, "SELECT has_table_privilege(%s, %s)", table, right)
    ]
    if missing:
        raise lacking(db, f"{', '.join(missing)} ON {table}")


def may_create(db: Db, schema: str) -> bool:
    return _one(db, "SELECT has_schema_privilege(%s, 'CREATE')", schema)


def lacking(db: Db, right: str) -> TargetError:
    role = db.info.user
    return TargetError(
        f"role {role} lacks the right {right}", hint=f"GRANT {right} TO {quote(role)};"
    )


def _one(db: Db, query: str, *values: Any) -> bool:
    row = db.execute(query, values).fetchone()
    return bool(row and row[0])


def _takes(kind: str, want: str) -> bool:
    decimals = want.startswith("numeric(") and not want.endswith("[]")
    return kind in _TAKE.get(want, ()) or (kind == "numeric" and decimals)
