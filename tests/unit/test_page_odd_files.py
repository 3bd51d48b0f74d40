"""Files of another shape: only the wrong part is left out."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import reading
from alive import Alive
from another import as_another, folder_for_all
from visited import ask, served

from onceflow.harness import charts
from onceflow.page.job_cache import HomeCache
from onceflow.page.metrics import exposition
from onceflow.protocol.home import now

pytestmark = pytest.mark.usefixtures("no_fsync")

HEAD = '{"board": "ads", "title": "Ads", "unit": {"clicks": "clicks"}}'
GOOD = '{"t": 3.0, "totals": {"clicks": 7, "spend_micros": 5}, "campaigns": []}'


def board(home: Path, *lines: str) -> None:
    (home / "_boards").mkdir()
    (home / "_boards" / "ads.jsonl").write_text("".join(f"{line}\n" for line in lines))


def strictly(body: bytes) -> Any:
    """As a browser reads JSON: without NaN and Infinity."""

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    return json.loads(body, parse_constant=refuse)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "1e308"])
def test_a_board_with_an_invalid_number_is_shown_with_the_others(
    tmp_path: Path, value: str
) -> None:
    odd = (
        f'{{"t": 2.0, "at": {value}, "totals": {{"clicks": {value}, "spend_micros": {value}}}, '
        f'"campaigns": [{{"campaign": "c", "clicks": {value}, "spend_micros": {value}, '
        f'"budget_micros": {value}}}]}}'
    )
    mark = f'{{"t": {value}, "mark": "kill", "what": {value}}}'
    board(tmp_path, HEAD[:-1] + f', "says": {value}}}', odd, mark, GOOD)
    with served(tmp_path) as page:
        assert "7 clicks" in ask(page, "/boards/ads").text
        found = strictly(ask(page, "/api/boards/ads").body)
        assert found["last"]["totals"]["clicks"] == 7
        strictly(ask(page, "/api/boards").body)
        assert ask(page, "/").status == 200


@pytest.mark.parametrize(
    "lines",
    [
        ('{"board": "ads", "unit": "EUR"}', GOOD),
        ('{"board": "ads", "unit": [1], "title": {"a": 1}}', GOOD),
        (HEAD, GOOD, '{"mark": ["kill"], "t": [1]}', '{"mark": {"a": 1}}'),
        (HEAD, GOOD, '{"t": "late", "totals": {"clicks": "many"}, "campaigns": 7}'),
        (HEAD, "[" * 100_000, GOOD),
    ],
)
def test_a_board_of_another_shape_is_shown_as_far_as_it_goes(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    board(tmp_path, *lines)
    with served(tmp_path) as page:
        got = ask(page, "/boards/ads")
        assert (got.status, "7 clicks" in got.text) == (200, True)
        assert strictly(ask(page, "/api/boards/ads").body)["samples"]


def test_a_large_whole_number_is_kept_exactly(tmp_path: Path) -> None:
    board(tmp_path, HEAD, '{"t": 1, "totals": {"clicks": 123456789012345678901234567890}}')
    (sample,) = reading.board(tmp_path, "ads")["samples"]
    assert sample["totals"]["clicks"] == 123456789012345678901234567890


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -1.0, 5e-324, 1.7e308])
def test_a_scale_ends_whatever_it_is_for(value: float) -> None:
    assert 0 < charts.round_up(value) < math.inf


# ---------------------------------------------------------------- progress of a driver


ODD = [None, True, "x", [1], {"a": "b"}, -1e300, 1e300, float("nan")]
FIELDS = ("epochs", "rows_in", "rows_in_per_s", "lag_s", "published_s_ago", "late_rows",
          "rejected_rows", "outputs", "steps_s", "committed_s", "query")  # fmt: skip


@pytest.mark.parametrize("value", ODD)
def test_progress_of_another_shape_hides_no_other_job(tmp_path: Path, value: Any) -> None:
    for name in ("a", "b"):
        job = Alive(tmp_path, name)
        job.start()
        job.run(2)
        job.tell()
    told = {"query": "out", "lag_s": 0.7}
    bodies: list[Any] = [{"queries": [{**told, field: value}]} for field in FIELDS]
    bodies += [{"queries": [{**told, "committed_s": {"at_most": value, "epochs": 1, "sum": 1}}]}]
    bodies += [
        {"queries": [{**told, "committed_s": {"at_most": [[value]], "epochs": 1, "sum": 1}}]}
    ]
    bodies += [{"queries": value}, {"queries": [value]}, value]
    for number, body in enumerate(bodies):
        with_who = {"at": now(), "pid": os.getpid(), **body} if isinstance(body, dict) else body
        progress = tmp_path / "b" / "progress.json"
        progress.write_text(json.dumps(with_who) + " " * number)
        home = HomeCache(tmp_path)
        home.read()
        assert [job.summary()["state"] for job in home.jobs] == ["running", "running"]
        strictly(json.dumps([job.details(home.jobs) for job in home.jobs]).encode())
        assert 'onceflow_up{job="b"} 1.0' in exposition().encode(home.jobs).decode()


@pytest.mark.parametrize("value", ODD)
def test_times_of_another_shape_are_left_out(tmp_path: Path, value: Any) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(2)
    lines = [{"epoch": 1, name: value} for name in ("ms", "rows_in", "state_rows", "at")]
    lines += [{"epoch": 1, "ms": {"stage": value}}, {"epoch": value}]
    times = shop.query.folder / "onceflow" / "times.jsonl"
    with times.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    with served(tmp_path) as page:
        assert ask(page, "/jobs/shop").status == 200
        strictly(ask(page, "/api/jobs/shop").body)


# ---------------------------------------------------------------- unreadable folders


LOOK = """
from asking import ask
from starlette.applications import Starlette
from onceflow.page.api import Api
from onceflow.page.home_reader import HomeReader
ask(Starlette(routes=Api(HomeReader("/nowhere")).routes()), "/api/jobs")  # imports the rest
"""


def test_an_unreadable_folder_hides_no_other_job() -> None:
    with folder_for_all() as home:
        for name in ("a", "b", "c"):
            Alive(home, name).start()
        (home / "b").chmod(0o700)
        said = as_another(LOOK, f"""
app = Starlette(routes=Api(HomeReader({str(home)!r})).routes())
print(ask(app, "/api/jobs").body.decode())
print(ask(app, "/api/jobs/b").body.decode())
print(ask(app, "/metrics").body.decode())
""")  # fmt: skip
    first, second, *told = said.splitlines()
    assert [(job["job"], job["state"]) for job in json.loads(first)] == [
        ("a", "running"), ("b", "damaged"), ("c", "running"),
    ]  # fmt: skip
    assert "Permission denied" in json.loads(second)["error"]
    assert 'onceflow_damaged{job="b"} 1.0' in told
    assert 'onceflow_up{job="c"} 1.0' in told


def test_an_unreadable_home_is_not_shown_as_empty() -> None:
    with folder_for_all() as folder:
        home = folder / "home"
        Alive(home).start()
        home.chmod(0o700)
        said = as_another(LOOK, f"""
app = Starlette(routes=Api(HomeReader({str(home)!r})).routes())
for path in ("/api/jobs", "/metrics"):
    answer = ask(app, path)
    print(answer.status, "cannot be listed: Permission denied" in answer.body.decode())
""")  # fmt: skip
    assert said.splitlines() == ["500 True"] * 2


def test_a_home_that_is_a_file_is_an_error_on_the_page(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    with served(home) as page:
        got = ask(page, "/")
        assert (got.status, "cannot be listed: Not a directory" in got.text) == (500, True)
        assert "No job has run here yet" not in got.text
