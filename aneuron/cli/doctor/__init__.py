"""`aneuron doctor`: what this machine can run, and why not.

Comes in: nothing but the machine. Goes out: a table on stdout, or with `--json` one JSON
object; status 0 if the default device works, else 1. `facts` asks the machine, `checks` judges
what it said. With `--probe` a Neuron device is measured (`probe`, on a small model of `rig`), and
the `report` goes out.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (the command line makes one)
from typing import TYPE_CHECKING

from aneuron.cli.doctor.checks import WORST, diagnose
from aneuron.cli.doctor.facts import gather
from aneuron.cli.options import Flag, JsonFlag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import show_json, stdout_console
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.cli.doctor.checks import Check

__all__ = ["doctor"]

_MARKS = {"ok": "[green]ok[/]", "note": "--", "warning": "[yellow]warning[/]", "no": "[red]no[/]"}


def doctor(
    *,
    probe: Flag = False,
    profile: Path | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Tell what this machine can run, and why not; status 0 if the default device works.

    Args:
        probe: Measure the Neuron device for some minutes, and print a report for an issue.
        profile: With --probe: write a latency profile, to be played with --device sim:FILE.json.
        as_json: Print one JSON object in place of the table, or of the report.
    """
    if probe:
        _probe(profile, as_json=as_json)
        return 0
    if profile is not None:
        raise ConfigError("a profile is what --probe measures: pass that, too", param="profile")
    facts = gather()
    checks = diagnose(facts)
    works = next(one for one in checks if one.name == "device cpu").status != WORST
    if as_json:
        show_json(
            {
                "works": works,
                "checks": [asdict(one) for one in checks],
                "facts": facts.as_json(),
            }
        )
    else:
        _show(checks)
    return 0 if works else 1


def _probe(profile: Path | None, *, as_json: bool) -> None:
    from aneuron.cli.doctor import report
    from aneuron.cli.doctor.probe import probe
    from aneuron.cli.loading import reporting
    from aneuron.device.neuron.found import find, open_neuron
    from aneuron.device.profile_files import check_writable, save_profile

    if profile is not None:
        check_writable(profile)
    device = open_neuron()
    with reporting("probe", quiet=as_json) as progress:
        findings = probe(device, progress)
    if as_json:
        show_json(asdict(findings))
    else:
        print(report.markdown(findings, str(find())), end="", flush=True)
    if profile is not None:  # behind the answer, which a full disk must not take along
        save_profile(report.as_profile(findings, profile.stem), profile)


def _show(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("", "", "what"):
        table.add_column(column, overflow="fold", no_wrap=False)
    table.show_header = False
    for one in checks:
        text = one.found if not one.advice else f"{one.found}\n→ {one.advice}"
        table.add_row(Text.from_markup(_MARKS[one.status]), one.name, Text(text))
    stdout_console().print(table)
