"""PostgreSQL: one cluster a session, a fresh database whenever one is asked for, and clusters of one's own to kill."""

import importlib.util
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.processes import Server, Unavailable, shared, unprivileged_user

# The files live as long as the session: nothing needs to reach a disk.
_HASTY = {"fsync": "off", "full_page_writes": "off", "wal_level": "minimal",
          "max_wal_senders": "0", "autovacuum": "off", "shared_buffers": "32MB", "max_connections": "200"}

_RELATIONS = """SELECT string_agg(format('%s %s %s', relname, relkind, relnatts), ',' ORDER BY relname)
    FROM pg_class WHERE relnamespace = 'public'::regnamespace"""
_FILLED = """SELECT relname FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND pg_relation_size(oid) > 0"""
# In any order of tables: triggers, and so foreign keys, are not looked at.
_EMPTY = f"""DO $$ DECLARE name text; BEGIN
    SET LOCAL session_replication_role = replica;
    FOR name IN {_FILLED} LOOP EXECUTE format('DELETE FROM %I', name); END LOOP;
    PERFORM setval(format('%I', sequencename)::regclass, start_value, false)
        FROM pg_sequences WHERE last_value IS NOT NULL;
END $$"""
_CUT_OFF = """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""
_MOST_LOANS = 25  # rows that are deleted stay in the files, and slow down whoever reads them


@dataclass
class _Loan:
    """A database that tests use one after the other."""

    name: str
    relations: str
    rows: dict[str, bytes]
    """By table, as COPY writes them: what the template has."""
    num_loans: int = 0


def program(name: str) -> str:
    """A program of the newest PostgreSQL here. Debian keeps them off the PATH. Raises Unavailable."""
    found = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"),
                                          key=lambda path: int(path.parts[4].partition(".")[0]))]
    on_path = shutil.which(name)
    if not found and on_path is None:
        raise Unavailable("no PostgreSQL server on this machine: apt-get install postgresql")
    return found[-1] if found else str(on_path)


class Postgres:
    """One running cluster."""

    def __init__(self, port: int, server: Server | None = None) -> None:
        self.port, self.server = port, server
        self._idle: dict[str, list[_Loan]] = {}

    def url(self, database: str) -> str:
        """The SQLAlchemy URL of one of its databases."""
        return f"postgresql+psycopg://eyrie@127.0.0.1:{self.port}/{database}"

    def create(self, template: str = "template1") -> str:
        """A new database like `template`; its name."""
        name = f"eyrie_{uuid.uuid4().hex[:12]}"
        # FILE_COPY beats the default for a small template: nothing goes through the log.
        self._administer(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        return name

    def drop(self, database: str) -> None:
        """Delete a database, cutting off whoever is still connected."""
        self._administer(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    @contextmanager
    def lend(self, template: str) -> Iterator[str]:
        """The URL of a database like `template`, emptied afterwards for the next test: creating costs more."""
        idle = self._idle.setdefault(template, [])
        loan = idle.pop() if idle else self._loan(self.create(template))
        yield self.url(loan.name)
        loan.num_loans += 1
        if loan.num_loans < _MOST_LOANS and self._emptied(loan):
            idle.append(loan)
        else:
            self.drop(loan.name)

    def _loan(self, name: str) -> _Loan:
        with self._connect(name) as connection:
            rows = {}
            for (table,) in connection.execute(_FILLED).fetchall():
                with connection.cursor().copy(f"COPY {table} TO STDOUT") as copy:
                    rows[table] = b"".join(copy)
            return _Loan(name, connection.execute(_RELATIONS).fetchone()[0], rows)

    def _emptied(self, loan: _Loan) -> bool:
        """Whether the database is again like its template; False where the test has changed the schema."""
        with self._connect(loan.name) as connection:
            connection.execute(_CUT_OFF)
            if connection.execute(_RELATIONS).fetchone()[0] != loan.relations:
                return False
            connection.execute(_EMPTY)
            for table, rows in loan.rows.items():
                with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
                    copy.write(rows)
            return True

    def rename(self, database: str, name: str) -> None:
        """Give a database another name; nobody may be connected to it."""
        self._administer(f"ALTER DATABASE {database} RENAME TO {name}")

    def _administer(self, statement: str) -> None:
        with self._connect("postgres") as connection:
            connection.autocommit = True
            connection.execute(statement)

    def _connect(self, database: str) -> Any:
        import psycopg  # here, so that sessions without a database do not load a driver

        return psycopg.connect(host="127.0.0.1", port=self.port, user="eyrie", dbname=database)


def start(directory: Path, settings: Mapping[str, str] = _HASTY) -> Postgres:
    """A cluster of one's own under `directory`, without fsync by default. Raises Unavailable."""
    if importlib.util.find_spec("psycopg") is None:
        raise Unavailable('no PostgreSQL driver: pip install "psycopg[binary]"')
    initdb, postgres, user = program("initdb"), program("postgres"), unprivileged_user()
    home = directory / "postgres"
    home.mkdir(mode=0o755)
    identity: dict[str, Any] = {}
    if user:
        shutil.chown(home, user)
        identity = {"user": user, "extra_groups": []}
    data = home / "data"
    made = subprocess.run([initdb, "-D", str(data), "-U", "eyrie", "--auth=trust", "--no-sync", "--encoding=UTF8",
                           "--locale=C"], capture_output=True, text=True, cwd="/", check=False,
                          env={**os.environ, "TZ": "UTC"}, **identity)
    if made.returncode != 0:
        raise Unavailable(f"initdb failed: {made.stderr[-500:]}")
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    server = Server(lambda port: [postgres, "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", "", *flags],
                    home / "log.txt", user=user, ready=_takes_queries)
    server.start()
    return Postgres(server.port, server)


def shared_postgres() -> Postgres:
    """The session's cluster. Raises Unavailable."""
    return Postgres(shared("postgres", lambda directory: {"port": start(directory).port})["port"])


def shared_template(server: Postgres, name: str, fill: Callable[[str], None]) -> str:
    """A database of the session's cluster that `fill(url)` has prepared, once, to be copied by `create`."""

    def make(_directory: Path) -> dict[str, Any]:
        made = server.create()
        fill(server.url(made))
        server.rename(made, name)
        return {"name": name}

    return str(shared(f"template-{name}", make)["name"])


def _takes_queries(port: int) -> bool:
    import psycopg

    try:
        psycopg.connect(host="127.0.0.1", port=port, user="eyrie", dbname="postgres", connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
