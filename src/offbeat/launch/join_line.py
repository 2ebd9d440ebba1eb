"""Command lines to copy, by which trainer, workers and judges join a run. They never contain a join token."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.coordinator.api.server import Address
from offbeat.net import is_loopback, own_addresses

HOST = "HOST"
"""Placeholder for an address that is not known on this machine."""


def join_lines(run: Path, url: str, near_url: str, address: Address, role: str = "", more: str = "") -> list[str]:
    """Returns the lines that a coordinator prints: how to join from this machine and, if other machines can reach it,
    how to join from them. Each command stands alone on its line, so that it can be copied whole.

    `url` is the coordinator's URL, as served at `address`; `near_url` is its URL for this machine. `role` is "" for
    workers that generate, `reward` or `trainer`; `more` holds further options.
    """
    token = f"offbeat worker token {shlex.quote(str(run))}{f' --role {role}' if role else ''}"
    who = {"": "a worker", "reward": "a judge", "trainer": "the trainer"}[role]
    join = {"": "offbeat worker", "reward": "offbeat worker --role reward", "trainer": "offbeat trainer"}[role]
    lines = [
        f"serving {url}; {who} on this machine joins with",
        f"  OFFBEAT_TOKEN=$({token}) {join} --join {near_url}{more}",
    ]
    if address.has_tls or not address.is_loopback or address.behind_proxy:
        elsewhere = far_url(url, address)
        is_here = address.certificate is not None and is_loopback(urlsplit(elsewhere).hostname or "")
        through = " through a tunnel, because the certificate names only this machine," if is_here else ""
        lines += [
            f"{who} elsewhere joins{through} with the next line, which asks for a token; {token} prints one",
            f"  {join} --join {elsewhere}{_trust(address)}{more}",
        ]
    return lines


def far_url(url: str, address: Address) -> str:
    """Returns the URL at which other machines reach the coordinator, with the configured host. If the certificate does
    not name that host, the URL has the certificate's first name instead. If the coordinator listens at all addresses
    without a certificate, the URL has this machine's first address. Behind a proxy, it has the placeholder `HOST`."""
    if address.behind_proxy:
        return f"https://{HOST}"
    names = [] if address.certificate is None else certificate_names(address.certificate)
    host = address.host if address.host not in ("", "0.0.0.0", "::") else ""
    found = [host] if host and (host in names or not names) else [*names, *([host] if host else own_addresses())]
    return f"{url.partition('://')[0]}://{_bracketed((found or [HOST])[0])}:{url.rpartition(':')[2]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _trust(address: Address) -> str:
    """Returns the option with which a member trusts a self-signed certificate, or accepts a private network without
    TLS; "" if it needs no option."""
    if address.is_plain:
        return " --allow-plain"
    if address.certificate is None or not is_self_signed(address.certificate):
        return ""
    return f" --ca-file {shlex.quote(address.certificate.name)}"


def certificate_names(file: Path) -> Sequence[str]:
    """Returns the names and addresses for which the first certificate in a PEM file is valid; none if the file cannot
    be read. Leaves out wildcards, and loopback addresses unless there are no others."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return ()
    names = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    if all(is_loopback(name) for name in names):
        return names
    return [name for name in names if "*" not in name and not is_loopback(name)]


def is_self_signed(file: Path) -> bool:
    """Whether the first certificate in a PEM file names itself as its issuer. False if the file cannot be read."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError):
        return False
    return certificate.issuer == certificate.subject
