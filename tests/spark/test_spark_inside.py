"""Which Spark versions the inside fits: every fact that `spark_inside` stands on, seen."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import onceflow
from pyspark.sql import functions as F
from story import FILES, Story, read_files

from onceflow.errors import JobError, SetupError
from onceflow.protocol.epoch import Epochs
from onceflow.spark.checkpoint import Checkpoint
from onceflow.spark.versions import SUPPORTED, check_version


def test_the_version_that_is_installed_is_one_that_it_knows(spark: Any) -> None:
    assert tuple(int(p) for p in spark.version.split(".")[:2]) in SUPPORTED


@pytest.mark.parametrize("version", ["3.5.1", "4.1.0", "4.4.0", "5.0.0-preview"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(SetupError, match="pip install"):
        check_version(version)


QUERIES = {
    "window": lambda s: (
        s.withWatermark("at", "5 seconds")
        .groupBy(F.window("at", "20 seconds"), "key")
        .count()
        .select("key", "count")
    ),
    "deduplication": lambda s: s.withWatermark("at", "5 seconds").dropDuplicates(["key", "at"]),
    "session": lambda s: (
        s.withWatermark("at", "5 seconds")
        .groupBy(F.session_window("at", "3 seconds"), "key")
        .count()
        .select("key", "count")
    ),
    "chained": lambda s: (
        s.withWatermark("at", "5 seconds")
        .dropDuplicates(["id", "at"])
        .groupBy(F.window("at", "20 seconds"))
        .count()
        .select("count")
    ),
    "stateless": lambda s: s.select("id"),
}


@pytest.mark.parametrize("query", [*QUERIES, "join"])
def test_what_is_read_inside_an_epoch_is_what_spark_writes_afterwards(
    tmp_path: Path, spark: Any, query: str
) -> None:
    """State ids and next watermark in the decision equal those in `commits/<N>`, for each N."""
    import onceflow
    from onceflow import sinks, sources

    story = Story(str(tmp_path), "stateless", "files")
    story.write_input(range(3))
    read = lambda name: sources.Files(  # noqa: E731 - one line, twice
        tmp_path / "in", schema="id long, key string, at timestamp", max_files_per_epoch=1
    ).stream(spark, name)
    rows = read("rows")
    if query == "join":
        left = rows.withWatermark("at", "5 seconds")
        right = read("others").withWatermark("at", "5 seconds")
        right = right.select(F.col("id").alias("other"), F.col("at").alias("then"))
        df = left.join(right, F.expr("id = other and at = then"))
    else:
        df = QUERIES[query](rows)
    onceflow.write(
        df, "probe", to=sinks.Files(tmp_path / "out"), home=tmp_path / "home", once=True
    ).awaitTermination()
    (folder,) = (tmp_path / "home").glob("probe/lineages/*/probe")
    decisions = (
        onceflow.protocol.home.JobFolder(tmp_path / "home", "probe").queries()[0].epoch_log().read()
    )
    assert len(decisions.decisions) >= 3
    for decision in decisions.decisions:
        version, text = (folder / "commits" / str(decision.epoch)).read_text().split("\n")
        written = json.loads(text)
        assert version == "v2"
        assert written["stateUniqueIds"] == decision.state
        assert written["nextBatchWatermarkMs"] == decision.watermark
        assert decision.offsets == (folder / "offsets" / str(decision.epoch)).read_text()
        assert bool(decision.state) == (query != "stateless")
        for file in Checkpoint(folder).state_files(decision.epoch, decision.state):
            assert file.exists()


def test_the_plan_of_an_epoch_is_read_from_sparks_memory(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(str(tmp_path), "stateful", "files")
    story.write_input()
    seen = []
    check = Epochs._check

    def spy(self: Epochs, epoch: int) -> Any:
        running, plan, offsets, entries = check(self, epoch)
        seen.append((plan, entries))
        return running, plan, offsets, entries

    monkeypatch.setattr(Epochs, "_check", spy)
    story.live()
    plans = [plan for plan, _ in seen]
    assert [plan.epoch for plan in plans] == list(range(FILES + 1))
    assert plans[0].start == {}
    assert all(a.end == b.start for a, b in pairwise(plans))
    assert [len(plan.files["rows"]) for plan in plans] == [1] * FILES + [0]  # the last: no data
    assert all(plan.compare_files(entries) == "" for plan, entries in seen)


def test_offsets_that_another_driver_overwrote_are_noticed(tmp_path: Path, spark: Any) -> None:
    """A paused driver's Spark can write `offsets/<N>` late. The plan in memory is what counts."""
    story = Story(str(tmp_path), "stateless", "files")
    story.write_input()
    story.live()
    story.write_input(range(FILES, FILES + 1))

    before = story.published()
    original = Epochs._check

    def late(self: Epochs, epoch: int) -> Any:
        newest = story.newest("offsets")
        newest.write_text(newest.read_text().replace('{"logOffset":5}', '{"logOffset":4}'))
        return original(self, epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Epochs, "_check", late)
        with pytest.raises(Exception, match="another driver wrote it"):
            story.live()
    assert story.published() == before
    story.live()
    story.check(files=FILES + 1)


