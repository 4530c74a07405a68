"""A real Chromium and real servers of the console. `make test-browser` installs the driver."""

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from benchmarks.campaigns.chaos import rehearsed
from benchmarks.campaigns.live_servers import Plane
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import CreateProject, Role
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.server import create_app
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from eyrie_pipelines.processes import wait_until
from tests.pipelines.conftest import Rehearsal

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = Path(__file__).resolve().parents[2] / ".eyrie" / "browser"
PICTURES = SHOTS / "pictures"
SIZES = ((375, 812), (820, 1180), (1440, 900))
"""Of a phone, a tablet and a screen."""

LOOKS = ((SIZES[0], "dark"), (SIZES[1], "light"), (SIZES[2], "dark"), (SIZES[2], "light"))
"""Sizes with colours that a person may have chosen: layout depends on the size, contrast on the colours."""

TOKEN = "installation-token-of-these-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without EYRIE_TEST_BROWSER nothing here runs: a browser and its driver are half a gigabyte."""
    reason = None
    if os.environ.get("EYRIE_TEST_BROWSER") != "1":
        reason = "a browser: make test-browser"
    elif CHROMIUM is None:
        reason = "no Chromium on this machine: apt-get install chromium"
    elif importlib.util.find_spec("playwright") is None:
        reason = "no playwright: make test-browser installs it"
    for item in items:
        if reason is not None and "tests/browser" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def faults() -> list[str]:
    """What the pages of a test wrote to the console's log as errors."""
    return []


@pytest.fixture
def open_page(chromium: Any, faults: list[str]) -> Iterator[Callable[..., Any]]:
    """Makes a page of a new browser profile; `faults` collects its errors."""
    contexts = []

    def make(**options: Any) -> Any:
        contexts.append(chromium.new_context(**options))
        contexts[-1].set_default_timeout(150_000)  # the driver's own is 30 s
        page = contexts[-1].new_page()
        page.on("console", lambda message: faults.append(f"{message.text} {message.location['url']}")
                if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        return page

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    """Stages of the planes of a test do no work."""
    with rehearsed(tmp_path) as found:
        yield found


@pytest.fixture
def plane(tmp_path: Path, rehearsal: Rehearsal) -> Iterator[Plane]:
    """The control plane of one machine, without a token."""
    (tmp_path / "home").mkdir()
    made = Plane(tmp_path / "home", webhooks_allow_private=True)
    assert made.start() is None, made.log.read_text()[-2000:]
    yield made
    made.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, Database]]:
    """The API with a token, as on a cluster, and its database. No worker runs its jobs."""
    home = tmp_path / "guarded"
    home.mkdir()
    settings = Settings(home=home, token=TOKEN)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(settings, database=database), host="127.0.0.1", port=port,
                                           log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started, 120.0)
    yield f"http://127.0.0.1:{port}", database
    server.should_exit = True
    thread.join(10.0)
    database.close()


def assert_accessible(page: Any, where: str, part: str | None = None) -> None:
    """No violation of WCAG 2.2 A and AA or of axe's best practices, which are its rules without options, on the page or
    in the element that a CSS selector names. axe is asked for violations alone: it would describe every element that
    passes too, which takes longer than the rules."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, part, {"resultTypes": ["violations"]})
    assert found.violations_count == 0, f"{where}: {found.generate_report()}"


def picture(page: Any, name: str, *parts: str) -> None:
    """A picture of docs/console.md: the elements that these CSS selectors name, one below the other. Taken at one
    width, in light colours; `python -m tests.docs.pictures` takes it over."""
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    if is_dark or page.viewport_size["width"] != SIZES[-1][0]:
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        page.locator(part).first.screenshot(path=PICTURES / f"{name}-{number}.png")


def within(project: str, database: Database) -> Scope:
    """The scope of an administrator in a project, which is made if need be."""
    if not Projects(database).exists(project):
        Projects(database).create(CreateProject(name=project))
    return Scope(LOCAL, project)


def key_in(database: Database, project: str, role: Role) -> str:
    """The secret of a new key of a project."""
    return ApiKeys(database, scope=within(project, database)).create(name="k", role=role)[1]


def signed_in(page: Any, url: str, secret: str, path: str = "") -> Any:
    """The page at a path, after signing in with a key on the way to it."""
    page.goto(url + path)
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="Sign out").wait_for()
    return page
