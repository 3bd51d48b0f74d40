"""Jobs and what is said about them: files that are loaded, names, times, errors, public names."""

from __future__ import annotations

import inspect
import os
import pickle
import re
from pathlib import Path

import pytest

import onceflow
import onceflow.sinks
import onceflow.sources
import onceflow.state
from onceflow import Job, errors, job
from onceflow.contract.quantities import milliseconds
from onceflow.errors import JobError, OnceflowError
from onceflow.jobs.job import import_root, load
from onceflow.service.driver import find_by_workers
from onceflow.store.names import check_name

JOB = """
from onceflow import job

@job("{name}", every="5 seconds", keep_epochs=7)
def {function}(flow):
    flow.declared = "{name}"
"""


def file(folder: Path, text: str, name: str = "jobs.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def one(name: str, function: str = "f") -> str:
    return JOB.format(name=name, function=function)


# ---------------------------------------------------------------- loading


def test_the_job_of_a_file_is_found(tmp_path: Path) -> None:
    found = load(file(tmp_path, one("word-count")))
    assert (found.name, found.every, found.keep_epochs) == ("word-count", "5 seconds", 7)

    class Flow:
        declared = ""

    flow = Flow()
    found(flow)  # type: ignore[arg-type]
    assert flow.declared == "word-count"


def test_one_of_several_jobs_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, one("a", "f") + one("b", "g"))
    assert load(f"{path}:b").name == "b"
    assert load(f"{path}:a").name == "a"


def refused(spec: str) -> JobError:
    with pytest.raises(JobError) as caught:
        load(spec)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = refused(str(tmp_path / "none.py"))
    assert str(tmp_path / "none.py") in error.message
    assert "onceflow run JOB.py" in error.hint
    assert "there is no file" in refused(str(tmp_path)).message


def test_a_file_without_a_job_says_how_to_make_one(tmp_path: Path) -> None:
    error = refused(file(tmp_path, "x = 1\ndef f(flow): pass\n"))
    assert "has no job" in error.message
    assert "@job" in error.hint


def test_of_two_jobs_one_must_be_named(tmp_path: Path) -> None:
    path = file(tmp_path, one("a", "f") + one("b", "g"))
    error = refused(path)
    assert "has 2 jobs: a, b" in error.message
    assert error.hint == f"name one: {path}:a"


def test_a_name_that_no_job_has_lists_those_there_are(tmp_path: Path) -> None:
    path = file(tmp_path, one("a", "f") + one("b", "g"))
    assert "has no job 'c'; it has a, b" in refused(f"{path}:c").message


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    assert "two jobs called a" in refused(file(tmp_path, one("a", "f") + one("a", "g"))).message


def test_one_job_under_two_names_is_one_job(tmp_path: Path) -> None:
    assert load(file(tmp_path, one("a") + "\nsame = f\n")).name == "a"


def test_a_file_that_fails_says_where(tmp_path: Path) -> None:
    text = "import json\n\ndef parse():\n    return json.loads('{')\n\nparse()\n"
    path = file(tmp_path, text)
    error = refused(path)
    assert error.message.startswith(f"{path}, line 4: JSONDecodeError: ")


def test_a_file_with_a_syntax_error_says_where(tmp_path: Path) -> None:
    path = file(tmp_path, "x = 1\ny = (\n")
    assert refused(path).message.startswith(f"{path}, line 2: ")


def test_a_file_that_imports_what_is_not_there_says_what(tmp_path: Path) -> None:
    path = file(tmp_path, "import no_such_module\n")
    message = refused(path).message
    assert message == f"{path}, line 1: ModuleNotFoundError: No module named 'no_such_module'"


def test_a_wrong_declaration_is_told_as_it_is(tmp_path: Path) -> None:
    assert "is not a name for a job" in refused(file(tmp_path, one("a b"))).message


def test_a_file_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    """A script that was not meant to be loaded must not look like a job that ran."""
    path = file(tmp_path, "import sys\nsys.exit(0)\n")
    assert f"{path}, line 2" in refused(path).message


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    assert "is not a Python file" in refused(file(tmp_path, "hello", "jobs.txt")).message


def test_a_job_may_use_modules_that_lie_beside_it(tmp_path: Path) -> None:
    file(tmp_path, "NAME = 'beside'\n", "beside_the_job.py")
    text = one("NAME").replace('"NAME"', "NAME")
    assert load(file(tmp_path, f"from beside_the_job import NAME\n{text}")).name == "beside"


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        file(tmp_path / folder, one(folder))
    assert [load(str(tmp_path / f / "jobs.py")).name for f in ("a", "b", "a")] == ["a", "b", "a"]


def package(root: Path, name: str, *, job: str) -> str:
    (root / name / "jobs").mkdir(parents=True)
    file(root / name, "", "__init__.py")
    file(root / name, f"NAME = {job!r}\n", "names.py")
    file(root / name / "jobs", "", "__init__.py")
    imports = f"from {name}.names import NAME\nfrom ..names import NAME as SAME\n"
    text = one("NAME").replace('"NAME"', "NAME")
    return file(root / name / "jobs", f"{imports}assert SAME == NAME\n{text}", "first.py")


def test_a_job_in_a_package_imports_its_package_from_the_folder_above(tmp_path: Path) -> None:
    path = package(tmp_path, "shop_of_a_test", job="in-a-package")
    assert import_root(Path(path)) == tmp_path
    found = load(path)
    assert found.name == "in-a-package"
    assert found.declare.__module__ == "shop_of_a_test.jobs.first"
    assert load(path).name == "in-a-package"  # a driver loads it twice


