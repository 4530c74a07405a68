"""A double of an OIDC issuer: discovery document, keys, and the endpoints of the code flow over real HTTP, tokens
signed with real keys. It asks nobody for a password; what it signs is what a test says."""

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

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
    signed_in: dict[str, Any] = field(default_factory=dict)
    """Claims of whoever signs in next, over those of a good token."""

    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Codes given out and not exchanged: what the browser asked with."""

    client_secret: str | None = None

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

    def sign_in(self, query: dict[str, str]) -> str:
        """Where a browser is sent that asked with these parameters (RFC 6749, section 4.1.2)."""
        code = secrets.token_hex(8)
        self.codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def exchange(self, form: dict[str, str], authorization: str | None) -> tuple[int, dict[str, Any]]:
        """The answer of the token endpoint (RFC 6749, section 4.1.3; RFC 7636, section 4.6). A code is good once."""
        asked = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if self.client_secret is not None:
            pair = f"{form['client_id']}:{self.client_secret}"
            if authorization != f"Basic {base64.b64encode(pair.encode()).decode()}":
                return 401, {"error": "invalid_client"}
        if (asked is None or asked["code_challenge"] != challenge or asked["code_challenge_method"] != "S256"
                or asked["redirect_uri"] != form["redirect_uri"] or asked["client_id"] != form["client_id"]):
            return 400, {"error": "invalid_grant"}
        claims = {"aud": asked["client_id"], "nonce": asked["nonce"]} | self.signed_in
        return 200, {"access_token": "opaque", "token_type": "Bearer", "id_token": self.token(**claims)}

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
            where = urlsplit(self.path)
            if where.path == "/authorize":
                self.send_response(302)
                self.send_header("Location", made.sign_in(dict(parse_qsl(where.query))))
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif self.path == "/.well-known/openid-configuration":
                self.reply(200, {"issuer": made.url, "jwks_uri": made.url + "/keys", "token_endpoint": made.url
                                 + "/token", "authorization_endpoint": made.url + "/authorize"})
            else:
                made.asked += 1
                self.reply(200, {"keys": made.served_keys()})

        def do_POST(self) -> None:
            form = dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.reply(*made.exchange(form, self.headers.get("Authorization")))

        def reply(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
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
