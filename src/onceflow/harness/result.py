"""The result of a run of `onceflow verify`, and its verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from onceflow.harness.checker import Violation
from onceflow.harness.fault_schedule import is_kill
from onceflow.store.version import __version__

Event = dict[str, Any]


@dataclass
class CaseResult:
    job: str
    sinks: str
    guarantees: dict[str, str] = field(default_factory=dict)
    rows_in: int = 0
    rows_out: int = 0
    epochs: int = 0
    polls: int = 0
    began: float = 0.0
    seconds: float = 0.0
    samples: list[tuple[float, int]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    allowed: list[Violation] = field(default_factory=list)  # by a weaker guarantee
    unknown: str = ""  # why there is no verdict


@dataclass
class Result:
    """Everything that is in the report."""

    seed: int
    command: str
    master: str
    began: str
    onceflow: str = __version__
    spark: str = ""
    seconds: float = 0.0
    faults: list[Event] = field(default_factory=list)
    cases: list[CaseResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    # Descriptions of faults that only this run has.
    kinds: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def violations(self) -> list[Violation]:
        return [v for case in self.cases for v in case.violations]

    @property
    def allowed(self) -> list[Violation]:
        return [v for case in self.cases for v in case.allowed]

    @property
    def unknown(self) -> list[str]:
        """Why there is no verdict: a check failed, no fault struck, or the run was interrupted."""
        found = [f"{c.job} to {c.sinks}: {c.unknown}" for c in self.cases if c.unknown]
        if not any(fault["hit"] for fault in self.faults):
            found.append("no fault struck")
        return found + ["it was interrupted"] * self.interrupted

    @property
    def verdict(self) -> str:
        return "invalid" if self.violations else "unknown" if self.unknown else "valid"

    @property
    def exit_code(self) -> int:
        return {"valid": 0, "invalid": 1, "unknown": 3}[self.verdict]

    def recovery(self) -> dict[str, float]:
        """Seconds from a fault to the next epoch, not counting the start of Spark."""
        return percentiles([f["recovery_s"] for f in self.faults if f["recovery_s"] is not None])

    def as_json(self) -> Event:
        return {
            "verdict": self.verdict, "seed": self.seed, "command": self.command,
            "master": self.master, "began": self.began, "seconds": round(self.seconds, 1),
            "onceflow": self.onceflow, "spark": self.spark,
            "struck": sum(f["hit"] for f in self.faults),
            "kills": sum(f["hit"] and is_kill(f["kind"]) for f in self.faults),
            "recovery_s": self.recovery(),
            "start_up_s": percentiles([f["start_up_s"] for f in self.faults if f["start_up_s"]]),
            "unknown": self.unknown, "left_out": self.left_out,
            "kinds": self.kinds,
            "violations": [asdict(v) for v in self.violations],
            "allowed": [asdict(v) for v in self.allowed],
            "cases": [asdict(case) for case in self.cases],
            "faults": self.faults,
        }  # fmt: skip


def percentiles(values: list[float]) -> dict[str, float]:
    """By the nearest rank; empty if there are no values."""
    ranked = sorted(values)
    if not ranked:
        return {}
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: ranked[max(0, math.ceil(q * len(ranked)) - 1)] for name, q in at.items()}
