"""A double of an OIDC issuer: discovery document and keys over real HTTP, tokens signed with real keys. It asks nobody
for a password; what it signs is what a test says."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from eyrie_api.clock import utc_now

AUDIENCE = "eyrie"


@cache
def rsa_key(_number: int = 0) -> rsa.RSAPrivateKey:
    """A key of RS256; making one takes a moment."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@cache
def ec_key() -> ec.EllipticCurvePrivateKey:
    """A key of ES256."""
    return ec.generate_private_key(ec.SECP256R1())


@dataclass
class IssuerDouble:
    """The issuer and what it names."""

    url: str = ""
    keys: dict[str, Any] = field(default_factory=lambda: {"rsa-1": rsa_key(), "ec-1": ec_key()})
    """Key id -> private key; their public halves are served."""

    asked: int = 0
    is_away: bool = False

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Claims of a good token, with changes; None takes one out."""
        now = int(utc_now().timestamp())
        made = {"iss": self.url, "sub": "ada", "aud": AUDIENCE, "iat": now, "nbf": now, "exp": now + 300,
                "groups": ["engineers"]} | changes
        return {name: value for name, value in made.items() if value is not None}

    def token(self, *, kid: str = "rsa-1", algorithm: str = "RS256", key: Any = None, **changes: Any) -> str:
        """A signed token."""
        return jwt.encode(self.claims(**changes), key if key is not None else self.keys[kid], algorithm=algorithm,
                          headers={"kid": kid})

    def served_keys(self) -> list[dict[str, Any]]:
        """The document under jwks_uri."""
        algorithms: dict[type, Any] = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
        found = []
        for kid, key in self.keys.items():
            kind = next(one for of, one in algorithms.items() if isinstance(key, of))
            found.append(json.loads(kind.to_jwk(key.public_key())) | {"kid": kid, "use": "sig"})
        return found


@contextmanager
def issuing() -> Iterator[IssuerDouble]:
    """An issuer, for as long as the context lasts."""
    made = IssuerDouble()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if made.is_away:
                self.send_error(503)
                return
            if self.path == "/.well-known/openid-configuration":
                document: Any = {"issuer": made.url, "jwks_uri": made.url + "/keys"}
            else:
                made.asked += 1
                document = {"keys": made.served_keys()}
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join(10)
