"""What a job promises, in words."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.contract.ledger import Guarantee

_SAYS = {
    Guarantee.EXACTLY_ONCE: "each row is in its target exactly once, whatever crashes",
    Guarantee.AT_LEAST_ONCE: "no row is lost; after a crash rows of one epoch may be there twice",
    Guarantee.AT_MOST_ONCE: "no row is there twice; after a crash rows of one epoch may be missing",
}
_WEAKEST_FIRST = (Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE)


def guarantee_of(outputs: Mapping[str, str | None]) -> tuple[str | None, str]:
    """The weakest of several outputs, and a sentence; None: it is not known yet."""
    for weakest in _WEAKEST_FIRST:
        having = [name for name, guarantee in outputs.items() if guarantee == weakest]
        if not having:
            continue
        says = _SAYS[weakest]
        if len(having) < len(outputs):
            says = f"{says} (output {', '.join(sorted(having))}; the others promise more)"
        return str(weakest), says
    return None, "no output has been opened yet, so nothing is promised yet"
