"""Metrics: in the format that Prometheus reads, and each as the documentation lists it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from alive import Alive
from asking import ask
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.applications import Starlette

from onceflow.page.api import Api
from onceflow.page.home_reader import HomeReader
from onceflow.page.job_cache import HomeCache
from onceflow.page.metrics import METRICS, exposition

pytestmark = pytest.mark.usefixtures("no_fsync")

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\}) (\S+)')
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Strictly: every line is a comment that belongs there, or a sample."""
    found: Samples = {}
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        labels = frozenset(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2]))
        assert (match[1], labels) not in found
        found[match[1], labels] = float(match[3])
    return found


def of(home: Path) -> Samples:
    found = HomeCache(home)
    found.read()
    return samples(exposition().encode(found.jobs).decode())


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((f"onceflow_{name}", frozenset(labels.items())))


def test_a_job_that_runs(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell()
    found, q = of(tmp_path), {"job": "shop", "query": "out"}
    assert value(found, "up", job="shop") == 1
    assert value(found, "leader_term", job="shop") == 1
    assert value(found, "restarts_total", job="shop") == 0
    assert value(found, "epoch", **q) == 2
    assert value(found, "epochs_total", **q) == 3
    assert value(found, "rows_in_total", **q) == 300
    assert value(found, "rows_out_total", **q, output="clicks") == 30
    assert value(found, "late_rows_total", **q) == 4
    assert value(found, "rejected_rows_total", **q) == 3
    assert value(found, "lag_seconds", **q) == 0.7
    assert value(found, "state_rows", **q) == 7
    assert value(found, "time_to_committed_seconds_count", **q) == 3
    assert value(found, "time_to_committed_seconds_bucket", **q, le="+Inf") == 3
    assert value(found, "step_seconds_total", **q, step="stage") is not None


def test_the_buckets_of_the_histogram_only_grow(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell(committed_s={"epochs": 3, "sum": 7.0, "at_most": [[0.5, 1], [1.0, 1], [5.0, 3]]})
    found, q = of(tmp_path), {"job": "shop", "query": "out"}
    assert [
        value(found, "time_to_committed_seconds_bucket", **q, le=le) for le in ("0.5", "1", "5")
    ] == [1, 1, 3]


def test_without_a_driver_counters_stay_and_what_only_it_knows_goes(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    shop.tell()
    shop.lease.release()
    found = of(tmp_path)
    assert value(found, "up", job="shop") == 0
    assert value(found, "epochs_total", job="shop", query="out") == 3
    assert value(found, "lag_seconds", job="shop", query="out") is None


def test_when_a_driver_was_heard_last_is_told_while_it_hangs_and_when_it_is_gone(
    tmp_path: Path,
) -> None:
    shop = Alive(tmp_path)
    shop.start()
    assert value(of(tmp_path), "heard_timestamp_seconds", job="shop") is None
    shop.tell()
    path = shop.folder.folder / "progress.json"
    body = {**json.loads(path.read_text()), "at": "2026-11-15T10:00:00.500Z"}
    path.write_text(json.dumps(body))
    found = of(tmp_path)
    assert value(found, "heard_timestamp_seconds", job="shop") == 1794736800.5
    assert (value(found, "up", job="shop"), value(found, "lag_seconds", job="shop")) == (1, None)
    shop.lease.release()
    assert value(of(tmp_path), "heard_timestamp_seconds", job="shop") == 1794736800.5


def test_an_empty_home_has_metrics_without_samples(tmp_path: Path) -> None:
    assert of(tmp_path) == {}
    assert of(tmp_path / "nowhere") == {}


def test_labels_are_escaped(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    shop.tell(outputs={'a"b\\c\nd': 1})
    found = of(tmp_path)
    assert value(found, "rows_out_total", job="shop", query="out", output=r"a\"b\\c\nd") == 1


def test_they_are_served_as_prometheus_wants_them(tmp_path: Path) -> None:
    Alive(tmp_path).start()
    answer = ask(Starlette(routes=Api(HomeReader(tmp_path)).routes()), "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert value(samples(answer.body.decode()), "up", job="shop") == 1


def test_they_are_served_as_openmetrics_to_those_who_accept_it(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell()
    app = Starlette(routes=Api(HomeReader(tmp_path)).routes())
    prometheus = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    )
    answer = ask(app, "/metrics", accept=prometheus)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    parsed = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert parsed == samples(ask(app, "/metrics", accept="text/plain").body.decode())
    for odd in ("application/openmetrics-text; version=x", "", "x" * 999, ";,;=", "*/*"):
        assert ask(app, "/metrics", accept=odd).status == 200


# ---------------------------------------------------------------- list and code


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    rows = re.findall(
        r"^\| `(onceflow_\w+)` \| (\w+) \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE
    )
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_documentation_lists_each_with_type_and_labels_and_nothing_else() -> None:
    assert documented() == {name: (m.type, m.labels) for name, m in METRICS.items()}


def test_what_is_told_is_what_is_declared(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    shop.tell()
    used: dict[str, set[str]] = {}
    for name, labels in of(tmp_path):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        used.setdefault(base, set()).update(label for label, _ in labels if label != "le")
    for name, labels in used.items():
        assert labels == set(METRICS[name].labels), name
    silent = set(METRICS) - set(used)
    assert silent == {"onceflow_watermark_timestamp_seconds"}  # this job has none


def test_names_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.type == "counter"), name
        assert not re.search(r"_(ms|millis|kb|mb|percent)(_|$)", name)
        assert metric.help.endswith(".")
