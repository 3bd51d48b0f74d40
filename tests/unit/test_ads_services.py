"""The reference application's services: orders over HTTP, staged answers, budgets, the board."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.answers import Answers
from ads.board import Board
from ads.budget import Budget, Campaign, CountLogs, campaigns, paused_ads
from ads.database import rows
from ads.feed import Feed
from ads.order_service import OrderService
from ads.places import Places
from ads.stream import Stream, must_load
from ads.world import ADS, BUDGETS, REGIONS, count_id
from ads_outputs import append, rows_of

from onceflow.errors import DiskFull, JobError, OnceflowError, OutOfRange, ServerSilent
from onceflow.log import EmbeddedLog

pytestmark = pytest.mark.timeout(120)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def service() -> Iterator[OrderService]:
    with OrderService() as running:
        yield running


def ask(url: str, body: bytes | None = None) -> Any:
    with build_opener(ProxyHandler({})).open(Request(url, body), timeout=10) as response:
        return json.loads(response.read())


# ---------------------------------------------------------------- the order service


def test_an_order_has_one_value_and_a_new_answer_every_time(service: OrderService) -> None:
    once, again = (ask(f"{service.url}/orders/order-1-7") for _ in range(2))
    assert once["answer_id"] != again["answer_id"]
    assert (once["value_cents"], once["courier"]) == (again["value_cents"], again["courier"])
    several = ask(f"{service.url}/orders", json.dumps(["order-1-7", "ö/ü ?"]).encode())
    assert set(several) == {"order-1-7", "ö/ü ?"}
    assert ask(f"{service.url}/asked") == {"order-1-7": 3, "ö/ü ?": 1}


def test_it_refuses_what_is_no_list_of_orders_and_goes_on(service: OrderService) -> None:
    for path, body, code in (
        ("/orders", b"{", 400),
        ("/orders", b"[1]", 400),
        ("/orders", b"\xff", 400),
        ("/orders", b"7", 400),
        ("/other", b"[]", 404),
        ("/../etc/passwd", None, 404),
        ("/orders/", None, 404),
    ):
        with pytest.raises(HTTPError) as refused:
            ask(service.url + path, body)
        assert refused.value.code == code
        refused.value.close()
    with closing(HTTPConnection(urlsplit(service.url).netloc, timeout=10)) as connection:
        connection.putrequest("POST", "/orders")
        connection.putheader("Content-Length", "1000001")
        connection.endheaders()
        assert connection.getresponse().status == 413
    assert ask(f"{service.url}/orders", b"[]") == {}


# ---------------------------------------------------------------- staged answers


def test_the_first_answer_is_the_one_for_ever(tmp_path: Path, service: OrderService) -> None:
    answers = Answers(tmp_path / "answers.db", service.url)
    orders = [f"order-1-{number}" for number in range(450)]
    first = answers.of(orders)
    assert set(first) == set(orders)
    replay = pickle.loads(pickle.dumps(answers)).of([*reversed(orders), orders[0], "another"])
    assert {order: replay[order] for order in orders} == first
    assert service.asked == dict.fromkeys([*orders, "another"], 1)
    assert answers.of([]) == {}


def test_what_is_staged_needs_no_service(tmp_path: Path) -> None:
    with OrderService() as service:
        first = Answers(tmp_path / "answers.db", service.url).of(["a", "b"])
    away = Answers(tmp_path / "answers.db", service.url, patience=0.3)
    assert away.of(["b", "a"]) == first
    with pytest.raises(ServerSilent, match="does not answer") as silent:
        away.of(["a", "c"])
    assert silent.value.retryable
    assert "order-service" in silent.value.hint


def test_a_service_that_says_not_now_is_asked_again(tmp_path: Path) -> None:
    with OrderService(failing=0.5) as service:
        found = Answers(tmp_path / "answers.db", service.url).of([f"o{n}" for n in range(300)])
    assert len(found) == 300


def test_a_refusal_is_not_asked_again(tmp_path: Path, service: OrderService) -> None:
    with pytest.raises(OnceflowError, match="refuses: 404") as refused:
        Answers(tmp_path / "answers.db", f"{service.url}/elsewhere").of(["a"])
    assert not refused.value.retryable


@pytest.mark.parametrize("said", [b"{}", b"<html>", b"[]", b'{"a": {"courier": "x"}}', b"null"])
def test_an_answer_that_is_none_is_told_as_such(tmp_path: Path, said: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(OnceflowError, match="no answer for 1 orders") as refused:
            Answers(tmp_path / "answers.db", url).of(["a"])
        server.shutdown()
    assert url in str(refused.value)
    assert refused.value.hint


def test_many_at_once_get_the_same_answers(tmp_path: Path) -> None:
    """Attempts of one task, say: each asks, one is first, all use its answers."""
    code = (
        "import json, sys; from pathlib import Path; from ads.answers import Answers\n"
        "sys.stdin.readline()\n"
        "found = Answers(Path(sys.argv[1]), sys.argv[2]).of([f'o{n}' for n in range(300)])\n"
        "print(json.dumps({order: answer.answer_id for order, answer in found.items()}))"
    )
    with OrderService(slow=0.05) as service:
        command = [sys.executable, "-c", code, str(tmp_path / "answers.db"), service.url]
        all_of_them = [
            subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": str(EXAMPLES)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(5)
        ]
        for process in all_of_them:
            assert process.stdin
            process.stdin.write("now\n")
            process.stdin.flush()
        said = [json.loads(process.communicate(timeout=60)[0]) for process in all_of_them]
        asked = service.asked["o0"]
    assert all(each == said[0] for each in said)
    staged = rows(tmp_path / "answers.db", "SELECT order_id, answer_id FROM answers")
    assert {row["order_id"]: row["answer_id"] for row in staged} == said[0]
    assert asked >= 1


# ---------------------------------------------------------------- budgets


class Counts:
    """The counts that the aggregation would publish, and what must be charged for them."""

    def __init__(self, places: Places, seed: int = 1) -> None:
        places.create()
        self.panes = 0
        self.spend = dict.fromkeys(BUDGETS, 0)
        self._places, self._chance = places, random.Random(seed)

    def publish(self, panes: int = 20) -> None:
        """An epoch of both regions."""
        for region in REGIONS:
            found = []
            for _ in range(panes):
                ad, clicks = self._chance.choice(list(ADS.values())), self._chance.randrange(30)
                minute = datetime(2026, 3, 2, tzinfo=UTC) + timedelta(minutes=self.panes)
                record = count_id(region, ad.name, minute, self.panes)
                found.append({"record_id": record, "region": region, "ad": ad.name,
                              "campaign": ad.campaign, "minute": minute, "pane": self.panes,
                              "impressions": 100, "clicks": clicks})  # fmt: skip
                self.panes += 1
                self.spend[ad.campaign] += clicks * ad.price_micros
            append(self._places, "counts", region, found)


def charged(places: Places) -> dict[str, int]:
    """By campaign, from the single charges."""
    found = rows(
        places.folder / "budget.db", "SELECT campaign, sum(micros) AS it FROM charges GROUP BY 1"
    )
    return {row["campaign"]: row["it"] for row in found}


def spent(places: Places) -> dict[str, int]:
    return {each.campaign: each.spent_micros for each in campaigns(places)}


def number_of_charges(places: Places) -> int:
    found = rows(places.folder / "budget.db", "SELECT count(*) AS it FROM charges")
    return int(found[0]["it"]) if found else 0


def test_each_pane_is_charged_once_and_a_spent_campaign_is_paused(tmp_path: Path) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    assert campaigns(places) == []
    with closing(Budget(places)) as budget:
        assert budget.step() == 0
        assert paused_ads(places) == set()
        while not any(each.paused for each in campaigns(places)):
            counts.publish()
            assert budget.step() == 40
        counts.publish()  # of paused ads, too: they are charged all the same
        assert budget.step() == 40
        assert budget.step() == 0
    assert charged(places) == spent(places) == counts.spend
    for each in campaigns(places):
        assert each.paused == (counts.spend[each.campaign] >= BUDGETS[each.campaign])
        ads = {ad.name for ad in ADS.values() if ad.campaign == each.campaign}
        assert (ads <= paused_ads(places)) == each.paused


def test_a_pane_that_is_read_again_is_not_charged_again(tmp_path: Path) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    counts.publish()
    with closing(Budget(places)) as budget, closing(Budget(places)) as another:
        assert budget.step() == 40
        another._db.execute("DELETE FROM progress")
        assert another.step() == 40
        counts.publish()
        assert another.step() == 40
        assert budget.step() == 0
    assert charged(places) == spent(places) == counts.spend


def test_a_step_that_fails_anywhere_charges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    counts.publish()
    charge = Budget._charge
    with closing(Budget(places)) as budget:
        for at in (0, 1, 17, 39):
            left = iter(range(at))

            def fails(budget: Budget, pane: Any, left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise OnceflowError("no more")
                charge(budget, pane)

            monkeypatch.setattr(Budget, "_charge", fails)
            with pytest.raises(OnceflowError, match="no more"):
                budget.step()
            assert charged(places) == {}
        monkeypatch.setattr(Budget, "_charge", charge)
        assert budget.step() == 40
    assert charged(places) == spent(places) == counts.spend


@pytest.mark.kill
def test_kill_9_at_any_moment_loses_no_charge_and_doubles_none(tmp_path: Path) -> None:
    places, chance = Places(tmp_path), random.Random(3)
    counts = Counts(places)
    small_steps = (
        "import sys; from pathlib import Path; from threading import Event\n"
        "from ads import budget; from ads.places import Places\n"
        "budget._MOST = 3\n"
        "budget.Budget(Places(Path(sys.argv[1]))).run(Event())"
    )
    for _ in range(4):
        began = number_of_charges(places)
        counts.publish(panes=60)
        service = subprocess.Popen(
            [sys.executable, "-c", small_steps, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(EXAMPLES)},
        )
        enough = began + chance.randrange(80)
        try:
            wait_until(lambda enough=enough: number_of_charges(places) > enough)
            assert service.poll() is None
        finally:
            service.send_signal(signal.SIGKILL)
            service.wait()
        assert charged(places) == {k: v for k, v in spent(places).items() if v}
    with closing(Budget(places)) as budget:
        while budget.step():
            pass
    assert charged(places) == spent(places) == counts.spend
    assert number_of_charges(places) == counts.panes


def test_the_service_runs_until_it_is_stopped(tmp_path: Path) -> None:
    places, stop = Places(tmp_path), threading.Event()
    counts = Counts(places)
    counts.publish()
    budget = Budget(places)
    thread = threading.Thread(target=budget.run, args=(stop,), kwargs={"every": 0.01})
    thread.start()
    wait_until(lambda: number_of_charges(places) == 40)
    counts.publish()
    wait_until(lambda: number_of_charges(places) == 80)
    stop.set()
    thread.join()
    budget.close()


def test_a_long_log_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    for _ in range(5):
        counts.publish()
    monkeypatch.setattr("ads.budget._MOST", 7)
    with closing(Budget(places)) as budget:
        while budget.step():
            pass
    assert charged(places) == spent(places) == counts.spend
    panes, reached = CountLogs(places).read({})
    assert len(panes) <= 2 * 2 * 7
    assert set(reached.values()) <= set(range(8))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_counts_that_were_replaced_are_not_charged_on(tmp_path: Path) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    counts.publish()
    with closing(Budget(places)) as budget:
        budget.catch_up()
    shutil.rmtree(places.log("counts", "eu"))
    Counts(places, seed=2).publish(panes=60)
    with pytest.raises(JobError, match="counts/eu is not the one") as refused:
        Budget(places)
    assert "budget.db" in refused.value.hint
    assert charged(places) == spent(places) == counts.spend


def test_counts_that_were_set_back_are_not_charged_on(tmp_path: Path) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    counts.publish()
    shutil.copytree(places.log("counts", "eu"), tmp_path / "backup")
    before = dict(counts.spend)
    counts.publish()
    with closing(Budget(places)) as budget:
        budget.catch_up()
    shutil.rmtree(places.log("counts", "eu"))
    (tmp_path / "backup").rename(places.log("counts", "eu"))
    with closing(Budget(places)) as budget, pytest.raises(OutOfRange, match="was set back"):
        budget.step()
    assert charged(places) == spent(places) == counts.spend != before


def test_a_pane_that_says_something_else_than_what_was_charged_is_refused(tmp_path: Path) -> None:
    places = Places(tmp_path)
    counts = Counts(places)
    counts.publish()
    pane = rows_of(places, "counts")[0]
    append(places, "counts", pane["region"], [pane])
    with closing(Budget(places)) as budget:
        budget.catch_up()  # the same again is nothing
        append(places, "counts", pane["region"], [pane | {"clicks": pane["clicks"] + 45}])
        with pytest.raises(JobError, match=f"was charged as {pane['clicks']} clicks") as refused:
            budget.step()
    assert "taken back" in refused.value.hint
    assert charged(places) == spent(places) == counts.spend


# ---------------------------------------------------------------- the feed


def test_a_feed_that_could_not_send_goes_past_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, stream = Places(tmp_path), Stream(seed=4, per_minute=300)
    places.create()
    feed = Feed(places, stream)
    feed.send(5)
    append_to_log = EmbeddedLog.append

    def full(log: EmbeddedLog, *_: Any, **__: Any) -> None:
        raise DiskFull(f"no room for {log.path}")

    monkeypatch.setattr(EmbeddedLog, "append", full)
    with pytest.raises(DiskFull):
        feed.send(5)
    monkeypatch.setattr(EmbeddedLog, "append", append_to_log)
    for go_on in (lambda: feed.send(5), feed.close):
        with pytest.raises(JobError, match="nothing goes past it"):
            go_on()
    Feed(places, stream).send(5)
    sent = sum(len(some) for lines in must_load(tmp_path).lines() for some in lines.values())
    assert len(rows_of(places, "raw")) == sent


# ---------------------------------------------------------------- places


def test_a_secret_that_is_not_there_is_told_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no connection string") as refused:
        Places.from_environment(tmp_path, {"ADS_POSTGRES_FILE": str(tmp_path / "none")})
    assert "ADS_POSTGRES_FILE" in refused.value.hint
    assert Places.from_environment(tmp_path, {"ADS_KAFKA": ""}).kafka is None


# ---------------------------------------------------------------- the board


def test_a_board_has_a_head_then_samples_and_marks(tmp_path: Path) -> None:
    now = [100.0]
    board = Board(tmp_path, clock=lambda: now[0])
    some = [Campaign("lunch", 3, 900, 1000, None), Campaign("dinner", 1, 50, 50, "2026")]
    assert board.sample(some, truth_clicks={"lunch": 4, "dinner": 1})
    now[0] += 0.4
    assert not board.sample(some)
    board.mark("kill", "kill -9 of aggregation: 14 processes")
    now[0] += 0.1
    assert board.sample(some)
    board.mark("verdict", "exact", exact=True)
    head, first, kill, second, verdict = map(json.loads, board.path.read_text().splitlines())
    assert board.path == tmp_path / "_boards" / "ads.jsonl"
    assert (head["board"], head["title"], head["unit"]["spend"]) == ("ads", "Ads", "EUR")
    assert first["totals"] == {"clicks": 4, "spend_micros": 950, "truth_clicks": 5,
                               "truth_spend_micros": None}  # fmt: skip
    assert first["campaigns"][1] == {
        "campaign": "dinner", "clicks": 1, "spend_micros": 50, "budget_micros": 50, "paused": True,
        "truth_clicks": 1, "truth_spend_micros": None,
    }  # fmt: skip
    assert (kill["mark"], kill["t"], second["t"]) == ("kill", 0.4, 0.5)
    assert (verdict["mark"], verdict["exact"]) == ("verdict", True)
