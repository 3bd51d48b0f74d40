"""The numbered commits of a folder: the ledger of every output, and which files are published.

    <folder>/_commits/<n>.json           one commit: fence(term), epoch(position, files), …
    <folder>/_commits/rollup-<n>.json    what the commits up to n came to; names manifests
    <folder>/_manifests/*.json           the files of a range of commits; never changes

A reader takes the newest roll-up, the files of its manifests, and those of the commits above it.
Manifests form a tree: `_FAN_OUT` of a level are named by one of the next level, so a roll-up
stays small and reading the head costs the same however old the folder is.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onceflow.errors import Damaged, Fenced
from onceflow.ledger import Ledger, Outcome, Position, Publication, judge
from onceflow.storage import LocalStore, NumberedLog, Put, seal, unseal

_MANIFEST = "manifest"
_FAN_OUT = 32

Commit = dict[str, Any]
Reference = dict[str, Any]  # name, level, first and last commit, and what `summary` says


@dataclass(frozen=True)
class _Ledger:
    said: Ledger = field(default_factory=Ledger)
    token: str = ""  # of the fence that set the term


class Commits:
    """What the commits of a folder come to. Kinds of folders add what is theirs."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self.restart(0, None)

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        body = roll_up or {}
        self.position = self.rolled_up = position
        self.ledgers = {name: _read_ledger(said) for name, said in body.get("ledgers", {}).items()}
        self.manifests: list[Reference] = list(body.get("manifests", ()))
        self.recent: list[Commit] = []  # with files, above the roll-up; if asked to keep them
        self.restarted(body)

    def apply(self, number: int, entry: Commit) -> None:
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
        return {"ledgers": said, "manifests": self.manifests, **self.rolled()}

    # -------------------------------------------------------------- of a kind of folder

    def restarted(self, body: dict[str, Any]) -> None:
        """Take from a roll-up what `rolled` put there."""

    def applied(self, number: int, entry: Commit) -> None:
        """Take in one more commit. Raises `Damaged` if it cannot follow."""

    def rolled(self) -> dict[str, Any]:
        return {}

    def kept(self, number: int, entry: Commit) -> Commit:
        """What a manifest keeps of a commit that has files."""
        return {"files": entry["files"]}

    def summary(self) -> dict[str, Any]:
        """What a reference to a manifest says, so that readers can pass it by."""
        return {}


