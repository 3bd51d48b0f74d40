"""`python -m onceflow.cli.class_archive FILE` makes an archive of Spark's classes.

It runs a small job; `onceflow.spark.class_archive` says what the archive is for.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from pathlib import Path

import click

from onceflow.spark.class_archive import ARCHIVE, QUIET


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Write an archive of the classes that a job needs to FILE (about 150 MB), unless it
    exists."""
    if file.exists():
        click.echo(f"{file} exists already")
        return
    if any(map(str.isspace, str(file.absolute()))):
        raise click.ClickException(
            f"{file.absolute()} contains a space, and Spark splits options at spaces"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.absolute().with_name(f".{file.name}.{os.getpid()}")
    os.environ.pop(ARCHIVE, None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _run_a_job(Path(folder), f"-XX:ArchiveClassesAtExit={unfinished} {QUIET}")
        if not unfinished.exists():
            raise click.ClickException("this Java wrote no archive; is the disk full?")
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)
    click.echo(f"{file}: {file.stat().st_size >> 20} MiB; use it with {ARCHIVE}={file.absolute()}")


def _run_a_job(folder: Path, java: str) -> None:
    """Reads a log, keeps state, writes files: it loads most of what any job needs."""
    import pyarrow as pa
    from pyspark.sql import functions as F

    import onceflow
    from onceflow.files.sink import Files
    from onceflow.log import EmbeddedLog
    from onceflow.log.source import Log
    from onceflow.spark.running_query import end_jvm

    log = EmbeddedLog.create(folder / "in")
    now = datetime.datetime.now(datetime.UTC)
    log.append(pa.table({"value": ["a b", "b"], "event_time": [now, now]}, log.schema))

    @onceflow.job("warm")
    def warm(flow: onceflow.Flow) -> None:
        rows = flow.read("rows", Log(folder / "in"))
        words = rows.select("event_time", F.explode(F.split("value", " ")).alias("word"))
        timed = words.withWatermark("event_time", "1 second")
        counts = timed.groupBy(F.window("event_time", "1 second"), "word").count()
        flow.write("counts", counts, to=Files(folder / "out"))

    settings = {"spark.driver.extraJavaOptions": java}
    spark = onceflow.get_session("local[2]", settings, log=folder / "spark.log")
    onceflow.start(warm, home=folder / "home", once=True).wait()
    end_jvm(spark, seconds=300)  # the archive is written while it ends


if __name__ == "__main__":
    sys.exit(command())
