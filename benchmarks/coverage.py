"""Tests which models of transformers and diffusers build unmodified, as one NPU partition, with PyTorch's results.

    make bench-coverage                              every family, writes results/coverage.json and docs/models.md
    make bench-coverage ARGS="llama diffusion"       only these families and groups; prints and writes nothing
    make bench-coverage ARGS="llama --merge"         only these; replaces them in the results
    make bench-coverage ARGS=--quick                 one family of each group, prints and writes nothing
    make bench-coverage ARGS=--table                 docs/models.md from the stored results

Unmodified means ``npusim.build(model, example_kwargs=...)`` with the arguments of the model's documentation. A decoder
counts as one partition only if the step that takes the returned cache is one, too. Models are small and have random
weights; every architectural default is kept. A result is right if its errors against the same model in float64 pass
the tests' error gate (tests/models/gate.py), which compares them with the errors of PyTorch eager in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAMILIES, Family
from readme import ROOT, hardware
from torch.overrides import TorchFunctionMode

import npusim
from npu_compiler.support.errors import NPUError

sys.path.insert(0, str(ROOT))
from tests.models import gate

RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
PAGE = ROOT / "docs" / "models.md"
LIBRARIES = ("transformers", "diffusers")
SECONDS = 300  # time limit of one family
EPS = torch.finfo(torch.float32).eps
STATES = ("one", "mixed", "host", "refused", "crash", "wrong")


@dataclass
class Outcome:
    """``state``: one of STATES. ``error``: RMS error divided by eager's, the largest of all results. ``seconds``: CPU
    time of building, compilers included. ``measured``: hardware and date."""

    group: str
    name: str
    model: str
    state: str
    npu: int = 0
    host: int = 0
    error: float = 0.0
    seconds: float = 0.0
    why: str = ""
    measured: str = ""


def try_family(family: Family) -> Outcome:
    """Build the family's model, and for decoders the decode step, and compare both with PyTorch."""
    outcome = Outcome(family.group, family.name, family.model, "one")
    start = os.times()
    try:
        model, config = make(family)
        inputs = family.inputs(config)
        exact = wide(family)
        eager = results(model, inputs)
        _compare(outcome, model, inputs, eager, wide_results(exact, inputs))
        if family.step and outcome.state not in ("refused", "crash"):
            following = step(inputs, eager)
            _compare(outcome, model, following, results(model, following), wide_results(exact, following))
    except NPUError as error:
        outcome.state, outcome.why = "refused", _said(error)
    except Exception as error:  # any other error is a bug, which the table shows
        outcome.state, outcome.why = "crash", _said(error)
    end = os.times()
    outcome.seconds = round(sum(end[:4]) - sum(start[:4]), 1)
    return outcome


def _said(error: Exception) -> str:
    """Return an error's first line, without the folder in which packages are installed here."""
    packages = f"{Path(transformers.__file__).parents[1]}{os.sep}"
    return f"{type(error).__name__}: {error}".replace(packages, "").splitlines()[0][:300]


