"""A plan for people: lines of tables from the values of `report`. Owns the look alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.core.units import format_bytes

N_MESHES = 8
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
NOT_HERE = "not in this engine"
CANNOT = "cannot be served by this version"


def lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """The whole plan."""
    yield from _model(plan["model"], plan["facts"])
    if "device" in plan:
        yield from _device(plan["device"], plan["workload"])
        yield from _memory(plan)
        yield from _meshes(plan)
        yield from _steps(plan)
        if plan.get("command"):
            yield from ("", "to serve it:", f"  {plan['command']}")
        elif plan.get("cannot"):
            yield from ("", f"{CANNOT}: {plan['cannot']}")
        if plan.get("unknown"):
            yield from ("", "not known:", *(f"  - {text}" for text in plan["unknown"]))
    else:
        yield "  what it takes, does and costs on a device: add --gpu NAME, such as --gpu h200, or --gpu here"


def objection(plan: Mapping[str, Any]) -> str:
    """Why the model does not fit, or not within the limits, or cannot be served so, in a sentence; empty: it can, or it
    was not asked."""
    if "device" not in plan:
        return ""
    where = f"{plan['device']['count']} x {plan['device']['name'].upper()}"
    if missed := plan.get("missed"):
        return f"{plan['model']} on {where}: {_missed(missed)}"
    if any("tokens_per_s" in mesh for mesh in plan.get("meshes", ())):
        return f"{plan['model']} on {where} {CANNOT}: {plan['cannot']}" if plan.get("cannot") else ""
    memory = plan.get("memory")
    if memory is None:
        return f"{plan['model']} cannot be divided among {where}: take another --count or --mesh"
    if memory["fits"]:
        lacking = f"not one sequence of {memory['batch_tokens']:,} tokens has room"
    else:
        lacking = f"short by {format_bytes(memory['lacking_bytes'])}"
    least, other = plan.get("least"), plan.get("least_other")
    instead = "no number of them would do"
    if least:
        instead = f"--count {least['devices']} ({least['mesh']}) is the least"
    elif other:
        instead = f"--count {other['devices']} ({other['mesh']}) would do, {NOT_HERE}"
    mesh = f" as {plan['meshes'][0]['mesh']}" if plan["device"]["count"] > 1 else ""
    return f"{plan['model']} does not fit on {where}{mesh}: {lacking}; {instead}"


def _model(name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    active = facts["active_parameters"]
    total = facts["parameters"]
    rest = f", {active:,} of them for each token" if active != total else ""
    yield f"{name}: {facts['family']}, {facts['layers']} layers, {total:,} parameters{rest}"
    yield from _table(
        ("part", "parameters", "share"),
        [(part, f"{n:,}", f"{100 * n / total:.1f} %") for part, n in _largest(facts["parameters_by_part"])],
    )
    yield (
        f"  weights {format_bytes(facts['weights_bytes'])}; "
        f"keys and values {format_bytes(facts['kv_bytes_token'])} a token"
        + (f"; states {format_bytes(facts['state_bytes_seq'])} a sequence" if facts["state_bytes_seq"] else "")
    )
    if codings := facts.get("codings"):
        yield f"  quantised checkpoint: {codings['words']}; {codings['becomes']}"
    if facts.get("checkpoint"):
        yield f"  checkpoint {_checkpoint(facts['checkpoint'], total)}"
    prompt = facts["flops_prompt"]
    yield (
        f"  FLOPs: a token {_si(facts['flops_token'])} and {_si(facts['flops_pair'])} for each token before it;"
        f" a prompt of {prompt['tokens']:,} {_si(prompt['flops'])}; a token in training "
        f"{_si(facts['flops_training_token'])}"
    )


def _checkpoint(files: Mapping[str, Any], n_parameters: int) -> str:
    """What its files hold beside what its description says."""
    if files.get("unknown"):
        return f"unknown: {files['unknown']}"
    types = ", ".join(f"{n:,} {dtype}" for dtype, n in files["numbers"].items())
    n_files = f"{files['n_files']:,} file{'s' if files['n_files'] != 1 else ''}"
    text = f"{n_files}, {format_bytes(files['n_bytes'])}: {types}"
    lacking = n_parameters - sum(files["numbers"].values())
    if files["is_rounded"] or not lacking:
        return text + ("" if files["is_rounded"] else ", as described")
    return f"{text}; {abs(lacking):,} {'fewer' if lacking > 0 else 'more'} than the description says"


def _largest(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, n) for name, n in parts.items() if n), key=lambda pair: -pair[1])


def _device(device: Mapping[str, Any], workload: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"{device['count']} x {device['name'].upper()}, {format_bytes(device['memory_bytes'])} each; reads"
        f" {device['read_bytes_per_s'] / 1e12:.3g} TB/s, products {_si(device['flops_per_s']['bfloat16'])}/s"
    )
    yield f"  {device['source']}"
    yield f"workload {workload['name']}: {workload['meaning']}; limits: {workload['slo']}"


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    memory = plan.get("memory")
    if memory is None:
        reasons = "; ".join(f"{mesh}: {why}" for mesh, why in list(plan["refused"].items())[:3])
        yield f"  no mesh of {plan['device']['count']} devices can divide the model ({reasons})"
        return
    told = {name: n for name, n in memory["terms"].items() if n}
    terms = ", ".join(f"{name} {size}" for name, size in zip(told, _sizes(list(told.values())), strict=True))
    yield f"memory of a device ({plan['meshes'][0]['mesh']}), of {format_bytes(memory['budget_bytes'])}: {terms}"
    if memory["fits"]:
        if memory["max_num_seqs"] < memory["asked_num_seqs"]:
            yield (
                f"  that is for {memory['max_num_seqs']:,} sequences at once: what is reserved for"
                f" {memory['asked_num_seqs']:,} leaves too little"
            )
        kept = f"{memory['kv_tokens']:,} tokens of keys and values; " if plan["facts"]["kv_bytes_token"] else ""
        yield (
            f"  it fits: {kept}at most {memory['largest_batch']:,} sequences of {memory['batch_tokens']:,} tokens,"
            f" or one of {memory['longest_context']:,}"
        )
    else:
        yield f"  it does not fit: short by {format_bytes(memory['lacking_bytes'])}"
    if experts := plan.get("experts"):
        yield f"  experts chosen as in {experts['loads']}: {_spread(experts)}"
    if plan.get("least"):
        yield f"  the least that would: {plan['least']['devices']} devices ({plan['least']['mesh']})"
    if plan.get("least_other"):
        other = plan["least_other"]
        yield f"  it would fit on {other['devices']} devices as {other['mesh']} ({NOT_HERE}: {other['refusal']})"


def _spread(experts: Mapping[str, Any]) -> str:
    if experts["ranks"] == 1:
        return "each device has all of them, or a part of every one"
    copies = f" with {experts['copies']:,} copies in a layer" if experts["copies"] else ""
    loaded = f", where it would have {experts['imbalance_in_turn']:.2f} as they are loaded" if experts["moved"] else ""
    return (
        f"of {experts['ranks']:,} ranks{copies} the busiest has {experts['imbalance']:.2f} times the rows of the mean"
        f"{loaded}"
    )


def _meshes(plan: Mapping[str, Any]) -> Iterator[str]:
    rows = [row for row in plan["meshes"] if "tokens_per_s" in row]
    if not rows:
        return
    yield ""
    head: tuple[str, ...] = ("mesh", "sequences", "TTFT ms", "TPOT ms", "output tok/s", "within", "SLO")
    marked = any(row["refusal"] for row in rows[:N_MESHES])
    priced = any("dollars_per_million" in row for row in rows)
    first, later = (_column([row[name] for row in rows[:N_MESHES]]) for name in ("ttft_ms", "tpot_ms"))
    body = []
    for i, row in enumerate(rows[:N_MESHES]):
        body.append((
            row["mesh"], f"{row['concurrency']:,}", first[i], later[i], f"{row['tokens_per_s']:,.0f}",
            f"± {100 * row['error']:.0f} %", "met" if row["meets_slo"] else "missed",
            *((_price(row),) if priced else ()),
            *((NOT_HERE if row["refusal"] else "",) if marked else ()),
        ))  # fmt: skip
    head += ("$/M tokens",) if priced else ()
    yield from _table((*head, "") if marked else head, body)
    if missed := plan.get("missed"):
        yield f"  {_missed(missed)}"
    if len(plan["meshes"]) > N_MESHES:
        yield f"  ({len(plan['meshes'])} meshes compared, {len(plan['refused'])} refused)"


def _missed(nearest: Mapping[str, Any]) -> str:
    return (
        f"no concurrency meets {nearest['slo']}; nearest is a TTFT of {nearest['ttft_ms']:,.1f} ms and a TPOT of"
        f" {nearest['tpot_ms']:.2f} ms at {_sequences(nearest['concurrency'])} ({nearest['mesh']})"
    )


def _price(row: Mapping[str, Any]) -> str:
    """Of what meets its limits; another does not compete."""
    dollars = row.get("dollars_per_million")
    return "" if dollars is None else f"{dollars:.3f}"


def _steps(plan: Mapping[str, Any]) -> Iterator[str]:
    for name, rows in plan.get("steps", {}).items():
        n_seqs, n_tokens = plan["step_spans"][name]
        what = (
            f"{_sequences(n_seqs)} at {n_tokens:,} tokens" if name == "decode" else f"a prompt of {n_tokens:,} tokens"
        )
        yield from ("", f"{name}, {what}:")
        yield from _table(
            ("operator", "times", "MB", "GFLOP", "FLOP/byte", "limit us", "bound by"),
            list(zip(
                [row["operator"] for row in rows], [str(row["times"]) for row in rows],
                _column([(row["bytes"] or row["wire_bytes"]) / 1e6 for row in rows]),
                _column([row["flops"] / 1e9 for row in rows]), _column([row["intensity"] for row in rows]),
                _column([row["limit_us"] for row in rows]), [row["bound"] for row in rows], strict=True,
            )),
        )  # fmt: skip
    sent = plan.get("communication")
    if sent:
        yield from ("", "communication of that decode step, of one rank:")
        yield from _table(
            ("what", "ranks", "times", "MB a call", "us in all"),
            list(zip(
                [row["name"] for row in sent], [str(row["ranks"]) for row in sent],
                [str(row["times"]) for row in sent], _column([row["bytes"] / 1e6 for row in sent]),
                _column([row["us"] for row in sent]), strict=True,
            )),
        )  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        first, *rest = row
        cells = [first.ljust(widths[0]), *(text.rjust(n) for text, n in zip(rest, widths[1:], strict=True))]
        yield f"  {'  '.join(cells)}".rstrip()


def _column(values: Sequence[float]) -> list[str]:
    """Numbers under each other, with as many decimals for all as the largest needs for four digits, at least one."""
    largest = max(map(abs, values), default=0.0)
    n = 1 if largest >= 100 else 2 if largest >= 10 else 3
    return [f"{value:,.{n}f}" for value in values]


def _sequences(n: int) -> str:
    return f"{n:,} sequence{'s' if n != 1 else ''}"


def _sizes(values: Sequence[float]) -> list[str]:
    """In the unit of the largest, GiB at most: beside weights of terabytes the others would be 0.00."""
    unit, scale = next((unit, scale) for unit, scale in UNITS if max(values) >= scale or scale == 1)
    return [f"{value / scale:,.2f} {unit}" for value in values]


def _si(value: float) -> str:
    """Three digits."""
    for power, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{value / power:#.3g}".rstrip(".") + f" {unit}FLOP"
    return f"{value:.0f} FLOP"
