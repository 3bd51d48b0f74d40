"""Sqlite takes rows back, through any chain of lineages, and says what it cannot take back."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onceflow.contract.abilities import can_rewind, require_rewind
from onceflow.contract.ledger import Publication
from onceflow.contract.schema import parse_schema
from onceflow.errors import JobError, TargetBehind
from onceflow.sinks import Sqlite
from onceflow.testing.stand_in import StandIn, folder_values
from walks import Walk

COLUMNS = "id long, name string"
CHILD = "3c8fad5b-d9cb-469f-a165-70867728950e"


class Database:
    """A file of SQLite with a table `rows` for a sink to write to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "out.db"

    def driver(self, term: int = 1, columns: str = COLUMNS, **more: Any) -> StandIn:
        facts = {"key": "id", **{n: more.pop(n) for n in ("key", "keep_before") if n in more}}
        return StandIn(sink=Sqlite(self.path, table="rows", **facts), home=self.folder,
                       schema=parse_schema(columns), term=term, folders=folder_values,
                       **{"mode": "update", **more})  # fmt: skip

    def child(self, **more: Any) -> StandIn:
        driver = self.driver(9, lineage=CHILD, **more)
        driver.fence()
        return driver

    def run(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return db.execute(sql).fetchall()

    def rows(self) -> list[Any]:
        return self.run("SELECT id, name FROM rows ORDER BY id, name")


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path)


def epochs(driver: StandIn, *numbers: int, **more: Any) -> list[Publication]:
    """Each changes row 1 and adds a row of its own."""
    return [driver.run(n, [{"id": 1, "name": f"of {n}", **more},
                           {"id": 10 + n, "name": "", **more}]) for n in numbers]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("key", "modes"),
    [((), ["append"]), ((), ["complete"]), (("id",), ["update"]),
     (("id",), ["append", "update", "complete"])],
    ids=["append", "complete", "update", "any"],
)  # fmt: skip
def test_the_table_is_what_it_was_at_the_cut(
    database: Database, key: tuple[str, ...], modes: Sequence[str], seed: int
) -> None:
    def drive(term: int, lineage: str, mode: str) -> StandIn:
        return database.driver(term, key=key, lineage=lineage, mode=mode)

    Walk(drive, database.rows, tuple(modes), seed).run(40)


def test_only_what_the_last_epochs_changed_is_kept(database: Database) -> None:
    cuts = epochs(database.driver(keep_before=2).open(), *range(6))
    kept = "SELECT count(DISTINCT _onceflow_at >> 32), count(*) FROM _onceflow_before_rows"
    assert database.run(kept) == [(2, 6)]
    child = database.child(keep_before=2)
    for ask in (
        child.rewind,
        lambda cut: require_rewind(child.sink).refuse_rewind(child.output, cut.position),
    ):
        with pytest.raises(TargetBehind, match="cannot go back to epoch 2") as refused:
            ask(cuts[2])
    assert "--published skip" in refused.value.hint
    assert len(database.rows()) == 7
    child.rewind(cuts[3])
    assert database.rows() == [(1, "of 3"), (10, ""), (11, ""), (12, ""), (13, "")]


def test_rows_that_carry_their_epoch_can_be_taken_back_however_old(database: Database) -> None:
    settings = {"key": (), "mode": "append", "keep_before": 1}
    cuts = epochs(database.driver(**settings).open(), *range(6))
    assert database.run("SELECT name FROM sqlite_master WHERE name LIKE '%before%'") == []
    database.child(**settings).rewind(cuts[0])
    assert database.rows() == [(1, "of 0"), (10, "")]


def test_without_images_nothing_is_kept_and_nothing_is_taken_back(database: Database) -> None:
    (cut, _) = epochs(database.driver(keep_before=0).open(), 0, 1)
    assert database.run("SELECT name FROM sqlite_master WHERE name LIKE '%rewind%'") == []
    child = database.child(keep_before=0)
    assert not can_rewind(child.sink)
    for ask in (
        child.rewind,
        lambda cut: require_rewind(child.sink).refuse_rewind(child.output, cut.position),
    ):
        with pytest.raises(JobError, match="cannot take back what it published: keep_before=0"):
            ask(cut)
    with pytest.raises(JobError, match="keep_before=-1"):
        database.driver(keep_before=-1)


