# SPDX-License-Identifier: Apache-2.0
"""The verb `tune`: measure configurations of `serve` under a workload, one after the other, and
write the options of the best one as a slipway.yaml.
"""

import dataclasses
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmi_config.options import arguments, option_files
from lmi_config.options.declared import PREFIX, Settings
from lmi_config.options.option_files import Given
from lmi_config.options.redaction import secret
from lmi_config.options.settings import SettingsError, option
from lmi_config.plan import explain, preflight, vllm
from lmi_config.plan.kv_tiers import NoTiers
from lmi_config.plan.plan import Plan
from serving.exit import DIED, START_FAILED, USAGE_ERROR
from serving.observability.redaction import redacted
from serving.server.prepare import Deployment, prepare
from serving.tune import load, plot, points, workload
from serving.tune.load import LoadError, Measured, Objectives
from serving.tune.points import Axis, Options, Point
from serving.tune.sweep import Sweep, SweepError
from serving.tune.tuned_server import Server, StartError
from serving.tune.workload import Level, Workload, WorkloadError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""
RESULTS = "tune"
"""The default folder of a sweep."""
_CONFIG = "OPTION_CONFIG_FILE"
_COLUMNS = ("load", "requests", "TTFT P50", "P99 ms", "ITL P50", "P99 ms", "tokens/s", "goodput/s")


