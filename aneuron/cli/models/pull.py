"""`aneuron models pull`: fetch a model ahead of its first use.

Comes in: a model's name. Goes out: on stderr how far it is; on stdout the directory that holds it.
"""

from __future__ import annotations

from aneuron.cli.loading import reporting
from aneuron.cli.options import Flag, JsonFlag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import show_json
from aneuron.errors import ConfigError
from aneuron.models.catalog import locate, resolve

__all__ = ["pull_model"]


def pull_model(
    model: str,
    /,
    *,
    revision: str | None = None,
    quiet: Flag = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch a model ahead of its first use; print the directory that holds it.

    Args:
        model: A built-in name, a .gguf file or a Hugging Face id.
        revision: Branch, tag or commit of a Hugging Face id.
        quiet: Do not show how far it is.
        as_json: Print one JSON object in place of the path.
    """
    if model.startswith("sim:"):
        raise ConfigError(f"{model} is simulated: there is nothing to fetch", param="model")
    before = locate(model, revision=revision)
    with reporting(model, quiet=quiet or as_json) as progress:
        found = resolve(model, revision=revision, progress=progress)
    num_bytes = sum(file.stat().st_size for file in found.path.iterdir() if file.is_file())
    if as_json:
        show_json(
            {
                "model": found.name,
                "path": str(found.path),
                "num_bytes": num_bytes,
                "was_here": before is not None and before.path == found.path,
            }
        )
    else:
        print(found.path, flush=True)
