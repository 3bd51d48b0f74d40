"""The PostgreSQL sink takes rows back, and says what it cannot take back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import COLUMNS, Place, row

from onceflow.contract.abilities import can_rewind, require_rewind
from onceflow.contract.ledger import Publication
from onceflow.errors import JobError, TargetBehind, TargetError
from onceflow.postgres.undo import images_of
from onceflow.testing.servers import Postgres as Server
from onceflow.testing.stand_in import StandIn
from walks import Walk

CHILD = "3c8fad5b-d9cb-469f-a165-70867728950e"


@pytest.fixture
def place(postgres: Server, tmp_path: Path) -> Place:
    return Place(postgres, tmp_path)


def start(place: Place, term: int = 1, *, dsn: str = "", **more: Any) -> StandIn:
    facts = {name: more.pop(name) for name in ("lineage", "mode", "columns") if name in more}
    sink = place.sink(dsn, **{"key": "id", **more})
    driver = place.driver(sink, term, **{"mode": "update", **facts})
    driver.fence()
    return driver


def child(place: Place, **more: Any) -> StandIn:
    return start(place, 9, lineage=CHILD, **more)


def epochs(driver: StandIn, *numbers: int) -> list[Publication]:
    """Each changes row 1 and adds a row of its own."""
    return [driver.run(n, [row(1, f"of {n}"), row(10 + n)]) for n in numbers]


def names(place: Place) -> dict[int, str]:
    return {found["id"]: found["name"] for found in place.read()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("modes", "settings"),
    [(("append",), {"epoch_column": "epoch"}), (("complete",), {"epoch_column": "epoch"}),
     (("update",), {"key": "id"}), (("append", "update", "complete"), {"key": "id"})],
    ids=["append", "complete", "update", "any"],
)  # fmt: skip
def test_the_table_is_what_it_was_at_the_cut(
    place: Place, modes: tuple[str, ...], settings: dict[str, Any], seed: int
) -> None:
    def drive(term: int, lineage: str, mode: str) -> StandIn:
        return place.driver(place.sink(**settings), term, lineage=lineage, mode=mode)

    def read() -> list[Any]:
        return place.read(f"SELECT id, name FROM {place.table} ORDER BY id, name")

    Walk(drive, read, modes, seed, replays="key" in settings).run(30)


def test_only_what_the_last_epochs_changed_is_kept(place: Place) -> None:
    cuts = epochs(start(place, keep_before=2), *range(6))
    kept = f"SELECT DISTINCT _onceflow_step FROM {place.schema}._onceflow_before_rows"
    assert len(place.read(kept)) == 2
    driver = child(place, keep_before=2)
    for ask in (
        driver.rewind,
        lambda cut: require_rewind(driver.sink).refuse_rewind(driver.output, cut.position),
    ):
        with pytest.raises(TargetBehind, match="cannot go back to epoch 2") as refused:
            ask(cuts[2])
    assert "--published skip" in refused.value.hint
    driver.rewind(cuts[3])
    assert names(place) == {1: "of 3", **{10 + n: f"name {10 + n}" for n in range(4)}}


def test_without_images_nothing_is_kept_and_nothing_is_taken_back(place: Place) -> None:
    cut, _ = epochs(start(place, keep_before=0), 0, 1)
    assert place.tables() == {"rows", "_onceflow_ledger"}
    driver = child(place, keep_before=0)
    with pytest.raises(JobError, match="cannot take back what it published: keep_before=0"):
        driver.rewind(cut)
    with pytest.raises(JobError, match="keep_before=-1"):
        place.sink(keep_before=-1)


def test_rows_without_key_and_epoch_cannot_be_taken_back_and_it_says_why(place: Place) -> None:
    cut, _ = epochs(start(place, key=(), mode="append"), 0, 1)
    assert place.tables() == {"rows", "_onceflow_ledger"}
    driver = child(place, key=(), mode="append")
    assert not can_rewind(driver.sink)
    with pytest.raises(JobError, match="name an epoch_column") as refused:
        require_rewind(driver.sink).refuse_rewind(driver.output, cut.position)
    assert "--published skip" in refused.value.hint


def test_columns_of_somebody_else_stay_as_they_are(place: Place) -> None:
    place.run(
        f"CREATE TABLE {place.table} (id int PRIMARY KEY, name varchar, doc json, "
        "\"100%\" numeric, note text DEFAULT 'new')"
    )
    columns = f"{COLUMNS.replace('long', 'int')}, doc struct<a: long>, `100%` decimal(10,2)"
    driver = start(place, columns=columns)
    more = {"doc": {"a": 1}, "100%": None}
    driver.run(0, [{**row(1), **more}, {**row(2), **more}])
    place.run(
        f"UPDATE {place.table} SET note = 'seen', doc = '{{ \"a\":  7 }}', "
        '"100%" = 1e30 WHERE id = 1'
    )
    cut = driver.run(1, [])
    was = place.read()
    driver.run(2, [{**row(1, "changed"), **more}, {**row(3), **more}])
    place.run(f"UPDATE {place.table} SET note = 'seen again' WHERE id = 1")
    child(place, columns=columns).rewind(cut)
    found = place.read()
    assert found == [{**was[0], "note": "seen again"}, was[1]]
    texts = place.read(f"SELECT doc::text AS doc FROM {place.table} WHERE id = 1")
    assert texts == [{"doc": '{ "a":  7 }'}]


def test_rows_that_refer_to_a_row_survive_that_it_is_put_back(place: Place) -> None:
    driver = start(place)
    cut, _ = epochs(driver, 0, 1)
    place.run(
        f"CREATE TABLE {place.schema}.parts "
        f"(of bigint REFERENCES {place.table} (id) ON DELETE CASCADE)",
        f"INSERT INTO {place.schema}.parts VALUES (1), (11)",
    )
    child(place).rewind(cut)
    assert names(place) == {1: "of 0", 10: "name 10"}
    assert place.read(f"SELECT of FROM {place.schema}.parts") == [{"of": 1}]


def test_a_table_that_was_altered_goes_back_to_what_it_was_after_that(place: Place) -> None:
    driver = start(place, columns="id int, name string")
    first, _ = epochs(driver, 0, 1)
    place.run(
        f"ALTER TABLE {place.table} ALTER COLUMN id TYPE bigint",
        f"INSERT INTO {place.table} VALUES ({2**40}, 'large')",
    )
    driver = start(place, 2)
    cut = driver.run(2, [row(2**40)])
    driver.run(3, [row(2**40, "larger")])
    after = child(place)
    with pytest.raises(TargetBehind, match="cannot go back to epoch 0"):
        after.rewind(first)
    after.rewind(cut)
    assert names(place) == {1: "of 1", 10: "name 10", 11: "name 11", 2**40: f"name {2**40}"}


def test_images_that_somebody_dropped_are_missed(place: Place) -> None:
    cuts = epochs(start(place), 0, 1)
    place.run(f"DROP TABLE {place.schema}._onceflow_before_rows")
    with pytest.raises(TargetBehind, match="was dropped"):
        child(place).rewind(cuts[0])
    epochs(start(place, 10), 2)
    driver = start(place, 11, lineage=CHILD)
    with pytest.raises(TargetBehind, match="cannot go back to epoch 0"):
        driver.rewind(cuts[0])
    driver.rewind(cuts[1])
    assert names(place) == {1: "of 1", 10: "name 10", 11: "name 11"}


def test_images_that_a_former_life_of_the_table_left_are_not_put_back(place: Place) -> None:
    epochs(start(place), 0, 1, 2)
    for table in ("rows", "_onceflow_ledger", "_onceflow_rewind"):
        place.run(f"DROP TABLE {place.schema}.{table}")
    cut, _ = epochs(start(place), 0, 1)
    child(place).rewind(cut)
    assert names(place) == {1: "of 0", 10: "name 10"}


def test_a_table_that_is_gone_is_not_taken_for_one_that_was_taken_back(place: Place) -> None:
    cuts = epochs(start(place), 0, 1)
    driver = child(place)
    place.run(f"DROP TABLE {place.table}")
    with pytest.raises(TargetBehind, match="the table is gone"):
        driver.rewind(cuts[0])


def test_a_long_name_of_a_table_has_images_too(place: Place) -> None:
    long = "x" * 63
    assert len(images_of(long)) <= 63
    cut, _ = epochs(start(place, table=long), 0, 1)
    assert images_of(long) in place.tables()
    child(place, table=long).rewind(cut)
    assert len(place.read(f"SELECT * FROM {place.schema}.{long}")) == 2


def test_a_table_of_too_many_columns_for_images_is_refused_at_the_start(place: Place) -> None:
    columns = ", ".join(["id long", *(f"c{n} long" for n in range(1_599))])
    with pytest.raises(JobError, match="too many columns"):
        start(place, columns=columns)
    start(place, columns=columns, keep_before=0)


# ---------------------------------------------------------------- rights


def test_the_rights_of_the_page_are_enough_and_each_is_asked_for(place: Place) -> None:
    """As docs/postgres.md has them, for tables that somebody else made."""
    schema = place.schema
    epochs(start(place), 0)  # makes all tables
    place.run(
        f"DROP TABLE {schema}._onceflow_before_rows",
        f"CREATE TABLE {schema}._onceflow_before_rows AS SELECT NULL::bigint AS _onceflow_step, "
        f"NULL::smallint AS _onceflow_there, id, name FROM {place.table} WITH NO DATA",
    )
    rights = [
        f"USAGE ON SCHEMA {schema}",
        f"SELECT, INSERT, UPDATE ON {schema}._onceflow_ledger",
        f"SELECT, INSERT, UPDATE ON {place.table}",
        f"SELECT, INSERT, UPDATE ON {schema}._onceflow_rewind",
        f"SELECT, INSERT, DELETE ON {schema}._onceflow_before_rows",
    ]
    for missing, said in ((3, "_onceflow_rewind"), (4, "_onceflow_before_rows")):
        some = tuple(right for n, right in enumerate(rights) if n != missing)
        with place.role(grants=some) as dsn, pytest.raises(TargetError, match=said) as refused:
            start(place, 2, dsn=dsn)
        assert refused.value.hint.startswith("GRANT SELECT, INSERT, ")
    with place.role(grants=tuple(rights)) as dsn:
        cut, _ = epochs(start(place, 3, dsn=dsn), 1, 2)
        with pytest.raises(TargetError, match="DELETE") as refused:
            child(place, dsn=dsn).rewind(cut)
        assert refused.value.hint.startswith(f'GRANT DELETE ON "{schema}"."rows"')
    with place.role(grants=(*rights, f"DELETE ON {place.table}")) as dsn:
        child(place, dsn=dsn).rewind(cut)
    assert names(place) == {1: "of 1", 10: "name 10", 11: "name 11"}


def test_tables_that_cannot_be_made_are_named_with_the_way_to_do_without(place: Place) -> None:
    epochs(start(place, keep_before=0), 0)
    rights = (
        f"USAGE ON SCHEMA {place.schema}",
        f"SELECT, INSERT, UPDATE ON {place.schema}._onceflow_ledger",
        f"SELECT, INSERT, UPDATE ON {place.table}",
    )
    with place.role(grants=rights) as dsn:
        with pytest.raises(TargetError, match="_onceflow_rewind") as refused:
            start(place, 2, dsn=dsn)
        assert "GRANT CREATE ON SCHEMA" in refused.value.hint
        assert "keep_before=0" in refused.value.hint
        epochs(start(place, 2, dsn=dsn, keep_before=0), 1)


def test_images_of_other_columns_that_are_somebody_elses_are_refused_at_the_start(
    place: Place,
) -> None:
    epochs(start(place), 0)
    place.run(f"ALTER TABLE {place.schema}._onceflow_before_rows DROP COLUMN name")
    rights = (
        f"USAGE, CREATE ON SCHEMA {place.schema}",
        f"SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {place.schema}",
    )
    with place.role(grants=rights) as dsn, pytest.raises(TargetError, match="other columns"):
        start(place, 2, dsn=dsn)
    epochs(start(place, 3), 1)  # who owns them makes them anew
