"""An API server that does not answer is away: it refuses nothing."""

import json
import socket
import threading
from pathlib import Path

import pytest

from eyrie_operator.cluster.client import Cluster, ClusterUnavailable


def test_a_connection_that_ends_in_the_tls_handshake_is_no_refusal(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1024)  # the client's greeting
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        threading.Thread(target=hang_up, daemon=True).start()
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": f"https://127.0.0.1:{server.getsockname()[1]}"}}]}))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for place in ("kubernetes.config.kube_config", "kubernetes.config"):
            monkeypatch.setattr(f"{place}.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        with pytest.raises(ClusterUnavailable):
            Cluster().get("v1", "ConfigMap", "default", "x")
        server.shutdown(socket.SHUT_RDWR)
