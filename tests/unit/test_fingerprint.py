"""The fingerprint of a job's code: the same for the same text, another for another."""

from __future__ import annotations

import shutil
from pathlib import Path

from onceflow.jobs.fingerprint import fingerprint
from onceflow.jobs.job import load

JOB = """
from onceflow import Flow, job
import helping
from parts.one import two

@job("a")
def a(flow: Flow) -> None:
    pass
"""


def written(folder: Path, name: str = "job.py") -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / name).write_text(JOB)
    (folder / "helping.py").write_text("import deeper\n")
    (folder / "deeper.py").write_text("import job, helping\n")  # they import each other
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "one.py").write_text("two = 2\n")
    (folder / "beside.py").write_text("nobody = 'imports this'\n")
    return folder / name


def of(file: Path) -> str | None:
    return fingerprint(load(str(file)).declare)


def test_what_the_author_wrote_changes_it_and_nothing_else(tmp_path: Path) -> None:
    file = written(tmp_path / "a")
    first = of(file)
    assert first is not None
    (tmp_path / "a" / "beside.py").write_text("changed")
    assert of(file) == first
    for name in ("helping.py", "deeper.py", "parts/__init__.py", "parts/one.py", "job.py"):
        path = tmp_path / "a" / name
        before = path.read_text()
        path.write_text(before + "\n# changed\n")
        assert of(file) != first, name
        path.write_text(before)
        assert of(file) == first


def test_modules_of_the_package_of_a_job_count(tmp_path: Path) -> None:
    folder = tmp_path / "stall_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "world.py").write_text("two = 2\n")
    text = JOB.replace("import helping", "").replace("parts.one", "stall_of_a_test.world")
    (folder / "job.py").write_text(text)
    first = of(folder / "job.py")
    (folder / "world.py").write_text("two = 3\n")
    assert of(folder / "job.py") != first


def test_where_the_files_lie_does_not_matter(tmp_path: Path) -> None:
    first = of(written(tmp_path / "a"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert of(tmp_path / "b" / "job.py") == first


def test_without_a_source_there_is_none() -> None:
    names: dict[str, object] = {}
    exec("def declare(flow): pass", names)
    assert fingerprint(names["declare"]) is None  # type: ignore[arg-type]
    assert fingerprint(len) is None
