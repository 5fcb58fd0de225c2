"""Under which names this server answers, and to which web pages: against DNS rebinding and forged requests.

A browser sends the name by which it found the server (`Host`) and the web page that asks (`Origin`,
`Sec-Fetch-Site`); no web page can change them. Owns --allowed-hosts, and the answers that CORS needs by
--allowed-origins, --allowed-methods, --allowed-headers and --allow-credentials. Does not own keys.
Invariants: a server on loopback answers under loopback names and those that were allowed; a web page of another origin
that was not allowed changes nothing here; clients that are no browsers send neither header and are not concerned.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final, NamedTuple

from quire.core.errors import ConfigError, shown
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Headers, Refusal

_HOST = re.compile(rb"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_FIELD_NAMES = re.compile(rb"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and without CORS another origin cannot read their answers."""
MAX_FIELD_NAMES_BYTES = 4096
EXPOSED = (
    b"x-request-id, request-id, x-client-request-id, retry-after, x-ignored-params, x-max-tokens,"
    b" x-max-tokens-requested"
)
"""Headers of an answer that a web page of another origin may read."""
PREFLIGHT_S = 600
"""How long a browser may remember a preflight."""
METHODS: Final = "GET, HEAD, POST, DELETE"
"""Those that the server has."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Cors(NamedTuple):
    """What web pages of other origins may do, as the options say it; * in a list stands for any."""

    origins: list[str]
    methods: list[str]
    headers: list[str]
    credentials: bool
    """Whether browsers send cookies and names of basic authentication, which a proxy may ask for."""


def is_loopback(name: str) -> bool:
    """True for localhost, names below it, and the addresses of this machine's loopback. Asks no DNS."""
    name = name.removesuffix(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def binds_loopback(host: str) -> bool:
    """True if a server that listens on `host` (an address, or a name to look up) is reached from this machine alone."""
    if is_loopback(host):
        return True
    if _address(host) is not None or not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_loopback(str(entry[4][0])) for entry in found)


def check_allowed(hosts: Iterable[str], cors: Cors) -> None:
    """ConfigError for a value of the options that can match nothing, or would let every web page act as its visitor."""
    for host in hosts:
        if host != "*" and _address(host) is None and not _NAME.fullmatch(host.lower()):
            raise ConfigError(
                f"allowed_hosts: {shown(host)} must be a name such as api.example.com, *.example.com, an address, or *"
                " for any; without scheme and port"
            )
    for name, words in (("allowed_methods", cors.methods), ("allowed_headers", cors.headers)):
        for word in words:
            if word != "*" and not _TOKEN.fullmatch(word):
                raise ConfigError(f"{name}: {shown(word)} must be * for any, or one name such as {_EXAMPLES[name]}")
    if cors.credentials and "*" in cors.origins:
        raise ConfigError(
            "allow_credentials with allowed_origins * would let every web page act as whoever looks at it: name the"
            " origins, or leave allow_credentials out (an API key needs none)"
        )
    for origin in cors.origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin.lower()):
            raise ConfigError(
                f"allowed_origins: {shown(origin)} must be * for any, or scheme://host with a port where it is not the"
                " scheme's own, such as https://app.example.com; without a path"
            )


_EXAMPLES: Final = {"allowed_methods": "POST", "allowed_headers": "Authorization"}


