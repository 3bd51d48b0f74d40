"""Jobs: named functions that declare sources, transformations and outputs."""

from __future__ import annotations

import importlib.util
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.quantities import milliseconds
from onceflow.errors import JobError
from onceflow.store.names import check_name

if TYPE_CHECKING:
    from onceflow.jobs.flow import Flow

# Makes the row of a number. The number seeds the generator, the only source of chance in the row.
Workload = Callable[[int, random.Random], Mapping[str, Any]]


@dataclass(frozen=True)
class Job:
    """A job, made from a function by `@job`."""

    name: str
    declare: Callable[[Flow], None]
    every: str = "1 second"
    keep_epochs: int = 100
    workload: Workload | Mapping[str, Workload] | None = None
    digests: bool = True

    def __call__(self, flow: Flow) -> None:
        self.declare(flow)


def job(
    name: str,
    *,
    every: str = "1 second",
    keep_epochs: int = 100,
    workload: Workload | Mapping[str, Workload] | None = None,
    digests: bool = True,
) -> Callable[[Callable[[Flow], None]], Job]:
    """Make a job from a function that declares it on a `Flow`.

    `every`: how often an epoch begins, if there is something to do. `keep_epochs`: how many past
    epochs can be shown and restored. `workload`: a function from (number, random.Random) to a row
    that `onceflow verify` feeds the job's log with; a mapping if there are several sources.
    `digests`: take a digest of the rows of each epoch. A restore that skips epochs compares the
    digests; without them it compares the number of rows.
    """
    check_name("job", name)
    milliseconds(every)
    if keep_epochs < 2:
        raise JobError(f"keep_epochs={keep_epochs} must be at least 2")
    return lambda declare: Job(name, declare, every, keep_epochs, workload, digests)


def load(spec: str) -> Job:
    """The job in `JOB.py`, or the one called `name` in `JOB.py:name`."""
    path, _, name = spec.partition(":")
    file = Path(path)
    if not file.is_file():
        raise JobError(
            f"there is no file {path}", hint="name the file of the job: onceflow run JOB.py"
        )
    found = _jobs_of(file)
    names = ", ".join(sorted(j.name for j in found))
    if not found:
        raise JobError(
            f"{path} has no job", hint='decorate a function: @job("name") def f(flow: Flow) -> None'
        )
    if name:
        chosen = [j for j in found if j.name == name]
        if not chosen:
            raise JobError(
                f"{path} has no job {name!r}; it has {names}",
                hint=f"name one: {path}:{found[0].name}",
            )
        return chosen[0]
    if len(found) > 1:
        raise JobError(
            f"{path} has {len(found)} jobs: {names}", hint=f"name one: {path}:{found[0].name}"
        )
    return found[0]


def import_root(file: Path) -> Path:
    """The folder in which a file's imports begin: its own, or the one above its outer package."""
    folder = file.absolute().parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _jobs_of(file: Path) -> list[Job]:
    root = import_root(file)
    *packages, stem = file.absolute().relative_to(root).with_suffix("").parts
    module_name = ".".join([*packages, stem]) if packages else f"onceflow_job_{stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise JobError(f"{file} is not a Python file", hint="name the file of the job: JOB.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(root))
    try:
        if packages:
            _import_package(".".join(packages), file)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise JobError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"{where(error, file)}: {type(error).__name__}: {error}") from error
    found: dict[int, Job] = {}
    for value in vars(module).values():
        if isinstance(value, Job):
            found[id(value)] = value
    names = [j.name for j in found.values()]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise JobError(f"{file} has two jobs called {', '.join(twice)}", hint="rename one")
    return list(found.values())


def _import_package(name: str, file: Path) -> None:
    """Import the package of a job file. `JobError` if another package has its name."""
    places = [Path(place).resolve() for place in importlib.import_module(name).__path__]
    if file.resolve().parent not in places:
        raise JobError(
            f"{file} is in a package called {name}, and {name} is imported from {places[0]}",
            hint="rename one of the two packages",
        )


def where(error: BaseException, file: Path) -> str:
    """The job file, with the last of its lines in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if Path(f.filename).absolute() == file.absolute()]
    return f"{file}, line {mine[-1].lineno}" if mine else str(file)
