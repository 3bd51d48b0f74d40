"""The ledger of an output in its target, and the rule by which every sink publishes.

The ledger of an output lives in the target itself and changes in the same atomic step as the
rows. Publishing is a compare-and-set from the position that the decision names to the epoch that it
decided. `judge` is that comparison; every sink calls it inside its atomic step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from onceflow.errors import Fenced, TargetBehind


@dataclass(frozen=True)
class Position:
    """The last epoch of a lineage that an output has published."""

    lineage: str
    epoch: int


@dataclass(frozen=True)
class Ledger:
    """The content of a ledger: the newest term that fenced it, and the last published epoch."""

    term: int = 0
    position: Position | None = None
    decision: str = ""  # the nonce of the last published decision


@dataclass(frozen=True)
class Committable:
    """One staged file, with the size and the checksum that it must have.

    `partition` is the sub-folder that its rows belong to in the target ("" for none).
    """

    path: str
    rows: int
    bytes: int
    crc32: int
    partition: str = ""


@dataclass(frozen=True)
class Publication:
    """Everything a sink needs to make one decided epoch of one output visible."""

    output: str  # job/query/output
    lineage: str
    epoch: int
    term: int  # of the driver that publishes
    previous: Position | None  # the position that the ledger must have before
    files: tuple[Committable, ...]
    schema: str  # Spark's JSON
    mode: str
    decision: str  # nonce of the decision

    @property
    def position(self) -> Position:
        return Position(self.lineage, self.epoch)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class Guarantee(StrEnum):
    """The guarantee of an output for the rows of a decided epoch. Weaker ones keep no ledger."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"  # added again after a crash, if Spark did not commit the epoch
    AT_MOST_ONCE = "at-most-once"  # added after the decision, and never again


class Outcome(Enum):
    """The result of `publish`."""

    PUBLISHED = "published"
    ALREADY_PUBLISHED = "already published"


class Verdict(Enum):
    """The result of `judge`: publish the epoch, or do nothing."""

    PUBLISH = "publish"
    ALREADY_PUBLISHED = "already published"


def judge(ledger: Ledger, publication: Publication, target: str) -> Verdict:
    """Compare a publication with the ledger. Raises an error if it may not be published."""
    at = ledger.position
    if at == publication.position:
        if ledger.decision != publication.decision:
            raise Fenced(
                f"{target} has epoch {publication.epoch} of another decision: a copy of this home "
                "publishes there",
                hint="only one home may publish to a target; keep the one that is ahead",
            )
        return Verdict.ALREADY_PUBLISHED
    # Even if the ledger's epoch is above ours: it does not say who decided the epochs below it.
    refuse_older(ledger.term, publication.term, target)
    if at is not None and at.lineage == publication.lineage and at.epoch > publication.epoch:
        return Verdict.ALREADY_PUBLISHED
    if at == publication.previous:
        return Verdict.PUBLISH
    wanted = publication.previous
    raise TargetBehind(
        f"{target} says that {_show(at)} was published last, but epoch {publication.epoch} "
        f"follows {_show(wanted)}: the target was set back, replaced or emptied",
        hint="bring back the target as it was (its newest copy), or send the output of a new "
        "job to a new target",
    )


def refuse_older(seen: int, term: int, target: object, *, is_ours: bool = True) -> None:
    """`Fenced` if the target has seen a newer term than ours, or the same term of another driver.

    `is_ours`: did this driver write the term that the target has seen? `fence` knows by the token.
    """
    if seen > term or (seen == term and not is_ours):
        raise Fenced(
            f"{target} has seen term {seen}, this driver has term {term}",
            hint="another driver leads this job now; let it work, or start again to take over",
        )


def needs_rewind(ledger: Ledger, to: Position, *, term: int, target: object) -> bool:
    """False if the ledger is in the lineage of `to`: the rewind was done before, and epochs of
    that lineage may have been published since. Raises `Fenced` for a driver with an older term."""
    if ledger.position is not None and ledger.position.lineage == to.lineage:
        return False
    refuse_older(ledger.term, term, target)
    return True


def staged_file_gone(target: str, path: str, epoch: int) -> TargetBehind:
    """The error for a ledger that lacks an epoch whose staged rows are gone: the epoch had been
    published before."""
    return TargetBehind(
        f"{target} lacks epoch {epoch}, but its staged file {path} is gone: the epoch had been "
        "published before, and the target was set back or emptied since",
        hint="bring back the target as it was (its newest copy), or send the output of a new "
        "job to a new target",
    )


def _show(position: Position | None) -> str:
    return "nothing" if position is None else f"epoch {position.epoch} of {position.lineage[:8]}"
