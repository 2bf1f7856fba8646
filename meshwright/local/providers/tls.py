"""The certificate that a provider's API server and nodes serve with."""

from __future__ import annotations

from pathlib import Path

from meshwright.local.apiserver import certificates


def serving_files(directory: Path, *, client: bool = False) -> certificates.TlsFiles:
    """A new certificate of the directory's authority, which is made when it is not there.

    The authority stays the same over restarts, so kubeconfig files that were copied elsewhere stay good. With `client`
    the certificate also serves to connect to nodes.
    """
    authority = certificates.load_authority(directory)
    certificate, key = authority.issue("meshwright-local", client=client)
    files = certificates.TlsFiles(directory / "serving.crt", directory / "serving.key", directory / "ca.crt")
    certificates.write_private(files.certificate, certificate)
    certificates.write_private(files.key, key)
    return files
