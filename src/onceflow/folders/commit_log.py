"""The numbered commits of a folder: the ledger of every output, and which files are published.

    <folder>/_commits/<n>.json           one commit: fence(term), epoch(position, files), …
    <folder>/_commits/rollup-<n>.json    the state after commit n; names manifests
    <folder>/_manifests/*.json           the files of a range of commits; never changes

A reader reads the newest roll-up, the files of its manifests, and those of the commits above it.
Manifests form a tree: a manifest of one level names `_FAN_OUT` of the level below, so a roll-up
stays small and reading the head costs the same however old the folder is.

Roll-ups are written at fixed numbers of commits and depend on the commits alone. So programs that
roll up at the same time, or late, write the same; the state in the memory of one is what the others
wrote; and if a newer roll-up does not name a manifest, no later one will.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onceflow.contract.ledger import (
    Ledger,
    Outcome,
    Position,
    Publication,
    Verdict,
    judge,
    refuse_older,
)
from onceflow.errors import Damaged
from onceflow.store.posix import LocalStore, NumberedLog, Put, seal, unseal

_MANIFEST = "manifest"
_SWAPPED = "put the file back from a backup: it was copied or swapped"
_FAN_OUT = 32

Commit = dict[str, Any]
Reference = dict[str, Any]  # name, level, first and last commit, and what `summary` says


@dataclass(frozen=True)
class _Ledger:
    said: Ledger = field(default_factory=Ledger)
    token: str = ""  # of the fence that set the term


class Forgotten(Damaged):
    """A manifest was removed on purpose meanwhile: nobody can read the rows of its files."""


class FolderState:
    """The state of a folder that its commits add up to. Subclasses add state of their own."""

    forgotten = 0  # manifests may no longer list commits up to here

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self.restart(0, None)

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        body = roll_up or {}
        if body.get("number", position) != position:
            raise Damaged(f"it is the roll-up of commit {body['number']}", hint=_SWAPPED)
        self.position = self.rolled_up = position
        self.ledgers = {name: _read_ledger(said) for name, said in body.get("ledgers", {}).items()}
        self.manifests: list[Reference] = list(body.get("manifests", ()))
        self.recent: list[Commit] = []  # with files, above the roll-up; only with `keep`
        self.restarted(body)

    def apply(self, number: int, entry: Commit) -> None:
        if entry.get("number") != number:
            raise Damaged(f"it is commit {entry.get('number')}", hint=_SWAPPED)
        self.applied(number, entry)
        self.position = number
        if entry.get("output"):
            before = self.ledgers.get(entry["output"], _Ledger())
            said, token = before.said, before.token
            said = replace(said, term=max(said.term, entry["term"]))
            if entry["type"] == "fence":
                token = entry["nonce"]
            else:
                at = Position(entry["lineage"], entry["epoch"])
                said = replace(said, position=at, decision=entry["decision"])
            self.ledgers[entry["output"]] = _Ledger(said, token)
        if self._keep and entry.get("files"):
            self.recent.append(self.kept(number, entry))

    def ledger(self, output: str) -> Ledger:
        return self.ledgers.get(output, _Ledger()).said

    def roll_up(self) -> dict[str, Any]:
        said = {name: _write_ledger(ledger) for name, ledger in self.ledgers.items()}
        own = self.rolled()  # it may drop manifests
        return {
            "number": self.position, "ledgers": said, "manifests": self.manifests, **own,
        }  # fmt: skip

    # -------------------------------------------------------------- of a kind of folder

    def restarted(self, body: dict[str, Any]) -> None:
        """Read from a roll-up the values that `rolled` put there."""

    def applied(self, number: int, entry: Commit) -> None:
        """Apply one more commit. Raises `Damaged` if it cannot follow."""

    def rolled(self) -> dict[str, Any]:
        return {}

    def stamp(self) -> str:
        """A text that distinguishes commits and manifests of this folder from those of others."""
        return ""

    def kept(self, number: int, entry: Commit) -> Commit:
        """The part of a commit with files that a manifest keeps."""
        return {"files": entry["files"]}

    def stands(self, commit: Commit) -> bool:
        """Were its files not taken back?"""
        return True

    def summary(self) -> dict[str, Any]:
        """Facts in a reference to a manifest, by which readers can skip it."""
        return {}


class CommitLog:
    """Appends commits, and lists the files that they published."""

    def __init__(self, path: Path, kind: str, state: FolderState) -> None:
        self.path = path
        self.numbered = NumberedLog(LocalStore(path), "_commits", f"{kind} commit", kind)
        self.state = state

    def catch_up(self) -> None:
        named, newest = _Named(self.numbered, self.state), self.numbered.newest_roll_up()
        if self.state.rolled_up < newest <= self.state.position:
            body = self.numbered.read_roll_up(newest)  # so that `recent` stays short
            if body is not None:
                named.restart(newest, body)
        while True:
            try:
                return self.numbered.catch_up(named)
            except _Covered:
                self.state.restart(0, None)

    # -------------------------------------------------------------- appending

    def append(self, make: Callable[[], Commit | None]) -> Commit | None:
        """Put the commit that `make` returns for the current head. It is called again whenever
        another program put its commit first. None: there is nothing left to append."""
        self.catch_up()
        nonce = uuid.uuid4().hex
        while (commit := make()) is not None:
            commit.setdefault("nonce", nonce)
            number = self.state.position + 1
            commit |= {"number": number, "of": self.state.stamp()}
            put = self.numbered.put(number, commit)
            found = self.numbered.entry(number) if put is Put.LOST else None
            if found is not None and found.get("nonce") == commit["nonce"]:  # it was our own put
                put = Put.COVERED if self.numbered.is_covered(number) else Put.WON
            if put is Put.WON:
                return commit
            self.catch_up()
        return None

    def fence(self, output: str, *, term: int, token: str, target: str) -> Ledger:
        def make() -> Commit | None:
            ledger = self.state.ledgers.get(output, _Ledger())
            if ledger.token == token:
                return None
            refuse_older(ledger.said.term, term, target, is_ours=False)
            return {"type": "fence", "output": output, "term": term, "nonce": token}

        self.append(make)
        self.catch_up()
        return self.state.ledger(output)

    def publish(self, publication: Publication, target: str, make: Callable[[], Commit]) -> Outcome:
        """Compare and set: append the commit that `make` returns, if the ledger allows it."""
        facts = {
            "type": "epoch", "output": publication.output, "lineage": publication.lineage,
            "epoch": publication.epoch, "term": publication.term,
            "decision": publication.decision,
        }  # fmt: skip

        def judged() -> Commit | None:
            verdict = judge(self.state.ledger(publication.output), publication, target)
            return None if verdict is Verdict.ALREADY_PUBLISHED else {**facts, **make()}

        done = self.append(judged)
        return Outcome.ALREADY_PUBLISHED if done is None else Outcome.PUBLISHED

    # -------------------------------------------------------------- roll-ups and manifests

    def roll_up(self, *, every: int, slack: int = 0) -> bool:
        """Roll up at every `every`th commit, once there are `slack` more. True if we wrote one.

        File lists go into manifests that never change, so a roll-up stays small."""
        if self.state.position + 1 - self.state.rolled_up < every + slack:
            return False
        wrote = False
        while (won := self._roll_up_next(every)) is not None:
            wrote = wrote or won
        if wrote:
            self._sweep_puts()
        self.catch_up()
        return wrote

    def _roll_up_next(self, every: int) -> bool | None:
        """None: it is not time yet, or another program does it. False: another one was first."""
        log, view = self.numbered, type(self.state)()
        named = _Named(log, view)
        base = log.newest_roll_up()
        if base:
            body = log.read_roll_up(base)
            if body is None:
                return None
            named.restart(base, body)
        entries: list[Commit] = []
        last = base - base % every + every
        for number in range(base + 1, last + 1):
            entry = log.entry(number)
            if entry is None:
                return None
            try:
                named.apply(number, entry)
            except _Covered:
                return None
            if entry.get("files"):
                entries.append(view.kept(number, entry))
        if log.is_covered(base + 1):
            return None
        if entries:
            view.manifests.append(self._manifest(view, 0, base + 1, {"commits": entries}))
        while len(top := _one_level(view.manifests)) >= _FAN_OUT:
            level, first = top[0]["level"] + 1, top[0]["first"]
            view.manifests[-len(top) :] = [self._manifest(view, level, first, {"manifests": top})]
        return log.roll_up(last, view.roll_up())

    def _manifest(
        self, view: FolderState, level: int, first: int, body: dict[str, Any]
    ) -> Reference:
        last = view.position
        name = f"{level}-{first:012d}-{last:012d}.json"
        data = seal(_MANIFEST, _subject(name, view), body)
        store, path = self.numbered.store, f"_manifests/{name}"
        if not store.put_if_absent(path, data) and store.read(path) not in (data, None):
            raise Damaged(
                f"{store.where(path)} belongs to other commits: those of {self.path} were set back",
                hint="bring back the whole folder as it was (its newest copy)",
            )
        return {"name": name, "level": level, "first": first, "last": last, **view.summary()}

    def read_manifest(self, name: str) -> dict[str, Any]:
        where = self.numbered.store.where(f"_manifests/{name}")
        data = self.numbered.store.read(f"_manifests/{name}")
        if data is None:
            now = type(self.state)()
            self.numbered.catch_up(_Named(self.numbered, now))
            listed = _Range.of(name)
            gone = listed is not None and listed.last <= now.forgotten
            kind = Forgotten if gone else Damaged
            raise kind(f"{where} is missing", hint="put it back from a backup")
        return unseal(data, _MANIFEST, _subject(name, self.state), where)

    def check_manifests(self) -> None:
        """`Damaged` if a manifest that the newest roll-up names is not as it was written. Those are
        fewer than `_FAN_OUT` of each level, however many there are below them."""
        for reference in self.state.manifests:
            with suppress(Forgotten):
                self.read_manifest(reference["name"])

    def published(self, wanted: Callable[[Reference], bool] | None = None) -> Iterator[Commit]:
        """The commits with files, oldest first. Skips manifests that are not `wanted`."""
        for reference in self.state.manifests:
            yield from self._published(reference, wanted)
        yield from self.state.recent

    def remembered(self, wanted: Callable[[Reference], bool] | None = None) -> Iterator[Commit]:
        """The same, without commits whose manifests are removed meanwhile."""
        for reference in self.state.manifests:
            with suppress(Forgotten):
                yield from self._published(reference, wanted)
        yield from self.state.recent

    def commit_with(self, paths: set[str], *, since: int) -> Commit | None:
        """The commit above `since` that has one of these files, whose names are unique. Others may
        have rolled up a commit before the program that put it looks for it."""
        for commit in self.remembered(lambda reference: reference["last"] > since):
            if any(file["path"] in paths for file in commit["files"]):
                return commit
        return None

    def files(self) -> list[dict[str, Any]]:
        """All published files, oldest first."""
        standing = filter(self.state.stands, self.published())
        return [file for commit in standing for file in commit["files"]]

    def newest(self) -> Iterator[Commit]:
        """The commits with files, newest first. Reads manifests only as the caller needs them."""
        yield from reversed(self.state.recent)
        left = list(self.state.manifests)
        while left:
            body = self.read_manifest(left.pop()["name"])
            yield from reversed(body.get("commits", ()))
            left += body.get("manifests", ())

    def _published(
        self, reference: Reference, wanted: Callable[[Reference], bool] | None
    ) -> Iterator[Commit]:
        if wanted is not None and not wanted(reference):
            return
        body = self.read_manifest(reference["name"])
        yield from body.get("commits", ())
        for below in body.get("manifests", ()):
            yield from self._published(below, wanted)

    def sweep(self) -> None:
        """Remove files that killed puts and roll-ups left behind."""
        self._sweep_puts()
        self.catch_up()
        self.numbered.prune()
        named = [_Range.of(reference["name"]) for reference in self.state.manifests]
        for name in self.numbered.store.list("_manifests"):
            found = _Range.of(name)
            if found is None or found.last > self.state.rolled_up:
                continue
            if not any(top is not None and found.is_below(top) for top in named):
                self.numbered.store.delete(f"_manifests/{name}")

    def _sweep_puts(self) -> None:
        LocalStore(self.path).sweep("_commits")
        LocalStore(self.path).sweep("_manifests")


@dataclass(frozen=True)
class _Named:
    """`FolderState` as a view of the log. Its errors name the damaged file."""

    numbered: NumberedLog
    state: FolderState

    @property
    def position(self) -> int:
        return self.state.position

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        with _naming(self.numbered.store.where(self.numbered.roll_up_name(position))):
            self.state.restart(position, roll_up)

    def apply(self, number: int, entry: Commit) -> None:
        try:
            with _naming(self.numbered.store.where(self.numbered.entry_name(number))):
                self.state.apply(number, entry)
        except Damaged:
            if self.numbered.newest_roll_up() > self.state.rolled_up:
                raise _Covered from None
            raise


class _Covered(Exception):
    """A newer roll-up covers an entry that was read: its name may have been freed and reused."""


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except Damaged as error:
        raise Damaged(f"{where} is not what belongs there: {error.message}", hint=error.hint) \
            from error  # fmt: skip


@dataclass(frozen=True)
class _Range:
    """The range of commits that a manifest lists, from its name."""

    level: int
    first: int
    last: int

    @classmethod
    def of(cls, manifest: str) -> _Range | None:
        """None if it is not a manifest."""
        parts = manifest.removesuffix(".json").split("-")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            return None
        return cls(*map(int, parts))

    def is_below(self, top: _Range) -> bool:
        """Is it `top`, or in its tree? Roll-ups have fixed numbers, so the ranges show it."""
        inside = top.first <= self.first and self.last <= top.last
        return inside and self.level <= top.level


def _subject(manifest: str, commits: FolderState) -> str:
    stamp = commits.stamp()
    return f"{manifest} of {stamp}" if stamp else manifest


def _one_level(references: list[Reference]) -> list[Reference]:
    """The newest references that have the same level."""
    found: list[Reference] = []
    for reference in reversed(references):
        if found and reference["level"] != found[0]["level"]:
            break
        found.insert(0, reference)
    return found


def _read_ledger(said: dict[str, Any]) -> _Ledger:
    at = Position(**said["at"]) if said["at"] else None
    return _Ledger(Ledger(said["term"], at, said["decision"]), said["token"])


def _write_ledger(ledger: _Ledger) -> dict[str, Any]:
    at = ledger.said.position
    return {
        "term": ledger.said.term, "token": ledger.token, "decision": ledger.said.decision,
        "at": {"lineage": at.lineage, "epoch": at.epoch} if at else None,
    }  # fmt: skip
