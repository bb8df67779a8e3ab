"""`aneuron models`: what is built in and what is in the cache; fetch, describe, remove.

Comes in: a sub-command and a model's name. Goes out: a table on stdout, or with `--json` one JSON
object. `list` and `rm` import neither torch nor a hub client.
"""

from __future__ import annotations

from cyclopts import App

from aneuron.cli.models.listing import list_models
from aneuron.cli.models.removal import remove_model

__all__ = ["models"]

models = App(name="models", help="See, fetch, describe and remove models.")
models.command(list_models, name="list")
models.command(
    "aneuron.cli.models.pull:pull_model",
    name="pull",
    help="Fetch a model ahead of its first use.",
)
models.command(
    "aneuron.cli.models.info:describe_model",
    name="info",
    help="Tell what a model is, and how it would run here.",
)
models.command(remove_model, name="rm")
