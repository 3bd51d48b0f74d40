"""The PostgreSQL sink against a real server: publishing, fencing, lost answers, dead servers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tables import Place, row

from onceflow import faults
from onceflow.contract.ledger import Ledger, Outcome, Publication
from onceflow.errors import Fenced, OnceflowError, PublishFailed, PublishUnknown
from onceflow.sinks import Postgres
from onceflow.testing.servers import Postgres as Server
from onceflow.testing.servers import commit
from onceflow.testing.stand_in import OUTPUT, StandIn


@pytest.fixture
def place(postgres: Server, tmp_path: Path) -> Place:
    return Place(postgres, tmp_path)


# ---------------------------------------------------------------- publishing


def test_of_several_rows_of_a_key_the_one_staged_last_stays(place: Place) -> None:
    driver = place.driver(place.sink(key="id"), mode="update").open()
    driver.run(0, [row(1, "old"), row(2)])
    driver.run(1, [row(3, "first"), row(1, "new"), row(3, "second"), row(3, "third")])
    assert place.read() == [row(1, "new"), row(2), row(3, "third")]


def test_a_key_may_be_all_there_is(place: Place) -> None:
    driver = place.driver(place.sink(key=["id", "name"])).open()
    driver.run(0, [row(1), row(1)])
    driver.run(1, [row(1), row(2)])
    assert place.read() == [row(1), row(2)]


def test_an_epoch_column_tells_which_epoch_a_row_came_with(place: Place) -> None:
    driver = place.driver(place.sink(epoch_column="epoch")).open()
    driver.run(0, [row(1)])
    driver.run(1, [row(2)])
    assert place.read() == [{**row(1), "epoch": 0}, {**row(2), "epoch": 1}]


def test_a_table_with_more_columns_of_its_own_is_written_to(place: Place) -> None:
    place.run(
        f"CREATE TABLE {place.table} (number int GENERATED ALWAYS AS IDENTITY, name varchar, "
        "id numeric, seen timestamptz DEFAULT now() NOT NULL, note text)"
    )
    place.driver(place.sink(create=False)).open().run(0, [row(7)])
    (found,) = place.read()
    assert (found["id"], found["name"], found["note"]) == (7, "name 7", None)
    assert found["seen"] is not None


def test_names_may_hold_what_they_like(place: Place) -> None:
    columns = 'id long, `100% "sure"` string, `select` string, `Größe` string'
    rows = [{"id": 1, '100% "sure"': "a", "select": "b", "Größe": "c"}]
    for key in ((), ("id", '100% "sure"')):
        sink = place.sink(table=f"odd-{len(key)} Name", key=key, epoch_column="Epoch $")
        output = f"job/query/{len(key)}"
        place.driver(sink, columns=columns, output=output).open().run(0, rows)
        (found,) = place.read(f'SELECT * FROM {place.schema}."odd-{len(key)} Name"')
        assert found == {**rows[0], "Epoch $": 0}


def test_a_weaker_guarantee_adds_rows_and_keeps_no_ledger(place: Place) -> None:
    driver = place.driver(place.sink()).open()
    decided = driver.stage(0, [row(1)])
    driver.sink.add(decided)
    driver.sink.add(decided)
    assert place.ids() == [1, 1]
    assert driver.sink.published(OUTPUT) == Ledger(term=1)


def test_the_environment_and_a_service_file_say_where_the_server_is(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = conninfo_to_dict(place.server.dsn)
    lines = [f"{name}={value}" for name, value in given.items() if name != "password"]
    service = tmp_path / "services"
    service.write_text("\n".join(["[warehouse]", *lines]))
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    monkeypatch.setenv("PGPASSWORD", str(given["password"]))
    sink = place.sink("service=warehouse")
    place.driver(sink).open().run(0, [row(1)])
    assert place.ids() == [1]
    assert sink.describe()["dsn"] == "service=warehouse"
    monkeypatch.setenv("PGSERVICE", "warehouse")
    found = Postgres(table="rows", schema=place.schema).published(OUTPUT)
    assert found == sink.published(OUTPUT)


# ---------------------------------------------------------------- fencing


class Sleeper:
    """A driver that publishes in a thread, and sleeps at a fault point until it is woken up."""

    def __init__(self, driver: StandIn, decided: Publication, point: str) -> None:
        self.there, self.awake = threading.Event(), threading.Event()
        self.said: Outcome | BaseException | None = None
        faults.arm(point, self._sleep)
        self._thread = threading.Thread(target=self._publish, args=(driver, decided))
        self._thread.start()
        assert self.there.wait(30)

    def _sleep(self, _: str) -> None:
        self.there.set()
        assert self.awake.wait(60)

    def _publish(self, driver: StandIn, decided: Publication) -> None:
        try:
            self.said = driver.publish(decided)
        except BaseException as error:
            self.said = error

    def wake_up(self) -> Outcome | BaseException | None:
        self.awake.set()
        self._thread.join(60)
        return self.said


@pytest.mark.parametrize("point", ["postgres.begun", "postgres.written"])
@pytest.mark.parametrize("key", ["", "id"])
def test_a_paused_driver_that_holds_the_lock_is_ended_and_publishes_nothing(
    place: Place, point: str, key: str
) -> None:
    older = place.driver(place.sink(key=key or ()), 1).open()
    older.run(0, [row(1)])
    decided = older.stage(1, [row(2)])
    sleeper = Sleeper(older, decided, point)
    newer = place.driver(place.sink(key=key or ()), 2)
    newer.fence()  # does not wait for the lock
    assert place.ids() == [1]
    said = sleeper.wake_up()
    assert isinstance(said, PublishFailed | Fenced)
    assert place.ids() == [1]
    assert newer.recover(decided) is Outcome.PUBLISHED
    with pytest.raises(Fenced):
        older.publish(older.stage(2, [row(3)]))
    assert place.ids() == [1, 2]


def test_a_lock_that_may_not_be_ended_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceflow.postgres.connection.LOCK_SECONDS", 0.3)
    older = place.driver(place.sink(), 1).open()
    older.run(0, [row(1)])
    sleeper = Sleeper(older, older.stage(1, [row(2)]), "postgres.begun")
    rights = (
        f"USAGE, CREATE ON SCHEMA {place.schema}",
        f"SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {place.schema}",
    )
    with place.role(grants=rights) as dsn, pytest.raises(PublishFailed) as refused:
        place.driver(place.sink(dsn), 2).fence()
    (holder,) = place.read(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'onceflow/%/1'"
    )
    assert f"backend {holder['pid']}" in refused.value.message
    assert "pg_terminate_backend" in refused.value.hint
    assert sleeper.wake_up() is Outcome.PUBLISHED


def test_a_lock_of_somebody_else_is_waited_for_and_then_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceflow.postgres.connection.LOCK_SECONDS", 0.3)
    driver = place.driver(place.sink()).open()
    driver.run(0, [row(1)])
    decided = driver.stage(1, [row(2)])
    with psycopg.connect(place.server.dsn) as other:
        other.execute(f"LOCK TABLE {place.table} IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(PublishFailed, match="lock timeout") as refused:
            driver.publish(decided)
    assert "pg_blocking_pids" in refused.value.hint
    assert refused.value.retryable
    assert driver.publish(decided) is Outcome.PUBLISHED
    assert place.ids() == [1, 2]


# ---------------------------------------------------------------- answers that get lost


def test_an_answer_to_commit_that_got_lost_is_found_in_the_ledger(place: Place) -> None:
    with place.server.proxy() as proxy:
        sink = place.sink(place.server.dsn_through(proxy))
        driver = place.driver(sink).open()
        decided = driver.stage(0, [row(1)])
        with proxy.losing(commit) as lost:
            lost.is_meant = _first(lost.is_meant)
            assert driver.publish(decided) is Outcome.PUBLISHED
        assert lost.count == 1
        assert place.ids() == [1]
        assert driver.publish(decided) is Outcome.ALREADY_PUBLISHED


def test_a_commit_that_never_arrived_published_nothing(place: Place) -> None:
    with place.server.proxy() as proxy:
        driver = place.driver(place.sink(place.server.dsn_through(proxy))).open()
        decided = driver.stage(0, [row(1)])
        faults.arm("postgres.written", lambda _: proxy.cut())
        with pytest.raises(PublishFailed):
            driver.publish(decided)
        assert driver.sink.published(OUTPUT).position is None
        assert driver.publish(decided) is Outcome.PUBLISHED
        assert place.ids() == [1]


def test_what_cannot_be_found_out_is_unknown_and_the_next_driver_knows(place: Place) -> None:
    with place.server.proxy() as proxy:
        driver = place.driver(place.sink(place.server.dsn_through(proxy))).open()
        decided = driver.stage(0, [row(1)])
        with proxy.losing(commit) as lost, pytest.raises(PublishUnknown):  # every one of them
            driver.publish(decided)
        assert lost.count == 2
    assert place.driver(place.sink(), 2).open(decided).ledger.position == decided.position
    assert place.ids() == [1]


def _first(is_meant: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    """Only the first request that is meant."""
    seen: list[bytes] = []

    def first(request: bytes) -> bool:
        if seen or not is_meant(request):
            return False
        seen.append(request)
        return True

    return first


# ---------------------------------------------------------------- a server that dies


@pytest.fixture
def restarted(place: Place) -> Iterator[Server]:
    yield place.server
    place.server.start()


@pytest.mark.parametrize("point", ["postgres.begun", "postgres.written", "postgres.committed"])
def test_a_server_killed_in_the_middle_of_a_publish_shows_all_or_nothing(
    place: Place, restarted: Server, point: str
) -> None:
    driver = place.driver(place.sink()).open()
    driver.run(0, [row(1)])
    decided = driver.stage(1, [row(2), row(3)])

    def crash(_: str) -> None:
        restarted.kill()
        restarted.start()

    faults.arm(point, crash)
    if point == "postgres.committed":
        assert driver.publish(decided) is Outcome.PUBLISHED
    else:
        with pytest.raises(PublishFailed) as failed:
            driver.publish(decided)
        assert failed.value.retryable
        assert place.ids() == [1]
    place.driver(place.sink(), 2).open(decided)
    assert place.ids() == [1, 2, 3]


def test_a_server_that_is_down_is_tried_again_and_says_so(place: Place, restarted: Server) -> None:
    driver = place.driver(place.sink()).open()
    decided = driver.stage(0, [row(1)])
    restarted.kill()
    for ask in (driver.fence, lambda: driver.publish(decided)):
        with pytest.raises(PublishFailed, match="cannot connect") as failed:
            ask()
        assert failed.value.retryable
        assert "start the server" in failed.value.hint
    restarted.start()
    assert driver.publish(decided) is Outcome.PUBLISHED
    assert place.ids() == [1]


def test_a_server_that_answers_nothing_is_not_waited_for_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceflow.postgres.connection._GRACE_SECONDS", 0.2)
    driver = place.driver(place.sink(timeout=1)).open()
    decided = driver.stage(0, [row(1)])
    frozen: list[int] = []

    def freeze(_: str) -> None:
        """The backend, and with it the server's own timeouts."""
        (holder,) = place.read(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'onceflow/%/1'"
        )
        frozen.append(holder["pid"])
        os.kill(holder["pid"], signal.SIGSTOP)

    faults.arm("postgres.begun", freeze)
    try:
        with pytest.raises(OnceflowError) as failed:
            driver.publish(decided)
    finally:
        os.kill(frozen[0], signal.SIGCONT)
    assert failed.value.retryable
    place.driver(place.sink(), 2).open(decided)
    assert place.ids() == [1]