def make(family: Family) -> tuple[torch.nn.Module, Any]:
    """Return the model in eval mode and its configuration. Parameters that start as ones or zeros get random values."""
    kind = getattr(import_module(family.library), family.model)
    torch.manual_seed(0)
    if family.library == "transformers":
        config = kind.config_class(**family.config)
        model = kind(config).eval()
    else:
        config = family.config
        model = kind(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter += 0.1 * torch.randn_like(parameter)
    return model, config


def wide(family: Family) -> torch.nn.Module:
    """Return the model in float64. Experts, if any, run one by one, because PyTorch has no grouped float64 matmul."""
    exact = make(family)[0].double()
    if getattr(exact.config, "_experts_implementation", None) is not None:
        exact.set_experts_implementation("eager")
    return exact


class _Wide(TorchFunctionMode):
    """Computes in float64 what a model asks for in float32, such as the angles of a rotary embedding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widened, args), **{k: widened(v) for k, v in (kwargs or {}).items()})


def wide_results(exact: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """Call the model in float64 on ``inputs``."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            return results(exact, widen(inputs))
    finally:
        torch.set_default_dtype(torch.float32)


def widen(inputs: Any) -> Any:
    """Return ``inputs`` with floating tensors, also those in a cache, in float64."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {k: _map(v, double) for k, v in inputs.items()}


def _map(value: Any, change: Any) -> Any:
    """Return ``value`` with ``change`` applied to every tensor in it, also in containers and attributes of caches."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(v, change) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    if hasattr(value, "__dict__") and type(value).__module__.startswith(LIBRARIES):
        made = copy.copy(value)
        made.__dict__.update({k: _map(v, change) for k, v in value.__dict__.items()})
        return made
    return value


def results(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """Call the model on a copy of ``inputs``, without gradients."""
    with torch.no_grad():
        return model(**copy.deepcopy(inputs))


def step(inputs: dict[str, Any], result: Any) -> dict[str, Any]:
    """Return the arguments of the call for one more token: the cache of ``result``, a longer mask."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = next(k for k in ("past_key_values", "cache_params") if result.get(k) is not None)
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return {"input_ids": ids[:, -1:] + 1, "attention_mask": longer, cache: result[cache]}


def _compare(outcome: Outcome, model: torch.nn.Module, inputs: dict[str, Any], eager: Any, reference: Any) -> None:
    built = npusim.build(model, example_kwargs=copy.deepcopy(inputs))
    partitions = [p.device for p in built.plan.partitions]
    npu = sum(device == "npu" for device in partitions)
    outcome.npu, outcome.host = max(outcome.npu, npu), max(outcome.host, len(partitions) - npu)
    outcome.state = "one" if (outcome.npu, outcome.host) == (1, 0) else "mixed" if outcome.npu else "host"
    if built.plan.reasons:
        ops = {n.name: n.op_type for n in built.plan.ir.nodes}
        causes = Counter(ops[n] for n, r in built.plan.reasons.items() if r.rule not in ("transfer", "follows"))
        outcome.why = ", ".join(f"{op} ×{count}" for op, count in causes.most_common(3))
    ours = built(**copy.deepcopy(inputs))
    for triple in zip(tensors(ours), tensors(eager), tensors(reference), strict=True):
        ratio, objection = _error(*triple)
        outcome.error = max(outcome.error, round(ratio, 3))
        if objection:
            outcome.state, outcome.why = "wrong", objection


def tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, also those of caches, in a fixed order."""
    found: list[torch.Tensor] = []
    _map(dict(result) if isinstance(result, dict) else result, lambda t: found.append(t) or t)
    return found


def _error(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> tuple[float, str]:
    """Return the RMS error divided by eager's (at least one rounding of the result), and why the gate fails, or ''."""
    assert ours.shape == eager.shape == exact.shape, (ours.shape, eager.shape, exact.shape)
    if not ours.is_floating_point() or not ours.numel():
        return 0.0, "" if torch.equal(ours, eager) else f"{ours.dtype} values differ"
    wanted = exact.double()
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(ours), finite):
        return math.inf, "other elements are finite"
    mine, theirs = (torch.where(finite, t.double() - wanted, 0).numpy() for t in (ours, eager))
    size = gate.rms(torch.where(finite, wanted, 0).numpy())
    found = gate.measure(mine, theirs)
    floor = gate.ULPS * EPS * size
    high = [f"{name} {m.ours:.3g} > {m.allowed:.3g}" for name, m in found.items() if m.ours > m.allowed + floor]
    rms = found["rms"]
    return rms.ours / max(rms.eager, EPS * size, 1e-300), ", ".join(high)


def isolated(family: Family) -> Outcome:
    """:func:`try_family` in a process of its own, for at most SECONDS."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, send))
    start = time.monotonic()
    process.start()
    send.close()
    try:
        outcome: Outcome = receive.recv() if receive.poll(SECONDS) else _lost(family, f"no result in {SECONDS} s")
    except EOFError:
        process.join()
        outcome = _lost(family, f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    print(f"{family.group:9s} {family.name:18s} {outcome.state:8s} {time.monotonic() - start:5.1f} s  {outcome.why}")
    return outcome


def _lost(family: Family, why: str) -> Outcome:
    return Outcome(family.group, family.name, family.model, "crash", why=why)


def _child(family: Family, send: Any) -> None:
    torch.set_num_threads(1)
    for library in LIBRARIES:
        import_module(library).logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    send.send(try_family(family))


def run(families: list[Family], jobs: int) -> list[Outcome]:
    """Try the families, ``jobs`` at a time, each in a process of its own."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(isolated, families))


def page(stored: dict[str, Any]) -> str:
    """docs/models.md."""
    outcomes = [Outcome(**o) for o in stored["families"]]
    groups = list(dict.fromkeys(o.group for o in outcomes))
    lines = [
        "# Models",
        "",
        "Families of transformers and, in the group diffusion, of diffusers, built as their documentation calls them: "
        "`npusim.build(model, example_kwargs=...)`, "
        "nothing adapted. Decoders are built twice, for a prompt and for the step that takes the returned cache. "
        "Architectures are exact, sizes small, weights random.",
        "",
        "| group | families | " + " | ".join(STATES) + " |",
        "|---|---:|" + "---:|" * len(STATES),
    ]
    for group in [*groups, "all"]:
        members = [o for o in outcomes if group in (o.group, "all")]
        counts = Counter(o.state for o in members)
        lines.append(f"| {group} | {len(members)} | " + " | ".join(str(counts[s] or "–") for s in STATES) + " |")
    lines += [
        "",
        "one: one NPU partition. mixed: some ops run in PyTorch on the host. host: all of them do. "
        "wrong: the errors fail the error gate of the tests. Error: RMS error against float64 over PyTorch eager's in "
        "float32 (which counts as at least one rounding of the result), the largest of all results.",
        "",
    ]
    for group in groups:
        lines += [f"## {group.capitalize()}", "", "| family | class | state | partitions | error | why |"]
        lines += ["|---|---|---|---|---:|---|"]
        for o in sorted((o for o in outcomes if o.group == group), key=lambda o: o.name):
            partitions = f"{o.npu} NPU" + (f", {o.host} host" if o.host else "") if o.npu or o.host else "–"
            error = f"{o.error:.2f}" if o.npu or o.host else "–"
            lines.append(f"| {o.name} | `{o.model}` | {o.state} | {partitions} | {error} | {o.why.replace('|', '/')} |")
        lines.append("")
    places = Counter(o.measured for o in outcomes)
    measured = "; ".join(place + (f" ({count} families)" if len(places) > 1 else "") for place, count in places.items())
    return "\n".join([*lines, f"{measured}. {stored['versions']}. `{stored['command']}`."])


def store(outcomes: list[Outcome]) -> None:
    """Write the outcomes to the results, where those of other families stay."""
    kept = json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else []
    new = {o.name: asdict(replace(o, measured=f"{hardware()}, {date.today()}")) for o in outcomes}
    found = {o["name"]: o for o in kept} | new
    stored = {
        "command": "make bench-coverage",
        "versions": ", ".join(f"{p} {version(p)}" for p in ("torch", *LIBRARIES, "numpy")),
        "families": [found[f.name] for f in FAMILIES if f.name in found],
    }
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families and groups; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    parser.add_argument("--quick", action="store_true", help="one family of each group")
    parser.add_argument("--merge", action="store_true", help="replace the named families in the stored results")
    parser.add_argument("--table", action="store_true", help="only write docs/models.md from the stored results")
    options = parser.parse_args()
    known = {n for f in FAMILIES for n in (f.name, f.group)}
    if unknown := sorted(set(options.names) - known):
        parser.error(f"unknown: {', '.join(unknown)}; families and groups are: {', '.join(sorted(known))}")
    if options.quick:
        options.names = list({f.group: f.name for f in reversed(FAMILIES)}.values())
    if not options.table:
        wanted = [f for f in FAMILIES if not options.names or {f.name, f.group} & {*options.names}]
        outcomes = run(wanted, options.jobs)
        if options.names and not options.merge:
            return
        store(outcomes)
    PAGE.write_text(page(json.loads(RESULTS.read_text())) + "\n")
    print(f"wrote {Path(PAGE).relative_to(ROOT)}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
