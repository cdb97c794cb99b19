"""Make what the services of the stack need before they start: databases, SSH keys, a bucket, Dagster's configuration.

Databases, keys and objects that are there stay.
"""

import os
import shutil
import subprocess
from pathlib import Path

import boto3
from sqlalchemy import Connection, create_engine, text

DATABASES = {
    "prefect": "PREFECT_DB_PASSWORD",
    "airflow": "AIRFLOW_DB_PASSWORD",
    "dagster": "DAGSTER_DB_PASSWORD",
    "skyward": "LEDGER_DB_PASSWORD",
}
"""Each database belongs to a user of the same name, whose password is in the variable."""
NODES = {"node-1": "NODE_1", "node-2": "NODE_2"}
"""The address of each node, as known_hosts has it, is in the variable."""
BUCKET = "skyward"


def make_databases(url: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for name, variable in DATABASES.items():
            make_database(connection, name, os.environ[variable])
    engine.dispose()


def make_database(connection: Connection, name: str, password: str) -> None:
    """Make a user and its database; the user has this password from now on."""
    if not _is_there(connection, "SELECT 1 FROM pg_roles WHERE rolname = :name", name):
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN")
    literal = "'" + password.replace("'", "''") + "'"
    connection.exec_driver_sql(f"ALTER ROLE {name} PASSWORD {literal}".replace("%", "%%"))
    if not _is_there(connection, "SELECT 1 FROM pg_database WHERE datname = :name", name):
        connection.exec_driver_sql(f"CREATE DATABASE {name} OWNER {name}")


def _is_there(connection: Connection, query: str, name: str) -> bool:
    return connection.execute(text(query), {"name": name}).first() is not None


def make_keys(client: Path, nodes: Path) -> None:
    """Make the clients' key, and a key for each node; write what each side has to know of the other."""
    public = make_key(client / "id_ed25519")
    hosts = {os.environ[variable]: make_key(nodes / name) for name, variable in NODES.items()}
    (nodes / "authorized_keys").write_text(public)
    (client / "known_hosts").write_text("".join(f"{address} {key}" for address, key in hosts.items()))


def make_key(path: Path) -> str:
    """Return the public key of a file, which is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "stack", "-f", str(path)], check=True)
    return path.with_suffix(".pub").read_text()


def make_bucket() -> None:
    boto3.client("s3").create_bucket(Bucket=BUCKET)  # in us-east-1 a bucket of one's own may be created again


if __name__ == "__main__":
    make_databases(os.environ["POSTGRES_URL"])
    make_keys(Path(os.environ["CLIENT_KEYS"]), Path(os.environ["NODE_KEYS"]))
    make_bucket()
    shutil.copy(Path(__file__).with_name("dagster") / "dagster.yaml", os.environ["DAGSTER_HOME"])
