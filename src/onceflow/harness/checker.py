"""The verdict on one case: what the targets hold, compared with the expected result.

| violation | meaning |
|---|---|
| lost | an expected row is missing |
| duplicated | a row is there more often than expected |
| corrupt | a row or a number that was never expected; a file that differs from its commit |
| torn | an output has a part of a decided epoch, or less of it than another output |
| disordered | rows of a key are not in the order of their epochs where that is promised |
| dirty | a reader of committed rows saw rows that are not in the end result |
| backwards | a reader saw rows that were gone later |
| left | staged rows, a held lease, a file that no commit names, or a process remains |
| stuck | no progress within a bound after a fault, or the driver gave up |
| unnoticed | a damaged file was not noticed |
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onceflow.harness.builtin_catalog import Expected
from onceflow.harness.observer import Observer, Seen
from onceflow.harness.target_reader import read
from onceflow.harness.targets import Corrupt, Published, Row, Target

_EXAMPLES = 3
# The violation that a weaker guarantee allows.
ALLOWED = {"at-least-once": "duplicated", "at-most-once": "lost"}


@dataclass(frozen=True)
class Violation:
    kind: str
    where: str  # an output, or the case
    message: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}"


def check(
    job: str,
    home: Path,
    observer: Observer,
    expected: dict[str, Expected] | None,
    *,
    in_order: str = "",
    stopped: bool = True,
    guarantees: Mapping[str, str] | None = None,
) -> list[Violation]:
    """All violations, once the job has read its input and was `stopped`.

    `expected` and `guarantees`: by query/output. `expected`: None if the caller compares rows.
    """
    found: list[Violation] = []
    ends: dict[str, Published] = {}
    for target in observer.targets:
        seen = observer.seen[target.output]
        found += [Violation("corrupt", target.output, said) for said in seen.corrupt]
        found += [Violation("backwards", target.output, said) for said in seen.backwards]
        if seen.owed and stopped:
            said = f"some rows that were taken back did not come again: {_examples(seen.owed)}"
            found.append(Violation("backwards", target.output, said))
        try:
            end = read(target, job)  # everything is read again
        except Corrupt as error:
            found.append(Violation("corrupt", target.output, str(error)))
            continue
        ends[target.output] = end
        if expected is not None:
            found += compare(target, expected[target.output], end, seen)
        if in_order and target.kind in ("log", "kafka") and not target.upserted:
            found += ordered(target, end, in_order)
    weaker = {output for output, g in (guarantees or {}).items() if g in ALLOWED}
    found += torn(observer, {output: end for output, end in ends.items() if output not in weaker})
    if stopped:
        return [*found, *left_behind(home / job, observer.targets)]
    return [v for v in found if v.kind not in ("lost", "torn")]  # the job has not read everything


# ---------------------------------------------------------------- rows


def compare(target: Target, expected: Expected, end: Published, seen: Seen) -> Iterator[Violation]:
    if expected.total is not None:
        yield from _totals(target, expected.total, end)
        return
    rows = Counter(end.rows)
    if target.upserted:
        yield from _dirty(target, expected, {*end.rows, *seen.rows})
        rows = Counter(end.last_of_key(target.key).values())
    elif target.kind == "kafka":
        yield from _taken_back(target, end, seen)
    yield from differences(target.output, expected.rows, rows)


def differences(where: str, expected: Counter[Row], rows: Counter[Row]) -> Iterator[Violation]:
    missing, more = expected - rows, rows - expected
    doubled = Counter({row: n for row, n in more.items() if row in expected})
    strange = more - doubled
    for kind, wrong in (("lost", missing), ("duplicated", doubled), ("corrupt", strange)):
        if wrong:
            count = wrong.total()
            yield Violation(kind, where, f"{count} rows, such as {_examples(wrong)}", count)


def _totals(target: Target, total: Row, end: Published) -> Iterator[Violation]:
    """The rows are random; the sums of the columns after the key are known."""
    first = len(target.key)
    width = len(total)
    sums = tuple(sum(row[first + i] for row in end.rows) for i in range(width))
    if sums != total:
        kind = "lost" if sums[0] < total[0] else "duplicated" if sums[0] > total[0] else "corrupt"
        yield Violation(kind, target.output, f"columns sum up to {sums}, not to {total}",
                        max(1, abs(sums[0] - total[0])))  # fmt: skip


def _dirty(target: Target, expected: Expected, seen: set[Row]) -> Iterator[Violation]:
    """Every version of a key that a reader saw is a sum of its input rows."""
    wrong = seen - expected.versions if expected.versions is not None else set()
    if wrong:
        message = f"{len(wrong)} versions that no input rows add up to, such as {_examples(wrong)}"
        yield Violation("dirty", target.output, message, len(wrong))


def _taken_back(target: Target, end: Published, seen: Seen) -> Iterator[Violation]:
    """A row that one consumer saw and a later one does not find was never committed."""
    wrong = Counter(seen.last.rows) - Counter(end.rows)
    if wrong:
        message = f"{wrong.total()} rows were read that are gone, such as {_examples(wrong)}"
        yield Violation("dirty", target.output, message, wrong.total())


def ordered(target: Target, end: Published, column: str) -> Iterator[Violation]:
    """Rows of a key are in one partition, in the order of their epochs. A topic does not tell
    epochs; there they are in the order of rows, because one task has all rows of a key."""
    at, key = end.names.index(column), end.names.index("key")
    newest: dict[Any, tuple[int, int]] = {}  # key -> epoch, highest number of epochs before
    highest: dict[Any, int] = {}
    wrong = []
    for row, epoch in zip(end.rows, end.epochs, strict=True):
        before = newest.get(row[key], (-1, -1))
        if epoch is None or epoch != before[0]:
            before = newest[row[key]] = (-1 if epoch is None else epoch, highest.get(row[key], -1))
        if row[at] <= before[1]:
            wrong.append(row)
        highest[row[key]] = max(highest.get(row[key], -1), row[at])
    if wrong:
        message = f"{len(wrong)} rows come after later ones of their key: {_examples(wrong)}"
        yield Violation("disordered", target.output, message, len(wrong))


def forked(name: str, targets: list[Target], expected: dict[str, Expected]) -> Iterator[Violation]:
    """A fork begins at a cut and ends before its parent, so it has a part of the expected rows,
    each once. Outputs with random rows are left out."""
    for target in targets:
        where, known = f"{name}/{target.output}", expected[target.output]
        if known.total is not None:
            continue
        try:
            end = read(target, name)
        except Corrupt as error:
            yield Violation("corrupt", where, str(error))
            continue
        if target.upserted:
            yield from _dirty(replace(target, output=where), known, set(end.rows))
        else:
            wrong = differences(where, known.rows, Counter(end.rows))
            yield from (violation for violation in wrong if violation.kind != "lost")


# ---------------------------------------------------------------- epochs


def torn(observer: Observer, ends: dict[str, Published]) -> Iterator[Violation]:
    """Each output has all rows of each decision that was seen."""
    for target in observer.targets:
        end = ends.get(target.output)
        query, _, output = target.output.partition("/")
        decided = observer.decided.get(query, {})
        if end is None or not decided:
            continue
        if end.ledger != max(decided):
            message = f"the ledger is at epoch {end.ledger}, decided is {max(decided)}"
            yield Violation("torn", target.output, message)
        if not end.has_epochs or (target.upserted and target.is_table):
            continue  # upserted rows replace those of other epochs
        have = Counter(end.epochs)
        wrong = {
            epoch: (have[epoch], decision.rows.get(output, 0))
            for epoch, decision in decided.items()
            if have[epoch] != decision.rows.get(output, 0)
        }
        if wrong:
            epoch, (rows, of) = next(iter(wrong.items()))
            message = f"epoch {epoch} has {rows} rows, decided are {of}"
            yield Violation("torn", target.output, message, len(wrong))


# ---------------------------------------------------------------- what is left behind


def left_behind(job: Path, targets: list[Target]) -> Iterator[Violation]:
    """After the driver has stopped."""
    strange = [*job.glob("lineages/*/*/onceflow/staged/*"), *job.rglob(".put-*")]
    for target in targets:
        if target.is_folder:
            root = Path(target.path)
            strange += [*root.glob("_staged/**/*.staged"), *root.rglob(".put-*")]
            strange += _unnamed(target, root, job.name)
    if strange:
        names = ", ".join(str(path) for path in strange[:_EXAMPLES])
        yield Violation("left", job.name, f"{len(strange)} files: {names}", len(strange))
    for target in targets:
        if target.is_server:
            from onceflow.harness.server_targets import left_open

            yield from (Violation("left", target.output, said) for said in left_open(target))
    for lock in job.glob("lease/*.lock"):
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield Violation("left", job.name, f"the lease is held: {lock}")


def _unnamed(target: Target, root: Path, job: str) -> list[Path]:
    """Data files that no commit names. A plain reader of the folder would read their rows."""
    if not root.is_dir() or target.kind != "files":
        return []
    try:
        named = set(read(target, job).files)
    except Corrupt:
        return []  # already a violation
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(("_", "."))]
        here = Path(folder).relative_to(root)
        found += [
            root / here / n for n in names if not n.startswith("_") and str(here / n) not in named
        ]
    return found


def _examples(rows: Any) -> str:
    return ", ".join(str(row) for row in sorted(rows, key=str)[:_EXAMPLES])
