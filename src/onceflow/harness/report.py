"""The result of `onceflow verify` as one HTML file without outside parts."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import Any

from onceflow.harness import charts
from onceflow.harness.fault_schedule import KINDS, SNAPSHOTS, is_kill

Json = dict[str, Any]

_SAYS = {
    "valid": "Every expected row is in its target exactly once.",
    "invalid": "The targets differ from the expected result, or a reader saw a broken promise.",
    "unknown": "A check could not be made, so there is no verdict.",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6672; --line: #d9dee4;
  --paper: #ffffff; --band: #f4f6f8; --ok: #1a7f4b; --bad: #c62f3b; --doubt: #9a6700;
  --rows: #2563a8; --kill: #c62f3b; --other: #b0741a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b1; --line: #333b45;
  --paper: #14181d; --band: #1b2027; --ok: #4cc38a; --bad: #ff6b76; --doubt: #e0b04a;
  --rows: #6cb0f5; --kill: #ff6b76; --other: #e0b04a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 40px 32px 64px; }
h1 { font-size: 15px; font-weight: 500; color: var(--soft); margin: 0 0 6px; }
h2 { font-size: 18px; margin: 40px 0 12px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
.verdict { font-size: 44px; font-weight: 700; letter-spacing: -0.02em; line-height: 1.1; }
.valid { color: var(--ok); } .invalid { color: var(--bad); } .unknown { color: var(--doubt); }
.facts { display: grid; grid-template-columns: repeat(5, 1fr); gap: 1px;
  background: var(--line); border: 1px solid var(--line); margin: 24px 0; }
.facts div { background: var(--paper); padding: 12px 16px; }
.facts b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.facts span { color: var(--soft); font-size: 13px; }
code, pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--band); border: 1px solid var(--line); padding: 12px 16px; margin: 8px 0;
  overflow-x: auto; white-space: pre-wrap; word-break: break-word; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line);
  padding: 6px 10px 6px 0; white-space: nowrap; }
td { border-bottom: 1px solid var(--line); padding: 6px 10px 6px 0; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.missed td { color: var(--soft); }
figure { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 4px 10px; margin: 0;
  font-size: 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.scale, .times { display: flex; justify-content: space-between; }
.scale { flex-direction: column; text-align: right; padding-top: 12px; }
.times { grid-column: 2; }
.strip, .plot { display: block; width: 100%; overflow: visible; }
.strip { height: 16px; } .strip text { fill: var(--soft); font-size: 11px; }
.plot { height: 240px; } .plot line, .line { vector-effect: non-scaling-stroke; }
.grid { stroke: var(--line); } .band-0 { fill: var(--band); } .band-1, .hit { fill: transparent; }
.line { fill: none; stroke: var(--rows); stroke-width: 2; }
.mark line { stroke: var(--other); stroke-width: 1.5; opacity: 0.6; }
.m-kill line { stroke: var(--kill); }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin: 0 5px 0 14px; }
@media (max-width: 700px) { main { padding: 24px 16px; } table { display: block; overflow-x: auto; }
  .facts { grid-template-columns: repeat(2, 1fr); } .strip text { display: none; } }
@media print { main { padding: 0; } tr { break-inside: avoid; } }
"""