# ---------------------------------------------------------------- what is left over


def test_copies_of_older_terms_are_swept_and_nobody_elses(place: Place) -> None:
    driver = place.driver(place.sink(), 3)
    sink = driver.sink
    assert isinstance(sink, Postgres)
    mine = sink._ledger.whose(OUTPUT)
    names = {
        f"_onceflow_{mine}_1_0", f"_onceflow_{mine}_2_7", f"_onceflow_{mine}_3_8",
        "_onceflow_0123456789ab_1_0",
    }  # fmt: skip
    place.run(*(f"CREATE UNLOGGED TABLE {place.schema}.{name} (id int)" for name in names))
    driver.open()
    gone = names - place.tables()
    assert gone == {f"_onceflow_{mine}_1_0", f"_onceflow_{mine}_2_7"}


def test_a_commit_is_flushed_also_where_the_role_does_not_ask_for_it(place: Place) -> None:
    place.run(
        f"CREATE TABLE {place.table} (id bigint, name text, "
        "how text DEFAULT current_setting('synchronous_commit'))"
    )
    rights = (f"USAGE, CREATE ON SCHEMA {place.schema}", f"INSERT ON {place.table}")
    with place.role(grants=rights) as dsn:
        user = conninfo_to_dict(dsn)["user"]
        place.run(f"ALTER ROLE {user} SET synchronous_commit = off")
        place.driver(place.sink(dsn)).open().run(0, [row(1)])
        assert place.read() == [{**row(1), "how": "on"}]


def test_two_that_fence_at_once_do_not_disturb_each_other(place: Place) -> None:
    said: dict[int, Ledger | BaseException] = {}

    def fence(term: int) -> None:
        try:
            driver = place.driver(place.sink(table=f"rows{term}"), 1, output=f"job/query/{term}")
            said[term] = driver.fence()
        except BaseException as error:
            said[term] = error

    threads = [threading.Thread(target=fence, args=(term,)) for term in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(said.values()) == [Ledger(term=1)] * 6


def test_a_decision_for_another_table_of_the_same_output_is_not_lost(place: Place) -> None:
    driver = place.driver(place.sink()).open()
    decided = driver.run(0, [row(1)])
    moved = place.driver(place.sink(table="elsewhere"), 2).open(decided)
    follows = replace(moved.stage(1, [row(2)]), previous=decided.position)
    with pytest.raises(OnceflowError, match="the table is gone"):
        moved.publish(follows)