def tune(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the verb. Returns the exit code. Raises SettingsError."""
    own, _ = arguments.apart("tune", words)
    argued = arguments.read("tune", words)
    if arguments.WORKLOAD not in own:
        raise SettingsError(
            [f"{arguments.WORKLOAD} FILE: is missing; write in it what to tune for"]
        )
    try:
        deployment = prepare(environ, argued)
        asked = workload.read(Path(own[arguments.WORKLOAD]))
        results = Path(own.get(arguments.RESULTS, RESULTS))
        tuning = _Tuning(asked, deployment, argued, environ, results)
    except (WorkloadError, SweepError) as error:
        print(redacted(str(error)), file=sys.stderr)
        return USAGE_ERROR
    if hindrance := deployment.plan.hindrance:
        print(hindrance, file=sys.stderr)
        return START_FAILED
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        tuning.run()
        return tuning.finish()
    except KeyboardInterrupt:
        done = len(tuning.sweep.points)
        print(f"\ninterrupted; the same command goes on after {_count(done)}", flush=True)
        return INTERRUPTED


class _Tuning:
    def __init__(
        self,
        asked: Workload,
        deployment: Deployment,
        argued: Mapping[str, Given],
        environ: Mapping[str, str],
        results: Path,
    ) -> None:
        self._workload = asked
        self._deployment = deployment
        plan = deployment.plan
        settings = plan.settings
        if not vllm.generates(settings):
            raise SettingsError(["tune: is for models that generate text; this one does not"])
        longest = preflight.longest_request(settings, plan.model)
        if longest and asked.longest > longest:
            raise WorkloadError(
                f"prompts and answers have up to {asked.longest:,} tokens together, and the "
                f"longest request is of {longest:,}; shorten them, or raise --max-model-len"
            )
        self._own, secrets, removable = operators(settings, argued)
        self._environ = {**environ, **secrets}
        self._objectives = Objectives(settings.slo_ttft_ms, settings.slo_itl_ms)
        self._axes = points.axes(plan, asked, removable)
        self._key = settings.api_key
        given = [
            [name, it] for name, it, of in explain.options(plan) if of not in ("derived", "default")
        ]
        self.sweep = Sweep(
            results,
            {
                "options": sorted(given),
                "workload": dataclasses.asdict(asked),
                "machine": [gpu.name for gpu in plan.machine.gpus] or len(plan.machine.cpus),
            },
        )

    def run(self) -> None:
        """Measure the remaining configurations."""
        print("\n".join(_told(self._axes)))
        if done := len(self.sweep.points):
            print(f"{self.sweep.folder} has {_count(done)} already; going on")
        self._tokenizer = str(
            self._deployment.plan.settings.engine.get("tokenizer")
            or self._deployment.model.fetch(lambda note: print(redacted(note), flush=True))
        )
        print(f"\n    {_row(_COLUMNS)}", flush=True)
        for number, point in enumerate(self.sweep.points, 1):
            rows = [f"{number:>2}  {described(point.options)}"]
            rows += [f"    {_row(_cells(it))}" for it in point.levels]
            print("\n".join(rows + [f"    {point.reason}"] * bool(point.reason)), flush=True)
        while (
            options := points.walk(self._axes, self.sweep.points, self._objectives)[1]
        ) is not None:
            print(f"{len(self.sweep.points) + 1:>2}  {described(options)}", flush=True)
            again = not options and bool(self.sweep.points)
            point = dataclasses.replace(self._point(options), again=again)
            if point.reason:
                print(f"    {point.reason}", flush=True)
            self.sweep.add(point)

    def _point(self, options: Options) -> Point:
        """Start a server with these options and measure it, if its plan fits. Returns the point."""
        file = self.sweep.file("yaml")
        try:
            plan = self._planned(options, file).plan
            if why := self._unfit(options, plan, file):
                return Point(options, reason=f"left out: {why}")
        except SettingsError as error:
            return Point(options, reason=redacted(f"left out: {'; '.join(error.faults)}"))
        scheme = "https" if plan.settings.tls_cert_file else "http"
        levels: list[Measured] = []
        try:
            with Server(file, self._environ, self.sweep.file("log"), scheme) as server:
                server.ready()
                for level in self._workload.levels:
                    try:
                        levels.append(self._measure(level, server, plan))
                    except LoadError as error:
                        if server.ended():
                            raise StartError(server.reason()) from None
                        why = f"{level}: {error}; see {self.sweep.file('load.log')}"
                        return Point(options, tuple(levels), why)
                    print(f"    {_row(_cells(levels[-1]))}", flush=True)
                    if self._objectives.excess(levels[-1]) > 1:
                        return Point(options, tuple(levels), "misses its objectives")
        except StartError as error:
            return Point(options, reason=redacted(f"failed: {error}"))
        return Point(options, tuple(levels))

    def _planned(self, options: Options, file: Path) -> Deployment:
        """Write a server's options to a file, and plan it."""
        file.write_text(_yaml(points.applied(self._own, options)))
        return prepare(self._environ, {_CONFIG: Given(str(file), "--config")})

    def _unfit(self, options: Options, plan: Plan, file: Path) -> str:
        """Return why these options do not change the plan, or ""."""
        if not options.get("lmcache_auto_config"):
            return ""
        if isinstance(plan.tiers, NoTiers):
            return plan.tiers.reason.removeprefix("left out: ")
        if options.get("kv_disk_size") == 0:
            more = self._planned({**options, "kv_disk_size": None}, file).plan.tiers
            self._planned(options, file)
            if isinstance(more, NoTiers) or not more.disk:
                return "there is no disk tier that could be left out"
        return ""

    def _measure(self, level: Level, server: Server, plan: Plan) -> Measured:
        result = self.sweep.file("json")
        # A load with the same prompts as an earlier one would find them cached, perhaps on a disk.
        number = len(self.sweep.points) * len(self._workload.levels)
        words = load.command(
            self._workload,
            level,
            url=server.url,
            model=plan.settings.model_names[0],
            tokenizer=self._tokenizer,
            seed=(self._workload.seed or 0) + number + self._workload.levels.index(level),
            objectives=self._objectives,
            result=result,
            remote_code=plan.settings.trust_remote_code,
        )
        return load.run(words, level, result=result, log=self.sweep.file("load.log"), key=self._key)

    def finish(self) -> int:
        """Print the best configuration, and write it and the plot. Returns the exit code."""
        tried = self.sweep.points
        options, _ = points.walk(self._axes, tried, self._objectives)
        key = points.key(options)
        number = max(n for n, it in enumerate(tried, 1) if points.key(it.options) == key)
        best = points.reached(tried[number - 1], self._objectives)
        picture = self.sweep.folder / "tune.svg"
        picture.write_text(plot.svg(tried, number if best else None, self._objectives))
        print(f"\nwrote {picture}")
        if best is None:
            why = "meets the objectives" if any(it.levels for it in tried) else "could be measured"
            print(f"no configuration {why}; no slipway.yaml was written", flush=True)
            return DIED
        planned = [it for it in tried if not it.options][-1]
        other = points.reached(planned, self._objectives)
        told = f"{number}, {described(options)}: {best.tokens:,.1f} tokens/s at {best.level}"
        if other and options:
            told += f", {best.tokens / other.tokens:.2f} x as planned"
        file = self.sweep.folder / option_files.YAML
        note = f"# Chosen by tune from {_count(len(tried))}: {told}\n"
        file.write_text(note + _yaml(points.applied(self._own, options)))
        print(f"wrote {file}: {told}\nserve --config {file}", flush=True)
        return 0


def operators(
    settings: Settings, argued: Mapping[str, Given]
) -> tuple[Options, Mapping[str, str], frozenset[str]]:
    """Return the operator's options of the command line and slipway.yaml in three parts: options
    for a new slipway.yaml, secrets as variables, and the names of options that no other place sets.
    """
    named = {option(name) for name in argued}
    found = {
        name: it
        for name, it in option_files.read(settings.model_folder, settings.config_file).items()
        if it.file and it.file.name != option_files.PROPERTIES and option(name) not in named
    }
    found |= {name: it for name, it in argued.items() if option(name) != "config_file"}
    own = {}
    for name, it in found.items():
        if not secret(name):
            folder = option(name) == "model_id" and Path(it.text).is_dir()
            own[_bare(name)] = str(Path(it.text).absolute()) if folder else _value(it.text)
    secrets = {name: it.text for name, it in found.items() if secret(name)}
    removable = frozenset(
        _bare(name)
        for name, it in found.items()
        if settings.origins.get(_bare(name)) == it.name and name in argued
    )
    return own, secrets, removable


def _bare(name: str) -> str:
    """Return the name of a variable in slipway.yaml."""
    return name.removeprefix(PREFIX).lower() if name.startswith(PREFIX) else name


def _value(text: str) -> Any:
    """Return a value for YAML, if YAML reads it as the same text, or else the text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict | list) or json.dumps(found) == text else text


def _yaml(options: Options) -> str:
    return yaml.safe_dump(dict(options), sort_keys=False) if options else ""


def described(options: Options) -> str:
    """Return a point's options for people."""
    if not options:
        return "as planned"
    told = [f"{name}: {json.dumps(it)}" for name, it in options.items() if it is not None]
    if options.get("speculative_config", "") is None:
        told.append("no draft")
    return ", ".join(told)


def _count(number: int) -> str:
    return f"{number} configuration{'s' * (number != 1)}"


def _told(axes: Sequence[Axis]) -> list[str]:
    """Return the values to try, one line for each option."""
    lines = []
    for axis in axes:
        values = " | ".join(
            json.dumps(it[axis.name]) if [*it] == [axis.name] else described(it)
            for it in axis.values
        )
        lines.append(f"{axis.name}: {values or 'not tried'} ({axis.reason})")
    return lines


def _cells(it: Measured) -> list[str]:
    times = (it.ttft_p50, it.ttft_p99, it.itl_p50, it.itl_p99)
    goodput = "-" if it.goodput is None else f"{it.goodput:.2f}"
    return [
        *(it.level, f"{it.requests:,}"),
        *(f"{value:,.1f}" for value in times),
        *(f"{it.tokens:,.1f}", goodput),
    ]


def _row(cells: Sequence[str]) -> str:
    return f"{cells[0]:20}" + "".join(f"{cell:>11}" for cell in cells[1:])