class Hosts:
    """What a server that listens on `bind_host` answers to. The lists are those of the options, checked."""

    def __init__(self, bind_host: str, allowed_hosts: Iterable[str], cors: Cors) -> None:
        allowed = {host.lower().removesuffix(".") for host in allowed_hosts}
        self._is_any = "*" in allowed or (not allowed and not binds_loopback(bind_host))
        self._names = {bind_host.lower(), *(name for name in allowed if not name.startswith("*."))}
        self._addresses = {address for address in map(_address, self._names) if address is not None}
        self._endings = tuple(name[1:] for name in allowed if name.startswith("*."))
        self._origins = {_plain(origin) for origin in cors.origins}
        methods = METHODS if "*" in cors.methods else ", ".join(cors.methods).upper()
        self._methods = methods.encode()
        headers = dict.fromkeys([*cors.headers, "Content-Type"])  # without the last no web page can send JSON
        self._headers = None if "*" in cors.headers else ", ".join(headers).encode()
        """None: those that a web page asks for."""
        self._credentials = [(b"access-control-allow-credentials", b"true")] if cors.credentials else []

    def check_host(self, exchange: Exchange, *, is_probe: bool) -> None:
        """Raises a Refusal: 400 without one good Host header, 421 if it names another server. A probe may ask under
        any name, as balancers do; HTTP/1.0 knew no Host."""
        given = exchange.header(b"host")
        if not given and exchange.scope.get("http_version") == "1.0":
            return
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None:
            message = "Send exactly one Host header with a name and perhaps a port."
            raise Refusal(400, message, code="bad_host", close=True)
        name = found[1].decode().lower().removesuffix(".")
        if not is_probe and not self._answers_to(name):
            bare = name.strip("[]")
            raise Refusal(
                421,
                f"This server does not answer under the name {shown(bare)}. If it should, start it with "
                f"--allowed-hosts {bare if len(bare) <= 100 else 'NAME'}.",
                code="host_not_allowed",
            )

    def check_origin(self, exchange: Exchange) -> None:
        """Let an allowed web page read the answer. Raises a 403 Refusal if another one wants to change something."""
        origins = exchange.header(b"origin")
        if len(origins) == 1 and self._is_allowed(origins[0]):
            exchange.more_headers += self._allowance(origins[0])
            return
        if exchange.scope["method"] in SAFE_METHODS:
            return
        site = exchange.header(b"sec-fetch-site")
        if site == [b"same-origin"]:  # the browser has compared, also where a proxy changed Host or took TLS away
            return
        if site not in ([], [b"none"]) or (origins and not self._is_own(exchange, origins)):
            whose = f" {shown(origins[0].decode('latin-1'))}" if len(origins) == 1 else ""
            raise Refusal(
                403,
                f"A web page of another origin{whose} may not do this. If it should, start the server with"
                " --allowed-origins and the web page's origin.",
                code="origin_not_allowed",
            )

    def preflight(self, exchange: Exchange) -> Headers | None:
        """The answer's headers if an allowed web page asks what it may send; None for any other request."""
        asked = exchange.scope["method"] == "OPTIONS" and exchange.header(b"access-control-request-method")
        if not asked or not exchange.more_headers:
            return None
        wanted = b",".join(exchange.header(b"access-control-request-headers"))
        if len(wanted) > MAX_FIELD_NAMES_BYTES or not _FIELD_NAMES.fullmatch(wanted):
            wanted = b"authorization, content-type"
        return [
            (b"access-control-allow-methods", self._methods),
            (b"access-control-allow-headers", wanted if self._headers is None else self._headers),
            (b"access-control-max-age", str(PREFLIGHT_S).encode()),
        ]

    def _answers_to(self, name: str) -> bool:
        if self._is_any or is_loopback(name) or name in self._names or name.endswith(self._endings or ("\0",)):
            return True
        return _address(name) in self._addresses

    def _is_allowed(self, origin: bytes) -> bool:
        return "*" in self._origins or _plain(origin.decode("latin-1")) in self._origins

    def _allowance(self, origin: bytes) -> Headers:
        exposed = (b"access-control-expose-headers", EXPOSED)
        if "*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), exposed]
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), exposed, *self._credentials]

    def _is_own(self, exchange: Exchange, origins: list[bytes]) -> bool:
        host = exchange.header(b"host")
        own = b"%b://%b" % (exchange.scope["scheme"].encode(), host[0] if host else b"")
        return len(origins) == 1 and _plain(own.decode("latin-1")) == _plain(origins[0].decode("latin-1"))


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `name` writes, in brackets or not; IPv4 in IPv6 as IPv4."""
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _plain(origin: str) -> str:
    """An origin in one spelling: lower case, without the scheme's own port."""
    origin = origin.lower()
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if origin.startswith(scheme):
            return origin.removesuffix(port)
    return origin