def html(result: Json) -> str:
    parts = [
        _head(result), _facts(result), _violations(result), _timeline(result), _kinds(result),
        _cases(result), _faults(result), _reading(result),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>onceflow verify: {result['verdict']}, seed {result['seed']}</title>"
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(result: Json) -> str:
    verdict = result["verdict"]
    return (
        f"<h1>onceflow verify</h1><div class='verdict {verdict}'>{verdict}</div>"
        f"<p>{_SAYS[verdict]}</p>"
        f"<p class='soft'>{escape(result['began'])}, onceflow {escape(result['onceflow'])}, "
        f"Spark {escape(result['spark'] or '-')}, {escape(result['master'])}</p>"
    )


def _facts(result: Json) -> str:
    cases, recovery = result["cases"], result["recovery_s"]
    start = result["start_up_s"]
    facts = [
        (result["struck"], "faults struck"),
        (result["kills"], "of them kill -9"),
        (f"{sum(case['rows_in'] for case in cases):,}", "rows appended"),
        (f"{sum(case['epochs'] for case in cases):,}", "epochs decided"),
        (len(result["violations"]), "violations"),
        (_seconds(recovery.get("p50")), "recovery, p50"),
        (_seconds(recovery.get("p95")), "recovery, p95"),
        (_seconds(recovery.get("max")), "recovery, max"),
        (_seconds(start.get("max")), "waited for Spark, max"),
        (f"{result['seconds'] / 60:.1f} min", "in all"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{what}</span></div>" for value, what in facts)
    return (
        f"<div class='facts'>{cells}</div><p>Seed {result['seed']}. To repeat the schedule:</p>"
        f"<pre>{escape(result['command'])}</pre>"
    )


def _violations(result: Json) -> str:
    found = _listed("Violations", result["violations"])
    found += _listed("Allowed by the guarantee that was chosen", result["allowed"])
    if result["unknown"]:
        why = "".join(f"<p>{escape(text)}</p>" for text in result["unknown"])
        found += f"<h2>Why it is unknown</h2>{why}"
    return found


def _listed(title: str, violations: list[Json]) -> str:
    lines = "".join(
        f"<tr><td>{escape(v['kind'])}</td><td>{escape(v['where'])}</td>"
        f"<td>{escape(v['message'])}</td></tr>"
        for v in violations
    )
    head = f"<h2>{title}</h2><table><tr><th>kind<th>where<th>what</tr>"
    return f"{head}{lines}</table>" if lines else ""


# ---------------------------------------------------------------- the picture


def _timeline(result: Json) -> str:
    """Rows published in each case over time, and every fault where it struck."""
    cases = result["cases"]
    lines = [charts.Line("rows", case["samples"], steps=True, name=_case(case)) for case in cases]
    marks = [
        charts.Mark(
            fault["at_s"],
            "kill" if is_kill(fault["kind"]) else "other",
            f"{fault['number'] + 1}: {_name(fault)}, {fault['what']}",
        )
        for fault in result["faults"]
        if fault["hit"]
    ]
    bands = [charts.Band(c["began"], c["began"] + c["seconds"], _case(c)) for c in cases]
    chart = charts.line_chart(lines, marks, "rows published over time, and every fault", bands)
    if chart is None:
        return ""
    scale = "".join(f"<span>{value:,.0f}</span>" for value in chart.scale)
    span = chart.last - chart.first
    times = "".join(f"<span>{chart.first + span * part / 6:.0f} s</span>" for part in range(7))
    legend = "".join(
        f"<span class='dot' style='background: var(--{name})'></span>{says}"
        for name, says in (("rows", "rows that can be read"), ("kill", "kill -9"),
                           ("other", "another fault"))
    )  # fmt: skip
    return (
        f"<h2>Rows published, and every fault</h2><p class='soft'>{legend}</p><figure>"
        f"<div class='scale'>{scale}</div><div>{chart.strip}{chart.svg}</div>"
        f"<div class='times'>{times}</div></figure>"
    )


def _case(case: Json) -> str:
    return f"{case['job']} to {case['sinks']}"


# ---------------------------------------------------------------- tables


def _kinds(result: Json) -> str:
    groups: dict[str, list[Json]] = defaultdict(list)
    for fault in result["faults"]:
        groups[fault["kind"]].append(fault)
    lines = ""
    for kind, says in {**KINDS, **result["kinds"]}.items():
        faults = groups.get(kind, [])
        times = sorted(f["recovery_s"] for f in faults if f["recovery_s"] is not None)
        if faults:
            lines += (
                f"<tr><td><code>{kind}</code></td><td>{escape(says)}</td>"
                f"<td class='n'>{sum(f['hit'] for f in faults)} of {len(faults)}</td>"
                f"<td class='n'>{_seconds(times[len(times) // 2] if times else None)}</td>"
                f"<td class='n'>{_seconds(times[-1] if times else None)}</td></tr>"
            )
    left = "".join(f"<p class='soft'>Left out: {escape(what)}</p>" for what in result["left_out"])
    return (
        "<h2>Faults by kind</h2><table><tr><th>kind<th>what it does<th class='n'>struck"
        f"<th class='n'>recovery, median<th class='n'>max</tr>{lines}</table>{left}"
    )


def _cases(result: Json) -> str:
    lines = ""
    for case in result["cases"]:
        wrong = len(case["violations"])
        says = "unknown" if case["unknown"] else "invalid" if wrong else "valid"
        promised = ", ".join(sorted(set(case["guarantees"].values()))) or "-"
        lines += (
            f"<tr><td>{escape(case['job'])}</td><td>{escape(case['sinks'])}</td>"
            f"<td>{escape(promised)}</td><td class='n'>{case['rows_in']:,}</td>"
            f"<td class='n'>{case['rows_out']:,}</td><td class='n'>{case['epochs']:,}</td>"
            f"<td class='n'>{case['polls']:,}</td><td class='{says}'>{says}</td></tr>"
        )
    return (
        "<h2>Jobs</h2><table><tr><th>job<th>to<th>guarantee<th class='n'>rows in"
        "<th class='n'>rows out<th class='n'>epochs<th class='n'>looks of the reader<th>verdict"
        f"</tr>{lines}</table>"
    )


def _faults(result: Json) -> str:
    lines = ""
    for fault in result["faults"]:
        missed = "" if fault["hit"] else " class='missed'"
        lines += (
            f"<tr{missed}><td class='n'>{fault['number'] + 1}</td>"
            f"<td class='n'>{fault['at_s']:.1f} s</td><td>{escape(fault['job'])}, "
            f"{escape(fault['sinks'])}</td><td><code>{escape(_name(fault))}</code></td>"
            f"<td>{'' if fault['hit'] else 'missed: '}{escape(fault['what'])}</td>"
            f"<td class='n'>{_seconds(fault['recovery_s'])}</td>"
            f"<td class='n'>{_seconds(fault['start_up_s'] or None)}</td></tr>"
        )
    return (
        "<h2>Every fault</h2><table><tr><th class='n'>no.<th class='n'>at<th>job<th>fault"
        "<th>what it hit<th class='n'>recovery<th class='n'>Spark's start</tr>"
        f"{lines}</table>"
    )


def _reading(result: Json) -> str:
    return (
        "<h2>How to read this</h2>"
        "<p>The input is numbered rows that follow from the seed. While a producer appends them, "
        "the faults above strike, in an order that was fixed before. A reader of committed rows "
        "reads the whole time. After the end of the input the rows of the targets are read without "
        "onceflow and compared with the expected result, as multisets.</p>"
        "<p>Violations: <b>lost</b>, <b>duplicated</b>, <b>corrupt</b> rows; <b>torn</b> epochs; "
        "rows <b>disordered</b> within a key; a <b>dirty</b> read, or one that went "
        "<b>backwards</b>; something <b>left</b> behind; a job that is <b>stuck</b>; damage that "
        "went <b>unnoticed</b>.</p>"
        "<p><b>Recovery</b> is the time from a fault to the next decided epoch. The time that was "
        "waited for a new Spark to start is apart: it depends on the machine and on how a job is "
        "deployed. A fault that was <b>missed</b> found nothing to strike in its time.</p>"
    )


def _name(fault: Json) -> str:
    choice = [fault.get("file")] if fault["kind"] in SNAPSHOTS else []
    where = [*choice, fault.get("point") or fault.get("file")]
    return " ".join(dict.fromkeys(filter(None, [fault["kind"], *where])))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
