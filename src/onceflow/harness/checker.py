"""The verdict on one case: what the targets hold against what is true.

| violation | meaning |
|---|---|
| lost | a row of the truth is not there |
| duplicated | a row is there more often than in the truth |
| corrupt | a row or a number that is in no truth; a file that is not what its commit says |
| torn | a decided epoch of which an output has a part, or has less than another output |
| disordered | rows of a key are not in the order of their epochs where that is promised |
| dirty | a reader of committed rows saw what is not in the end result |
| backwards | a reader saw rows, and later not any more |
| left | staged rows, a held lease, a file that no commit names, a process: left behind |
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
# What an output may show that promises less.
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
    truth: dict[str, Expected] | None,
    *,
    in_order: str = "",
    stopped: bool = True,
    guarantees: Mapping[str, str] | None = None,
) -> list[Violation]:
    """All that is wrong once the job has used up its input and was `stopped`. `truth`: of each
    output, by query/output; None: somebody else judges the rows. `guarantees` by output, too."""
    found: list[Violation] = []
    ends: dict[str, Published] = {}
    for target in observer.targets:
        seen = observer.seen[target.output]
        found += [Violation("corrupt", target.output, said) for said in seen.corrupt]
        found += [Violation("backwards", target.output, said) for said in seen.backwards]
        if seen.owed and stopped:
            said = f"of rows that were taken back some did not come again: {_examples(seen.owed)}"
            found.append(Violation("backwards", target.output, said))
        try:
            end = read(target, job)  # nothing that was read before is trusted
        except Corrupt as error:
            found.append(Violation("corrupt", target.output, str(error)))
            continue
        ends[target.output] = end
        if truth is not None:
            found += compare(target, truth[target.output], end, seen)
        if in_order and target.kind in ("log", "kafka") and not target.upserted:
            found += ordered(target, end, in_order)
    weaker = {output for output, g in (guarantees or {}).items() if g in ALLOWED}
    found += torn(observer, {output: end for output, end in ends.items() if output not in weaker})
    if stopped:
        return [*found, *left_behind(home / job, observer.targets)]
    return [v for v in found if v.kind not in ("lost", "torn")]  # it did not come that far


# ---------------------------------------------------------------- rows


def compare(target: Target, truth: Expected, end: Published, seen: Seen) -> Iterator[Violation]:
    if truth.total is not None:
        yield from _totals(target, truth.total, end)
        return
    rows = Counter(end.rows)
    if target.upserted:
        yield from _dirty(target, truth, {*end.rows, *seen.rows})
        rows = Counter(end.last_of_key(target.key).values())
    elif target.kind == "kafka":
        yield from _taken_back(target, end, seen)
    yield from differences(target.output, truth.rows, rows)


def differences(where: str, truth: Counter[Row], rows: Counter[Row]) -> Iterator[Violation]:
    missing, more = truth - rows, rows - truth
    doubled = Counter({row: n for row, n in more.items() if row in truth})
    strange = more - doubled
    for kind, wrong in (("lost", missing), ("duplicated", doubled), ("corrupt", strange)):
        if wrong:
            count = wrong.total()
            yield Violation(kind, where, f"{count} rows, such as {_examples(wrong)}", count)


def _totals(target: Target, total: Row, end: Published) -> Iterator[Violation]:
    """The rows are not known, the sums of their columns behind the key are."""
    first = len(target.key)
    width = len(total)
    sums = tuple(sum(row[first + i] for row in end.rows) for i in range(width))
    if sums != total:
        kind = "lost" if sums[0] < total[0] else "duplicated" if sums[0] > total[0] else "corrupt"
        yield Violation(kind, target.output, f"columns sum up to {sums}, not to {total}",
                        max(1, abs(sums[0] - total[0])))  # fmt: skip


def _dirty(target: Target, truth: Expected, seen: set[Row]) -> Iterator[Violation]:
    """Each version of a key that was ever to be read is one that its records add up to."""
    wrong = seen - truth.versions if truth.versions is not None else set()
    if wrong:
        message = f"{len(wrong)} versions that no records add up to, such as {_examples(wrong)}"
        yield Violation("dirty", target.output, message, len(wrong))


def _taken_back(target: Target, end: Published, seen: Seen) -> Iterator[Violation]:
    """A consumer that reads on sees each row once: what another one does not find, never was."""
    wrong = Counter(seen.last.rows) - Counter(end.rows)
    if wrong:
        message = f"{wrong.total()} rows were read that are not there, such as {_examples(wrong)}"
        yield Violation("dirty", target.output, message, wrong.total())


def ordered(target: Target, end: Published, column: str) -> Iterator[Violation]:
    """Rows of a key are in one partition, epoch behind epoch; in a topic, which does not tell
    epochs, row behind row: the built-in jobs have a key's rows of an epoch in one task."""
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
        message = f"{len(wrong)} rows come behind later ones of their key: {_examples(wrong)}"
        yield Violation("disordered", target.output, message, len(wrong))


def forked(name: str, targets: list[Target], truth: dict[str, Expected]) -> Iterator[Violation]:
    """A fork begins at a cut and ends before its parent: of the truth it has a part, each row
    once. Where rows are left to chance nothing can be said."""
    for target in targets:
        where, true = f"{name}/{target.output}", truth[target.output]
        if true.total is not None:
            continue
        try:
            end = read(target, name)
        except Corrupt as error:
            yield Violation("corrupt", where, str(error))
            continue
        if target.upserted:
            yield from _dirty(replace(target, output=where), true, set(end.rows))
        else:
            wrong = differences(where, true.rows, Counter(end.rows))
            yield from (violation for violation in wrong if violation.kind != "lost")


# ---------------------------------------------------------------- epochs


def torn(observer: Observer, ends: dict[str, Published]) -> Iterator[Violation]:
    """Each decision that was seen is in each of its outputs, as a whole."""
    for target in observer.targets:
        end = ends.get(target.output)
        query, _, output = target.output.partition("/")
        decided = observer.decided.get(query, {})
        if end is None or not decided:
            continue
        if end.ledger != max(decided):
            message = f"the ledger is at epoch {end.ledger}, decided is {max(decided)}"
            yield Violation("torn", target.output, message)
        if target.kind == "kafka" or (target.upserted and target.is_table):
            continue  # a topic does not tell epochs; rows of an epoch replace those of others
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
    """Data files that no commit names: a plain reader of a folder takes them for rows."""
    if not root.is_dir() or target.kind != "files":
        return []
    try:
        named = set(read(target, job).files)
    except Corrupt:
        return []  # told already
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