def test_two_packages_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    assert load(package(tmp_path / "a", "twin_of_a_test", job="a")).name == "a"
    error = refused(package(tmp_path / "b", "twin_of_a_test", job="b"))
    assert "is in a package called twin_of_a_test" in error.message
    assert str(tmp_path / "a") in error.message


def test_workers_find_the_package_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    find_by_workers(package(tmp_path, "found_by_a_test", job="a"))
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/elsewhere"]


# ---------------------------------------------------------------- declaring


def test_a_job_has_sensible_settings() -> None:
    @job("word-count")
    def word_count(flow: onceflow.Flow) -> None: ...

    assert isinstance(word_count, Job)
    assert (word_count.every, word_count.keep_epochs) == ("1 second", 100)


@pytest.mark.parametrize("keep", [1, 0, -5])
def test_too_few_kept_epochs_are_refused(keep: int) -> None:
    with pytest.raises(JobError, match="keep_epochs"):
        job("a", keep_epochs=keep)


def test_settings_are_checked_when_the_job_is_declared() -> None:
    with pytest.raises(JobError, match="is not a time"):
        job("a", every="often")
    with pytest.raises(JobError, match="is not a name"):
        job("../a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 500),
        ("1 second", 1000),
        ("2 seconds", 2000),
        (" 3s ", 3000),
        ("1 min", 60_000),
        ("10 minutes", 600_000),
        ("2h", 7_200_000),
        ("1 hour", 3_600_000),
        ("7 days", 604_800_000),
        ("1d", 86_400_000),
        ("0 ms", 0),
        ("7 milliseconds", 7),
    ],
)
def test_times_are_written_as_people_write_them(text: str, expected: int) -> None:
    assert milliseconds(text) == expected


@pytest.mark.parametrize("text", ["", "1", "s", "-1 s", "1.5 s", "1 fortnight", "1 s s", "1 S"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(JobError, match=re.escape(f"{text!r} is not a time")):
        milliseconds(text)


@pytest.mark.parametrize("name", ["a", "word-count", "Word_Count.v2", "9lives", "x" * 100])
def test_names_that_can_be_folders_are_taken(name: str) -> None:
    assert check_name("job", name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "a/b", "a b", "a\n", "ä", "x" * 101, None, 7, "a\x00"]
)
def test_names_that_cannot_be_folders_are_refused(name: str) -> None:
    with pytest.raises(JobError, match="is not a name for a job"):
        check_name("job", name)


# ---------------------------------------------------------------- errors

ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, OnceflowError)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_cross_processes_whole(kind: type[OnceflowError]) -> None:
    """From an executor to the driver, from the driver to the supervisor."""
    before = kind("what happened: ä", hint="what to do")
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    assert (after.message, after.hint) == (before.message, before.hint)
    assert (after.exit_code, after.retryable) == (before.exit_code, before.retryable)
    assert str(after) == "what happened: ä\n  fix: what to do"


def test_an_error_without_a_hint_is_one_line() -> None:
    assert str(JobError("wrong")) == "wrong"


def tree() -> dict[str, str]:
    """Class -> parent, as errors.py draws it."""
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for text in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"    ((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)(?:  +(\S.*))?", text)
        if found is None:
            continue
        depth = len(found[1]) // 4 + ("──" in text)
        parents[depth:] = [found[2]]
        assert found[2] not in drawn, f"{found[2]} is drawn twice"
        assert depth == 0 or found[3], f"{found[2]} is not explained"
        drawn[found[2]] = parents[depth - 1] if depth else "Exception"
    return drawn


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    assert tree() == {kind.__name__: kind.__bases__[0].__name__ for kind in ERRORS}


def test_exit_codes_are_errors_and_what_a_retry_mends_says_so() -> None:
    for kind in ERRORS:
        assert 0 < kind.exit_code < 126
        assert kind.retryable == (kind.exit_code == 75)  # EX_TEMPFAIL
        assert kind.retryable or not kind.away


# ---------------------------------------------------------------- public names


def test_the_public_names_are_these() -> None:
    assert onceflow.__all__ == [
        "Flow",
        "Handle",
        "Job",
        "__version__",
        "get_session",
        "job",
        "profile",
        "start",
        "write",
    ]
    assert onceflow.sinks.__all__ == [
        "CanAdd",
        "CanCleanUp",
        "CanPartition",
        "CanReadBack",
        "CanRefuseRows",
        "CanRewind",
        "CanStage",
        "Committable",
        "Files",
        "HasReaders",
        "Kafka",
        "Ledger",
        "Log",
        "Outcome",
        "Position",
        "Postgres",
        "Publication",
        "Sink",
        "Sqlite",
        "Staged",
        "Verdict",
        "judge",
        "open_target",
    ]
    assert onceflow.sources.__all__ == ["Files", "Kafka", "Log", "Source"]
    assert onceflow.state.__all__ == [
        "Deduplicate",
        "JoinLast",
        "KeyedProcess",
        "Last",
        "ListState",
        "MapState",
        "ReducingState",
        "Sessions",
        "Timer",
        "TopN",
        "Totals",
        "ValueState",
    ]


@pytest.mark.parametrize("module", [onceflow, onceflow.sinks, onceflow.sources, onceflow.state])
def test_every_public_name_is_there(module: object) -> None:
    assert all(hasattr(module, name) for name in module.__all__)  # type: ignore[attr-defined]
