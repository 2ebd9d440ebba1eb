"""Where a coordinator listens, and with which certificate.

With `serve.certificate = "auto"` a run has a certificate of its own, made in its folder when it is first served. Nobody
has to sign it: members of the run get it together with the URL and trust nothing else.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.config.explain import show
from offbeat.config.schema import Config
from offbeat.coordinator.api.server import Address
from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.launch.run_folder import ADDRESS
from offbeat.net import is_loopback, own_addresses

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

PLAIN, AUTO = "plain", "auto"
"""Values of `serve.certificate`: no TLS, for a private network in which secrets may be sent unencrypted; and the run's
own certificate."""
CERTIFICATE, KEY = "certificate.pem", "certificate.key"
VALID_DAYS = 365
LEFT_DAYS = 30
"""A certificate that is valid for fewer days than this is replaced when the run is served again."""


def address_of(config: Config, run: Path | None = None) -> Address:
    """Returns the configured address to serve at. If the port is 0 (any), takes the port at which the run in folder
    `run` was served last, because its workers know that port. With `serve.certificate = "auto"`, makes the run's own
    certificate in `run`; without `run`, returns an address that only says whether the other keys are right."""
    wanted = config.serve
    is_plain, is_own = wanted.certificate == PLAIN, wanted.certificate == AUTO
    if (is_plain or is_own) and wanted.key is not None:
        raise UserError(
            f"serve.key = {show(wanted.key)}: is not used with serve.certificate = {show(wanted.certificate)}; leave "
            "out serve.key, or set serve.certificate to the file of a certificate"
        )
    if is_own and run is not None:
        certificate, key = own_certificate(run, wanted.host)
        return Address(host=wanted.host, port=wanted.port or port_before(run, "url"), certificate=certificate, key=key)
    is_plain = is_plain or is_own
    return Address(
        host=wanted.host,
        port=wanted.port or (port_before(run, "url") if run is not None else 0),
        certificate=None if wanted.certificate is None or is_plain else Path(wanted.certificate).expanduser(),
        key=None if wanted.key is None else Path(wanted.key).expanduser(),
        behind_proxy=wanted.behind_proxy,
        is_plain=is_plain,
    )


def port_before(run: Path, which: str) -> int:
    """Returns the port at which the run was served last: that of the URL with the key `which` in serve.json.

    Returns 0 (any port) if there is none. A copied run folder also gets 0 while the original exists, because the port
    belongs to the original's workers.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        last = json.loads((run / ADDRESS).read_text())
        home = Path(last.get("run") or run)
        if home.resolve() == run.resolve() or not (home / ADDRESS).is_file():
            return int(last[which].rsplit(":", 1)[1])
    return 0


def own_certificate(run: Path, host: str) -> tuple[Path, Path]:
    """Returns the files with the run's own certificate and its key, which no other user can read. The certificate is
    made if there is none, if it ends soon, or if it does not name this machine, as after a move."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate, key = run / CERTIFICATE, run / KEY
    names = _names(host)
    if certificate.is_file() and key.is_file() and _still_fits(certificate, names):
        return certificate, key
    secret, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "offbeat")])
    day = datetime.timedelta(days=1)
    # Clocks of machines differ, so it begins a day ago. It is its own authority: Python then accepts it as a CA file.
    made = (
        x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + VALID_DAYS * day)
        .add_extension(x509.SubjectAlternativeName([_general_name(one) for one in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(True, False, False, False, False, True, False, False, False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(secret.public_key()), critical=False)
        .sign(secret, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_atomic(key, private, mode=0o600)
    write_atomic(certificate, made.public_bytes(pem))
    return certificate, key


def _names(host: str) -> list[str]:
    """Returns what the certificate names: the configured host, or all addresses of this machine."""
    everywhere = host in ("", "0.0.0.0", "::")
    return [*(own_addresses() if everywhere else [host]), "127.0.0.1"]


def _general_name(name: str) -> GeneralName:
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


def _still_fits(certificate: Path, names: list[str]) -> bool:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        stated = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    left_s = found.not_valid_after_utc.timestamp() - time.time()
    held = {str(one.value) for one in stated}
    return left_s > LEFT_DAYS * 86400 and held >= {name for name in names if not is_loopback(name)}
