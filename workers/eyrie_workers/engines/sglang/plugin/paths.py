"""Paths of engines that clients may reach: inference, health and metrics. Pure.

One definition for the gateway of one machine and for pods of SGLang on a cluster (`guarded`). SGLang has others, which
change weights, end other clients' requests or stop the server.
"""

OTHERS = frozenset({"/generate", "/health", "/health_generate", "/ready", "/metrics", "/get_model_info", "/model_info",
                    "/tokenize", "/detokenize"})
"""Besides /v1/: the embedded engine has /health and /metrics, SGLang all of them."""


def is_inference(path: str) -> bool:
    """Whether clients may reach the decoded `path`."""
    return (path.startswith("/v1/") and ".." not in path.split("/")) or path in OTHERS
