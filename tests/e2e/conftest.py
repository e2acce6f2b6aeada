"""Runs that the tests of a module share: each is started once, two at a time, in the order written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.commands import Ended


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Ended]]:
    """`runs("name")` is what the function RUNS["name"] of the module returned, given a folder of its own."""
    table: dict[str, Callable[..., Ended]] = request.module.RUNS
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(make, tmp_path_factory.mktemp(name)) for name, make in table.items()}
        yield lambda name: started[name].result()
        pool.shutdown(cancel_futures=True)
