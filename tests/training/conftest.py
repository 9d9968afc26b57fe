"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.stages import Stages


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with Stages(tmp_path_factory.mktemp("stages") / "stage.log") as running:
        yield running
