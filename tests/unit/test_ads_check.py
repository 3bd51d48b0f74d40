"""The check of the reference application finds whatever is lost, doubled or wrong anywhere."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.answers import Answers
from ads.budget import Budget
from ads.check import by_campaign, check
from ads.generator import Generator, Line
from ads.main import main
from ads.order_service import OrderService
from ads.places import Places
from ads.stream import Stream
from ads.truth import Truth
from ads.world import BUDGETS, EVENT, REGIONS, count_id
from ads_outputs import append, publish, rows_of

from onceflow.log import EmbeddedLog

STREAM = Stream(seed=2, per_minute=300, chunks=60, closed=True)


def epochs() -> list[dict[str, list[Line]]]:
    """All lines, a few seconds at a time."""
    chunks = list(STREAM.lines())
    return [
        {
            region: [line for chunk in chunks[n : n + 15] for line in chunk[region]]
            for region in REGIONS
        }
        for n in range(0, len(chunks), 15)
    ]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Places, Truth]:
    places = Places(tmp_path_factory.mktemp("ads"))
    STREAM.save(places.folder)
    with OrderService() as service:
        answers = Answers(places.folder / "answers.db", service.url)
        truth = publish(places, epochs(), answers)
    with closing(Budget(places)) as budget:
        while budget.step():
            pass
    return places, truth


@pytest.fixture
def copied(right: tuple[Places, Truth], tmp_path: Path) -> tuple[Places, Truth]:
    """To be spoilt."""
    shutil.copytree(right[0].folder, tmp_path / "copy")
    return Places(tmp_path / "copy"), right[1]


def test_what_perfect_jobs_publish_is_exact(right: tuple[Places, Truth]) -> None:
    verdict = check(*right)
    assert verdict.differences == ()
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.exact
    assert verdict.compared > 20_000
    lines = by_campaign(*right)
    assert [line.campaign for line in lines] == list(BUDGETS)
    for line in lines:
        assert line.truth_clicks == line.clicks > 0
        assert line.truth_spend_micros == line.charged_micros > 0


def test_before_the_jobs_have_run_everything_is_lost(tmp_path: Path) -> None:
    places, truth = Places(tmp_path), Truth()
    places.create()
    truth.add(Generator(1).chunk())
    verdict = check(tmp_path, truth)
    assert verdict.duplicated == 0
    assert verdict.lost > 3_000
    assert {d.target.split("/")[0] for d in verdict.differences} == {
        "events", "counts", "attributed", "record ids of attributed", "worth",
        "serving ad_minutes", "serving attributions", "warehouse ad_minutes",
        "warehouse attributions", "charges, micro-units", "campaigns, micro-units",
        "campaigns, clicks",
    }  # fmt: skip


# ---------------------------------------------------------------- what it finds


def again(stream: str) -> Callable[[Places], None]:
    """A row of a stream is there twice."""

    def spoil(places: Places) -> None:
        row = next(row for row in rows_of(places, stream) if row.get("clicks", 1))
        append(places, stream, "eu", [row])

    return spoil


def changed(stream: str, **values: Any) -> Callable[[Places], None]:
    """A row of a stream is there once more, with another value."""

    def spoil(places: Places) -> None:
        append(places, stream, "eu", [rows_of(places, stream)[0] | values])

    return spoil


def sql(file: str, statement: str) -> Callable[[Places], None]:
    def spoil(places: Places) -> None:
        with closing(sqlite3.connect(places.folder / file)) as db, db:
            assert db.execute(statement).rowcount == 1

    return spoil


def file_of(table: str, *, twice: bool) -> Callable[[Places], None]:
    """A Parquet file is gone, or there under another name, too."""

    def spoil(places: Places) -> None:
        path = sorted(places.warehouse_folder(table).rglob("*.parquet"))[0]
        assert pq.read_metadata(path).num_rows
        if twice:
            shutil.copy(path, path.with_name("again.parquet"))
        else:
            path.unlink()

    return spoil


def another_pane(places: Places) -> None:
    """The sums are right, but a record has an id that no replay would give it."""
    row = next(row for row in rows_of(places, "counts") if row["region"] == "eu")
    other = count_id("eu", row["ad"], row["minute"], row["pane"])
    zero = {"impressions": 0, "clicks": 0}
    append(places, "counts", "eu", [row | zero | {"record_id": other, "pane": 10_000}])


def neighbours_worth(places: Places) -> None:
    """The answers of two orders are mixed up, where they are staged and where they are used."""
    one, other = (row for row in rows_of(places, "attributed")[:2])
    swapped = {name: (one[name], other[name]) for name in ("value_cents", "courier", "answer_id")}
    eu = EmbeddedLog(places.log("attributed", "eu"))
    rows = [row for batch in eu.read() for row in batch.to_pylist()]
    for name, (first, second) in swapped.items():
        rows[0][name], rows[1][name] = second, first
        with closing(sqlite3.connect(places.folder / "answers.db")) as db, db:
            for row in rows[:2]:
                db.execute(
                    f"UPDATE answers SET {name} = ? WHERE order_id = ?",
                    (row[name], f"eu/{row['order_id']}"),
                )
    shutil.rmtree(places.log("attributed", "eu"))
    places.create()
    append(places, "attributed", "eu", rows)


def late(places: Places) -> None:
    log = EmbeddedLog.create(places.late_log("attribution"), EVENT)
    event = {name: row for name, row in rows_of(places, "events")[0].items() if name[0] != "_"}
    log.append(pa.Table.from_pylist([event], log.schema))


ROWS = {"rows of serving ad_minutes", "rows of warehouse ad_minutes"}
ORDERS = {"rows of serving attributions", "rows of warehouse attributions"}


@pytest.mark.parametrize(
    ("spoil", "finds"),
    [
        pytest.param(again("events"), {"events/eu"}, id="an event twice"),
        pytest.param(changed("events", user="x"), {"events/eu"}, id="an event of another user"),
        pytest.param(again("rejected"), {"rejected"}, id="a rejected line twice"),
        pytest.param(changed("rejected", reason="x"), {"rejected"}, id="a reason that is wrong"),
        pytest.param(
            again("counts"), {"counts", "record ids of counts", "charges", *ROWS}, id="a pane twice"
        ),
        pytest.param(
            another_pane, {"record ids of counts", "charges", *ROWS}, id="a record id that is wrong"
        ),
        pytest.param(
            again("attributed"),
            {"attributed", "record ids of attributed", "worth", "answers", *ORDERS},
            id="an order twice",
        ),
        pytest.param(neighbours_worth, {"worth", *ORDERS}, id="an order worth what another was"),
        pytest.param(late, {"late"}, id="an event that came too late"),
        pytest.param(
            sql("answers.db", "UPDATE answers SET answer_id = 'x' WHERE rowid = 5"), {"answers"},
            id="another answer than the staged one",
        ),
        pytest.param(
            sql("answers.db", "DELETE FROM answers WHERE rowid = 5"), {"answers"},
            id="an answer that was not staged",
        ),
        pytest.param(
            sql("serving.db", "UPDATE ad_minutes SET clicks = clicks + 1 WHERE rowid = 9"),
            {"serving ad_minutes", "rows of serving ad_minutes"}, id="a click too many in a table",
        ),
        pytest.param(
            sql("serving.db", "DELETE FROM attributions WHERE rowid = 3"),
            {"serving attributions", "rows of serving attributions"}, id="an order lost in a table",
        ),
        pytest.param(
            file_of("ad_minutes", twice=False),
            {"warehouse ad_minutes", "rows of warehouse ad_minutes"}, id="a file lost",
        ),
        pytest.param(
            file_of("attributions", twice=True),
            {"warehouse attributions", "rows of warehouse attributions"}, id="a file twice",
        ),
        pytest.param(
            sql("budget.db", "UPDATE charges SET micros = micros + 1 WHERE rowid = 7"),
            {"charges", "charges, micro-units"}, id="a micro-unit too much",
        ),
        pytest.param(
            sql("budget.db", "UPDATE campaigns SET spent_micros = 1 WHERE campaign = 'lunch'"),
            {"campaigns, micro-units"}, id="the sum of a campaign wrong",
        ),
        pytest.param(
            sql("budget.db", "UPDATE campaigns SET clicks = 0 WHERE campaign = 'lunch'"),
            {"campaigns, clicks"}, id="the clicks of a campaign wrong",
        ),
        pytest.param(
            sql("budget.db", "UPDATE campaigns SET paused_at = 'now' WHERE campaign = 'weekend'"),
            {"campaigns, paused"}, id="a campaign paused that has money left",
        ),
    ],
)  # fmt: skip
def test_it_finds(
    copied: tuple[Places, Truth], spoil: Callable[[Places], None], finds: set[str]
) -> None:
    places, truth = copied
    spoil(places)
    verdict = check(places, truth)
    assert {difference.target for difference in verdict.differences} == finds
    assert not verdict.exact
    sums = {"campaigns, micro-units", "campaigns, clicks", "campaigns, paused"}
    assert bool(verdict.lost or verdict.duplicated) == (not finds <= sums)


def test_it_finds_a_spent_campaign_that_is_not_paused(
    right: tuple[Places, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUDGETS, "lunch", 1)
    (found,) = check(*right).differences
    assert (found.target, found.what, found.found) == ("campaigns, paused", "lunch", 0)


# ---------------------------------------------------------------- its command


def test_the_command_says_what_is_wrong_and_ends_with_1(copied: tuple[Places, Truth]) -> None:
    places, _ = copied
    command = ["check", "--folder", str(places.folder)]
    exact = CliRunner().invoke(main, command)
    assert exact.exit_code == 0, exact.output
    assert exact.output.rstrip().endswith("exact")
    again("events")(places)
    wrong = CliRunner().invoke(main, command)
    assert wrong.exit_code == 1
    assert "2 instead of 1" in wrong.output
    assert "lost 0, duplicated 1" in wrong.output
    in_json = CliRunner().invoke(main, [*command, "--json", "--only", "events"])
    said = json.loads(in_json.output)
    assert in_json.exit_code == 1
    assert (said["exact"], said["lost"], said["duplicated"]) == (False, 0, 1)
    assert said["first"][0]["target"] == "events/eu"
    assert {line["campaign"] for line in said["campaigns"]} == set(BUDGETS)


def test_every_command_has_help_and_json() -> None:
    for name, command in main.commands.items():
        shown = CliRunner().invoke(main, [name, "--help"])
        assert shown.exit_code == 0
        assert "--json" in shown.output
        assert command.help


def test_generate_truth_and_budget_by_their_commands(tmp_path: Path) -> None:
    folder = ["--folder", str(tmp_path), "--json"]
    first = CliRunner().invoke(main, ["generate", "--events", "1000", "--fast", *folder])
    assert first.exit_code == 0, first.output
    more = CliRunner().invoke(main, ["generate", "--events", "1000", "--fast", "--close", *folder])
    sent = [json.loads(each.output)["lines"] for each in (first, more)]
    true = json.loads(CliRunner().invoke(main, ["truth", *folder]).output)
    assert true["lines"] == sum(sent)
    assert true["lines"] == true["events"] + true["again"] + true["rejected"]
    charged = json.loads(CliRunner().invoke(main, ["budget", "--once", *folder]).output)
    assert [each["clicks"] for each in charged] == [0] * len(BUDGETS)


def test_a_folder_without_a_stream_is_refused_with_the_fix(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["check", "--folder", str(tmp_path)])
    assert refused.exit_code == 2
    assert f"generate --folder {tmp_path}" in refused.output
