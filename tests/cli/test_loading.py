"""What a command says of work that goes on behind an open engine."""

from __future__ import annotations

import logging

import pytest

from aneuron.cli.loading import Told


@pytest.mark.parametrize("quiet", [False, True])
def test_compiling_is_told(
    quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger = logging.getLogger("aneuron.native")
    with Told(quiet=quiet):
        logger.info("compiling")
        logger.warning("failed")
    logger.error("later")
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == (["failed", "later"] if quiet else ["compiling", "failed"])
    assert logger.handlers == []
    assert logger.level == logging.NOTSET