class CommitLog:
    """Appends commits, and finds the files that they published."""

    def __init__(self, path: Path, kind: str, commits: Commits) -> None:
        self.path = path
        self.log = NumberedLog(LocalStore(path), "_commits", f"{kind} commit", kind)
        self.commits = commits

    def catch_up(self) -> None:
        self.log.catch_up(self.commits)

    # -------------------------------------------------------------- appending

    def append(self, make: Callable[[], Commit | None]) -> Commit | None:
        """Put the commit that `make` gives for the head as it stands; it is asked again whenever
        somebody came first. None: there is nothing to append any more."""
        self.catch_up()
        nonce = uuid.uuid4().hex
        while (commit := make()) is not None:
            commit.setdefault("nonce", nonce)
            number = self.commits.position + 1
            put = self.log.put(number, commit)
            if put is Put.LOST and (self.log.entry(number) or {}).get("nonce") == commit["nonce"]:
                put = Put.COVERED if self.log.covered(number) else Put.WON  # our answer got lost
            if put is Put.WON:
                return commit
            self.catch_up()
        return None

    def fence(self, output: str, *, term: int, token: str, target: str) -> Ledger:
        def make() -> Commit | None:
            ledger = self.commits.ledgers.get(output, _Ledger())
            if ledger.token == token:
                return None
            if ledger.said.term >= term:
                raise Fenced(
                    f"{target} has seen term {ledger.said.term}, this driver has term {term}",
                    hint="another driver leads this job now",
                )
            return {"type": "fence", "output": output, "term": term, "nonce": token}

        self.append(make)
        self.catch_up()
        return self.commits.ledger(output)

    def publish(self, publication: Publication, target: str, make: Callable[[], Commit]) -> Outcome:
        """Compare and set: the commit that `make` gives, if the ledger agrees."""
        facts = {
            "type": "epoch", "output": publication.output, "lineage": publication.lineage,
            "epoch": publication.epoch, "term": publication.term,
            "decision": publication.decision,
        }  # fmt: skip

        def judged() -> Commit | None:
            said = judge(self.commits.ledger(publication.output), publication, target)
            return None if said is Outcome.ALREADY_PUBLISHED else {**facts, **make()}

        done = self.append(judged)
        return Outcome.ALREADY_PUBLISHED if done is None else Outcome.PUBLISHED

    # -------------------------------------------------------------- roll-ups and manifests

    def roll_up(self, *, every: int) -> bool:
        """File lists go into manifests that never change, so a roll-up stays small."""
        log, commits = self.log, self.commits
        if commits.position + 1 - commits.rolled_up < every:
            return False
        if log.newest_roll_up() > commits.rolled_up:
            commits.restart(0, None)  # a paused driver finished its own in between
        log.catch_up(commits)
        first, last = commits.rolled_up + 1, commits.position
        entries: list[Commit] = []
        for number in range(first, last + 1):
            entry = log.entry(number)
            if entry is None:
                return False  # somebody else rolled up: a successor of ours is at work
            if entry.get("files"):
                entries.append(commits.kept(number, entry))
        if last < first or log.covered(first):
            return False
        won = False
        try:
            won = self._write_roll_up(first, last, entries)
        finally:
            if not won:
                commits.restart(0, None)  # what is in memory is not what is written
        return won

    def _write_roll_up(self, first: int, last: int, entries: list[Commit]) -> bool:
        commits = self.commits
        if entries:
            commits.manifests.append(self._manifest(0, first, last, {"commits": entries}))
        while len(top := _one_level(commits.manifests)) >= _FAN_OUT:
            level, begin = top[0]["level"] + 1, top[0]["first"]
            index = self._manifest(level, begin, top[-1]["last"], {"manifests": top})
            commits.manifests[-len(top) :] = [index]
        commits.rolled_up, commits.recent = last, []
        return self.log.roll_up(last, commits.roll_up())

    def _manifest(self, level: int, first: int, last: int, body: dict[str, Any]) -> Reference:
        name = f"{level}-{first:012d}-{last:012d}.json"
        reference = {
            "name": name, "level": level, "first": first, "last": last, **self.commits.summary(),
        }  # fmt: skip
        self.log.store.put_if_absent(f"_manifests/{name}", seal(_MANIFEST, name, body))
        return reference

    def read_manifest(self, name: str) -> dict[str, Any]:
        where = self.log.store.where(f"_manifests/{name}")
        data = self.log.store.read(f"_manifests/{name}")
        if data is None:
            raise Damaged(f"{where} is missing", hint="put it back from a backup")
        return unseal(data, _MANIFEST, name, where)

    def published(self, wanted: Callable[[Reference], bool] | None = None) -> Iterator[Commit]:
        """The commits with files, oldest first; only those of manifests that are `wanted`."""
        for reference in self.commits.manifests:
            yield from self._published(reference, wanted)
        yield from self.commits.recent

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
        """Remove what killed puts and roll-ups left behind."""
        LocalStore(self.path).sweep("_commits")
        LocalStore(self.path).sweep("_manifests")
        self.catch_up()
        self.log.prune()
        known = {name for top in self.commits.manifests for name in self._names(top)}
        for name in self.log.store.list("_manifests"):
            # Of a roll-up that was never finished, and that nobody can finish any more: a newer
            # one covers it. (A paused driver may yet write a roll-up that names a younger one.)
            last = int(name.removesuffix(".json").rsplit("-", 1)[1])
            if name not in known and last <= self.commits.rolled_up:
                self.log.store.delete(f"_manifests/{name}")

    def _names(self, reference: Reference) -> Iterator[str]:
        yield reference["name"]
        if reference["level"]:
            for below in self.read_manifest(reference["name"])["manifests"]:
                yield from self._names(below)


def _one_level(references: list[Reference]) -> list[Reference]:
    """The newest references, as far back as they are of one level."""
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
