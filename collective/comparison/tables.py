"""The tables and sentences of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collective.comparison.equality import ROUNDING, TOLERANCE
from collective.comparison.results import EqualityProof, Results
from collective.comparison.runs import ALONE, REFERENCE, SHARE
from collective.comparison.speed import Fastest, Timed, bottleneck, by_rate, fastest


@dataclass
class Table:
    """A table of strings."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)  # of each row: good, bad, or ""
    sentences: list[str] = field(default_factory=list)  # below it

    def add(self, mark: str, *cells: str) -> None:
        """Add a row."""
        self.rows.append(list(cells))
        self.marks.append(mark)


def tables(results: Results) -> list[Table]:
    """Return every table of a comparison, in order of presentation."""
    found = [_equal(precision, proof) for precision, proof in results.equal.items()]
    for replicas in sorted(map(int, results.fast)):
        found += [_fast(results, replicas), _parts(results, replicas)]
    if results.left_out:
        table = Table("Left out", ["backend", "why"])
        for name, why in results.left_out.items():
            table.add("", name, why)
        found.append(table)
    return found


def _equal(precision: str, proof: EqualityProof) -> Table:
    of = f"Equal? {precision}, against {proof.reference}"
    columns = ["backend", "verdict", "loss", "parameters", "first difference"]
    bits = any(verdict.sha256 for verdict in proof.verdicts.values())
    table = Table(of, [*columns, "state_sha256"] if bits else columns)
    for name, verdict in proof.verdicts.items():
        where = ""
        if not verdict.equal and verdict.first_step is not None:
            where = f"step {verdict.first_step}, {verdict.first_tensor}"
        answer = "equal" if verdict.equal else "NOT EQUAL"
        table.add("good" if verdict.equal else "bad", name, answer,
                  f"{verdict.loss:.1e}", f"{verdict.parameter:.1e}", where,
                  *([verdict.sha256[:16]] if bits else []))  # fmt: skip
    for name, (why, tail) in proof.failures.items():
        table.add("bad", name, why, *[""] * (len(table.columns) - 2))
        table.sentences.append(f"The last lines of {name}:\n{tail}")
    if bits:
        table.sentences.append("With virtual replicas every bit has to be the same.")
        return table
    tolerances = {v.tolerance for v in proof.verdicts.values()}
    for first, last in tolerances:
        text = f"Largest relative differences. Up to {first:.1e} is rounding"
        if last > TOLERANCE[precision]:
            text += f" after the first step, {last:.1e} after the last"
            text += f" ({ROUNDING:g} x what other orders of the sums do in one process)"
        table.sentences.append(text + ".")
    return table


def _fast(results: Results, replicas: int) -> Table:
    timed = results.fast[str(replicas)]
    columns = ["backend", "samples/s", "rounds", f"x {REFERENCE}", "of the ideal"]
    columns += ["memory"]
    table = Table(f"Fast? {replicas} replica{'s' * (replicas > 1)}", columns)
    share, alone = timed.get(SHARE, Timed()), timed.get(REFERENCE, Timed())
    cores = results.machine["cores"]
    for name in by_rate(timed):
        one = timed[name]
        if not one.rates:
            table.add("bad", name, one.failure or "not run", *[""] * 4)
            if one.tail:
                table.sentences.append(f"The last lines of {name}:\n{one.tail}")
            continue
        ideal = share.rate * min(replicas, cores)
        several = name not in ALONE
        table.add(
            "",
            name,
            f"{one.rate:,.0f}",
            f"{min(one.rates):,.0f}–{max(one.rates):,.0f}" if one.rates[1:] else "1",
            f"{one.rate / alone.rate:.2f}" if alone.rate else "",
            f"{one.rate / ideal:.0%}" if ideal and several else "",
            f"{one.memory / 2**20:,.0f} MiB",
        )
    if winner := _winner(timed):
        table.sentences.append(winner.sentence())
    if results.busy:
        table.sentences.append(f"Beside the runs, {results.busy}: times say little.")
    threads = max(1, cores // replicas)
    table.sentences.append(
        f"'{SHARE}' is one process with {threads} thread{'s' * (threads > 1)}, what "
        f"each of {replicas} has; the ideal is {min(replicas, cores)} times its rate."
    )
    return table


def _parts(results: Results, replicas: int) -> Table:
    timed = {n: t for n, t in results.fast[str(replicas)].items() if t.rates}
    columns = ["backend", "step", "input", "compute", "wait", "all-reduce", "update"]
    table = Table(
        f"Where the time goes, {replicas} replica{'s' * (replicas > 1)}, ms", columns
    )
    for name, one in sorted(timed.items(), key=lambda pair: pair[1].step):
        times = [f"{1e3 * seconds:.2f}" for seconds in (one.step, *one.parts.values())]
        table.add("", name, *times)
    if winner := _winner(timed):
        table.sentences.append(bottleneck(winner.backend, timed[winner.backend]))
    return table


def _winner(timed: Mapping[str, Timed]) -> Fastest | None:
    return fastest({name: one for name, one in timed.items() if name != SHARE})
