"""The chores as a Celery app of their own process: `eyrie worker`, or `celery -A eyrie_operator.celery_app worker`.

For chore workers beside the API server, on one Redis (EYRIE_BROKER_URL) and one database (EYRIE_DATABASE_URL).
The embedded world's files must be shared, so all of them run on one machine or on one shared volume; leases keep them
apart. On one machine without Redis nothing of this is needed: `eyrie up` runs the same chores in its own process.
"""

from typing import Any

from eyrie_api.database import Database
from eyrie_api.settings import Settings
from eyrie_api.tasks import make_celery, run_worker
from eyrie_operator.embedded import Embedded
from eyrie_operator.embedded_endpoints import EmbeddedEndpoints


def make_app() -> Any:
    """The Celery app, from EYRIE_* variables."""
    settings = Settings.from_env()
    database = Database(settings.resolved_database_url)
    return make_celery(settings, Embedded(settings, database).advance,
                       tend=EmbeddedEndpoints(settings, database).tend, database=database)


def work(settings: Settings, concurrency: int) -> None:
    """Take chores in prefork processes until told to stop."""
    database = Database(settings.resolved_database_url)
    database.migrate()
    database.engine.dispose()  # children open connections of their own
    app = make_celery(settings, Embedded(settings, database).advance,
                      tend=EmbeddedEndpoints(settings, database).tend, database=database)
    run_worker(app, settings, concurrency=concurrency, database=database)


def __getattr__(name: str) -> Any:
    """`app`, made when celery asks for it: importing this module must open no database."""
    if name == "app":
        globals()["app"] = make_app()
        return globals()["app"]
    raise AttributeError(name)
