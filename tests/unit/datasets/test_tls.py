"""`https://` with real TLS reads only from servers that prove their identity."""

from __future__ import annotations

import ipaddress
import os
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ray_workers.shared.node_needs import DataPolicy
from tests.integration.harness import ROOT
from tests.marks import ONE_SET, soak
from tests.unit.datasets.web import Answer, serving

READ = """
import sys
from dataclasses import replace
from dray.spec import Data
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.datasets import open_table
from ray_workers.datasets.sources import source
from ray_workers.training.core.errors import SourceUnavailableError
source.FIRST_PAUSE_S = 0.001
data = Data(source=sys.argv[1], format="csv", target="y")
policy = replace(DataPolicy.open(sys.argv[2]), private_hosts=("127.0.0.1", "localhost"))
try:
    print(open_table(data, policy, classifies=True).target.tolist())
except SourceUnavailableError as error:
    print(error)
"""
"""Runs in a separate process, because the trusted authorities are read at its start."""

REFUSED = "/t.csv: the server's certificate can't be verified; tried 4 times"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a key and a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dray's tests")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


@ONE_SET
@pytest.mark.parametrize(
    ("is_trusted", "host", "expected"),
    [
        (True, "127.0.0.1", "[0, 1, 0]"),
        (False, "127.0.0.1", REFUSED),
        soak(True, "localhost", REFUSED),
    ],
    ids=["trusted", "of an unknown authority", "for another name"],
)
def test_a_server_is_read_that_proves_who_it_is(
    is_trusted: bool, host: str, expected: str, certificate: Path, policy: DataPolicy
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    if is_trusted:
        environment["SSL_CERT_FILE"] = str(certificate)
    with serving(tls) as web:
        web.answers["/t.csv"] = Answer(b"x,y\n1,a\n2,b\n3,a\n")
        printed = subprocess.run(
            [sys.executable, "-c", READ, web.url("/t.csv", host), policy.cache_dir or ""],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert printed.endswith(expected)
        assert bool(web.asked) == (expected != REFUSED), "nothing is sent to a stranger"