def test_a_shuffle_behind_the_last_stateful_operator_is_refused(tmp_path: Path, spark: Any) -> None:
    import onceflow
    from onceflow import sinks, sources

    story = Story(str(tmp_path), "stateless", "sqlite")
    story.write_input(range(1))
    rows = sources.Files(tmp_path / "in", schema="id long, key string").stream(spark, "rows")

    @onceflow.job("sorted")
    def job(flow: onceflow.Flow) -> None:
        to = sinks.Sqlite(tmp_path / "out.db", table="t")
        flow.write("t", rows.groupBy("key").count().orderBy("count"), to=to, mode="complete")

    with pytest.raises(JobError, match="sort when reading"):
        onceflow.start(job, home=tmp_path / "home", once=True).wait()


def test_the_writer_gets_the_plan_of_the_epoch_with_the_names_and_types_of_its_rows(
    tmp_path: Path, spark: Any
) -> None:
    """The first epoch of a driver is never collected. An optimiser may rename what it moves."""
    import pyarrow.parquet as pq

    import onceflow
    from onceflow.sinks import Files

    spark.range(0, 5, 1, 1).selectExpr("id", "timestamp_micros(id) AS at").write.parquet(
        f"{tmp_path}/in"
    )
    rows = spark.readStream.name("rows").schema("id long, at timestamp").parquet(f"{tmp_path}/in")
    renamed = rows.select(rows.id.alias("ID"), rows.at.alias("_at")).select("ID", "_at")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    try:
        query = onceflow.write(
            renamed, "out", to=Files(tmp_path / "out"), home=tmp_path / "home", once=True
        )
        query.awaitTermination()
    finally:
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    (file,) = (tmp_path / "out").glob("*.parquet")
    said = pq.ParquetFile(file)
    assert said.schema_arrow.names == ["ID", "_at"]
    assert str(said.schema.column(1).logical_type).startswith("Timestamp(isAdjustedToUTC=true, ")
    assert said.schema.column(1).physical_type == "INT64"
    assert said.metadata.row_group(0).column(0).compression == "ZSTD"
    assert pq.read_table(file).column("ID").to_pylist() == list(range(5))


KEYED = """
from onceflow import job
from onceflow.sinks import Files
from onceflow.sources import Log
from onceflow.state import KeyedProcess, ReducingState

class Counts(KeyedProcess):
    rows = ReducingState("long", "count")

@job("keyed")
def keyed(flow):
    words = flow.read("words", Log("in"))
    flow.write("counts", flow.keyed(words, by="value", process=Counts()), to=Files("out"))
"""


def test_keyed_state_does_not_need_pandas(tmp_path: Path) -> None:
    """`pip install onceflow` brings none, and Spark's own `mapInArrow` asks for it."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "pandas.py").write_text("raise ImportError('not installed')")
    (tmp_path / "keyed.py").write_text(KEYED)
    (tmp_path / "in.txt").write_text("a\nb\na\n")
    assert onceflow("log", "append", "in", "in.txt", cwd=tmp_path).returncode == 0
    ran = onceflow("run", "keyed.py", "--once", cwd=tmp_path, PYTHONPATH=str(tmp_path / "none"))
    assert ran.returncode == 0, ran.stderr
    rows = read_files(tmp_path / "out")
    assert sorted(rows.elements()) == [("a", 2), ("b", 1)]