def test_epochs_that_were_published_without_images_are_not_taken_back(database: Database) -> None:
    (first,) = epochs(database.driver().open(), 0)
    between = database.driver(2, keep_before=0)
    between.fence()
    epochs(between, 1)
    driver = database.driver(3)
    driver.fence()
    cut, *_ = epochs(driver, 2, 3, 4)
    child = database.child()
    with pytest.raises(TargetBehind):
        child.rewind(first)
    child.rewind(cut)
    assert database.rows() == [(1, "of 2"), (10, ""), (11, ""), (12, "")]


def test_a_table_that_was_altered_goes_back_to_what_it_was_after_that(database: Database) -> None:
    (first,) = epochs(database.driver().open(), 0)
    database.run("ALTER TABLE rows ADD COLUMN note TEXT")
    columns = f"{COLUMNS}, note string"
    driver = database.driver(2, columns)
    driver.fence()
    cut, _ = epochs(driver, 1, 2, note="seen")
    child = database.child(columns=columns)
    child.rewind(cut)
    assert database.rows() == [(1, "of 1"), (10, ""), (11, "")]
    again = replace(first, lineage=CHILD)
    grandchild = database.driver(10, columns, lineage="grandchild")
    grandchild.fence()
    grandchild.rewind(again)  # the image of epoch 1 was made after the change
    assert database.rows() == [(1, "of 0"), (10, "")]


def test_images_that_somebody_dropped_are_missed(database: Database) -> None:
    cuts = epochs(database.driver().open(), 0, 1)
    database.run("DROP TABLE _onceflow_before_rows")
    with pytest.raises(TargetBehind, match="was dropped"):
        database.child().rewind(cuts[0])
    driver = database.driver(10)
    driver.fence()
    epochs(driver, 2)
    child = database.driver(11, lineage=CHILD)
    child.fence()
    with pytest.raises(TargetBehind, match="cannot go back to epoch 0"):
        child.rewind(cuts[0])
    child.rewind(cuts[1])
    assert database.rows() == [(1, "of 1"), (10, ""), (11, "")]


def test_images_that_a_former_life_of_the_table_left_are_not_put_back(database: Database) -> None:
    epochs(database.driver().open(), 0, 1, 2)
    for table in ("rows", "_onceflow_ledger", "_onceflow_rewind"):
        database.run(f"DROP TABLE {table}")
    cut, _ = epochs(database.driver().open(), 0, 1)
    database.child().rewind(cut)
    assert database.rows() == [(1, "of 0"), (10, "")]


def test_a_table_that_is_gone_is_not_taken_for_one_that_was_taken_back(database: Database) -> None:
    cuts = epochs(database.driver().open(), 0, 1)
    child = database.child()
    database.run("DROP TABLE rows")
    with pytest.raises(TargetBehind, match="the table is gone"):
        child.rewind(cuts[0])


@pytest.mark.parametrize("settings", [{"mode": "update"}, {"mode": "complete", "key": ()}])
def test_columns_that_are_called_like_tags_are_the_users_own(
    database: Database, settings: dict[str, Any]
) -> None:
    settings = {**settings, "columns": f"{COLUMNS}, _lineage string, _epoch long"}
    rows = [{"id": n, "name": "", "_lineage": "mine", "_epoch": 7} for n in range(3)]
    driver = database.driver(**settings).open()
    cut, _ = driver.run(0, rows), driver.run(1, rows[:1])
    database.child(**settings).rewind(cut)
    assert database.rows() == [(0, ""), (1, ""), (2, "")]


def test_a_table_of_too_many_columns_for_images_is_refused_at_the_start(database: Database) -> None:
    columns = ", ".join(["id long", *(f"c{n} long" for n in range(1_999))])
    with pytest.raises(JobError, match="too many columns"):
        database.driver(columns=columns).open()
    database.driver(columns=columns, keep_before=0).open()
